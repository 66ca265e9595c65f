"""Faults that public implementations of this family have had, one test each, against every form here.

The numbers are those of the list in the kernels' README.
"""

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from delta_streams import FORMS, Stream, everything, normal, run, stream, unit

from nestling.core.errors import ConfigError
from nestling.kernels.delta_rule import chunked, delta_rule, delta_rule_step

EXACT_FORMS = [form for form in FORMS if form[2] in (torch.float32, torch.float64)]
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}
all_forms = pytest.mark.parametrize("form", EXACT_FORMS, ids=str)
Form = tuple[str, str, torch.dtype]


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    return got.shape == wanted.shape and bool((got - wanted).abs().max() <= limit * wanted.abs().max())


@all_forms
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 2.0])
def test_issue_01_near_parallel_keys_do_not_explode(form: Form, beta: float) -> None:
    """flash-linear-attention #537. One write, then writes of zero: while β‖k‖² ≤ 2, no read outgrows the first write.
    The bound on the inverse itself is in test_delta_chunked.py.
    """
    each = stream(256, d_k=32, d_v=1)
    k = unit(normal(1, 1, 1, 32) + 0.01 * normal(1, 256, 2, 32, seed=1))
    v = torch.zeros_like(each.v)
    v[:, 0] = 1.0
    each = replace(each, q=k, k=k, v=v, beta=torch.full_like(each.beta, beta), state=None)
    outputs, _ = run(each.rounded(form[2], form[1]), form[0])
    assert outputs.abs().max() <= beta + 1e-3


@all_forms
@pytest.mark.parametrize("T", [1, 63, 64, 65, 100])
def test_issue_02_prefill_and_one_token_equal_a_full_pass(form: Form, T: int) -> None:
    """transformers #46190."""
    impl, device, dtype = form
    each = stream(T, B=2, gated=True).rounded(dtype, device)
    with torch.no_grad():
        outputs, last = run(each, impl)
        before, state = run(each.part(0, T - 1), impl)
        one, after = run(replace(each.part(T - 1, T), state=state), impl)
        stepped = delta_rule_step(
            *(x[:, -1] for x in (each.q, each.k, each.v)), beta=each.beta[:, -1], g=each.g[:, -1], state=state
        )
    assert close(torch.cat([before, one], 1), outputs, LIMIT[dtype])
    assert close(after, last, LIMIT[dtype])
    assert close(stepped, outputs[:, -1], LIMIT[dtype])
    assert close(state, last, LIMIT[dtype])


@all_forms
@pytest.mark.parametrize("cut", [1, 64, 77, 199])
def test_issue_03_a_carried_state_is_used_by_many_tokens(form: Form, cut: int) -> None:
    """transformers #45513."""
    impl, device, dtype = form
    each = stream(200, gated=True).rounded(dtype, device)
    with torch.no_grad():
        outputs, last = run(each, impl)
        before, state = run(each.part(0, cut), impl)
        rest, after = run(replace(each.part(cut, 200), state=state), impl)
        forgotten, _ = run(replace(each.part(cut, 200), state=torch.zeros_like(state)), impl)
    assert close(torch.cat([before, rest], 1), outputs, LIMIT[dtype])
    assert close(after, last, LIMIT[dtype])
    assert not close(forgotten, rest, 1e-3)


def padded(each: Stream, pads: int) -> Stream:
    """`each` behind `pads` masked tokens that hold large numbers."""

    def front(x: torch.Tensor | None, seed: int) -> torch.Tensor | None:
        if x is None:
            return None
        return torch.cat([100 * normal(*x.shape[:1], pads, *x.shape[2:], seed=seed).abs() * x.mean().sign(), x], 1)

    mask = torch.ones(each.k.shape[0], pads + each.k.shape[1], dtype=torch.bool)
    mask[:, :pads] = False
    names = ("q", "k", "v", "beta", "g")
    return replace(each, mask=mask, **{name: front(getattr(each, name), i) for i, name in enumerate(names)})


@all_forms
@pytest.mark.parametrize("B", [1, 3])
def test_issue_04_left_pads_count_for_nothing_at_any_batch_size(form: Form, B: int) -> None:
    """transformers #46773."""
    impl, device, dtype = form
    each = stream(90, B=B, gated=True)
    outputs, last = run(each.rounded(dtype, device), impl)
    behind, last_behind = run(padded(each, 37).rounded(dtype, device), impl)
    assert close(behind[:, 37:], outputs, 2e-6)
    assert close(last_behind, last, 2e-6)


