"""The PyTorch form by itself: its derivatives, its sizes, its inverse, and what it keeps for the backward pass."""

from itertools import product

import pytest
import torch
from delta_streams import Stream, everything, normal, run, stream, unit
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nestling.kernels.delta_rule import chunked


def inputs(each: Stream) -> tuple[Tensor | None, ...]:
    return each.q, each.k, each.v, each.beta, each.g, each.state


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_derivatives_by_finite_differences(gated: bool, additive: bool) -> None:
    """Eleven tokens in chunks of 2 and groups of 2: several groups, and a tail."""
    each = stream(11, group=2, d_k=3, d_v=2, gated=gated).rounded(torch.float64)
    assert torch.autograd.gradcheck(lambda *x: chunked.run(*x, additive=additive, sizes=(2, 2)), inputs(each))


def gradients(each: Stream, sizes: tuple[int, int]) -> list[Tensor]:
    given = [x for x in inputs(each) if x is not None]
    outputs, last = chunked.run(*inputs(each), additive=False, sizes=sizes)
    weight = normal(*outputs.shape, seed=2)
    return [outputs, last, *torch.autograd.grad((outputs * weight).sum() + last.square().sum(), given)]


@pytest.mark.parametrize("gated", [False, True])
def test_results_do_not_depend_on_the_sizes(gated: bool) -> None:
    each = stream(300, gated=gated).rounded(torch.float64)
    first = gradients(each, (64, 1))
    for sizes in product([16, 32, 64, 100, 512], [1, 2, 4, 8]):
        for one, two in zip(first, gradients(each, sizes), strict=True):
            assert (one - two).abs().max() <= 1e-12 * one.abs().max()


def kept(each: Stream) -> int:
    """How many numbers a forward pass leaves for the backward pass, beyond its inputs."""
    mine = {x.data_ptr() for x in inputs(each) if x is not None and x.numel()}
    sizes = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(0 if x.data_ptr() in mine - {each.state.data_ptr()} else x.untyped_storage().nbytes() // 8)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        chunked.run(*inputs(each), additive=False, sizes=(32, 4))
    return sum(sizes)


def test_only_one_state_a_group_is_kept() -> None:
    each = stream(1024, H=2, d_k=8, d_v=6).rounded(torch.float64)
    assert kept(each) == 1024 // 128 * 2 * 8 * 6


def test_nothing_is_kept_where_no_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    each, forward, starts = stream(256).rounded(torch.float64), chunked._forward, []

    def spy(*given: object) -> tuple[Tensor, Tensor, list[Tensor]]:
        results = forward(*given)
        starts.append(len(results[2]))
        return results

    monkeypatch.setattr(chunked, "_forward", spy)
    chunked.run(*inputs(each), additive=False, sizes=(32, 4))
    with torch.no_grad():
        chunked.run(*inputs(each), additive=False, sizes=(32, 4))
    detached = Stream(*(None if x is None else x.detach() for x in inputs(each)))
    chunked.run(*inputs(detached), additive=False, sizes=(32, 4))
    assert starts == [2, 0, 0]


def inverse(noise: float, beta: float) -> Tensor:
    """(I + B A)⁻¹ in float32, for 64 unit keys that differ by `noise`."""
    k = unit(normal(1, 1, 1, 32) + noise * normal(1, 64, 1, 32, seed=1))
    k = (k / k.norm(dim=-1, keepdim=True)).float()
    strength = torch.full((1, 64, 1), beta)
    return chunked._prepare(k, k, strength, None, (0, 1, 64), additive=False).inverse


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 10.0])
@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0, 1.9, 2.0])
def test_the_inverse_stays_small_in_the_domain(noise: float, beta: float) -> None:
    """Its entries are −β kᵢᵀ ∏(I − β k kᵀ) kⱼ, and each factor is a contraction while β‖k‖² ≤ 2."""
    assert inverse(noise, beta).abs().max() <= max(beta, 1.0) + 1e-4


def test_the_inverse_explodes_beyond_the_domain() -> None:
    assert inverse(0.01, 2.2).abs().max() > 1e3


def test_bytes_allocated_grow_linearly() -> None:
    """Indexing a long tensor chunk by chunk under autograd makes a full-size zero for each: quadratic, and avoided."""

    def allocated(T: int) -> int:
        each = stream(T, gated=True, d_k=16, d_v=16).rounded(torch.float32)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            everything(each, "chunked")
        return sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())

    assert allocated(512) <= 2.1 * allocated(256)


def test_the_masks_of_two_dtypes_do_not_mix() -> None:
    each = stream(40)
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert run(each.rounded(dtype), "chunked")[1].dtype == dtype
