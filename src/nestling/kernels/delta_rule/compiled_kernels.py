"""The delta rule on a CPU: 16 tokens at a time, the state of one memory in the first-level cache all along.

Derivation: kernels/README.md. K and Q of a chunk are stacked (`KQ`; several Q where query heads share a memory), and so
are A over P and, in the backward pass, −dX over dO (`Y`): what is true of keys and of queries is then one product.

    A = tril(K Kᵀ ∘ Γ, −1)   P = tril(Q Kᵀ ∘ Γ)   E = V − c K S − A U   U = β E   O = c Q S + P U   S ← c_C S + Kᵀ t U

    μ = P ᵀdO + t K dS − Aᵀ β μ   dV = dX = β μ   dβ = ⟨μ, E⟩   W = tril(Y Uᵀ) ∘ Γ
    [dK_read; dQ] = c Y Sᵀ + W K   dK_write = t U dSᵀ + Wᵀ KQ   dS ← c_C dS + (c KQ)ᵀ Y

Γ_ij is the decay from token j to token i, a product of factors ≤ 1 (never a quotient: a log-decay of −∞ is legal), c_i
the decay from the chunk's start, t_i the decay to its end. A log-decay collects ⟨q, dq⟩ + ⟨k, dk_read⟩ − ⟨k, dk_write⟩
of the tokens from its own to the end of the chunk, and what flows through the chunk's last state.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from numba.core import types

from nestling.kernels.delta_rule.compiled_tiles import (
    CHUNK,
    FLOATS,
    INT,
    LANES,
    compiled,
    decay,
    dot,
    fade,
    floats,
    multiply,
    multiply_add,
    multiply_subtract,
    row_multiply,
    row_multiply_subtract,
    scale,
    solve_down,
    solve_up,
    transpose,
)

SEGMENT = 16  # chunks between two kept states; the backward pass holds one segment in the second-level cache
SPAN = SEGMENT * CHUNK  # its tokens

# Rows of `places`: the address of a tensor and its strides, in floats, along batch, token and head. Address 0: absent.
# STATE, KEPT and D_STATE are contiguous. OUT, STATE and KEPT are written forward; D_STATE and D_Q … D_G backward.
Q, K, V, BETA, G, OUT, STATE, KEPT, D_OUT, D_STATE, D_Q, D_K, D_V, D_BETA, D_G = range(15)
TENSORS = 15


class Sizes(NamedTuple):
    """What a call is about. `group` is the number of query heads a memory; `kept` the states kept for each memory."""

    length: int
    heads: int
    group: int
    d_k: int
    d_v: int
    kept: int
    gated: int
    additive: int


class Space(NamedTuple):
    """Offsets in the workspace. The first nine belong to a chunk, and repeat every `block` floats in a segment."""

    S: int  # the state before the chunk
    KQ: int
    AP: int
    E: int  # V, then X, then E
    U: int
    decay: int  # Γ
    beta: int
    c: int
    t: int
    KR: int  # KQ, decayed for the product at hand
    KT: int  # Kᵀ
    Y: int  # forward: O in its query rows
    YT: int
    UT: int
    mu: int
    W: int
    flat: int  # a product whose transpose is wanted
    D: int  # [dK_read; dQ]
    DW: int  # dK_write
    dS: int
    block: int
    floats: int  # needed in all


def plan(sizes: Sizes, chunks: int) -> Space:
    """The workspace for `chunks` chunks held at a time.

    >>> plan(Sizes(length=16, heads=1, group=1, d_k=64, d_v=64, kept=0, gated=0, additive=0), 1).KQ
    4096
    """
    d_k, d_v, rows = sizes.d_k, sizes.d_v, (1 + sizes.group) * CHUNK
    state, k, v, square = d_k * d_v, CHUNK * d_k, CHUNK * d_v, CHUNK * CHUNK
    local = [state, rows * d_k, rows * CHUNK, v, v, square, CHUNK, CHUNK, CHUNK]
    block = sum(local)
    scratch = [rows * d_k, k, rows * d_v, rows * d_v, v, v, rows * CHUNK, rows * d_k, rows * d_k, k, state]
    first = [sum(local[:i]) for i in range(len(local))]
    rest = [chunks * block + sum(scratch[:i]) for i in range(len(scratch))]
    return Space(*first, *rest, block, chunks * block + sum(scratch))


_PLACES = types.Array(INT, 2, "C")
_SIZES = types.NamedUniTuple(INT, len(Sizes._fields), Sizes)
_SPACE = types.NamedUniTuple(INT, len(Space._fields), Space)
_CALL = (FLOATS, _PLACES, _SIZES, _SPACE)


# `no_type_check` keeps the shape checker of the tests from wrapping what Numba has to compile.


@compiled(_PLACES, INT, INT, INT, INT, returns=INT)
@no_type_check
def _at(places, row, batch, t, head):
    """Where a token's first entry is in its tensor."""
    return batch * places[row, 1] + t * places[row, 2] + head * places[row, 3]


