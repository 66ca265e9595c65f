"""Small dense products for a CPU, in Numba: what the delta rule's chunks are made of.

A chunk's matrices (16 rows, 64 or 128 columns) are too small for the call of a library and too dense for a plain loop.
So every product goes through one tile whose sums stay in registers, emitted as LLVM vector instructions, which any
processor has in some width. All matrices lie in one flat workspace `w`, row by row, named by their offsets in floats.
Each sum has a fixed order; nothing here depends on threads.

Numba's cache watches the file of the caller alone: after a change here, delete the __pycache__ beside it.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if numba.config.DISABLE_JIT:
    raise ImportError("Numba's compiler is switched off (NUMBA_DISABLE_JIT)")

CHUNK = 16  # tokens solved together: the triangular work grows with it, the traffic of the state shrinks


def _registers() -> tuple[int, int, int]:
    """Floats in a vector register; rows of a tile two registers wide, and of one a single register wide."""
    names = numba.config.CPU_FEATURES
    features = binding.get_host_cpu_features() if names is None else {n[1:]: n[0] == "+" for n in names.split(",") if n}
    if features.get("avx512f"):
        return 16, 8, 16
    return (8, 4, 8) if features.get("avx") else (4, 4, 8)


LANES, WIDE, NARROW = _registers()

INT = types.int64
FLOATS = types.CPointer(types.float32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INDEX = ir.IntType(32)


def compiled(*signature: Any, returns: Any = types.void, **flags: Any) -> Callable[[Callable], Callable]:
    """Compile at import, from the cache on disk where there is one and without it where none can be written."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}} | flags

    def compile_now(function: Callable) -> Callable:
        try:
            return numba.njit(returns(*signature), cache=True, **options)(function)
        except (RuntimeError, OSError):
            return numba.njit(returns(*signature), **options)(function)

    return compile_now


# Vector instructions. Each emitter below adds them to the function that calls the intrinsic. Addresses are offsets in
# floats from `w`; no vector needs to be aligned.


def _load(builder: Any, w: Any, offset: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(w, [offset]), _VECTOR.as_pointer()), align=4)


def _store(builder: Any, value: Any, w: Any, offset: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(w, [offset]), _VECTOR.as_pointer()), align=4)


def _spread(builder: Any, w: Any, offset: Any) -> Any:
    """The float at `offset` in every lane."""
    value = builder.load(builder.gep(w, [offset]))
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES))


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, in one rounding where the processor can."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(function, [x, y, z])


def _steps(builder: Any, first: Any, step: Any, count: int) -> list[Any]:
    """first, first + step, …"""
    offsets = [first]
    for _ in range(count - 1):
        offsets.append(builder.add(offsets[-1], step))
    return offsets


def _tile(rows: int, vectors: int, combine: str) -> Callable:
    """C = A B ("set"), C += A B ("fadd") or C −= A B ("fsub") for one tile of C; A(i, p) = w[a + i a_row + p a_col].

    The product is summed by itself and meets C in one rounding, not in one for every term: what 4,096 tokens have added
    to a state is then as exact as in a chunked matrix product.
    """

    @intrinsic
    def tile(typingctx, w, a, a_row, a_col, b, c, columns, depth):
        def emit(context, builder, signature, arguments):
            w, a, a_row, a_col, b, c, columns, depth = arguments
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)]
            for place in (place for row in sums for place in row):
                builder.store(ir.Constant(_VECTOR, [0.0] * LANES), place)
            starts = _steps(builder, a, a_row, rows)
            with cgutils.for_range(builder, depth) as loop:
                row = builder.add(b, builder.mul(loop.index, columns))
                right = [_load(builder, w, builder.add(row, ir.Constant(row.type, LANES * n))) for n in range(vectors)]
                across = builder.mul(loop.index, a_col)
                for m in range(rows):
                    left = _spread(builder, w, builder.add(starts[m], across))
                    for n in range(vectors):
                        builder.store(_fused(builder, left, right[n], builder.load(sums[m][n])), sums[m][n])
            for m, start in enumerate(_steps(builder, c, columns, rows)):
                for n in range(vectors):
                    place, value = builder.add(start, ir.Constant(start.type, LANES * n)), builder.load(sums[m][n])
                    if combine != "set":
                        value = getattr(builder, combine)(_load(builder, w, place), value)
                    _store(builder, value, w, place)
            return context.get_dummy_value()

        return types.void(FLOATS, *[INT] * 7), emit

    return tile


@intrinsic
def _flip(typingctx, w, source, source_row, target, target_row):
    """Transpose LANES × LANES floats: log2(LANES) rounds that exchange ever larger blocks of two rows."""

    def emit(context, builder, signature, arguments):
        w, source, source_row, target, target_row = arguments
        rows = [_load(builder, w, offset) for offset in _steps(builder, source, source_row, LANES)]
        half = 1
        while half < LANES:
            low = [LANES + i - half if i & half else i for i in range(LANES)]
            high = [LANES + i if i & half else i + half for i in range(LANES)]
            masks = [ir.Constant(ir.VectorType(_INDEX, LANES), mask) for mask in (low, high)]
            for i in range(LANES):
                if not i & half:
                    x, y = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (builder.shuffle_vector(x, y, mask) for mask in masks)
            half *= 2
        for row, offset in zip(rows, _steps(builder, target, target_row, LANES), strict=True):
            _store(builder, row, w, offset)
        return context.get_dummy_value()

    return types.void(FLOATS, *[INT] * 4), emit


