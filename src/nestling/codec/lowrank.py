"""Every matrix as a product of two thin ones, found by one step of subspace iteration: PowerSGD.

A tensor of two or more dimensions is read as a matrix M of [first dimension, all others]. Its thin factor Q is kept
from round to round, so that over rounds the step becomes the power method and P Qᵀ the best approximation of its rank.

    P = orthonormalise(M Q)          Q = Mᵀ P          M̂ = P Qᵀ  (the projection of M's columns on those of P)

Source: Vogels, Karimireddy & Jaggi (arXiv 1905.13727), algorithm 1. Where we differ: there P and Q are averaged over
the workers in two exchanges, so that none sees another's matrices; here the server decodes every reply, so each client
sends factors of its own in one message, as many bytes as in the paper. The first Q is of signs, not of normals, drawn
from the key, and so is a column that has lost its direction. What the rank leaves over is for error feedback to keep.

A matrix goes as its factors if they are fewer numbers than it has; every other tensor, norms and biases above all, goes
as it is and is counted. A decoder adds up r products of float32 numbers, each exact in float64, one after the other,
and rounds once: the same bits on every machine. The encoder's bits are those of its BLAS; nobody has to repeat them.
"""

from functools import partial
from itertools import accumulate, pairwise
from math import prod

import numpy as np
from jaxtyping import Float64

from nestling.codec.form import FLT_MAX, Body, Codec, Limits, Memory, key_stream
from nestling.core.errors import ConfigError, WireError
from nestling.core.vectors import Layout, Vector

FACTORS = "factors"
"""Where the Q of all matrices, one after the other and row by row, are kept between rounds."""

_NOTHING = 1e-9  # of a column's length; less than that left over is rounding, not a direction


def powersgd(rank: int) -> Codec:
    """The codec `powersgd@rank` (number 13). Raises `ConfigError` unless rank is an integer of 1 … 1,024.

    With a memory, its entry "factors" (float32, see `factor_size`) is read, if it fits, and replaced.

    >>> layout, codec = Layout.of([("weight", (6, 4)), ("bias", (6,))]), powersgd(1)
    >>> x = np.append(np.outer(np.arange(6), [1, -1, 2, 0]).ravel(), np.ones(6)).astype(np.float32)
    >>> body = codec.encode(layout, x, bytes(28), None)
    >>> len(body), np.abs(codec.decode(layout, body, Limits(), bytes(28)) - x).max() < 1e-5
    (64, np.True_)
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 1024:
        raise ConfigError(f"rank is {rank!r}", where="codec", remedy="Give an integer of 1 … 1,024.")
    return Codec(f"powersgd@{rank}", 13, partial(_size, rank), partial(_encode, rank), partial(_decode, rank))


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """[rows, columns] of the matrix a tensor is sent as, or None if it goes as it is.

    >>> matrix_shape((64, 3, 3, 3), 2), matrix_shape((64,), 2), matrix_shape((4, 4), 2)
    ((64, 27), None, None)
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if rank * (rows + columns) < rows * columns else None


def factor_size(layout: Layout, rank: int) -> int:
    """Numbers in the memory's "factors".

    >>> factor_size(Layout.of([("weight", (6, 4)), ("bias", (6,))]), 1)
    4
    """
    return sum(rank * shape[1] for shape in _matrices(layout, rank) if shape)


def orthonormal(matrix: Float64[np.ndarray, "n r"]) -> Float64[np.ndarray, "n r"]:
    """Gram–Schmidt, column by column, each one twice; what depends on the columns before it becomes zero.

    >>> orthonormal(np.array([[3.0, 1.0, 6.0], [4.0, 0.0, 8.0]])).round(6).tolist()
    [[0.6, 0.8, 0.0], [0.8, -0.6, 0.0]]
    """
    columns = matrix.T.copy()
    for index, column in enumerate(columns):
        length = float(np.linalg.norm(column))
        for _ in range(2):  # the second time takes off what rounding left of the first
            column -= columns[:index].T @ (columns[:index] @ column)
        left = float(np.linalg.norm(column))
        columns[index] = column / left if left > _NOTHING * length else 0.0
    return columns.T


def _matrices(layout: Layout, rank: int) -> list[tuple[int, int] | None]:
    return [matrix_shape(shape, rank) for shape in layout.shapes]


def _counts(layout: Layout, rank: int) -> list[int]:
    """Numbers sent for each tensor."""
    shapes = zip(_matrices(layout, rank), layout.sizes, strict=True)
    return [rank * sum(shape) if shape else size for shape, size in shapes]


def _size(rank: int, layout: Layout) -> int:
    return 4 * sum(_counts(layout, rank))


def _encode(rank: int, layout: Layout, vector: Vector, key: bytes, memory: Memory | None) -> bytes:
    starts = _first_factors(rank, layout, key, memory)
    parts, kept, at = [], [np.empty(0, np.float32)], 0
    start = 0
    for shape, size in zip(_matrices(layout, rank), layout.sizes, strict=True):
        x = vector[start : start + size]
        start += size
        if not shape:
            parts.append(x)
            continue
        before = starts[at : at + rank * shape[1]]
        at += before.size
        P, Q = _factors(x.reshape(shape).astype(np.float64), before.reshape(-1, rank))
        if float(np.abs(Q).max()) > FLT_MAX:
            raise WireError("overflow", "a factor exceeds what a float32 holds", remedy="Use float32.")
        parts += [P.astype(np.float32).ravel(), Q.astype(np.float32).ravel()]
        kept.append(parts[-1])
    if memory is not None:
        memory[FACTORS] = np.concatenate(kept)
    return b"".join(part.astype("<f4").tobytes() for part in parts)


def _factors(M: np.ndarray, Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P, orthonormal but for its rounding to float32, and Mᵀ P."""
    P = orthonormal(M @ Q).astype(np.float32).astype(np.float64)
    return P, M.T @ P


def _first_factors(rank: int, layout: Layout, key: bytes, memory: Memory | None) -> np.ndarray:
    """float64: Q of every matrix to begin with, the last round's where there is one with a direction."""
    total = factor_size(layout, rank)
    drawn = key_stream(key, "powersgd").signs(total).astype(np.float64)
    before = None if memory is None else memory.get(FACTORS)
    if before is None or before.shape != (total,) or not np.isfinite(before).all():
        return drawn
    ends = [0, *accumulate(rank * shape[1] for shape in _matrices(layout, rank) if shape)]
    for first, last in pairwise(ends):
        Q, fresh = before[first:last].reshape(-1, rank), drawn[first:last].reshape(-1, rank)
        fresh[:] = np.where(Q.any(axis=0), Q, fresh)
    return drawn


def _decode(rank: int, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    sent = np.frombuffer(body, "<f4")
    vector, at, start = np.empty(layout.size, np.float32), 0, 0
    for shape, size, count in zip(_matrices(layout, rank), layout.sizes, _counts(layout, rank), strict=True):
        numbers = sent[at : at + count]
        at += count
        vector[start : start + size] = _product(numbers, shape, rank) if shape else numbers
        start += size
    return vector


def _product(numbers: np.ndarray, shape: tuple[int, int], rank: int) -> np.ndarray:
    """P Qᵀ as float32, flat: r products, added in order."""
    P, Q = (part.reshape(-1, rank).astype(np.float64) for part in np.split(numbers, [rank * shape[0]]))
    total = np.zeros(shape)
    for p, q in zip(P.T, Q.T, strict=True):
        total += np.outer(p, q)
    return total.astype(np.float32).ravel()