@compiled(FLOATS, INT, INT, INT, _PLACES, INT, INT, INT, INT)
@no_type_check
def _read(w, to, width, rows, places, row, batch, t, head):
    """Copy tokens of a tensor into a chunk; those missing at the end of a sequence count as zero."""
    x, start, step = floats(places[row, 0]), _at(places, row, batch, t, head), places[row, 2]
    for i in range(rows):
        for j in range(width):
            w[to + i * width + j] = x[start + i * step + j]
    for j in range(rows * width, CHUNK * width):
        w[to + j] = np.float32(0)


@compiled(FLOATS, INT, INT, INT, _PLACES, INT, INT, INT, INT)
@no_type_check
def _write(w, source, width, rows, places, row, batch, t, head):
    """Copy the first `rows` tokens of a chunk into a tensor."""
    x, start, step = floats(places[row, 0]), _at(places, row, batch, t, head), places[row, 2]
    for i in range(rows):
        for j in range(width):
            x[start + i * step + j] = w[source + i * width + j]


@compiled(FLOATS, INT, FLOATS, INT, INT)
@no_type_check
def _copy(w, to, x, start, count):
    for j in range(count):
        w[to + j] = x[start + j]


@compiled(FLOATS, _SPACE, INT)
@no_type_check
def _undecayed(w, m, chunks):
    """Γ of every chunk as it is without a gate."""
    for n in range(chunks):
        for i in range(CHUNK):
            for j in range(CHUNK):
                w[m.decay + n * m.block + i * CHUNK + j] = np.float32(1) if j <= i else np.float32(0)


@compiled(FLOATS, _SIZES, INT, INT)
@no_type_check
def _mask(w, sizes, x, gamma):
    """Each 16 × 16 block of a stack ∘= Γ."""
    for r in range(1 + sizes.group):
        for j in range(CHUNK * CHUNK):
            w[x + r * CHUNK * CHUNK + j] *= w[gamma + j]


@compiled(*_CALL, INT, INT, INT, INT, INT)
@no_type_check
def _open(w, places, sizes, m, b, batch, head, t, rows):
    """Read a chunk; make its decays, A (upper part unused) and P. `b` is where the chunk's block starts."""
    KQ, AP, c, end, d_k = m.KQ + b, m.AP + b, m.c + b, m.t + b, sizes.d_k
    _read(w, KQ, d_k, rows, places, K, batch, t, head)
    for r in range(sizes.group):
        _read(w, KQ + (1 + r) * CHUNK * d_k, d_k, rows, places, Q, batch, t, head * sizes.group + r)
    _read(w, m.E + b, sizes.d_v, rows, places, V, batch, t, head)
    _read(w, m.beta + b, 1, rows, places, BETA, batch, t, head)
    if sizes.gated:
        g, start = floats(places[G, 0]), _at(places, G, batch, t, head)
        product = np.float32(1)
        for j in range(CHUNK):
            w[end + j] = np.float32(0)
        for i in range(CHUNK):
            a = np.exp(g[start + i * places[G, 2]]) if i < rows else np.float32(1)
            product *= a
            w[c + i] = product
            for j in range(CHUNK):
                w[end + j] *= a
            w[end + i] = np.float32(1)
            for j in range(CHUNK):
                w[m.decay + b + i * CHUNK + j] = w[end + j]
    transpose(w, CHUNK, d_k, KQ, m.KT)
    multiply(w, (1 + sizes.group) * CHUNK, CHUNK, d_k, KQ, d_k, 1, m.KT, AP)
    _mask(w, sizes, AP, m.decay + b)


