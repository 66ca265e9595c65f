"""Six ways to write a flat float32 vector as bytes, each with a length that follows from the layout alone.

Floats are copied (32 or 16 bits); integers of 8 or 4 bits stand for multiples of a step. The step is either one per
tensor and symmetric, or one per message with an offset, which is the form of the FLITE paper (arXiv 2607.18343):

    per tensor:   x = s_l · c           c in −127 … 127 or −7 … 7,   s_l = max|x_l| / 127 (or 7)
    per message:  x = z + s · c         c in 0 … 255 or 0 … 15,      z = min x,  s = (max x − min x) / 255 (or 15)

Where we differ: the paper does not say how it rounds. Here s is rounded so that no decoded number leaves the range of
the numbers encoded, and is never below the smallest normal float32. SPEC.md, beside this file, is the definition.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.vectors import Layout, Vector

FLT_MIN = float(np.finfo(np.float32).tiny)  # smallest normal float32; a smaller step would lose bits as it decodes
FLT_MAX = float(np.finfo(np.float32).max)

Body = bytes | memoryview


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts, whatever the sender writes.

    The defaults belong together: 1e4 is a float16, so rounding cannot lift a number above it, and 1e4 · √10,000 = 1e6,
    so a layout of up to 10,000 numbers that are each within `max_abs` cannot exceed `max_norm` either. Longer vectors
    need room for rounding: see "Limits" in SPEC.md.

    Args:
        max_examples: the largest number of examples a client may claim, 1 … 2^32 − 1.
        max_abs: the largest absolute value of a number. At least 1, which is the step of an all-zero tensor.
        max_norm: the largest L2 norm of the whole vector.

    Raises `ConfigError` if a limit is outside its range or NaN.

    >>> Limits(max_norm=50.0).max_abs
    10000.0
    """

    max_examples: int = 1_000_000
    max_abs: float = 1e4
    max_norm: float = 1e6

    def __post_init__(self) -> None:
        if not 1 <= self.max_examples < 2**32:
            raise ConfigError(f"is {self.max_examples}", where="max_examples", remedy="Give 1 … 2^32 − 1.")
        if not 1.0 <= self.max_abs <= FLT_MAX:
            raise ConfigError(f"is {self.max_abs}", where="max_abs", remedy="Give 1 … 3.4e38, the range of a float32.")
        if not self.max_norm > 0.0:
            raise ConfigError(f"is {self.max_norm}", where="max_norm", remedy="Give a positive number.")


@dataclass(frozen=True)
class Codec:
    """One way to write a vector: its number on the wire and the three functions behind the public ones below.

    `encode` is given finite float32 numbers, `decode` a body of the right length; `decode` checks everything but the
    values themselves.
    """

    name: str
    id: int
    size: Callable[[Layout], int]
    encode: Callable[[Layout, Vector], bytes]
    decode: Callable[[Layout, Body, Limits], Vector]


def named_codec(name: str) -> Codec:
    """The codec called `name`. Raises `ConfigError` if there is none.

    >>> named_codec("int4-message").id
    5
    """
    if name not in CODECS:
        raise ConfigError(f"there is no codec {name!r}", where="codec", remedy=f"Choose from {', '.join(CODECS)}.")
    return CODECS[name]


def body_size(codec: str, layout: Layout) -> int:
    """Bytes of every body of this codec and layout. Raises `ConfigError` on an unknown codec.

    >>> layout = Layout.of((f"conv{index}", (64,)) for index in range(20))
    >>> body_size("float32", layout), body_size("int4-message", layout)
    (5120, 648)
    """
    return named_codec(codec).size(layout)


def encode_body(codec: str, layout: Layout, vector: Vector) -> bytes:
    """The bytes of `vector`, float32 of shape (layout.size,).

    Raises `WireError` with code `non_finite` or `overflow` if the numbers cannot be sent, `ContextError` if the vector
    is not one of this layout, `ConfigError` on an unknown codec.

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
    return named_codec(codec).encode(layout, vector)


def decode_body(codec: str, layout: Layout, body: Body, limits: Limits) -> Vector:
    """The float32 numbers, shape (layout.size,), in a body; a fresh array that does not share its memory.

    Raises `WireError` with code `length`, `scale`, `zero`, `nibble_pad`, `code_range`, `non_finite`, `abs` or `norm`,
    checked in this order, and `ConfigError` on an unknown codec.

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
    # Overflow and signalling NaN are not accidents here: they are what the checks below look for.
    with np.errstate(over="ignore", invalid="ignore"):
        vector = chosen.decode(layout, body, limits)
    _check_values(vector, limits)
    return vector


