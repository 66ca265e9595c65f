"""The compiled path of the delta rule: tensors in, addresses to the kernels, gradients out.

Memories (batch × head) are independent and each is computed by one thread from beginning to end, so the bits do not
depend on how many threads there are. Only the state before every 256th token is kept for the backward pass.
Threads come from a plain pool that lives for one call: Numba's own are not safe where clients train in threads, a kept
pool would not survive a fork, and there is no barrier to wait at when another process holds a core.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from nestling.kernels.delta_rule import compiled_kernels as kernels
from nestling.kernels.delta_rule.compiled_kernels import SEGMENT, SPAN, TENSORS, Sizes, plan

WIDTH = 16  # head dimensions are padded to a multiple of it
PARALLEL_WORK = 1 << 22  # tokens · heads · d_k · d_v below which a second thread costs more than it saves


def run(
    q: Float[Tensor, "B T Hq d_k"],
    k: Float[Tensor, "B T H d_k"],
    v: Float[Tensor, "B T H d_v"],
    beta: Float[Tensor, "B T H"],
    g: Float[Tensor, "B T H"] | None,
    state: Float[Tensor, "B H d_k d_v"],
    *,
    additive: bool,
) -> tuple[Float[Tensor, "B T Hq d_v"], Float[Tensor, "B H d_k d_v"]]:
    """Outputs in v's dtype and the state after the last token in float32; computed in float32 on the CPU.

    Query head i reads memory head i // (Hq/H). Any strides; nothing given is changed. Differentiable once in all six.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> o, S = run(one, one, 3 * one, 0.5 * one[..., 0], None, one, additive=False)
    >>> S.item()  # 1 + ½ (3 − 1)
    2.0
    """
    given = [x for x in (q, k, v, beta, g, state) if x is not None]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    d_k, d_v = k.shape[-1], v.shape[-1]
    extra_k, extra_v = -d_k % WIDTH, -d_v % WIDTH
    if extra_k or extra_v:
        q, k, v = pad(q, (0, extra_k)), pad(k, (0, extra_k)), pad(v, (0, extra_v))
        outputs, last = _DeltaRule.apply(q, k, v, beta, g, pad(state, (0, extra_v, 0, extra_k)), additive, keep)
        return outputs[..., :d_v].contiguous(), last[..., :d_k, :d_v].contiguous()
    return _DeltaRule.apply(q, k, v, beta, g, state, additive, keep)


def step(
    q: Float[Tensor, "B Hq d_k"],
    k: Float[Tensor, "B H d_k"],
    v: Float[Tensor, "B H d_v"],
    beta: Float[Tensor, "B H"],
    g: Float[Tensor, "B H"] | None,
    state: Float[Tensor, "B H d_k d_v"],
    *,
    additive: bool = False,
) -> Float[Tensor, "B Hq d_v"]:
    """One token of a stream: `state` (float32, contiguous) is updated in place; the output has v's dtype. No gradients.

    >>> one = torch.ones(1, 1, 1)
    >>> S = torch.ones(1, 1, 1, 1)
    >>> step(one, one, 3 * one, 0.5 * one[..., 0], None, S).item(), S.item()
    (2.0, 2.0)
    """
    assert state.dtype == torch.float32
    assert state.is_contiguous()
    dtype, (B, H, d_k), d_v = v.dtype, k.shape, v.shape[2]
    extra_k, extra_v = -d_k % WIDTH, -d_v % WIDTH
    if extra_k or extra_v:
        wide = pad(state, (0, extra_v, 0, extra_k))
        o = step(pad(q, (0, extra_k)), pad(k, (0, extra_k)), pad(v, (0, extra_v)), beta, g, wide, additive=additive)
        state.copy_(wide[..., :d_k, :d_v])
        return o[..., :d_v]
    q, k, v, beta = (x.float().contiguous() for x in (q, k, v, beta))
    g = None if g is None else g.float().contiguous()
    outputs, space = torch.empty(B, q.shape[1], d_v), torch.empty(d_k + d_v)
    kernels.step(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        beta.data_ptr(),
        0 if g is None else g.data_ptr(),
        state.data_ptr(),
        outputs.data_ptr(),
        B * H,
        q.shape[1] // H,
        d_k,
        d_v,
        additive,
        space.data_ptr(),
    )
    return outputs if dtype == torch.float32 else outputs.to(dtype)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        state: Tensor,
        additive: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        sizes = _sizes(q, k, v, g, additive=additive, keep=keep)
        outputs = torch.empty(*q.shape[:3], sizes.d_v)
        last = state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        kept = torch.empty(k.shape[0] * sizes.heads * sizes.kept, sizes.d_k, sizes.d_v)
        places = np.zeros((TENSORS, 4), np.int64)
        alive = [_place(places, row, x) for row, x in enumerate((q, k, v, beta, g)) if x is not None]
        for row, x in ((kernels.OUT, outputs), (kernels.STATE, last), (kernels.KEPT, kept)):
            _place(places, row, x)
        _share(kernels.forward, places, sizes, k.shape[0] * sizes.heads, chunks=1)
        del alive
        ctx.save_for_backward(q, k, v, beta, g, kept)
        ctx.sizes = sizes
        return outputs.to(v.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, kept = ctx.saved_tensors
        sizes = ctx.sizes
        places = np.zeros((TENSORS, 4), np.int64)
        alive = [_place(places, row, x) for row, x in enumerate(inputs) if x is not None]
        alive.append(_place(places, kernels.D_OUT, d_outputs))
        d_state = d_last.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        _place(places, kernels.KEPT, kept)
        _place(places, kernels.D_STATE, d_state)
        gradients = [None if x is None else torch.empty(x.shape) for x in inputs]
        for row, gradient in enumerate(gradients):
            if gradient is not None:
                _place(places, kernels.D_Q + row, gradient)
        _share(kernels.backward, places, sizes, inputs[1].shape[0] * sizes.heads, chunks=SEGMENT)
        del alive
        cast = [None if d is None else d.to(x.dtype) for d, x in zip(gradients, inputs, strict=True)]
        return (*cast, d_state, None, None)


def _place(places: np.ndarray, row: int, x: Tensor) -> Tensor:
    """Write the address and the strides (batch, token, head) of a tensor; what is returned has to outlive the kernel.

    It is a copy only where a kernel could not read the tensor: another dtype, or a last axis that is not contiguous.
    """
    x = x.detach().float()
    if x.dim() == 4 and x.stride(3) != 1:
        x = x.contiguous()
    places[row] = (x.data_ptr(), *x.stride()[:3])
    return x


def _sizes(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *, additive: bool, keep: bool) -> Sizes:
    (_, T, H, d_k), d_v = k.shape, v.shape[3]
    return Sizes(T, H, q.shape[2] // H, d_k, d_v, -(-T // SPAN) if keep else 0, int(g is not None), int(additive))


def _share(kernel: Callable[..., None], places: np.ndarray, sizes: Sizes, memories: int, *, chunks: int) -> None:
    """Run `kernel` over all memories, in a few ranges a thread so that a busy core does not hold up the rest."""
    space = plan(sizes, chunks)

    def work(first: int, last: int) -> None:
        floats = np.empty(space.floats + WIDTH, np.float32)
        kernel(places, sizes, space, first, last, -(-floats.ctypes.data // 64) * 64)  # on a cache line

    threads = torch.get_num_threads()
    if threads == 1 or memories * sizes.length * sizes.d_k * sizes.d_v < PARALLEL_WORK:
        work(0, memories)
        return
    pieces = min(memories, 4 * threads)
    cuts = [memories * piece // pieces for piece in range(pieces + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, cuts[:-1], cuts[1:]))