@all_forms
def test_issue_05_zero_keys_and_pads_have_finite_gradients(form: Form) -> None:
    """maxtext #5295. The root of the normalisation holds its ε inside: a zero row has a gradient."""
    impl, device, dtype = form
    each = stream(70, gated=False).rounded(dtype, device)
    raw = each.k.detach().clone()
    raw[:, 10:20] = 0
    raw.requires_grad_()
    outputs, last = run(replace(each, k=unit(raw)), impl)
    (outputs.sum() + last.square().sum()).backward()
    assert all(x.isfinite().all() for x in (outputs, last, raw.grad, each.v.grad, each.beta.grad, each.state.grad))
    silent = stream(70).part(10, 20)
    kept = run(replace(silent, k=torch.zeros_like(silent.k)).rounded(dtype, device), impl)[1]
    assert torch.equal(kept.cpu(), silent.state.to(dtype))
    gradients = everything(padded(stream(40, gated=True), 37).rounded(dtype, device), impl)
    assert all(not gradients[name][:, :37].any() for name in ("q", "k", "v", "beta", "g"))


@all_forms
@pytest.mark.parametrize("decay", [-100.0, -torch.inf, None])
def test_issue_06_tiny_decays_neither_overflow_nor_lose_digits(form: Form, decay: float | None) -> None:
    """executorch #21417."""
    impl, device, dtype = form
    each = stream(300, gated=True, d_k=32, d_v=32)
    g = each.g * 60
    if decay is not None:
        g = torch.zeros_like(g)
        g[:, 2::7] = decay
    given = replace(each, g=g).rounded(dtype, device)
    got, wanted = everything(given, impl), everything(given.rounded(torch.float64), "reference")
    for name in got:
        assert got[name].isfinite().all()
        largest = wanted[name].abs().max().clamp(min=1e-30)
        assert (got[name].cpu() - wanted[name]).abs().max() <= 1e-6 * largest, name


def test_issue_07_the_interval_of_kept_states_changes_no_gradient() -> None:
    """mlstm_kernels #10."""
    each = stream(600, gated=True).rounded(torch.float64)
    inputs = (each.q, each.k, each.v, each.beta, each.g, each.state)

    def gradients(every: int) -> tuple[torch.Tensor, ...]:
        outputs, last = chunked.run(*inputs, additive=False, sizes=(32, every))
        return torch.autograd.grad(outputs.square().sum() + last.sum(), inputs)

    wanted = gradients(1)
    for every in (2, 4, 8):
        assert all(close(one, two, 1e-12) for one, two in zip(gradients(every), wanted, strict=True))


@all_forms
def test_issue_08_expanded_gradients_and_slices_of_a_fused_projection(form: Form) -> None:
    """flash-linear-attention #1138 and #759."""
    impl, device, dtype = form
    each = stream(70, B=2, d_k=8, d_v=8, gated=True).rounded(dtype, device)
    leaves = list(each.floats().values())
    outputs, last = run(each, impl)
    by_sum = torch.autograd.grad((outputs.sum(), last.sum()), leaves, retain_graph=True)
    by_ones = torch.autograd.grad((outputs, last), leaves, (torch.ones_like(outputs), torch.ones_like(last)))
    assert all(torch.equal(one, two) for one, two in zip(by_sum, by_ones, strict=True))

    fused = torch.cat([each.q, each.k, each.v], -1).detach()
    q, k, v = fused.split(8, -1)
    views = replace(each, q=q.requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_())
    got, wanted = everything(views, impl), everything(each, impl)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@all_forms
def test_issue_09_packed_sequences_do_not_see_each_other(form: Form) -> None:
    """flash-linear-attention #1184, transformers #44836."""
    impl, device, dtype = form
    lengths = [5, 64, 0, 100]
    each = replace(
        stream(169, gated=True, group=2), state=normal(4, 2, 8, 6), cu_seqlens=torch.tensor([0, 5, 69, 69, 169])
    )
    together = each.rounded(dtype, device)
    outputs, last = run(together, impl)
    (outputs.square().sum() + last.square().sum()).backward()
    first = 0
    for n, length in enumerate(lengths):
        one = replace(each.part(first, first + length), state=each.state[n : n + 1], cu_seqlens=None).rounded(
            dtype, device
        )
        o, S = run(one, impl)
        (o.square().sum() + S.square().sum()).backward()
        here = slice(first, first + length)
        assert torch.equal(outputs[:, here], o)
        assert torch.equal(last[n : n + 1], S)
        assert torch.equal(together.state.grad[n : n + 1], one.state.grad)
        for name in ("q", "k", "v", "beta", "g") if length else ():
            assert torch.equal(getattr(together, name).grad[:, here], getattr(one, name).grad), name
        first += length


