"""Number by number: eight ways to write a float32 vector, each with a length that follows from the layout alone.

Floats are copied (32 or 16 bits); integers of 8, 4 or 2 bits stand for multiples of a step. The step is either one per
tensor and symmetric, or one per message with an offset, which is the form of the FLITE paper (arXiv 2607.18343):

    per tensor:   x = s_l · c           c in −top … top,  top = 127, 7 or 1;      s_l = max|x_l| / top
    per message:  x = z + s · c         c in 0 … top,     top = 255, 15 or 3;     z = min x,  s = (max x − min x) / top

    nearest:      c = round(t), half to even, for t = x / s_l or (x − z) / s
    stochastic:   c = ⌊t⌋ + [u < t − ⌊t⌋],  u uniform in [0, 1), so that E[c] = t                   (QSGD, 1610.02132)

Where we differ: the FLITE paper does not say how it rounds. Here s is rounded so that no decoded number leaves the
range of the numbers encoded, and is never below the smallest normal float32. SPEC.md, beside this file, is the
definition.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from nestling.codec.form import (
    FLT_MAX,
    FLT_MIN,
    Body,
    Codec,
    Limits,
    Memory,
    key_stream,
    pack,
    packed_size,
    pad_error,
    read_scale,
    unpack,
)
from nestling.core.errors import WireError
from nestling.core.vectors import Layout, Vector

Rounding = Callable[[np.ndarray, int, int, bytes, int], np.ndarray]
"""(t, low, high, key, start) → int16 codes in low … high; `start` is the place of t's first number in the vector."""


# Floats: the numbers themselves, little-endian.


def _float_size(dtype: str, layout: Layout) -> int:
    return layout.size * np.dtype(dtype).itemsize


def _encode_float(dtype: str, layout: Layout, vector: Vector, key: bytes, memory: Memory | None) -> bytes:
    with np.errstate(over="ignore"):
        written = vector.astype(dtype)
    if not np.isfinite(written).all():
        raise WireError(
            "overflow",
            f"{float(np.abs(vector).max()):.6g} does not fit a float16",
            remedy="Numbers must stay below 65,520; use float32 or an integer codec.",
        )
    return written.tobytes()


