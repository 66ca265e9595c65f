"""Codes of 4, 2 or 1 bits for a vector that was rotated at random first, so that it looks normal whatever it was.

A rotation both sides draw spreads every number over its block; what comes out is close to normal, and the quantiser
that is best for a normal distribution (Lloyd–Max, levels q) is then best for any vector. One scale a block goes along.

    z = H D x / √d          D random signs, H the Hadamard matrix of the block's d numbers (Sylvester's order)
    c_i = the level nearest to z_i / rms(z)          s = ⟨q_c, z⟩ / ⟨q_c, q_c⟩          x̂ = s D H q_c / √d

Source: EDEN (Vargaftik et al., arXiv 2108.08842). Where we differ: s is the least-squares scale. EDEN's own,
‖z‖² / ⟨q_c, z⟩, is unbiased, but has the larger error, 0.133 in place of 0.118 at 2 bits and 0.571 in place of 0.363
at 1 bit. Ours makes x̂ the projection of x on the levels: its error never exceeds x, which error feedback needs. The
price is a mean that is short by that error: x̂ ≈ 0.99 x, 0.88 x or 0.64 x along x, at 4, 2 and 1 bits.

Blocks hold 4,096, 1,024 or 256 numbers, and a shorter vector's 64, 16, 4 or 1: powers of four, whose √d is a power of
two. 256 is the smallest because a scale then costs at most an eighth of a bit a number. If fewer numbers remain than
that, one more block reaches back over some that are rotated already: a product of rotations is a rotation, and nothing
is padded. 1,280 numbers are 1,024 + 256, so two scales: 648, 328 and 168 bytes.

Levels are whole multiples of 2^−12, so as long as a block has one scale every sum in a decoder is exact in float64 and
nothing depends on its order; the order of the rest is fixed by the butterflies below. SPEC.md is the definition.
"""

from functools import partial
from itertools import pairwise

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
    unpack,
)
from nestling.core.errors import WireError
from nestling.core.vectors import Layout, Vector

LEVELS: dict[int, tuple[int, ...]] = {
    1: (3268,),
    2: (1855, 6187),
    4: (526, 1589, 2690, 3860, 5146, 6628, 8475, 11193),
}
"""By bits: the positive half of the Lloyd–Max levels of a standard normal, in units of 2^−12; the others mirror it."""

UNIT = 2.0**-12
LARGEST, SMALLEST = 4096, 256
_ROWS = 64  # blocks transformed together: 2 MiB of float64, which stays in the cache

Run = tuple[int, int, int]
"""First number, block size and number of equal blocks that follow each other."""


def runs(n: int) -> list[Run]:
    """The blocks of a vector of n numbers, in the order in which they are rotated.

    >>> runs(1280), runs(300)
    ([(0, 1024, 1), (1024, 256, 1)], [(0, 256, 1), (44, 256, 1)])
    """
    size, smallest = LARGEST, SMALLEST
    while smallest > max(n, 1):
        smallest //= 4
    found, start = [], 0
    while size >= smallest:
        if count := (n - start) // size:
            found.append((start, size, count))
            start += size * count
        size //= 4
    if start < n:
        found.append((n - smallest, smallest, 1))
    return found


