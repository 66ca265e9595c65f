"""Streams to run the delta rule on, and the comparison every fast form is held to: the float64 definition, gradients
and all. A new implementation is one line in `FORMS`.
"""

import math
from dataclasses import dataclass, replace

import torch
from tolerance import assert_close
from torch import Tensor

from nestling.kernels.delta_rule import delta_rule, dispatch

# implementation, device, dtype
FORMS = [("chunked", "cpu", torch.float64), ("chunked", "cpu", torch.float32), ("chunked", "cpu", torch.bfloat16)]
if dispatch._compiled() is not None:
    FORMS += [("compiled", "cpu", torch.float32), ("compiled", "cpu", torch.bfloat16)]
if torch.cuda.is_available():
    FORMS += [("chunked", "cuda", torch.float32)]
    FORMS += [("fla", "cuda", torch.bfloat16)] if dispatch._fla() is not None else []
FLOAT32_FORMS = [form for form in FORMS if form[2] == torch.float32]


@dataclass(frozen=True)
class Stream:
    """Inputs of `delta_rule`; the floating ones are float64 until `rounded`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    state: Tensor | None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    update: str = "delta"

    def rounded(self, dtype: torch.dtype, device: str = "cpu") -> "Stream":
        """In `dtype` (the state in float32 or more), as leaves that ask for gradients."""

        def leaf(x: Tensor | None, kind: torch.dtype) -> Tensor | None:
            return None if x is None else x.detach().to(device, kind, copy=True).requires_grad_()

        exact = torch.promote_types(dtype, torch.float32)
        floats = {name: leaf(getattr(self, name), dtype) for name in ("q", "k", "v", "beta", "g")}
        others = {name: None if (x := getattr(self, name)) is None else x.to(device) for name in ("mask", "cu_seqlens")}
        return replace(self, **floats, **others, state=leaf(self.state, exact))

    def part(self, first: int, last: int) -> "Stream":
        """Tokens first … last − 1, views, with the same initial state."""
        cut = {
            name: x[:, first:last]
            for name in ("q", "k", "v", "beta", "g", "mask")
            if (x := getattr(self, name)) is not None
        }
        return replace(self, **cut)

    def floats(self) -> dict[str, Tensor]:
        names = ("q", "k", "v", "beta", "g", "state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def stream(
    T: int, *, B: int = 1, H: int = 2, group: int = 1, d_k: int = 8, d_v: int = 6, gated: bool = False, seed: int = 0
) -> Stream:
    """Random unit keys and queries of spread lengths, β in (0, 1), a non-zero state; g down to −½ if gated."""
    draw = torch.Generator().manual_seed(seed)
    options = {"generator": draw, "dtype": torch.float64}
    q, k = torch.randn(B, T, H * group, d_k, **options), unit(torch.randn(B, T, H, d_k, **options))
    v, state = torch.randn(B, T, H, d_v, **options), torch.randn(B, H, d_k, d_v, **options)
    beta, g = torch.rand(B, T, H, **options), torch.rand(B, T, H, **options) * -0.5
    return Stream(q, k, v, beta, g if gated else None, state)


def run(each: Stream, impl: str) -> tuple[Tensor, Tensor]:
    return delta_rule(
        each.q,
        each.k,
        each.v,
        beta=each.beta,
        g=each.g,
        state=each.state,
        mask=each.mask,
        cu_seqlens=each.cu_seqlens,
        update=each.update,
        impl=impl,
    )


def everything(each: Stream, impl: str) -> dict[str, Tensor]:
    """Outputs, the last state, and the gradient of a fixed random functional of both in every floating input."""
    outputs, last = run(each, impl)
    weight, end_weight = (normal(*x.shape, seed=9 + x.dim()).to(x) / math.sqrt(x.shape[-1]) for x in (outputs, last))
    leaves = each.floats()
    total = (outputs * weight).sum() + (last * end_weight).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)  # no token: no path to q
    return {"outputs": outputs, "last": last, **dict(zip(leaves, gradients, strict=True))}


def assert_as_defined(each: Stream, form: tuple[str, str, torch.dtype]) -> None:
    """All of `everything` equals the float64 definition on the same rounded inputs, within the table of tolerances."""
    impl, device, dtype = form
    given = each.rounded(dtype, device)
    wanted = everything(given.rounded(torch.float64), "reference")
    for name, got in everything(given, impl).items():
        expected = each.v.dtype if dtype == torch.float64 else torch.float32 if name in ("last", "state") else dtype
        assert got.dtype == expected, name
        try:
            assert_close(got.detach().cpu(), wanted[name].detach(), dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
