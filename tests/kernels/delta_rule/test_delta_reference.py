"""The definition itself: numbers worked by hand, derivatives by finite differences, and the rule it is a step of."""

import pytest
import torch
from delta_streams import everything, normal, run, stream, unit

from nestling.kernels.delta_rule import delta_rule, reference


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Two tokens: S₁ = (2, 0); decayed to (1, 0), the second key reads 0.6, so 9.4 of 10 is missing: S₂ = (1 + 5.64, 7.52).
Q, K = column(1, 1, 0, 1).view(1, 2, 1, 2), column(1, 0, 0.6, 0.8).view(1, 2, 1, 2)
V, BETA, G = (
    column(4, 10).view(1, 2, 1, 1),
    column(0.5, 1).view(1, 2, 1),
    column(-1, 0.5).log().nan_to_num(-7).view(1, 2, 1),
)


@pytest.mark.parametrize(
    ("additive", "outputs", "last"), [(False, [2.0, 7.52], [6.64, 7.52]), (True, [2.0, 8.0], [7.0, 8.0])]
)
def test_two_tokens_by_hand(additive: bool, outputs: list[float], last: list[float]) -> None:
    o, S = reference.run(Q, K, V, BETA, G, torch.zeros(1, 1, 2, 1, dtype=torch.float64), additive=additive)
    torch.testing.assert_close(o.flatten(), column(*outputs))
    torch.testing.assert_close(S.flatten(), column(*last))


def test_a_unit_key_written_at_full_strength_reads_back_its_value() -> None:
    each = stream(5, d_k=8, d_v=3)
    k = unit(each.k) / unit(each.k).norm(dim=-1, keepdim=True)
    o, _ = delta_rule(k, k, each.v, beta=torch.ones_like(each.beta), state=each.state, impl="reference")
    torch.testing.assert_close(o, each.v)


def test_writes_under_orthogonal_keys_do_not_disturb_each_other() -> None:
    k, v = torch.eye(6, dtype=torch.float64).view(1, 6, 1, 6), normal(1, 6, 1, 4)
    _, S = delta_rule(k, k, v, beta=torch.ones(1, 6, 1, dtype=torch.float64), impl="reference")
    torch.testing.assert_close(S[0, 0], v[0, :, 0])


def test_query_heads_share_a_memory_in_order() -> None:
    each = stream(20, H=2, group=3, gated=True)
    o, S = run(each, "reference")
    k, v, beta, g = (x.repeat_interleave(3, dim=2) for x in (each.k, each.v, each.beta, each.g))
    state = each.state.repeat_interleave(3, dim=1)
    apart, S_apart = delta_rule(each.q, k, v, beta=beta, g=g, state=state, impl="reference")
    torch.testing.assert_close(o, apart, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(S, S_apart[:, ::3], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_derivatives_by_finite_differences(gated: bool, additive: bool) -> None:
    each = stream(5, group=2, d_k=3, d_v=2, gated=gated).rounded(torch.float64)
    inputs = (each.q, each.k, each.v, each.beta, each.g, each.state)
    assert torch.autograd.gradcheck(lambda *x: reference.run(*x, additive=additive), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_outputs_keep_the_dtype_and_the_state_its_digits(dtype: torch.dtype) -> None:
    o, S = run(stream(6, gated=True).rounded(dtype), "reference")
    assert o.dtype == dtype
    assert S.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_decay_of_zero_forgets_everything_and_has_no_gradient() -> None:
    each = stream(6, gated=True)
    each.g[:, 2] = -torch.inf
    given = each.rounded(torch.float64)
    got = everything(given, "reference")
    assert all(x.isfinite().all() for x in got.values())
    assert not got["g"][:, 2].any()
    assert not torch.autograd.grad(run(given, "reference")[1].sum(), given.state)[0].any()


def descend(k: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, a: torch.Tensor, M: torch.Tensor) -> torch.Tensor:
    """Titans' linear memory without momentum (arXiv 2501.00663): a step down ‖Mᵀk − v‖² at M before its decay."""
    for k_t, v_t, theta_t, a_t in zip(k, v, theta, a, strict=True):
        at = M.clone().requires_grad_()
        (step,) = torch.autograd.grad((at.T @ k_t - v_t).square().sum(), at)
        M = a_t * M - theta_t * step
    return M


def test_titans_linear_memory_is_this_rule_with_other_numbers() -> None:
    """The error is taken before the decay there, after it here: β = 2θ/a and v' = a v make them one."""
    each = stream(30, H=1, gated=True)
    k, v, a, theta = each.k[0, :, 0], each.v[0, :, 0], each.g[0, :, 0].exp(), each.beta[0, :, 0] / 4
    wanted = descend(k, v, theta, a, each.state[0, 0])
    beta, values = (2 * theta / a)[None, :, None], (a[:, None] * v)[None, :, None]
    _, got = delta_rule(each.q, each.k, values, beta=beta, g=each.g, state=each.state, impl="reference")
    torch.testing.assert_close(got[0, 0], wanted, rtol=1e-12, atol=1e-12)
    _, same_letters = delta_rule(each.q, each.k, each.v, beta=2 * each.beta / 4, g=each.g, state=each.state)
    assert (same_letters[0, 0] - wanted).abs().max() > 1e-3
