"""The sign map on a CPU: bits are regenerated block by block and never leave the first-level cache.

Eight columns share one byte of a row, so U y for them is one of 256 sums: `expand` tabulates those sums once and then
reads r/8 of them a row. `reduce` is its transpose: r/8 additions a row into 256 bins, and one fold of the bins a block.

    table[k][b] = Σ_{j<8} ±y_{8k+j}  (sign + where bit j of b is set)
    (U y)_i     = Σ_k table[k][byte k of row i]

Every sum has the order written here (no reassociation, no atomics, blocks added in order), so the bits of the result
do not depend on the number of threads. Kernels are serial and release the interpreter lock: a plain thread pool over
ranges of blocks is safe where clients train in threads, which Numba's own threading layer is not.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, no_type_check

import numba
import numpy as np
from jaxtyping import Float32, Float64, UInt32
from numba.core import types

from nestling.core.seeds import MULTIPLIERS, ROUNDS, WEYL, Key
from nestling.kernels.signs.reference import words_per_row

if numba.config.DISABLE_JIT:
    raise ImportError("Numba's compiler is switched off (NUMBA_DISABLE_JIT)")

BLOCK = 16384  # rows that share one set of bins: enough to make the fold cheap, few enough for short float32 sums
CHUNK = 1024  # rows whose words are in the buffer at one time; a multiple of 4, so a chunk starts a Philox block
PARALLEL_ROWS = 200_000  # below this a second thread costs more than it saves

_M0, _M1 = (np.uint64(value) for value in MULTIPLIERS)
_W0, _W1 = (np.uint32(value) for value in WEYL)
_HALF = np.uint64(32)
_BYTE = np.uint32(255)
_8, _16, _24 = np.uint32(8), np.uint32(16), np.uint32(24)

# Inputs are declared read-only, which also admits writable arrays.
_IN = types.Array(types.float32, 1, "C", readonly=True)
_OUT = types.Array(types.float32, 1, "C")
_TABLE = types.Array(types.float32, 2, "C")
_WORDS = types.Array(types.uint32, 1, "C")


def _compiled(*signature: Any) -> Callable[[Callable], Callable]:
    """Compile at import, from the cache on disk where there is one and without it where none can be written."""

    def compile_now(function: Callable) -> Callable:
        try:
            return numba.njit(types.void(*signature), nogil=True, cache=True)(function)
        except (RuntimeError, OSError):
            return numba.njit(types.void(*signature), nogil=True)(function)

    return compile_now


# `no_type_check` keeps the shape checker of the tests from wrapping what Numba has to compile.


@_compiled(types.uint32, types.uint32, types.uint64, _WORDS)
@no_type_check
def _philox(k0, k1, first, out):
    """Fill `out` (a multiple of 4) with the words of blocks first, first + 1, …; the loop is vectorised over blocks."""
    for block in range(out.size // 4):
        counter = first + np.uint64(block)
        c0, c1, c2, c3 = np.uint32(counter), np.uint32(counter >> _HALF), np.uint32(0), np.uint32(0)
        a, b = k0, k1
        for _ in range(ROUNDS):
            p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
            c0, c2 = np.uint32(p1 >> _HALF) ^ c1 ^ a, np.uint32(p0 >> _HALF) ^ c3 ^ b
            c1, c3 = np.uint32(p1), np.uint32(p0)
            a, b = np.uint32(a + _W0), np.uint32(b + _W1)
        out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3] = c0, c1, c2, c3


@_compiled(_IN, _TABLE)
@no_type_check
def _tabulate(y, table):
    """All 256 signed sums of each eight columns; columns beyond the rank count as zero."""
    for k in range(table.shape[0]):
        sums = table[k]
        sums[0] = np.float32(0)
        for j in range(8):
            value = y[8 * k + j] if 8 * k + j < y.size else np.float32(0)
            half = 1 << j
            for b in range(half):
                sums[half + b] = sums[b] + value
                sums[b] = sums[b] - value


@_compiled(types.uint32, types.uint32, _TABLE, _IN, _OUT, types.int64, types.int64)
@no_type_check
def _expand(k0, k1, table, base, out, first, last):
    """out = base + U y for the blocks first … last − 1."""
    W = table.shape[0] // 4
    words, total = np.empty(CHUNK * W, np.uint32), np.empty(CHUNK, np.float32)
    for low in range(first * BLOCK, min(last * BLOCK, out.size), CHUNK):
        high = min(low + CHUNK, out.size)
        count = high - low
        _philox(k0, k1, np.uint64(low * W // 4), words[: (count * W + 3) // 4 * 4])
        total[:] = np.float32(0)
        for w in range(W):
            t0, t1, t2, t3 = table[4 * w], table[4 * w + 1], table[4 * w + 2], table[4 * w + 3]
            for i in range(count):
                x = words[i * W + w]
                total[i] += (t0[x & _BYTE] + t1[(x >> _8) & _BYTE]) + (t2[(x >> _16) & _BYTE] + t3[x >> _24])
        start, into = base[low:high], out[low:high]  # slices: an index known to be positive is vectorised
        for i in range(count):
            into[i] = start[i] + total[i]


@_compiled(_TABLE, _OUT)
@no_type_check
def _fold(bins, sums):
    """The transpose of `_tabulate`: what fell into 256 bins, as eight signed sums."""
    difference = np.empty(128, np.float32)
    for k in range(bins.shape[0]):
        bin_ = bins[k]
        for j in range(7, -1, -1):
            half = 1 << j
            for b in range(half):
                difference[b] = bin_[half + b] - bin_[b]
                bin_[b] += bin_[half + b]
            while half > 1:
                half //= 2
                for b in range(half):
                    difference[b] += difference[half + b]
            sums[8 * k + j] = difference[0]


@_compiled(types.uint32, types.uint32, _IN, _TABLE, types.int64, types.int64)
@no_type_check
def _reduce(k0, k1, g, partial, first, last):
    """partial[b] = U_bᵀ g_b for the blocks b = first … last − 1."""
    W = partial.shape[1] // 32
    words = np.empty(CHUNK * W, np.uint32)
    bins = np.empty((4 * W, 256), np.float32)
    for block in range(first, last):
        bins[:] = np.float32(0)
        end = min((block + 1) * BLOCK, g.size)
        for low in range(block * BLOCK, end, CHUNK):
            high = min(low + CHUNK, end)
            count = high - low
            _philox(k0, k1, np.uint64(low * W // 4), words[: (count * W + 3) // 4 * 4])
            values = g[low:high]
            for w in range(W):
                t0, t1, t2, t3 = bins[4 * w], bins[4 * w + 1], bins[4 * w + 2], bins[4 * w + 3]
                for i in range(count):
                    x, value = words[i * W + w], values[i]
                    t0[x & _BYTE] += value
                    t1[(x >> _8) & _BYTE] += value
                    t2[(x >> _16) & _BYTE] += value
                    t3[x >> _24] += value
        _fold(bins, partial[block])


@_compiled(_TABLE, types.Array(types.float64, 1, "C"))
@no_type_check
def _total(partial, total):
    """Add the blocks' sums in float64, in block order."""
    for block in range(partial.shape[0]):
        for j in range(total.size):
            total[j] += np.float64(partial[block, j])


