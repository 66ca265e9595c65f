"""One contract for every fast form: outputs, last state and all gradients are the definition's, on every kind of
input.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from delta_streams import FLOAT32_FORMS, FORMS, Stream, assert_as_defined, everything, normal, run, stream, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.kernels.delta_rule import delta_rule, dispatch


def every_seventh(T: int, value: float) -> torch.Tensor:
    g = torch.zeros(1, T, 2, dtype=torch.float64)
    g[:, 3::7] = value
    return g


def with_keys(each: Stream, noise: float, beta: float) -> Stream:
    """Keys that differ from one direction by `noise`; 0 makes them identical."""
    one, other = normal(1, 1, *each.k.shape[2:], seed=5), normal(*each.k.shape, seed=6)
    return replace(each, k=unit(one + noise * other), beta=torch.full_like(each.beta, beta))


def masked(each: Stream, *, pads: int = 0, share: float = 0.0) -> Stream:
    mask = torch.rand(each.k.shape[:2], generator=torch.Generator().manual_seed(3)) >= share
    mask[:, :pads] = False
    return replace(each, mask=mask)


def packed(each: Stream, lengths: list[int]) -> Stream:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return replace(each, cu_seqlens=bounds, state=normal(len(lengths), *each.state.shape[1:], seed=4))


CASES = {
    "plain": stream(200, B=2),
    "no state": replace(stream(70), state=None),
    "gated": stream(200, B=2, gated=True),
    "one token": stream(1, B=2, gated=True),
    "one short of a chunk": stream(15),
    "one more than a group": stream(129, gated=True),
    "one stream, one head": stream(97, H=1, gated=True),
    "grouped": stream(80, B=2, group=3),
    "grouped, gated": stream(150, group=2, gated=True),
    "all queries on one memory": stream(70, H=1, group=5),
    "wide keys": stream(70, d_k=33, d_v=4),
    "wide values": stream(70, d_k=3, d_v=40, gated=True),
    "width one": stream(70, d_k=1, d_v=1, gated=True),
    "additive": replace(stream(150, B=2), update="additive"),
    "additive, grouped, gated": replace(stream(150, group=2, gated=True), update="additive"),
    "left pads": masked(stream(100, B=2, gated=True), pads=37),
    "random mask": masked(stream(100, B=2, group=2, gated=True), share=0.4),
    "additive, mask": replace(masked(stream(100), share=0.4), update="additive"),
    "nothing unmasked": masked(stream(40, gated=True), share=2.0),
    "packed": packed(stream(169, gated=True), [5, 64, 0, 100]),
    "packed, masked, grouped": packed(masked(stream(90, group=2, gated=True), share=0.3), [33, 1, 56]),
    "beta 0 and 1": replace(stream(90), beta=(normal(1, 90, 2) > 0).double()),
    "keys of length 0": replace(stream(90), k=stream(90).k * (normal(1, 90, 2, 1) > 0)),
    "beta up to 2": replace(stream(200, d_k=32, d_v=32), beta=2 * stream(200, d_k=32, d_v=32).beta),
    "decays to 0": replace(stream(150), g=every_seventh(150, -torch.inf)),
    "decays to e^-100": replace(stream(150), g=every_seventh(150, -100.0)),
    "decays to e^-30": replace(stream(150), g=stream(150, gated=True).g * 60),
    "decays to 0 at both ends": replace(stream(65), g=every_seventh(72, -torch.inf)[:, 3:68]),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_definitions(name: str, form: tuple[str, str, torch.dtype]) -> None:
    each = CASES[name]
    if form[0] == "fla" and dispatch._unsuited_for_fla(each.q.to("cuda", form[2]), each.k, each.mask, each.update):
        pytest.skip("not taken by fla")
    assert_as_defined(each, form)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    number = st.integers(1, 3)
    lengths = draw(st.lists(st.integers(0, 150), max_size=4)) if draw(st.booleans()) else None
    T = draw(st.integers(0, 150)) if lengths is None else sum(lengths)
    each = stream(
        T,
        B=draw(number) if lengths is None else 1,
        H=draw(number),
        group=draw(number),
        d_k=draw(st.integers(1, 20)),
        d_v=draw(st.integers(1, 20)),
        gated=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    each = replace(each, update=draw(st.sampled_from(["delta", "additive"])))
    each = masked(each, pads=draw(st.integers(0, T)), share=0.3) if draw(st.booleans()) else each
    return each if lengths is None else packed(each, lengths)


@settings(max_examples=60)
@given(each=streams())
def test_any_stream_in_float64(each: Stream) -> None:
    assert_as_defined(each, ("chunked", "cpu", torch.float64))


@pytest.mark.parametrize("form", [form for form in FORMS if form[2] != torch.float64 and form[0] != "fla"], ids=str)
@settings(max_examples=20)
@given(each=streams())
def test_any_stream_is_finite_and_leaves_its_inputs(form: tuple[str, str, torch.dtype], each: Stream) -> None:
    impl, device, dtype = form
    given = each.rounded(dtype, device)
    before = {name: x.detach().clone() for name, x in given.floats().items()}
    assert all(x.isfinite().all() for x in everything(given, impl).values())
    assert all(torch.equal(x, before[name]) for name, x in given.floats().items())


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(0, 200), max_size=4).map(sorted),
    gated=st.booleans(),
    update=st.sampled_from(["delta", "additive"]),
)
def test_any_cut_of_a_stream_with_the_state_carried_is_one_pass(
    form: tuple[str, str, torch.dtype], cuts: list[int], gated: bool, update: str
) -> None:
    impl, device, dtype = form
    each = replace(stream(200, B=2, gated=gated), update=update).rounded(dtype, device)
    with torch.no_grad():
        outputs, last = run(each, impl)
        pieces, state = [], each.state
        for first, end in zip([0, *cuts], [*cuts, 200], strict=True):
            piece, state = run(replace(each.part(first, end), state=state), impl)
            pieces.append(piece)
    limit = {torch.float64: 1e-13, torch.float32: 5e-6}.get(dtype, 5e-2)
    assert (torch.cat(pieces, 1) - outputs).abs().max() <= limit * outputs.abs().max()
    assert (state - last).abs().max() <= min(limit, 5e-6) * last.abs().max()


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] != "fla"], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cuts", [[64], [64, 128, 192], [192], [128, 256]])
def test_cuts_at_multiples_of_64_give_the_same_bits(
    form: tuple[str, str, torch.dtype], gated: bool, cuts: list[int]
) -> None:
    impl, device, dtype = form
    for heads in (1, 3):
        each = stream(300, H=heads, d_k=64, d_v=64, gated=gated).rounded(dtype, device)
        with torch.no_grad():
            outputs, last = run(each, impl)
            pieces, state = [], each.state
            for first, end in zip([0, *cuts], [*cuts, 300], strict=True):
                piece, state = run(replace(each.part(first, end), state=state), impl)
                pieces.append(piece)
        assert torch.equal(torch.cat(pieces, 1), outputs)
        assert torch.equal(state, last)


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] != "fla"], ids=str)
def test_gradients_flow_through_a_carried_state_as_through_one_pass(form: tuple[str, str, torch.dtype]) -> None:
    impl, device, dtype = form
    each = stream(150, gated=True).rounded(dtype, device)
    leaves = list(each.floats().values())
    outputs, last = run(each, impl)
    whole = torch.autograd.grad(outputs.square().sum() + last.sum(), leaves)
    start, state = run(each.part(0, 64), impl)
    rest, last = run(replace(each.part(64, 150), state=state), impl)
    cut = torch.autograd.grad(torch.cat([start, rest], 1).square().sum() + last.sum(), leaves)
    limit = {torch.float64: 1e-13, torch.float32: 5e-6}.get(dtype, 5e-2)
    for one, two in zip(whole, cut, strict=True):
        assert (one - two).abs().max() <= limit * one.abs().max()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_precision_does_not_depend_on_autocast(form: tuple[str, str, torch.dtype]) -> None:
    impl, device, dtype = form
    each = stream(100, gated=True, d_k=16, d_v=16).rounded(dtype, device)
    plain = everything(each, impl)
    with torch.autocast(device, torch.bfloat16):
        inside = everything(each, impl)
    assert all(torch.equal(plain[name], inside[name]) for name in plain)


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] != "fla"], ids=str)
def test_what_masked_tokens_hold_is_never_read(form: tuple[str, str, torch.dtype]) -> None:
    impl, device, dtype = form
    each = masked(stream(100, B=2, group=2, gated=True), share=0.4).rounded(dtype, device)
    poison = {name: x.detach().clone() for name, x in each.floats().items()}
    for name in ("q", "k", "v", "beta", "g"):
        poison[name][~each.mask] = -torch.inf if name == "g" else torch.nan
    poisoned = replace(each, **{name: x.requires_grad_() for name, x in poison.items()})
    clean, got = everything(each, impl), everything(poisoned, impl)
    assert all(torch.equal(got[name], clean[name]) for name in clean)
    assert not got["outputs"][~each.mask].any()
    assert all(not got[name][~each.mask].any() for name in ("q", "k", "v", "beta", "g"))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_strides(form: tuple[str, str, torch.dtype]) -> None:
    impl, device, dtype = form
    each = stream(70, B=2, d_k=8, d_v=8, gated=True).rounded(dtype, device)
    turned = {name: x.detach().transpose(1, -1).contiguous().transpose(1, -1) for name, x in each.floats().items()}
    turned |= {"v": each.v.detach()[:, :, :1].expand(each.v.shape)}
    got = everything(replace(each, **{name: x.requires_grad_() for name, x in turned.items()}), impl)
    plain = everything(replace(each, v=turned["v"].contiguous().requires_grad_()), impl)
    assert all(torch.equal(got[name], plain[name]) for name in plain)


def test_results_are_contiguous_and_share_no_memory_with_the_given_state() -> None:
    for impl in ["reference", *{form[0] for form in FORMS if form[1] == "cpu"}]:
        for T in (0, 1, 40):
            given = stream(T, d_k=7).rounded(torch.float32)
            outputs, last = delta_rule(given.q, given.k, given.v, beta=given.beta, state=given.state, impl=impl)
            assert last.untyped_storage().data_ptr() != given.state.untyped_storage().data_ptr()
            assert last.is_contiguous()
            assert outputs.is_contiguous()


LONG = {
    "random keys": (stream(4096, d_k=64, d_v=64), 1e-6),
    "random keys, beta 0.999": (replace(s := stream(4096, d_k=64, d_v=64), beta=torch.full_like(s.beta, 0.999)), 1e-6),
    "keys within 0.1, beta 0.999": (with_keys(s, 0.1, 0.999), 5e-6),
    "keys within 0.01, beta 0.999": (with_keys(s, 0.01, 0.999), 5e-6),
    "keys within 0.01, beta 0.5": (with_keys(s, 0.01, 0.5), 5e-6),
    "identical keys, beta 1": (with_keys(s, 0.0, 1.0), 5e-6),
    "g down to -0.1": (replace(s, g=stream(4096, gated=True).g / 5), 1e-6),
    "g down to -30": (replace(s, g=stream(4096, gated=True).g * 60), 1e-6),
    "g -inf every 7th": (replace(s, g=every_seventh(4096, -torch.inf)), 1e-6),
}


@cache
def defined(name: str) -> dict[str, torch.Tensor]:
    wanted = everything(LONG[name][0].rounded(torch.float32).rounded(torch.float64), "reference")
    return {key: value.detach() for key, value in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("form", FLOAT32_FORMS, ids=str)
def test_4096_tokens_keep_their_digits(name: str, form: tuple[str, str, torch.dtype]) -> None:
    each, limit = LONG[name]
    got = everything(each.rounded(torch.float32, form[1]), form[0])
    errors = {
        key: float((got[key].detach().cpu().double() - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for key, value in defined(name).items()
    }
    assert max(errors.values()) <= limit, errors