def transform(rows: np.ndarray) -> np.ndarray:
    """H x for each row x of float64[b, d], d a power of two, as float64[b, d]: (a, b) → (a + b, a − b) at distances 1,
    2, 4, … d / 2, in this order.

    >>> transform(np.array([[1.0, 2.0, 3.0, 4.0]])).tolist()
    [[10.0, -2.0, -4.0, 0.0]]
    """
    count, size = rows.shape
    now = np.ascontiguousarray(rows.T)  # neighbours in a row lie far apart, so that each step adds long stretches
    then = np.empty_like(now)
    half = 1
    while half < size:
        pairs, sums = (array.reshape(size // (2 * half), 2, half * count) for array in (now, then))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        now, then, half = then, now, 2 * half
    return now.T


def rotated(name: str, number: int, bits: int) -> Codec:
    """The codec of `bits` (4, 2 or 1) bits a number, called `name`, with `number` on the wire.

    >>> codec, layout = rotated("rotated2", 9, 2), Layout.of([("latent", (1280,))])
    >>> x = np.linspace(-1, 1, 1280, dtype=np.float32) ** 3
    >>> body = codec.encode(layout, x, bytes(28), None)
    >>> left = codec.decode(layout, body, Limits(), bytes(28)) - x
    >>> len(body), left @ left < 0.13 * (x @ x)
    (328, np.True_)
    """
    return Codec(name, number, partial(_size, bits), partial(_encode, bits), partial(_decode, bits))


def _size(bits: int, layout: Layout) -> int:
    return 4 * sum(count for _, _, count in runs(layout.size)) + packed_size(layout.size, bits)


def _levels(bits: int) -> np.ndarray:
    """float64[2^bits], rising, in units of 2^−12."""
    half = np.array(LEVELS[bits], np.float64)
    return np.concatenate((-half[::-1], half))


def _lengths(n: int) -> np.ndarray:
    """int64[blocks]: how many numbers each scale serves; one fewer where the last block reaches back."""
    starts = [start + size * index for start, size, count in runs(n) for index in range(count)]
    return np.diff(np.array([*starts, n], np.int64))


def _signs(key: bytes, n: int) -> np.ndarray:
    """float32 ±1 for each number of each block, in the order of `runs`."""
    return key_stream(key, "rotate").signs(sum(size * count for _, size, count in runs(n)))


def _rotate(x: np.ndarray, signs: np.ndarray, *, back: bool) -> None:
    """Replace float64[n] by its rotation, or (`back`) by what it was the rotation of."""
    steps, used = [], 0
    for start, size, count in runs(x.size):
        for first in range(0, count, _ROWS):
            rows = min(_ROWS, count - first)
            steps.append((start + first * size, size, rows, used))
            used += rows * size
    for start, size, rows, used in reversed(steps) if back else steps:
        block = x[start : start + rows * size].reshape(rows, size)
        turned = signs[used : used + rows * size].reshape(rows, size)
        scale = 1.0 / np.sqrt(size)  # a power of two
        block[:] = transform(block) * turned * scale if back else transform(block * turned) * scale


def _totals(values: np.ndarray) -> np.ndarray:
    """float64[blocks]: the sum of float64[n] over the numbers of each scale, halves added to halves, so that it is the
    same on every machine."""
    totals = [np.empty(0)]
    for (start, size, count), (end, _, _) in pairwise([*runs(values.size), (values.size, 0, 0)]):
        for first in range(start, start + size * count, size * _ROWS):
            part = values[first : min(first + size * _ROWS, end)]
            rows = np.zeros((-(-part.size // size), size))
            rows.reshape(-1)[: part.size] = part
            while rows.shape[1] > 1:
                half = rows.shape[1] // 2
                rows = rows[:, :half] + rows[:, half:]
            totals.append(rows[:, 0])
    return np.concatenate(totals)


def _encode(bits: int, layout: Layout, vector: Vector, key: bytes, memory: Memory | None) -> bytes:
    levels, lengths = _levels(bits), _lengths(layout.size)
    z = vector.astype(np.float64)
    _rotate(z, _signs(key, layout.size), back=False)
    rms = np.sqrt(_totals(z * z) / lengths)
    limits = (levels[:-1] + levels[1:]) / 2 * UNIT
    codes = np.searchsorted(limits, z / np.repeat(np.where(rms > 0, rms, 1.0), lengths), side="right").astype(np.uint8)
    chosen = levels[codes] * UNIT
    scale = _totals(chosen * z) / _totals(chosen * chosen)
    if scale.size and float(scale.max()) > FLT_MAX:
        cause = f"the scale {scale.max():.6g} is more than a float32 holds"
        raise WireError("overflow", cause, remedy="Use float32, or smaller numbers.")
    written = np.where(scale < FLT_MIN, 0.0, scale).astype("<f4")
    codes[np.repeat(written == 0, lengths)] = 0
    return written.tobytes() + pack(codes, bits)


def _decode(bits: int, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    n, lengths = layout.size, _lengths(layout.size)
    scales = np.frombuffer(body, "<f4", lengths.size)
    wrong = ~((scales.view("<u4") == 0) | (scales >= FLT_MIN) & (scales <= limits.max_abs))  # True for NaN and −0
    if wrong.any():
        raise WireError(
            "scale",
            f"the scale of block {wrong.argmax()} is {scales[wrong][0]:.6g}, neither 0 nor a normal number up to "
            f"{limits.max_abs:.6g}",
            remedy="The sender does not follow the format; drop it.",
        )
    codes = unpack(body[4 * lengths.size :], bits)
    if codes[n:].any():
        raise pad_error()
    codes = codes[:n]
    if codes[np.repeat(scales == 0, lengths)].any():
        raise WireError(
            "code_range",
            "contains a code other than 0 in a block whose scale is 0",
            remedy="The sender does not follow the format; drop it.",
        )
    z = _levels(bits)[codes] * np.repeat(scales.astype(np.float64) * UNIT, lengths)
    _rotate(z, _signs(key, n), back=True)
    z += 0.0  # −0 becomes 0
    vector: Vector = z.astype(np.float32)
    return vector