def _substitution(upward: bool) -> Callable:
    """Solve for LANES columns, the rows of X in registers.

    Downward: E_i = X_i − Σ_{j<i} A_ij U_j, U = β E. Upward, with Aᵀ: μ_i = X_i − Σ_{j>i} A_ji β_j μ_j, U = −β μ.
    """

    @intrinsic
    def substitute(typingctx, w, A, beta, X, U, columns):
        def emit(context, builder, signature, arguments):
            w, A, beta, X, U, columns = arguments
            places = _steps(builder, X, columns, CHUNK)
            x = [_load(builder, w, place) for place in places]
            order = range(CHUNK - 1, -1, -1) if upward else range(CHUNK)
            targets = _steps(builder, U, columns, CHUNK)
            for j in order:
                u = builder.fmul(x[j], _spread(builder, w, builder.add(beta, ir.Constant(beta.type, j))))
                negative = builder.fneg(u)
                _store(builder, negative if upward else u, w, targets[j])
                for i in range(j) if upward else range(j + 1, CHUNK):
                    entry = j * CHUNK + i if upward else i * CHUNK + j
                    factor = _spread(builder, w, builder.add(A, ir.Constant(A.type, entry)))
                    x[i] = _fused(builder, negative, factor, x[i])
            for value, place in zip(x, places, strict=True):
                _store(builder, value, w, place)
            return context.get_dummy_value()

        return types.void(FLOATS, *[INT] * 5), emit

    return substitute


@intrinsic
def floats(typingctx, address):
    """An address from outside as a pointer to floats."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(FLOATS))

    return FLOATS(INT), emit


_set2, _set1 = _tile(WIDE, 2, "set"), _tile(NARROW, 1, "set")
_add2, _add1 = _tile(WIDE, 2, "fadd"), _tile(NARROW, 1, "fadd")
_sub2, _sub1 = _tile(WIDE, 2, "fsub"), _tile(NARROW, 1, "fsub")
row_multiply, row_multiply_subtract = _tile(1, 1, "set"), _tile(1, 1, "fsub")
solve_down, solve_up = _substitution(False), _substitution(True)

# `no_type_check` keeps the shape checker of the tests from wrapping what Numba has to compile. Products are
# C[rows, columns] and A[rows, depth] B[depth, columns]; rows is a multiple of 16, and so is columns.

_PRODUCT = (FLOATS, *[INT] * 8)


@compiled(*_PRODUCT)
@no_type_check
def multiply(w, rows, columns, depth, a, a_row, a_col, b, c):
    """C = A B."""
    wide = columns // (2 * LANES) * (2 * LANES)
    for j in range(0, wide, 2 * LANES):
        for i in range(0, rows, WIDE):
            _set2(w, a + i * a_row, a_row, a_col, b + j, c + i * columns + j, columns, depth)
    for j in range(wide, columns, LANES):
        for i in range(0, rows, NARROW):
            _set1(w, a + i * a_row, a_row, a_col, b + j, c + i * columns + j, columns, depth)


@compiled(*_PRODUCT)
@no_type_check
def multiply_add(w, rows, columns, depth, a, a_row, a_col, b, c):
    """C += A B."""
    wide = columns // (2 * LANES) * (2 * LANES)
    for j in range(0, wide, 2 * LANES):
        for i in range(0, rows, WIDE):
            _add2(w, a + i * a_row, a_row, a_col, b + j, c + i * columns + j, columns, depth)
    for j in range(wide, columns, LANES):
        for i in range(0, rows, NARROW):
            _add1(w, a + i * a_row, a_row, a_col, b + j, c + i * columns + j, columns, depth)


@compiled(*_PRODUCT)
@no_type_check
def multiply_subtract(w, rows, columns, depth, a, a_row, a_col, b, c):
    """C −= A B."""
    wide = columns // (2 * LANES) * (2 * LANES)
    for j in range(0, wide, 2 * LANES):
        for i in range(0, rows, WIDE):
            _sub2(w, a + i * a_row, a_row, a_col, b + j, c + i * columns + j, columns, depth)
    for j in range(wide, columns, LANES):
        for i in range(0, rows, NARROW):
            _sub1(w, a + i * a_row, a_row, a_col, b + j, c + i * columns + j, columns, depth)


@compiled(FLOATS, INT, INT, INT, INT)
@no_type_check
def transpose(w, rows, columns, source, target):
    """target[columns, rows] = source[rows, columns]ᵀ."""
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            _flip(w, source + i * columns + j, columns, target + j * rows + i, rows)


@compiled(FLOATS, INT, INT, INT, INT, INT)
@no_type_check
def scale(w, rows, columns, source, factors, target):
    """target = diag(factors) source."""
    for i in range(rows):
        factor = w[factors + i]
        for j in range(columns):
            w[target + i * columns + j] = factor * w[source + i * columns + j]


@compiled(FLOATS, INT, INT, INT, INT)
@no_type_check
def decay(w, count, source, factor, target):
    """target = w[factor] · source."""
    a = w[factor]
    for j in range(count):
        w[target + j] = a * w[source + j]


@compiled(FLOATS, INT, INT, INT)
@no_type_check
def fade(w, count, x, factor):
    """x *= w[factor]; apart from `decay`, because two names for one place are not vectorised."""
    a = w[factor]
    for j in range(count):
        w[x + j] *= a


@compiled(FLOATS, INT, INT, INT, returns=types.float32, fastmath={"contract", "reassoc"})
@no_type_check
def dot(w, x, y, count):
    """⟨x, y⟩, summed in an order fixed when it was compiled."""
    total = np.float32(0)
    for j in range(count):
        total += w[x + j] * w[y + j]
    return total
