"""The public functions: what they refuse, what they choose, the one-token step, and the CUDA kernels' wrapper."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from delta_streams import run, stream
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.kernels.delta_rule import choose, delta_rule, delta_rule_step, dispatch

SIZES = {
    "q": (2, 5, 4, 3),
    "k": (2, 5, 2, 3),
    "v": (2, 5, 2, 6),
    "beta": (2, 5, 2),
    "g": (2, 5, 2),
    "state": (2, 2, 3, 6),
}


def arguments(**changes: object) -> dict[str, object]:
    return {name: -torch.ones(size) if name == "g" else torch.ones(size) for name, size in SIZES.items()} | changes


def call(**changes: object) -> tuple[Tensor, Tensor]:
    given = arguments(**changes)
    return delta_rule(given.pop("q"), given.pop("k"), given.pop("v"), **given)


REFUSED = {
    "q of another width": ("q", torch.ones(2, 5, 4, 4)),
    "q with 3 heads for 2": ("q", torch.ones(2, 5, 3, 3)),
    "q without heads": ("q", torch.ones(2, 5, 0, 3)),
    "k without batch": ("k", torch.ones(5, 2, 3)),
    "v of another length": ("v", torch.ones(2, 6, 2, 6)),
    "v of width 0": ("v", torch.ones(2, 5, 2, 0)),
    "beta for query heads": ("beta", torch.ones(2, 5, 4)),
    "beta with a last axis": ("beta", torch.ones(2, 5, 2, 1)),
    "g of another length": ("g", -torch.ones(2, 4, 2)),
    "g above 0": ("g", torch.full((2, 5, 2), 1e-3)),
    "state turned": ("state", torch.ones(2, 2, 6, 3)),
    "state in bfloat16": ("state", torch.ones(2, 2, 3, 6, dtype=torch.bfloat16)),
    "state in float64 for float32": ("state", torch.ones(2, 2, 3, 6, dtype=torch.float64)),
    "k in another dtype": ("k", torch.ones(2, 5, 2, 3, dtype=torch.bfloat16)),
    "q of integers": ("q", torch.ones(2, 5, 4, 3, dtype=torch.int64)),
    "beta of booleans": ("beta", torch.ones(2, 5, 2, dtype=torch.bool)),
    "state on another device": ("state", torch.ones(2, 2, 3, 6, device="meta")),
    "v on another device": ("v", torch.ones(2, 5, 2, 6, device="meta")),
    "mask of floats": ("mask", torch.ones(2, 5)),
    "mask of another length": ("mask", torch.ones(2, 4, dtype=torch.bool)),
    "an unknown update": ("update", "hebbian"),
    "an unknown implementation": ("impl", "triton"),
    "packed sequences in two streams": ("cu_seqlens", torch.tensor([0, 5])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    where, value = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        call(**{where: value})
    assert caught.value.where == where
    assert caught.value.remedy
    assert call()[0].shape == (2, 5, 4, 6)


@pytest.mark.parametrize(
    "bounds", [[0, 3], [1, 5], [0, 4, 3, 5], [0, 6], [], [[0, 5]], [0.0, 5.0], [False, True]], ids=str
)
def test_boundaries_that_do_not_cover_the_tokens_are_refused(bounds: list) -> None:
    each = stream(5)
    with pytest.raises(ConfigError, match="cu_seqlens"):
        delta_rule(each.q, each.k, each.v, beta=each.beta, cu_seqlens=torch.tensor(bounds))


def test_a_packed_state_has_one_row_a_sequence() -> None:
    each = replace(stream(5), cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    with pytest.raises(ConfigError, match="state"):
        run(each, "auto")
    assert run(replace(each, state=None), "auto")[1].shape == (2, 2, 8, 6)


def test_an_empty_pack_gives_nothing() -> None:
    each = replace(stream(0), cu_seqlens=torch.tensor([0]), state=torch.zeros(0, 2, 8, 6, dtype=torch.float64))
    outputs, last = run(each, "auto")
    assert outputs.shape == (1, 0, 2, 6)
    assert last.shape == (0, 2, 8, 6)


def test_beta_and_g_may_have_more_digits_than_the_rest() -> None:
    given = arguments()
    short = {name: given[name].bfloat16() for name in ("q", "k", "v")}
    outputs, last = call(**short)
    assert outputs.dtype == torch.bfloat16
    assert last.dtype == torch.float32


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    dispatch._compiled.cache_clear()
    yield
    dispatch._compiled.cache_clear()


def test_without_numba_one_warning_and_the_pytorch_form(fresh_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nestling.kernels.delta_rule.compiled", None)  # makes the import fail
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        assert choose(torch.ones(1)) == "chunked"
    assert choose(torch.ones(1)) == "chunked"
    with pytest.raises(ConfigError, match="working Numba"):
        call(impl="compiled")
    assert call()[0].isfinite().all()


def test_auto_runs_what_choose_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dispatch, "_compiled", lambda: SimpleNamespace(run=record))

    def record(*inputs: Tensor | None, additive: bool) -> tuple[Tensor, Tensor]:
        calls.append(inputs)
        return dispatch.chunked.run(*inputs, additive=additive)

    for dtype, times in ((torch.float32, 1), (torch.bfloat16, 2), (torch.float64, 2)):
        assert choose(torch.ones(1, dtype=dtype)) == ("chunked" if dtype == torch.float64 else "compiled")
        run(stream(3).rounded(dtype), "auto")
        assert len(calls) == times
    assert all(x is None or x.dtype == torch.float32 for inputs in calls for x in inputs)
    with pytest.raises(ConfigError, match="float64"):
        run(stream(3), "compiled")


def test_fla_is_refused_where_it_is_not_installed_or_not_suited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_fla", lambda: None)
    with pytest.raises(ConfigError, match="pip install"):
        call(impl="fla")
    monkeypatch.setattr(dispatch, "_fla", lambda: sys)
    with pytest.raises(ConfigError, match="float32 on cpu"):
        call(impl="fla")


def stub(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The signature and the conventions of fla-core 0.6: g before beta, a hidden scale, no final state unless asked."""
    assert all(x.dtype == torch.bfloat16 for x in (q, k, v, beta))
    assert g.isfinite().all()
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    outputs, last = delta_rule(q.float(), k.float(), v.float(), beta=beta, g=g, state=initial_state, impl="reference")
    return outputs.to(q.dtype), last if output_final_state else None


