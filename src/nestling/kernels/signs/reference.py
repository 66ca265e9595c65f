"""The sign map's two products, written as they are defined: build the matrix of signs, then multiply.

U ∈ {±1}^{n×r} is never stored elsewhere. Row i reads the W = ⌈r/32⌉ words i·W … i·W + W − 1 of its stream; its column j
is bit j mod 32 of word j div 32 of those, a set bit meaning +1.

    expand: y ↦ U y          reduce: g ↦ Uᵀ g

Source: FLITE (arXiv 2607.18343), which leaves the distribution of U open; signs from a counter-based integer stream are
ours, because they are the same bits everywhere.
"""

import numpy as np
from jaxtyping import Float, Int8

from nestling.core.seeds import Key, words


def words_per_row(rank: int) -> int:
    """W: how many 32-bit words hold one row's signs.

    >>> [words_per_row(rank) for rank in (1, 32, 33, 64)]
    [1, 1, 2, 2]
    """
    return -(-rank // 32)


def sign_matrix(key: Key, rows: int, rank: int) -> Int8[np.ndarray, "rows rank"]:
    """U as int8[rows, rank] of ±1.

    >>> sign_matrix((1, 2), 2, 3).tolist()
    [[-1, 1, -1], [-1, 1, 1]]
    """
    W = words_per_row(rank)
    drawn = words(key, 0, rows * W).reshape(rows, W)
    column = np.arange(rank)
    bits = (drawn[:, column // 32] >> (column % 32).astype(np.uint32)) & np.uint32(1)
    return (2 * bits.astype(np.int8) - 1).astype(np.int8)


def expand(key: Key, y: Float[np.ndarray, " rank"], rows: int) -> Float[np.ndarray, " rows"]:
    """U y, in the precision of `y`.

    >>> expand((1, 2), np.array([1.0, 10.0]), 2).tolist()
    [9.0, 9.0]
    """
    return sign_matrix(key, rows, y.size).astype(y.dtype) @ y


def reduce(key: Key, g: Float[np.ndarray, " rows"], rank: int) -> Float[np.ndarray, " rank"]:
    """Uᵀ g, in the precision of `g`.

    >>> reduce((1, 2), np.array([1.0, 10.0]), 2).tolist()
    [-11.0, 11.0]
    """
    return sign_matrix(key, g.size, rank).astype(g.dtype).T @ g
