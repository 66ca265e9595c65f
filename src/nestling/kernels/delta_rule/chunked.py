"""The delta rule a chunk of C tokens at a time, in PyTorch, for any device: a few matrix products in place of C steps.

With the chunk's start state S₀, decays c_i = a_1…a_i and Γ_ij = a_{j+1}…a_i, B = diag(β):

    A = tril(K Kᵀ ∘ Γ, −1)    P = tril(Q Kᵀ ∘ Γ)    U = (I + B A)⁻¹ B (V − diag(c) K S₀)
    O = diag(c) Q S₀ + P U    S₁ = c_C S₀ + Kᵀ diag(Γ_C·) U

Only the start state of each group of chunks is kept for the backward pass, which is derived by hand in ../README.md;
the rest is computed again. The chunk form is DeltaNet's (arXiv 2406.06484); doing without its W, and summing each Γ_ij
by itself, are ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tokens of a chunk (short ones need fewer operations, long ones fewer calls), and chunks of a group, which are prepared
# together and share one kept state: on a CPU few enough for its second-level cache, elsewhere enough to fill a device.
CPU_SIZES = (16, 4)
DEVICE_SIZES = (64, 16)


def run(
    q: Float[Tensor, "B T Hq d_k"],
    k: Float[Tensor, "B T H d_k"],
    v: Float[Tensor, "B T H d_v"],
    beta: Float[Tensor, "B T H"],
    g: Float[Tensor, "B T H"] | None,
    state: Float[Tensor, "B H d_k d_v"],
    *,
    additive: bool,
    sizes: tuple[int, int] | None = None,
) -> tuple[Float[Tensor, "B T Hq d_v"], Float[Tensor, "B H d_k d_v"]]:
    """As `reference.run`; every input has one dtype, float32 or float64. Differentiable once.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> run(one, one, 3 * one, 0.5 * one[..., 0], None, one, additive=False)[1].item()
    2.0
    """
    chunk, group = sizes or (CPU_SIZES if k.device.type == "cpu" else DEVICE_SIZES)
    inputs = (q, k, v, beta, g, state)
    keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
    return _Chunked.apply(*inputs, _Plan(additive, chunk, group, keep))


@dataclass(frozen=True)
class _Plan:
    additive: bool
    chunk: int
    group: int
    keep: bool  # whether a backward pass may come, so that the groups' start states are kept

    def groups(self, T: int) -> Iterator[tuple[int, int, int]]:
        """(first token, chunks, tokens of a chunk) of each group; the tail is a shorter chunk of its own."""
        first, C = 0, self.chunk
        while T - first >= C:
            count = min(self.group, (T - first) // C)
            yield first, count, C
            first += count * C
        if first < T:
            yield first, 1, T - first


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            outputs, last, starts = _forward(q, k, v, beta, g, state, plan)
        ctx.save_for_backward(q, k, v, beta, g, *starts)
        ctx.plan = plan
        return outputs, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, *starts = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return *_backward(q, k, v, beta, g, starts, d_outputs, d_last, ctx.plan), None


@dataclass(frozen=True)
class _Group:
    """What both passes need of a group: M = chunks · batch · heads matrices, the R queries of a head one below another.

    The readers are [K; Q], (1 + R)·C rows: keys read in order to write, queries in order to answer.
    """

    readers: Tensor  # [K; Q]                 M × (1+R)C × d_k
    from_start: Tensor  # diag(c) [K; Q]: how the readers see S₀; for the additive update keys read nothing
    to_end: Tensor  # diag(Γ_C·) K: what the writes leave in S₁   M × C × d_k
    A: Tensor  # M × C × C
    P: Tensor  # M × RC × C
    inverse: Tensor  # (I + B A)⁻¹, unit lower triangular
    b: Tensor  # M × C
    mask: Tensor  # who reads whom: strictly lower for keys, lower for queries   (1+R)C × C
    gamma: Tensor | None  # Γ   M × C × C
    c: Tensor | None  # M × C
    R: int

    @property
    def keys(self) -> Tensor:
        return self.readers[:, : self.b.shape[1]]


@lru_cache(maxsize=64)
def _masks(C: int, R: int, additive: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Who reads whom as (1+R)C × C numbers, the strictly lower triangle as booleans, and the identity."""
    ones = torch.ones(C, C, dtype=dtype, device=device)
    before, until = ones.tril(-1), ones.tril()
    keys = torch.zeros_like(ones) if additive else before
    return torch.cat([keys, *[until] * R]), before.bool(), torch.eye(C, dtype=dtype, device=device)