def _decode_float(dtype: str, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    return np.frombuffer(body, dtype).astype(np.float32)


# From a multiple of the step, as float64, to a code.


def _nearest(t: np.ndarray, low: int, high: int, key: bytes, start: int) -> np.ndarray:
    codes: np.ndarray = np.rint(t).astype(np.int16)
    return codes


def _stochastic(t: np.ndarray, low: int, high: int, key: bytes, start: int) -> np.ndarray:
    """Number i of the vector compares its fraction with word i of the stream, so tensors may be rounded one by one."""
    whole = np.floor(t)
    drawn = key_stream(key, "rounding").words(t.size, start)
    codes: np.ndarray = whole.astype(np.int16) + (drawn < (t - whole) * 2.0**32)
    codes.clip(low, high, out=codes)  # t may lie a rounding outside: the scale is the float32 below the exact one
    return codes


# One scale per tensor, symmetric.


def _tensor_size(bits: int, layout: Layout) -> int:
    return sum(4 + packed_size(size, bits) for size in layout.sizes)


def _symmetric_scale(peak: float, top: int) -> np.float32:
    """The largest step s with top · s ≤ peak, so that no decoded number exceeds the peak."""
    if peak == 0.0:
        return np.float32(1.0)
    scale = np.float32(peak / top)
    if top * float(scale) > peak:  # exact in float64
        scale = np.nextafter(scale, np.float32(0.0))
    return max(scale, np.float32(FLT_MIN))


def _code_offset(bits: int) -> int:
    """What is added to a code when it is written: 8 or 2, and nothing to one of 8 bits, in two's complement."""
    return 0 if bits == 8 else 2 ** (bits - 1)


def _encode_tensor(
    bits: int, rounded: Rounding, layout: Layout, vector: Vector, key: bytes, memory: Memory | None
) -> bytes:
    top = 2 ** (bits - 1) - 1
    parts, start = [], 0
    for size in layout.sizes:
        x = vector[start : start + size].astype(np.float64)
        scale = _symmetric_scale(float(np.abs(x).max()) if size else 0.0, top)
        codes = rounded(x / float(scale), -top, top, key, start) + _code_offset(bits)
        parts += [scale.astype("<f4").tobytes(), pack(codes.astype(np.uint8), bits)]
        start += size
    return b"".join(parts)


def _decode_tensor(bits: int, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    top, per_byte = 2 ** (bits - 1) - 1, 8 // bits
    written = unpack(body, bits)  # scales included: only the slices that hold codes are read
    codes = np.empty(layout.size, np.uint8)
    scales, padded = [], False
    start = offset = 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        scales.append(read_scale(body, offset, limits, name))
        first = (offset + 4) * per_byte
        offset += 4 + packed_size(size, bits)
        codes[start : start + size] = written[first : first + size]
        padded |= bool(written[first + size : offset * per_byte].any())
        start += size
    if padded:
        raise pad_error()
    signed = codes.view(np.int8) - np.int8(_code_offset(bits))
    if signed.size and int(signed.min()) < -top:  # the other end cannot be exceeded
        raise WireError(
            "code_range",
            f"contains the code {-top - 1}, the range is −{top} … {top}",
            remedy="The sender does not follow the format; drop it.",
        )
    return np.repeat(np.array(scales, np.float32), layout.sizes) * signed.astype(np.float32)


# One scale and one zero per message, affine: the paper's form.


def _message_size(bits: int, layout: Layout) -> int:
    return 8 + packed_size(layout.size, bits)


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


def _encode_message(
    bits: int, rounded: Rounding, layout: Layout, vector: Vector, key: bytes, memory: Memory | None
) -> bytes:
    top = 2**bits - 1
    low, high = (vector.min(), vector.max()) if vector.size else (np.float32(0.0), np.float32(0.0))
    zero = low + np.float32(0.0)  # −0 becomes 0: which of the two a minimum returns differs between machines
    scale = _affine_scale(zero, high, top)
    codes = rounded((vector.astype(np.float64) - float(zero)) / float(scale), 0, top, key, 0)
    return np.array([scale, zero], "<f4").tobytes() + pack(codes.astype(np.uint8), bits)


def _decode_message(bits: int, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    scale = read_scale(body, 0, limits, "the message")
    zero = np.frombuffer(body, "<f4", 1, 4)[0]
    if not abs(zero) <= limits.max_abs:  # False for NaN
        raise WireError(
            "zero",
            f"the zero of the message is {zero:.6g}, the limit is {limits.max_abs:.6g}",
            remedy="The sender does not follow the format; drop it.",
        )
    written = unpack(body[8:], bits)
    if written[layout.size :].any():
        raise pad_error()
    # Two roundings to float32, product then sum. A fused multiply-add would give other bits.
    return np.float32(zero) + scale * written[: layout.size].astype(np.float32)


def _floats(name: str, number: int, dtype: str) -> Codec:
    return Codec(
        name, number, partial(_float_size, dtype), partial(_encode_float, dtype), partial(_decode_float, dtype)
    )


def _integers(rounded: Rounding) -> tuple[Codec, ...]:
    tensor, message = ((2, 8), (3, 4), (6, 2)), ((4, 8), (5, 4), (7, 2))
    return (
        *(
            Codec(
                f"int{bits}-tensor", number, partial(_tensor_size, bits), partial(_encode_tensor, bits, rounded),
                partial(_decode_tensor, bits),
            )
            for number, bits in tensor
        ),
        *(
            Codec(
                f"int{bits}-message", number, partial(_message_size, bits), partial(_encode_message, bits, rounded),
                partial(_decode_message, bits),
            )
            for number, bits in message
        ),
    )  # fmt: skip


PLAIN = (_floats("float32", 0, "<f4"), _floats("float16", 1, "<f2"), *_integers(_nearest))
STOCHASTIC = {codec.name: codec for codec in _integers(_stochastic)}
"""The integer codecs with another encoder: the bytes mean the same."""
