"""The codecs by name, and a body's two ways: numbers to bytes, and bytes that nobody vouches for to numbers.

    body length = size(codec, parameter, layout)        nothing a sender writes decides it

A name may carry one parameter after "@", the share of the numbers sent (``topk@0.01``, ``randomk@0.01``) or a rank
(``powersgd@2``). The number on the wire is the family's; the parameter, like the layout, was agreed on beforehand.
SPEC.md, beside this file, is the definition.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from nestling.codec.form import Body, Codec, Limits, Memory
from nestling.codec.lowrank import powersgd
from nestling.codec.quantise import PLAIN, STOCHASTIC
from nestling.codec.rotate import rotated
from nestling.codec.sparsify import randomk, topk
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.vectors import Layout, Vector

__all__ = ["CODECS", "FAMILIES", "Codec", "Limits", "body_size", "decode_body", "encode_body", "named_codec"]


CODECS = {
    codec.name: codec
    for codec in (*PLAIN, *(rotated(f"rotated{bits}", number, bits) for number, bits in ((8, 4), (9, 2), (10, 1))))
}
"""The codecs that need no parameter."""

_PARAMETRIC: dict[str, tuple[str, Callable[[str], Codec]]] = {
    "topk": ("0.01", lambda word: topk(float(word))),
    "randomk": ("0.01", lambda word: randomk(float(word))),
    "powersgd": ("2", lambda word: powersgd(int(word))),
}
"""The others: an example of the parameter, and what makes the codec of one."""

FAMILIES = {codec.id: name for name, codec in CODECS.items()} | {
    make(example).id: name for name, (example, make) in _PARAMETRIC.items()
}
"""Every number on the wire, and the name before "@"."""


def named_codec(name: str) -> Codec:
    """The codec called `name`. Raises `ConfigError` if there is none, or for a parameter it cannot have.

    >>> named_codec("int4-message").id, named_codec("topk@0.01").id
    (5, 11)
    """
    return CODECS[name] if name in CODECS else _parametric(name)


@lru_cache(maxsize=64)
def _parametric(name: str) -> Codec:
    family, _, word = name.partition("@")
    if family not in _PARAMETRIC:
        known = [*CODECS, *(f"{other}@{example}" for other, (example, _) in _PARAMETRIC.items())]
        raise ConfigError(f"there is no codec {name!r}", where="codec", remedy=f"Choose from {', '.join(known)}.")
    example, make = _PARAMETRIC[family]
    try:
        codec = make(word)
    except ValueError as error:  # no number; the codec's own ConfigError is one too
        cause = error.cause if isinstance(error, ConfigError) else f"{word!r} is no parameter"
        raise ConfigError(cause, where=f"codec {name!r}", remedy=f"Write it as {family}@{example}.") from error
    if codec.name != name:  # both sides compare names: one spelling for each codec
        raise ConfigError(f"is written {codec.name}", where=f"codec {name!r}", remedy="Write it so on both sides.")
    return codec


def body_size(codec: str, layout: Layout) -> int:
    """Bytes of every body of this codec and layout. Raises `ConfigError` on an unknown codec.

    >>> layout = Layout.of((f"conv{index}", (64,)) for index in range(20))
    >>> body_size("float32", layout), body_size("int4-message", layout)
    (5120, 648)
    """
    return named_codec(codec).size(layout)


def encode_body(
    codec: str,
    layout: Layout,
    vector: Vector,
    *,
    key: bytes = b"",
    memory: Memory | None = None,
    stochastic: bool = False,
) -> bytes:
    """The bytes of `vector`, float32 of shape (layout.size,).

    `key` seeds what both sides must draw alike, and the rounding if it is `stochastic`; a message's is `message_key`.
    `memory` is what this encoder keeps from one vector to the next, entry by entry; it may be read and replaced.

    Raises `WireError` with code `non_finite` or `overflow` if the numbers cannot be sent, `ContextError` if the vector
    is not one of this layout, `ConfigError` on an unknown codec or one that cannot round stochastically.

    >>> encode_body("int4-message", Layout.of([("a", (3,))]), np.array([0.0, 7.0, 15.0], np.float32)).hex(" ", -4)
    '0000803f 00000000 700f'
    """
    if vector.dtype != np.float32 or vector.shape != (layout.size,):
        raise ContextError(
            f"is {vector.dtype} of shape {vector.shape}, the layout holds {layout.size} float32 numbers",
            where="vector",
            remedy="Was it made by another adapter or model?",
        )
    if not np.isfinite(vector).all():
        raise WireError(
            "non_finite",
            f"{np.count_nonzero(~np.isfinite(vector))} of {layout.size} numbers are NaN or infinite",
            remedy="Lower the learning rate, or let this client decline the round.",
        )
    chosen = named_codec(codec)
    if stochastic:
        if codec not in STOCHASTIC:
            raise ConfigError(
                f"{codec} does not round stochastically", where="rounding", remedy=f"Use {', '.join(STOCHASTIC)}."
            )
        chosen = STOCHASTIC[codec]
    return chosen.encode(layout, vector, key, memory)


def decode_body(codec: str, layout: Layout, body: Body, limits: Limits, *, key: bytes = b"") -> Vector:
    """The float32 numbers, shape (layout.size,), in a body; a fresh array that does not share its memory.

    Raises `WireError` with code `length`, then what the codec's own checks find (`scale`, `zero`, `nibble_pad`,
    `code_range`, …), then `non_finite`, `abs` or `norm`, and `ConfigError` on an unknown codec.

    >>> decode_body("int4-message", Layout.of([("a", (3,))]), bytes.fromhex("0000803f00000000700f"), Limits())
    array([ 0.,  7., 15.], dtype=float32)
    """
    chosen = named_codec(codec)
    if len(body) != chosen.size(layout):
        raise WireError(
            "length",
            f"a {codec} body of {layout.size} numbers has {chosen.size(layout)} bytes, this one {len(body)}",
            remedy="Both sides must use the same layout and codec.",
        )
    # Overflow and signalling NaN are not accidents here: they are what the checks look for.
    with np.errstate(over="ignore", invalid="ignore"):
        vector = chosen.decode(layout, body, limits, key)
        _check_values(vector, limits)
    return vector


def _check_values(vector: Vector, limits: Limits) -> None:
    """Computed in float64, the norm is at least the largest number: squares of float32 numbers are exact there, and
    sums of squares round to no less than each. A norm within `max_abs` therefore spares the search for that number."""
    wide = vector.astype(np.float64)
    norm = math.sqrt(wide.dot(wide))  # NaN or infinite if any number is
    if not norm <= limits.max_abs:
        peak = float(np.abs(vector).max())  # NaN if any number is
        if not math.isfinite(peak):
            raise WireError("non_finite", "contains NaN or infinite numbers", remedy="The sender diverged; drop it.")
        if peak > limits.max_abs:
            raise WireError(
                "abs",
                f"contains {peak:.6g}, the limit is {limits.max_abs:.6g}",
                remedy="Drop it, or raise max_abs if honest clients send this.",
            )
    if norm > limits.max_norm:
        raise WireError(
            "norm",
            f"has norm {norm:.6g}, the limit is {limits.max_norm:.6g}",
            remedy="Drop it, or raise max_norm if honest clients send this.",
        )