def _take(x: Tensor, first: int, count: int, C: int) -> Tensor:
    """Tokens first … first + count·C − 1 of [B, T, H, …], seen as [count, B, H, C, …]."""
    piece = x[:, first : first + count * C]
    return piece.unflatten(1, (count, C)).permute(1, 0, 3, 2, *range(4, x.dim() + 1))


def _prepare(
    q: Tensor, k: Tensor, beta: Tensor, g: Tensor | None, place: tuple[int, int, int], additive: bool
) -> _Group:
    count, C = place[1:]
    B, _, H, d_k = k.shape
    M, R = count * B * H, q.shape[2] // H
    stack = k.new_empty(count, B, H, 1 + R, C, d_k)
    stack[:, :, :, 0] = _take(k, *place)
    stack[:, :, :, 1:] = _take(q.unflatten(2, (H, R)), *place).transpose(3, 4)
    readers = stack.view(M, (1 + R) * C, d_k)
    K = readers[:, :C]
    b = _take(beta, *place).reshape(M, C)
    mask, before, eye = _masks(C, R, additive, k.dtype, k.device)
    scores = torch.bmm(readers, K.transpose(1, 2))
    gamma = c = None
    from_start, to_end = readers, K
    if g is None:
        scores.mul_(mask)
    else:
        log_a = _take(g, *place).reshape(M, C)
        # Each segment is summed by itself: a difference of two running sums loses its digits under strong decay, and
        # is NaN after a_t = 0.
        gamma = torch.where(before, log_a[:, :, None], 0.0).cumsum_(1).exp_().mul_(mask[C : 2 * C])
        scores.view(M, 1 + R, C, C).mul_(gamma[:, None])
        scores[:, :C].mul_(mask[:C])
        c = log_a.cumsum(-1).exp_()
        from_start = readers * c.repeat(1, 1 + R)[..., None]
        to_end = K * gamma[:, -1, :, None]
    if additive:
        from_start = from_start.clone() if from_start is readers else from_start
        from_start[:, :C] = 0
        inverse = eye.repeat(M, 1, 1)
    else:
        system = scores[:, :C] * b[..., None]
        inverse = torch.linalg.solve_triangular(system, eye.expand(M, C, C), upper=False, unitriangular=True)
    return _Group(readers, from_start, to_end, scores[:, :C], scores[:, C:], inverse, b, mask, gamma, c, R)


