"""One encoded picture: its pixels, and what is refused before and while it is decoded."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nestling.core.errors import WireError
from nestling.tasks.pictures import decode


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


COLOURS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
GREY = COLOURS[:, :, 0]
PNG = encoded(COLOURS)
WHERE = {"side": 8, "where": "the picture"}


def test_a_png_keeps_every_pixel_and_channels_come_first() -> None:
    got = decode(PNG, channels=3, **WHERE)
    assert got.flags.c_contiguous
    assert np.array_equal(got, COLOURS.transpose(2, 0, 1))
    assert np.array_equal(decode(encoded(GREY), channels=1, **WHERE), GREY[None])


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_grey_picture_becomes_grey_colours(kind) -> None:
    got = decode(encoded(GREY, kind), channels=3, **WHERE)
    assert got.shape == (3, 8, 8)
    assert np.array_equal(got[0], got[1])
    assert np.array_equal(got[0], got[2])
    assert np.abs(got[0] - GREY.astype(int)).mean() < 20
    assert len(np.unique(got)) > 8


def test_a_palette_is_looked_up() -> None:
    file = io.BytesIO()
    Image.fromarray(np.repeat(GREY[:, :, None], 3, 2)).convert("P").save(file, "PNG")
    got = decode(file.getvalue(), channels=3, **WHERE)
    assert len(np.unique(got)) > 2


@pytest.mark.parametrize("shape", [(8, 9, 3), (7, 8, 3), (16, 16, 3)])
def test_another_size_is_refused(shape) -> None:
    with pytest.raises(WireError, match=rf"the picture: is {shape[1]}×{shape[0]}, not 8×8"):
        decode(encoded(np.zeros(shape, np.uint8)), channels=3, **WHERE)


def test_a_size_that_would_fill_memory_is_refused_before_any_pixel_is_made() -> None:
    large = encoded(np.zeros((1, 1), np.uint8))
    sides = bytearray(large)
    sides[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height in the header; its checksum is then wrong, too
    with pytest.raises(WireError):
        decode(bytes(sides), channels=3, **WHERE)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_other_formats_are_not_tried(kind) -> None:
    with pytest.raises(WireError, match="no picture that can be decoded"):
        decode(encoded(COLOURS, kind), channels=3, **WHERE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_that_was_cut_off_before_its_last_pixels_is_refused(kind) -> None:
    whole = encoded(COLOURS, kind)
    for length in range(
        len(whole) - 32
    ):  # behind the pixels are checksums and an end mark, which Pillow can do without
        with pytest.raises(WireError):
            decode(whole[:length], channels=3, **WHERE)


@given(st.integers(0, len(PNG) - 1), st.integers(0, 255))
@settings(max_examples=60)
def test_a_changed_byte_raises_nothing_else(position: int, value: int) -> None:
    raw = bytearray(PNG)
    raw[position] = value
    try:
        got = decode(bytes(raw), channels=3, **WHERE)
    except WireError:
        return
    assert got.shape == (3, 8, 8)
