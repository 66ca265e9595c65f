"""Encoded pictures, decoded: the pixels of one PNG or JPEG, of the size and number of channels that its set has.

Decoding is Pillow's, which comes with matplotlib. A PNG has the same pixels everywhere; a JPEG may differ in single
steps of 1/255 between builds of libjpeg, which is why a run's record digests the pixels and not the files.
"""

import io
from typing import Any

import numpy as np
from jaxtyping import UInt8

from nestling.core.errors import WireError

FORMATS = ("PNG", "JPEG")
"""No other is in the sets we know, and each decoder less is one less to trust."""


def decode(data: bytes, *, channels: int, side: int, where: str) -> UInt8[np.ndarray, "c h w"]:
    """The pixels of an encoded picture; a grey one is repeated in each colour if `channels` is 3.

    Args:
        data: the file's content.
        channels: 1 or 3.
        side: height and width that it must have, which is looked at before any pixel is decoded.
        where: named in errors.

    Raises `WireError` if it is no PNG or JPEG, is cut off, or has another size.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (2, 2), 7).save(file, "PNG")
    >>> decode(file.getvalue(), channels=3, side=2, where="it").tolist()
    [[[7, 7], [7, 7]], [[7, 7], [7, 7]], [[7, 7], [7, 7]]]
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            return pixels(picture, channels=channels, side=side, where=where)
    except WireError:
        raise
    except Exception as error:  # the library raises OSError, SyntaxError, ValueError, struct.error and more
        raise WireError("damaged", f"is no picture that can be decoded ({error})", where=where) from error


def pixels(picture: Any, *, channels: int, side: int, where: str) -> UInt8[np.ndarray, "c h w"]:
    """The same of an image that Pillow has opened. Raises `WireError` for another size, and what Pillow raises."""
    if picture.size != (side, side):
        width, height = picture.size
        raise WireError("damaged", f"is {width}×{height}, not {side}×{side}", where=where)
    found = np.asarray(picture.convert("L" if channels == 1 else "RGB"), np.uint8)
    return np.ascontiguousarray(found[None] if channels == 1 else found.transpose(2, 0, 1))