@compiled(FLOATS, _SIZES, _SPACE, INT, INT, INT, returns=INT)
@no_type_check
def _decayed(w, sizes, m, b, factors, blocks):
    """Where diag(factors) KQ is, for the first `blocks` blocks of rows: KQ itself without a gate."""
    if not sizes.gated:
        return m.KQ + b
    for r in range(blocks):
        offset = r * CHUNK * sizes.d_k
        scale(w, CHUNK, sizes.d_k, m.KQ + b + offset, factors + b, m.KR + offset)
    return m.KR


@compiled(FLOATS, _SIZES, _SPACE, INT, INT)
@no_type_check
def _solve(w, sizes, m, b, K_read):
    """V becomes E, what a read gets wrong (in the additive rule V itself), and U = β E is what is written."""
    E, U, beta, d_v = m.E + b, m.U + b, m.beta + b, sizes.d_v
    if sizes.additive:
        scale(w, CHUNK, d_v, E, beta, U)
        return
    multiply_subtract(w, CHUNK, d_v, sizes.d_k, K_read, sizes.d_k, 1, m.S + b, E)
    for j in range(0, d_v, LANES):
        solve_down(w, m.AP + b, beta, E + j, U + j, d_v)


@compiled(_PLACES, _SIZES, _SPACE, INT, INT, INT)
@no_type_check
def forward(places, sizes, m, first, last, workspace):
    """Outputs and last states of the memories first … last − 1, numbered batch · heads + head."""
    w, states, kept = floats(workspace), floats(places[STATE, 0]), floats(places[KEPT, 0])
    d_k, d_v, size, queries = sizes.d_k, sizes.d_v, sizes.d_k * sizes.d_v, sizes.group * CHUNK
    O = m.Y + CHUNK * d_v
    _undecayed(w, m, 1)
    for begin in range(0, sizes.length, SPAN):
        for memory in range(first, last):  # inside, because neighbouring heads are neighbours in the tensors
            batch, head = memory // sizes.heads, memory % sizes.heads
            _copy(w, m.S, states, memory * size, size)
            if sizes.kept:
                _copy(kept, (memory * sizes.kept + begin // SPAN) * size, w, m.S, size)
            for t in range(begin, min(begin + SPAN, sizes.length), CHUNK):
                rows = min(CHUNK, sizes.length - t)
                _open(w, places, sizes, m, 0, batch, head, t, rows)
                reads = _decayed(w, sizes, m, 0, m.c, 1 + sizes.group)
                multiply(w, queries, d_v, d_k, reads + CHUNK * d_k, d_k, 1, m.S, O)
                _solve(w, sizes, m, 0, reads)
                multiply_add(w, queries, d_v, CHUNK, m.AP + CHUNK * CHUNK, CHUNK, 1, m.U, O)
                if sizes.gated:
                    fade(w, size, m.S, m.c + CHUNK - 1)
                multiply_add(w, d_k, d_v, CHUNK, _decayed(w, sizes, m, 0, m.t, 1), 1, d_k, m.U, m.S)
                for r in range(sizes.group):
                    _write(w, O + r * CHUNK * d_v, d_v, rows, places, OUT, batch, t, head * sizes.group + r)
            _copy(states, memory * size, w, m.S, size)


@compiled(*_CALL, INT, INT, INT, INT)
@no_type_check
def _replay(w, places, sizes, m, batch, head, begin, chunks):
    """Run a segment again from its kept state, holding on to what every chunk's backward pass needs."""
    d_k, d_v, size = sizes.d_k, sizes.d_v, sizes.d_k * sizes.d_v
    for n in range(chunks):
        b, t = n * m.block, begin + n * CHUNK
        _open(w, places, sizes, m, b, batch, head, t, min(CHUNK, sizes.length - t))
        _solve(w, sizes, m, b, _decayed(w, sizes, m, b, m.c, 1))
        if n + 1 < chunks:
            S, after = m.S + b, m.S + b + m.block
            if sizes.gated:
                decay(w, size, S, m.c + b + CHUNK - 1, after)
            else:
                _copy(w, after, w, S, size)
            multiply_add(w, d_k, d_v, CHUNK, _decayed(w, sizes, m, b, m.t, 1), 1, d_k, m.U + b, after)


@compiled(*_CALL, INT, INT, INT, INT, INT)
@no_type_check
def _chunk_values(w, places, sizes, m, b, batch, head, t, rows):
    """Y = [−dX; dO], and the gradients of v and β."""
    d_k, d_v, beta = sizes.d_k, sizes.d_v, m.beta + b
    for r in range(sizes.group):
        _read(w, m.Y + (1 + r) * CHUNK * d_v, d_v, rows, places, D_OUT, batch, t, head * sizes.group + r)
    writes = _decayed(w, sizes, m, b, m.t, 1)
    multiply(w, CHUNK, d_v, sizes.group * CHUNK, m.AP + b + CHUNK * CHUNK, 1, CHUNK, m.Y + CHUNK * d_v, m.mu)
    for i in range(0, d_k, CHUNK):  # dS is long, and K dS short where keys repeat: short sums keep its digits
        multiply_add(w, CHUNK, d_v, CHUNK, writes + i, d_k, 1, m.dS + i * d_v, m.mu)
    if not sizes.additive:
        for j in range(0, d_v, LANES):
            solve_up(w, m.AP + b, beta, m.mu + j, m.Y + j, d_v)
    scale(w, CHUNK, d_v, m.mu, beta, m.flat)
    _write(w, m.flat, d_v, rows, places, D_V, batch, t, head)
    if sizes.additive:  # nothing was read
        for j in range(CHUNK * d_v):
            w[m.Y + j] = np.float32(0)
    d_beta, start = floats(places[D_BETA, 0]), _at(places, D_BETA, batch, t, head)
    for i in range(rows):
        d_beta[start + i * places[D_BETA, 2]] = dot(w, m.mu + i * d_v, m.E + b + i * d_v, d_v)


@compiled(*_CALL, INT, INT, INT, INT, INT)
@no_type_check
def _chunk_keys(w, places, sizes, m, b, batch, head, t, rows):
    """The gradients of k, q and g; dS of the chunk's end becomes dS of its start."""
    d_k, d_v, stack, KQ, c, end = sizes.d_k, sizes.d_v, 1 + sizes.group, m.KQ + b, m.c + b, m.t + b
    size, all_rows, part = d_k * d_v, stack * CHUNK, CHUNK * d_k
    transpose(w, CHUNK, d_v, m.U + b, m.UT)
    transpose(w, all_rows, d_v, m.Y, m.YT)
    multiply(w, all_rows, CHUNK, d_v, m.Y, d_v, 1, m.UT, m.W)
    _mask(w, sizes, m.W, m.decay + b)
    for i in range(CHUNK):
        w[m.W + i * (CHUNK + 1)] = np.float32(0)
    multiply(w, d_k, all_rows, d_v, m.S + b, d_v, 1, m.YT, m.flat)
    transpose(w, d_k, all_rows, m.flat, m.D)
    multiply(w, d_k, CHUNK, d_v, m.dS, d_v, 1, m.UT, m.flat)
    transpose(w, d_k, CHUNK, m.flat, m.DW)
    through = np.float32(0)  # ⟨dS, S⟩ at the chunk's end
    if sizes.gated:
        for i in range(CHUNK):
            fade(w, d_k, m.DW + i * d_k, end + i)
            for r in range(stack):
                fade(w, d_k, m.D + r * part + i * d_k, c + i)
        through = dot(w, m.dS, m.S + b, size) * w[c + CHUNK - 1] + dot(w, m.DW, KQ, part)
        fade(w, size, m.dS, c + CHUNK - 1)
    multiply_add(w, all_rows, d_k, CHUNK, m.W, CHUNK, 1, KQ, m.D)
    multiply_add(w, CHUNK, d_k, all_rows, m.W, 1, CHUNK, KQ, m.DW)
    multiply_add(w, d_k, d_v, all_rows, _decayed(w, sizes, m, b, m.c, stack), 1, d_k, m.Y, m.dS)
    if sizes.gated:
        d_g, start = floats(places[D_G, 0]), _at(places, D_G, batch, t, head)
        for i in range(CHUNK - 1, -1, -1):
            for r in range(stack):
                through += dot(w, KQ + r * part + i * d_k, m.D + r * part + i * d_k, d_k)
            through -= dot(w, KQ + i * d_k, m.DW + i * d_k, d_k)
            if i < rows:
                d_g[start + i * places[D_G, 2]] = through
    for j in range(part):
        w[m.DW + j] += w[m.D + j]
    _write(w, m.DW, d_k, rows, places, D_K, batch, t, head)
    for r in range(sizes.group):
        _write(w, m.D + (1 + r) * part, d_k, rows, places, D_Q, batch, t, head * sizes.group + r)


@compiled(_PLACES, _SIZES, _SPACE, INT, INT, INT)
@no_type_check
def backward(places, sizes, m, first, last, workspace):
    """All gradients of the memories first … last − 1. D_STATE holds the last states', then the first's."""
    w, kept, d_states = floats(workspace), floats(places[KEPT, 0]), floats(places[D_STATE, 0])
    size = sizes.d_k * sizes.d_v
    _undecayed(w, m, SEGMENT)
    for segment in range(sizes.kept - 1, -1, -1):
        begin = segment * SPAN
        chunks = min(SEGMENT, (sizes.length - begin + CHUNK - 1) // CHUNK)
        for memory in range(first, last):
            batch, head = memory // sizes.heads, memory % sizes.heads
            _copy(w, m.S, kept, (memory * sizes.kept + segment) * size, size)
            _copy(w, m.dS, d_states, memory * size, size)
            _replay(w, places, sizes, m, batch, head, begin, chunks)
            for n in range(chunks - 1, -1, -1):
                t = begin + n * CHUNK
                rows = min(CHUNK, sizes.length - t)
                _chunk_values(w, places, sizes, m, n * m.block, batch, head, t, rows)
                _chunk_keys(w, places, sizes, m, n * m.block, batch, head, t, rows)
            _copy(d_states, memory * size, w, m.dS, size)


@compiled(*[INT] * 13)
@no_type_check
def step(query, key, value, strength, log_decay, state, output, memories, group, d_k, d_v, additive, workspace):
    """One token for all memories, their states updated in place. Addresses of contiguous tensors; no gate: 0."""
    w, queries, keys, values = floats(workspace), floats(query), floats(key), floats(value)
    strengths, decays = floats(strength), floats(log_decay)
    read = 0
    u = read + d_k
    for memory in range(memories):
        S = (state - workspace) // 4 + memory * d_k * d_v  # offsets from the workspace reach anywhere
        a = np.exp(decays[memory]) if log_decay != 0 else np.float32(1)
        for j in range(d_v):
            w[u + j] = values[memory * d_v + j]
        if not additive:
            for i in range(d_k):
                w[read + i] = a * keys[memory * d_k + i]
            for j in range(0, d_v, LANES):
                row_multiply_subtract(w, read, 0, 1, S + j, u + j, d_v, d_k)
        for j in range(d_v):
            w[u + j] *= strengths[memory]
        for i in range(d_k):
            k = keys[memory * d_k + i]
            for j in range(d_v):
                w[S + i * d_v + j] = a * w[S + i * d_v + j] + k * w[u + j]
        for r in range(group):
            o = (output - workspace) // 4 + (memory * group + r) * d_v
            for i in range(d_k):
                w[read + i] = queries[(memory * group + r) * d_k + i]
            for j in range(0, d_v, LANES):
                row_multiply(w, read, 0, 1, S + j, o + j, d_v, d_k)