@pytest.mark.parametrize("gated", [False, True])
def test_the_wrapper_of_fla_speaks_its_conventions(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_fla", lambda: SimpleNamespace(chunk_gated_delta_rule=stub))
    monkeypatch.setattr(dispatch, "_unsuited_for_fla", lambda *_: "")
    each = stream(20, gated=gated)
    if gated:
        each.g[:, 5] = -torch.inf
    given = each.rounded(torch.bfloat16)
    got, wanted = run(given, "fla"), run(given, "reference")
    assert got[0].dtype == torch.bfloat16
    for one, two in zip(got, wanted, strict=True):
        assert (one.float() - two.float()).abs().max() <= 1e-2 * two.abs().max()


@pytest.mark.parametrize("update", ["delta", "additive"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numba", [True, False])
def test_steps_in_place_equal_a_pass(
    numba: bool, dtype: torch.dtype, gated: bool, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not numba:
        monkeypatch.setattr(dispatch, "_compiled", lambda: None)
    each = replace(stream(12, B=2, group=3, gated=gated), update=update).rounded(dtype)
    wanted, last = run(each, "reference")
    state = each.state.detach().clone()
    address, outputs = state.data_ptr(), []
    for t in range(12):
        q, k, v, beta = (x[:, t] for x in (each.q, each.k, each.v, each.beta))
        g = None if each.g is None else each.g[:, t]
        outputs.append(delta_rule_step(q, k, v, beta=beta, g=g, state=state, update=update))
    limit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    assert (torch.stack(outputs, 1) - wanted).abs().max() <= limit * wanted.abs().max()
    assert (state - last).abs().max() <= min(limit, 2e-6) * last.abs().max()
    assert state.data_ptr() == address
    assert outputs[0].dtype == dtype
    assert not outputs[0].requires_grad


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("state", torch.ones(2, 2, 6, 3).transpose(2, 3)),
        ("state", torch.ones(2, 2, 3, 6, dtype=torch.float16)),
        ("v", torch.ones(2, 3, 6)),
        ("g", torch.ones(2, 2)),
        ("update", "hebbian"),
    ],
    ids=str,
)
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(where: str, value: object) -> None:
    given = {name: x[:, 0] if name != "state" else x for name, x in arguments().items()}
    state = given["state"]
    given[where] = value
    with pytest.raises(ConfigError) as caught:
        delta_rule_step(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert caught.value.where == where
    assert torch.equal(state, torch.ones_like(state))


def test_the_same_call_twice_gives_the_same_bits() -> None:
    each = stream(150, gated=True, d_k=16, d_v=16).rounded(torch.float32)
    one, two = (run(each, "auto") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_batch_is_its_streams() -> None:
    each = stream(100, B=3, gated=True, d_k=16, d_v=16)
    outputs, last = run(each.rounded(torch.float64), "chunked")
    for b in range(3):
        alone = {name: x[b : b + 1] for name, x in each.floats().items()}
        o, S = run(replace(each, **alone).rounded(torch.float64), "chunked")
        torch.testing.assert_close(outputs[b : b + 1], o, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(last[b : b + 1], S, rtol=1e-12, atol=1e-12)