def _scan(x: _Group, V: Tensor, S: Tensor, rows: int, states: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run `S` through the group's chunks, in place; V is [count, B, H, C, d_v].

    Gives what the first `rows` readers found in their chunk's start state, X and U; fills `states` with those states.
    """
    count, B, H, C, d_v = V.shape
    N = B * H
    read, X, U = (S.new_empty(count, N, each, d_v) for each in (rows, C, C))
    solve = (x.inverse * x.b[:, None, :]).unflatten(0, (count, N))
    reads, to_end = x.from_start[:, :rows].unflatten(0, (count, N)), x.to_end.unflatten(0, (count, N))
    for i in range(count):
        if states is not None:
            states[i] = S
        torch.bmm(reads[i], S, out=read[i])
        torch.sub(V[i], read[i, :, :C].unflatten(0, (B, H)), out=X[i].view(B, H, C, d_v))
        torch.bmm(solve[i], X[i], out=U[i])
        if x.c is not None:
            S.mul_(x.c.view(count, N, C)[i, :, -1, None, None])
        S.baddbmm_(to_end[i].transpose(1, 2), U[i])
    return read.flatten(0, 1), X.flatten(0, 1), U.flatten(0, 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, list[Tensor]]:
    (B, T, H, d_k), d_v = k.shape, v.shape[-1]
    S = state.reshape(B * H, d_k, d_v).clone()
    outputs = v.new_empty(B, T, q.shape[2], d_v)
    kept = []
    for place in plan.groups(T):
        count, C = place[1:]
        x = _prepare(q, k, beta, g, place, plan.additive)
        if plan.keep:
            kept.append(S.clone())
        read, _, U = _scan(x, _take(v, *place), S, x.readers.shape[1])
        out = torch.bmm(x.P, U).add_(read[:, C:])
        _take(outputs.unflatten(2, (H, x.R)), *place).transpose(3, 4).copy_(out.view(count, B, H, x.R, C, d_v))
    return outputs, S.view(B, H, d_k, d_v), kept


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    kept: list[Tensor],
    d_outputs: Tensor,
    d_last: Tensor,
    plan: _Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, β, g and the first state; names as in ../README.md."""
    (B, T, H, d_k), d_v = k.shape, v.shape[-1]
    N = B * H
    dq, dk, dv, db = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v, beta))
    dg = None if g is None else torch.empty_like(g, memory_format=torch.contiguous_format)
    dS = d_last.reshape(N, d_k, d_v).clone()
    for place, start in reversed(list(zip(plan.groups(T), kept, strict=True))):
        count, C = place[1:]
        heads = (count, B, H)
        M = count * N
        x = _prepare(q, k, beta, g, place, plan.additive)
        rows, R = (1 + x.R) * C, x.R
        states = start.new_empty(count, *start.shape)
        _, X, U = _scan(x, _take(v, *place), start.clone(), C, states)
        S0, E = states.flatten(0, 1), X.baddbmm_(x.A, U, alpha=-1)
        # Y = [−dX; dO] gives every gradient that goes through a read its sign.
        Y = v.new_empty(M, rows, d_v)
        dO = _take(d_outputs.unflatten(2, (H, R)), *place).transpose(3, 4)
        Y.view(*heads, 1 + R, C, d_v)[:, :, :, 1:] = dO
        mu, ends = _scan_back(x, Y, torch.bmm(x.P.transpose(1, 2), Y[:, C:]), dS, count)
        torch.neg(Y[:, :C].unflatten(0, heads), out=_take(dv, *place))
        _take(db, *place).copy_((mu * E).sum(-1).view(*heads, C))
        d_scores = torch.bmm(Y, U.transpose(1, 2)).mul_(x.mask)  # [dA; dP]
        d_reader, d_writer = torch.bmm(Y, S0.transpose(1, 2)), torch.bmm(U, ends.transpose(1, 2))
        if plan.additive:
            d_reader[:, :C] = 0
        if x.gamma is not None:
            d_scores.view(M, 1 + R, C, C).mul_(x.gamma[:, None])
            d_reader.mul_(x.c.repeat(1, 1 + R)[..., None])
            d_writer.mul_(x.gamma[:, -1, :, None])
            through_end = (ends * S0).sum((1, 2)) * x.c[:, -1] + (d_writer * x.keys).sum((1, 2))  # ⟨dS₁, S₁⟩
        d_reader.baddbmm_(d_scores, x.keys)
        d_writer.baddbmm_(d_scores.transpose(1, 2), x.readers)
        if dg is not None:
            d_log = (x.readers * d_reader).sum(-1).view(M, 1 + R, C).sum(1) - (x.keys * d_writer).sum(-1)
            d_log[:, -1] += through_end
            _take(dg, *place).copy_(d_log.flip(-1).cumsum(-1).flip(-1).view(*heads, C))
        torch.add(d_writer.unflatten(0, heads), d_reader[:, :C].unflatten(0, heads), out=_take(dk, *place))
        dQ = d_reader[:, C:].view(*heads, R, C, d_k)
        _take(dq.unflatten(2, (H, R)), *place).transpose(3, 4).copy_(dQ)
    return dq, dk, dv, db, dg, dS.view(B, H, d_k, d_v)


def _scan_back(x: _Group, Y: Tensor, dU: Tensor, dS: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """From the last chunk to the first: μ = (I + B A)⁻ᵀ dU and the gradient of each chunk's end state.

    Fills the key rows of `Y` with −dX = −B μ and turns `dS`, the gradient of the group's last state, into its first's.
    """
    C, N = x.b.shape[1], dS.shape[0]
    mu, ends = torch.empty_like(dU), dS.new_empty(count, *dS.shape)
    minus_b = -x.b[..., None]
    for i in reversed(range(count)):
        r = slice(i * N, (i + 1) * N)
        ends[i] = dS
        dU[r].baddbmm_(x.to_end[r], dS)
        torch.bmm(x.inverse[r].transpose(1, 2), dU[r], out=mu[r])
        torch.mul(mu[r], minus_b[r], out=Y[r, :C])
        if x.c is not None:
            dS.mul_(x.c[r, -1, None, None])
        dS.baddbmm_(x.from_start[r].transpose(1, 2), Y[r])
    return mu, ends.flatten(0, 1)