def words(key: Key, first_block: int, blocks: int) -> UInt32[np.ndarray, " words"]:
    """The 4·blocks words from block `first_block` on, as the kernels make them.

    >>> words((0, 0), 0, 1)[0] == 0x6627E8D5
    np.True_
    """
    drawn = np.empty(4 * blocks, np.uint32)
    _philox(np.uint32(key[0]), np.uint32(key[1]), np.uint64(first_block), drawn)
    return drawn


def expand(
    key: Key,
    y: Float32[np.ndarray, " rank"],
    *,
    base: Float32[np.ndarray, " rows"],
    out: Float32[np.ndarray, " rows"],
    threads: int = 1,
) -> None:
    """out = base + U y in one pass; `out` may be `base` itself. All arrays contiguous (`TypeError` otherwise).

    >>> out = np.empty(2, np.float32)
    >>> expand((1, 2), np.array([1, 10], np.float32), base=np.zeros(2, np.float32), out=out)
    >>> out.tolist()
    [9.0, 9.0]
    """
    table = np.empty((4 * words_per_row(y.size), 256), np.float32)
    _tabulate(y, table)
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    _spread(lambda first, last: _expand(k0, k1, table, base, out, first, last), out.size, threads)


def reduce(key: Key, g: Float32[np.ndarray, " rows"], rank: int, *, threads: int = 1) -> Float64[np.ndarray, " rank"]:
    """Uᵀ g: float32 sums inside a block of rows, float64 across blocks. `g` contiguous (`TypeError` otherwise).

    >>> reduce((1, 2), np.array([1, 10], np.float32), 2).tolist()
    [-11.0, 11.0]
    """
    columns = 32 * words_per_row(rank)
    partial = np.empty((_blocks(g.size), columns), np.float32)
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    _spread(lambda first, last: _reduce(k0, k1, g, partial, first, last), g.size, threads)
    total = np.zeros(columns, np.float64)
    _total(partial, total)
    return total[:rank]


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK)


def _spread(work: Callable[[int, int], None], rows: int, threads: int) -> None:
    """Run `work(first, last)` over all blocks, in a few ranges a thread so that a busy core does not hold up the rest.

    The pool lives for one call: a kept one would not survive a fork.
    """
    blocks = _blocks(rows)
    if threads <= 1 or rows <= PARALLEL_ROWS:
        work(0, blocks)
        return
    pieces = min(blocks, 4 * threads)
    cuts = [blocks * piece // pieces for piece in range(pieces + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, cuts[:-1], cuts[1:]))