@all_forms
def test_issue_10_no_token(form: Form) -> None:
    """flashinfer #3536, FlashKDA #32."""
    impl, device, dtype = form
    each = stream(0, B=3, gated=True).rounded(dtype, device)
    outputs, last = run(each, impl)
    assert outputs.shape == (3, 0, 2, 6)
    assert torch.equal(last, each.state)
    end = normal(*last.shape).to(last)
    assert torch.equal(torch.autograd.grad(last, each.state, end)[0], end)


@all_forms
def test_issue_11_rows_beyond_the_data_are_never_read(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention #892: every uninitialised buffer starts as NaN here."""
    impl, device, dtype = form
    fresh = np.empty

    def poisoned(*args: object, **options: object) -> np.ndarray:
        array = fresh(*args, **options)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        for T in (1, 65, 130):
            got = everything(stream(T, gated=True, group=2).rounded(dtype, device), impl)
            assert all(x.isfinite().all() for x in got.values())
    finally:
        torch.use_deterministic_algorithms(False)


PEAK = """
import pathlib, sys, torch
import nestling
from nestling.kernels.delta_rule import delta_rule
torch.set_num_threads(1)
impl, T = sys.argv[1], int(sys.argv[2])
def peak():  # of this process: the figure of getrusage may be that of its parent
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
def inputs(T):
    q, k, v = (torch.randn(1, T, 16, 64) for _ in range(3))
    return [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, torch.rand(1, T, 16))]
def use(q, k, v, beta):
    outputs, _ = delta_rule(q, k, v, beta=beta, impl=impl)
    outputs.backward(outputs.detach())
use(*inputs(256))
given = inputs(T)
before = peak()
use(*given)
print(peak() - before)
"""


def peak(impl: str, T: int) -> float:
    """MB that a forward and a backward pass add, outputs and gradients included."""
    found = subprocess.run([sys.executable, "-c", PEAK, impl, str(T)], capture_output=True, text=True, check=True)
    return int(found.stdout) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process's peak")
@pytest.mark.slow
@pytest.mark.parametrize("impl", sorted({form[0] for form in FORMS if form[1] == "cpu"}))
def test_issue_12_memory_is_linear_and_small(impl: str) -> None:
    """mlx-lm #1870 and #1389: a state for every token is 108 GB at T = 4,096. That time is linear too follows from the
    bytes in test_delta_chunked.py; here no test is timed.
    """
    at_8k, at_16k = peak(impl, 8192), peak(impl, 16384)
    assert 100 < at_8k < 300  # four gradients and the outputs alone are 128
    assert at_16k < 2.2 * at_8k


@all_forms
@pytest.mark.parametrize("T", [0, 1, 4, 65])
def test_issue_13_the_last_state_has_the_shape_of_the_first(form: Form, T: int) -> None:
    """vLLM #28698."""
    each = stream(T, B=3, group=2).rounded(form[2], form[1])
    assert run(each, form[0])[1].shape == each.state.shape
    assert run(replace(each, state=None), form[0])[1].shape == each.state.shape


@all_forms
@pytest.mark.parametrize("T", [1, 2, 5, 15, 16, 17, 31, 63])
def test_issue_14_an_input_shorter_than_a_chunk_is_learnt(form: Form, T: int) -> None:
    """titans-pytorch #59."""
    each = stream(T).rounded(form[2], form[1])
    last = run(each, form[0])[1]
    assert not close(last, each.state, 1e-3)
    assert close(last.cpu().double(), run(each.rounded(torch.float64), "reference")[1], 2e-6)


def test_issue_15_beta_and_g_cannot_change_places() -> None:
    """flash-linear-attention's two naive functions take them in different orders."""
    for function in (delta_rule, delta_rule_step):
        parameters = inspect.signature(function).parameters
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("beta", "g"))
    each = stream(3, gated=True)
    with pytest.raises(ConfigError, match="did beta and g change places"):
        delta_rule(each.q, each.k, each.v, beta=each.g, g=each.beta)