def _check_values(vector: Vector, limits: Limits) -> None:
    peak = float(np.abs(vector).max()) if vector.size else 0.0  # NaN if any number is
    if not math.isfinite(peak):
        raise WireError("non_finite", "contains NaN or infinite numbers", remedy="The sender diverged; drop it.")
    if peak > limits.max_abs:
        raise WireError(
            "abs",
            f"contains {peak:.6g}, the limit is {limits.max_abs:.6g}",
            remedy="Drop it, or raise max_abs if honest clients send this.",
        )
    wide = vector.astype(np.float64)  # squares of float32 numbers fit a float64
    norm = math.sqrt(float(wide @ wide))
    if norm > limits.max_norm:
        raise WireError(
            "norm",
            f"has norm {norm:.6g}, the limit is {limits.max_norm:.6g}",
            remedy="Drop it, or raise max_norm if honest clients send this.",
        )


# Floats: the numbers themselves, little-endian.


def _float_size(dtype: str, layout: Layout) -> int:
    return layout.size * np.dtype(dtype).itemsize


def _encode_float(dtype: str, layout: Layout, vector: Vector) -> bytes:
    with np.errstate(over="ignore"):
        written = vector.astype(dtype)
    if not np.isfinite(written).all():
        raise WireError(
            "overflow",
            f"{float(np.abs(vector).max()):.6g} does not fit a float16",
            remedy="Numbers must stay below 65,520; use float32 or an integer codec.",
        )
    return written.tobytes()


def _decode_float(dtype: str, layout: Layout, body: Body, limits: Limits) -> Vector:
    return np.frombuffer(body, dtype).astype(np.float32)


# Codes of 8 or 4 bits. Two 4-bit codes share a byte, the first in its low half.


def _packed_size(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def _pack(codes: np.ndarray, bits: int) -> bytes:
    if bits == 8:
        return codes.tobytes()
    low, high = codes[0::2].copy(), codes[1::2]
    low[: high.size] |= high << 4
    return low.tobytes()


def _unpack(body: Body, bits: int) -> np.ndarray:
    raw = np.frombuffer(body, np.uint8)
    if bits == 8:
        return raw
    codes = np.empty(2 * raw.size, np.uint8)
    codes[0::2], codes[1::2] = raw & 15, raw >> 4
    return codes


def _read_scale(body: Body, offset: int, limits: Limits, place: str) -> np.float32:
    scale = np.frombuffer(body, "<f4", 1, offset)[0]
    if not FLT_MIN <= scale <= limits.max_abs:  # False for NaN
        raise WireError(
            "scale",
            f"the scale of {place} is {scale:.6g}, not a normal number up to {limits.max_abs:.6g}",
            remedy="The sender does not follow the format; drop it.",
        )
    return np.float32(scale)


def _pad_error() -> WireError:
    return WireError(
        "nibble_pad",
        "the unused half of a last byte is not 0",
        remedy="The sender does not follow the format; drop it.",
    )


# One scale per tensor, symmetric.


def _tensor_size(bits: int, layout: Layout) -> int:
    return sum(4 + _packed_size(size, bits) for size in layout.sizes)


def _symmetric_scale(peak: float, top: int) -> np.float32:
    """The largest step s with top · s ≤ peak, so that no decoded number exceeds the peak."""
    if peak == 0.0:
        return np.float32(1.0)
    scale = np.float32(peak / top)
    if top * float(scale) > peak:  # exact in float64
        scale = np.nextafter(scale, np.float32(0.0))
    return max(scale, np.float32(FLT_MIN))


def _encode_tensor(bits: int, layout: Layout, vector: Vector) -> bytes:
    top = 2 ** (bits - 1) - 1
    offset = 8 if bits == 4 else 0  # a 4-bit code is written as code + 8, an 8-bit one in two's complement
    parts, start = [], 0
    for size in layout.sizes:
        x = vector[start : start + size].astype(np.float64)
        scale = _symmetric_scale(float(np.abs(x).max()) if size else 0.0, top)
        codes = np.rint(x / float(scale)).astype(np.int8) + np.int8(offset)
        parts += [scale.astype("<f4").tobytes(), _pack(codes.view(np.uint8), bits)]
        start += size
    return b"".join(parts)


def _decode_tensor(bits: int, layout: Layout, body: Body, limits: Limits) -> Vector:
    top, per_byte = 2 ** (bits - 1) - 1, 8 // bits
    written = _unpack(body, bits)  # scales included: only the slices that hold codes are read
    codes = np.empty(layout.size, np.uint8)
    scales, pads = [], 0
    start = offset = 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        scales.append(_read_scale(body, offset, limits, name))
        first = (offset + 4) * per_byte
        codes[start : start + size] = written[first : first + size]
        if size % per_byte:
            pads |= int(written[first + size])
        start += size
        offset += 4 + _packed_size(size, bits)
    if pads:
        raise _pad_error()
    signed = codes.view(np.int8) - np.int8(8) if bits == 4 else codes.view(np.int8)
    if signed.size and int(signed.min()) < -top:  # the other end cannot be exceeded
        raise WireError(
            "code_range",
            f"contains the code {-top - 1}, the range is −{top} … {top}",
            remedy="The sender does not follow the format; drop it.",
        )
    return np.repeat(np.array(scales, np.float32), layout.sizes) * signed.astype(np.float32)


# One scale and one zero per message, affine: the paper's form.


def _message_size(bits: int, layout: Layout) -> int:
    return 8 + _packed_size(layout.size, bits)


def _affine_scale(low: np.float32, high: np.float32, top: int) -> np.float32:
    """The step nearest (high − low) / top from which code `top` does not decode to more than `high`."""
    if low == high:
        return np.float32(1.0)
    span = float(high) - float(low)  # may exceed a float32
    if span > FLT_MAX:
        raise WireError(
            "overflow",
            f"the numbers span {span:.6g}, more than a float32 holds",
            remedy="Use float32, or an integer codec with a scale per tensor.",
        )
    scale = np.float32(span / top)
    with np.errstate(over="ignore"):
        while low + scale * np.float32(top) > high:  # at most three steps: each takes off more than half a rounding
            scale = np.nextafter(scale, np.float32(0.0))
    return max(scale, np.float32(FLT_MIN))


def _encode_message(bits: int, layout: Layout, vector: Vector) -> bytes:
    low, high = (vector.min(), vector.max()) if vector.size else (np.float32(0.0), np.float32(0.0))
    zero = low + np.float32(0.0)  # −0 becomes 0: which of the two a minimum returns differs between machines
    scale = _affine_scale(zero, high, 2**bits - 1)
    codes = np.rint((vector.astype(np.float64) - float(zero)) / float(scale)).astype(np.uint8)
    return np.array([scale, zero], "<f4").tobytes() + _pack(codes, bits)


def _decode_message(bits: int, layout: Layout, body: Body, limits: Limits) -> Vector:
    scale = _read_scale(body, 0, limits, "the message")
    zero = np.frombuffer(body, "<f4", 1, 4)[0]
    if not abs(zero) <= limits.max_abs:  # False for NaN
        raise WireError(
            "zero",
            f"the zero of the message is {zero:.6g}, the limit is {limits.max_abs:.6g}",
            remedy="The sender does not follow the format; drop it.",
        )
    written = _unpack(body[8:], bits)
    if written[layout.size :].any():
        raise _pad_error()
    # Two roundings to float32, product then sum. A fused multiply-add would give other bits.
    return np.float32(zero) + scale * written[: layout.size].astype(np.float32)


def _floats(name: str, number: int, dtype: str) -> Codec:
    return Codec(
        name, number, partial(_float_size, dtype), partial(_encode_float, dtype), partial(_decode_float, dtype)
    )


def _per_tensor(name: str, number: int, bits: int) -> Codec:
    return Codec(
        name, number, partial(_tensor_size, bits), partial(_encode_tensor, bits), partial(_decode_tensor, bits)
    )


def _per_message(name: str, number: int, bits: int) -> Codec:
    return Codec(
        name, number, partial(_message_size, bits), partial(_encode_message, bits), partial(_decode_message, bits)
    )


CODECS = {
    codec.name: codec
    for codec in (
        _floats("float32", 0, "<f4"),
        _floats("float16", 1, "<f2"),
        _per_tensor("int8-tensor", 2, 8),
        _per_tensor("int4-tensor", 3, 4),
        _per_message("int8-message", 4, 8),
        _per_message("int4-message", 5, 4),
    )
}
