"""The delta-rule memory as the rest of the house calls it: inputs checked, masks and packing folded away, then one of
four forms of the same computation (`reference`, `chunked`, `compiled`, `fla`), chosen by `choose`.

    S_t = a_t S_{t−1} + k_t (β_t (v_t − (a_t S_{t−1})ᵀ k_t))ᵀ      o_t = S_tᵀ q_t      a_t = exp(g_t)

Axes: B streams, T tokens, H memory heads, Hq query heads (a multiple of H; query head i reads memory i // (Hq/H)), N
packed sequences. Sums are float32 whatever the inputs (float64 for float64 inputs); no scale is hidden: fold it into q.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.kernels.delta_rule import chunked, reference

IMPLEMENTATIONS = ("auto", "reference", "chunked", "compiled", "fla")
UPDATES = ("delta", "additive")

Run = Callable[..., tuple[Tensor, Tensor]]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    g: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    update: str = "delta",
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the memory over a piece of a stream: outputs [B, T, Hq, d_v] in the inputs' dtype, and the state after it.

    Differentiable, once, in every floating input, `state` and the returned state included. Passing the state on, any
    cut of a stream equals one pass to rounding, and bit for bit where cuts are multiples of 64 tokens.

    Args:
        q: queries [B, T, Hq, d_k].
        k: keys [B, T, H, d_k], of unit length or shorter: the memory stays bounded while β‖k‖² ≤ 2.
        v: values [B, T, H, d_v]; q, k and v share one floating dtype. Any strides.
        beta: write strengths [B, T, H], any floating dtype.
        g: log-decays [B, T, H], 0 … −∞ (forget everything); none means no decay.
        state: [B, H, d_k, d_v] (N in place of B when packed), float32, or float64 for float64 inputs. Zeros if not
            given. Never changed; the returned one has new storage.
        mask: bool [B, T]. Where False, a token neither writes nor decays, whatever it holds (NaN included); its output
            is zero, and so are its gradients.
        cu_seqlens: integers [N + 1] from 0 to T, for B = 1: sequence n is tokens cu_seqlens[n] … cu_seqlens[n + 1] − 1
            and has its own state.
        update: "delta", or "additive": S_t = a_t S_{t−1} + β_t k_t v_tᵀ.
        impl: "auto" (see `choose`) or one of `IMPLEMENTATIONS`.

    Raises `ConfigError` for shapes, dtypes or devices that do not fit, g > 0 (looked for on the CPU alone: elsewhere it
    would wait for the device), and an implementation that is unknown, missing or cannot take these inputs.

    >>> q = k = torch.nn.functional.normalize(torch.ones(1, 3, 2, 4), dim=-1)
    >>> v, beta = torch.ones(1, 3, 2, 5), torch.full((1, 3, 2), 0.5)
    >>> outputs, state = delta_rule(q, k, v, beta=beta)
    >>> outputs[0, :, 0, 0].tolist(), state.shape  # each write halves what is missing
    ([0.5, 0.75, 0.875], torch.Size([1, 2, 4, 5]))
    """
    lengths = _lengths(cu_seqlens, q)
    _check(q, k, v, beta, g, state, streams=len(lengths) if lengths is not None else None)
    _check_mask(mask, k)
    if update not in UPDATES:
        raise ConfigError(f"is {update!r}", where="update", remedy=f"Give one of {', '.join(UPDATES)}.")
    run = _implementation(choose(q, k, mask=mask, update=update) if impl == "auto" else impl, q, k, mask, update)
    exact = torch.float64 if v.dtype == torch.float64 else torch.float32
    if state is None:
        streams = len(lengths) if lengths is not None else k.shape[0]
        state = torch.zeros(streams, k.shape[2], k.shape[3], v.shape[3], dtype=exact, device=k.device)
    dtype = v.dtype
    if run is not _run_fla:
        q, k, v = q.to(exact), k.to(exact), v.to(exact)
    beta, g = beta.to(exact), None if g is None else g.to(exact)
    if mask is not None:
        unseen = ~mask[..., None]
        q, k, v = (each.masked_fill(unseen[..., None], 0) for each in (q, k, v))
        beta, g = beta.masked_fill(unseen, 0), None if g is None else g.masked_fill(unseen, 0)
    pieces = (q, k, v, beta, g, state)
    if lengths is None:
        outputs, last = _run(run, *pieces, additive=update == "additive")
    else:
        outputs, last = _run_packed(run, *pieces, lengths=lengths, additive=update == "additive")
    if mask is not None:
        outputs = outputs.masked_fill(unseen[..., None], 0)
    return outputs.to(dtype).contiguous(), last.contiguous()


@torch.no_grad()
def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, g: Tensor | None = None, state: Tensor, update: str = "delta"
) -> Tensor:
    """One token of decoding: `state` [B, H, d_k, d_v] is changed IN PLACE; outputs [B, Hq, d_v]. No gradients.

    q [B, Hq, d_k], k [B, H, d_k], v [B, H, d_v], beta and g [B, H]; dtypes as for `delta_rule`. Raises `ConfigError`
    for shapes or dtypes that do not fit, and for a state that is not contiguous.

    >>> k, state = torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 2, 1)
    >>> delta_rule_step(k, k, torch.tensor([[[4.0]]]), beta=torch.tensor([[0.5]]), state=state).item()
    2.0
    >>> state.flatten().tolist()
    [2.0, 0.0]
    """
    _check(q[:, None], k[:, None], v[:, None], beta[:, None], None if g is None else g[:, None], state)
    if not state.is_contiguous():
        raise ConfigError("is not contiguous", where="state", remedy="Call .contiguous() once, before the first step.")
    if update not in UPDATES:
        raise ConfigError(f"is {update!r}", where="update", remedy=f"Give one of {', '.join(UPDATES)}.")
    if choose(v) == "compiled":
        return _compiled().step(q, k, v, beta, g, state, additive=update == "additive").contiguous()
    B, H, d_k, d_v = state.shape
    dtype, exact = v.dtype, state.dtype
    with _without_autocast(v.device):
        S, K = state.view(B * H, d_k, d_v), k.reshape(B * H, 1, d_k).to(exact)
        U, b = v.reshape(B * H, 1, d_v).to(exact), beta.reshape(B * H, 1, 1).to(exact)
        if g is not None:
            S.mul_(g.reshape(B * H, 1, 1).to(exact).exp())
        if update == "delta":
            U = torch.baddbmm(U, K, S, alpha=-1)
        S.baddbmm_(K.transpose(1, 2), U * b)
        return torch.bmm(q.reshape(B * H, -1, d_k).to(exact), S).view(B, -1, d_v).to(dtype)


def choose(q: Tensor, k: Tensor | None = None, *, mask: Tensor | None = None, update: str = "delta") -> str:
    """The implementation that impl="auto" takes for such inputs; values are not read, only device, dtype and shape.

    "compiled" on a CPU where Numba works, save for float64; "fla" on CUDA where flash-linear-attention is installed and
    can take the inputs; else "chunked".

    >>> choose(torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    'chunked'
    """
    if q.device.type == "cpu" and q.dtype != torch.float64 and _compiled() is not None:
        return "compiled"
    if q.device.type == "cuda" and _fla() is not None and not _unsuited_for_fla(q, q if k is None else k, mask, update):
        return "fla"
    return "chunked"


def _without_autocast(device: torch.device) -> AbstractContextManager:
    """Sums stay in the state's precision; entering torch.autocast costs half a step, so only where it is on."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _run(
    run: Run, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, *, additive: bool
) -> tuple[Tensor, Tensor]:
    """One call of an implementation; without a token the state passes through, in new storage."""
    if k.shape[0] * k.shape[1] == 0:
        return v.new_zeros(*q.shape[:3], v.shape[3]), state.clone()
    with _without_autocast(k.device):
        return run(q, k, v, beta, g, state, additive=additive)


def _run_packed(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    lengths: list[int],
    additive: bool,
) -> tuple[Tensor, Tensor]:
    """Each sequence by itself. Cut with `split`, whose gradient is one concatenation; slices would each cost T."""
    if not lengths:
        return v.new_zeros(*q.shape[:3], v.shape[3]), state.clone()
    cut = [each.split(lengths, 1) for each in (q, k, v, beta)]
    decays = [None] * len(lengths) if g is None else g.split(lengths, 1)
    runs = [_run(run, *piece, additive=additive) for piece in zip(*cut, decays, state.split(1), strict=True)]
    return torch.cat([outputs for outputs, _ in runs], 1), torch.cat([last for _, last in runs])


def _implementation(name: str, q: Tensor, k: Tensor, mask: Tensor | None, update: str) -> Run:
    """The function behind a name, or a `ConfigError` that says what is missing."""
    if name == "reference":
        return reference.run
    if name == "chunked":
        return chunked.run
    if name == "compiled":
        module = _compiled()
        if module is None:
            raise ConfigError("compiled needs a working Numba", where="impl", remedy='Give "auto" or "chunked".')
        if q.device.type != "cpu" or q.dtype == torch.float64:
            cause = f"compiled runs float32 and shorter on a CPU, the inputs are {q.dtype} on {q.device}"
            raise ConfigError(cause, where="impl", remedy='Give "auto" or "chunked".')
        return module.run
    if name == "fla":
        if _fla() is None:
            raise ConfigError("fla needs flash-linear-attention", where="impl", remedy="pip install 'nestling[fla]'")
        unsuited = _unsuited_for_fla(q, k, mask, update)
        if unsuited:
            raise ConfigError(f"fla cannot take {unsuited}", where="impl", remedy='Give "auto" or "chunked".')
        return _run_fla
    raise ConfigError(f"is {name!r}", where="impl", remedy=f"Give one of {', '.join(IMPLEMENTATIONS)}.")


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    """The CPU kernels, imported when first needed; None, with one warning, where Numba is missing or broken."""
    try:
        return importlib.import_module("nestling.kernels.delta_rule.compiled")
    except Exception as error:  # a broken compiler fails in many ways, and every one has the same remedy
        warnings.warn(
            f"Numba cannot be used ({error}); the delta rule runs in PyTorch, correctly but several times slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@lru_cache(maxsize=1)
def _fla() -> ModuleType | None:
    """flash-linear-attention's gated delta rule, where it and Triton are installed and can be imported."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.import_module("fla.ops.gated_delta_rule")
    except Exception as error:  # it asks for particular versions of Triton and torch
        warnings.warn(f"flash-linear-attention cannot be used ({error})", RuntimeWarning, stacklevel=2)
        return None


def _unsuited_for_fla(q: Tensor, k: Tensor, mask: Tensor | None, update: str) -> str:
    """What in the inputs those kernels cannot take; empty if nothing."""
    if q.device.type != "cuda" or q.dtype != torch.bfloat16:
        return f"{q.dtype} on {q.device} (it takes bfloat16 on CUDA)"
    if q.shape[2] != k.shape[2]:
        return "several queries a memory head"
    if k.shape[3] > 256:
        return "keys longer than 256"
    if mask is not None:
        return "a mask"
    return "" if update == "delta" else "the additive update"


def _run_fla(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, *, additive: bool
) -> tuple[Tensor, Tensor]:
    """flash-linear-attention's chunk kernels behind our signature.

    Written against fla-core 0.6 and never run yet: it needs a GPU, where the contract tests take it up. Its g may not
    be −∞ (it forms differences of running sums), so g stops at −80: beside 1, e⁻⁸⁰ is nothing, and so is its gradient.
    """
    assert not additive
    g = torch.zeros_like(beta) if g is None else g.clamp(min=-80.0)
    return _fla().chunk_gated_delta_rule(
        q, k, v, g, beta.to(q.dtype), scale=1.0, initial_state=state, output_final_state=True
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor | None, streams: int | None = None
) -> None:
    """The tensors fit each other, or a `ConfigError` names the first that does not."""
    if k.dim() != 4 or min(k.shape[2:]) < 1:
        raise ConfigError(f"has shape {tuple(k.shape)}", where="k", remedy="Give [B, T, H, d_k] with H, d_k ≥ 1.")
    B, T, H, d_k = k.shape
    _check_shape("v", v, (B, T, H, None), "[B, T, H, d_v]")
    _check_shape("q", q, (B, T, None, d_k), "[B, T, Hq, d_k]")
    if q.shape[2] < 1 or q.shape[2] % H:
        raise ConfigError(
            f"has {q.shape[2]} heads for {H} memory heads",
            where="q",
            remedy="Give a multiple: query head i reads memory head i // (Hq/H).",
        )
    _check_shape("beta", beta, (B, T, H), "[B, T, H]")
    for name, each in (("q", q), ("k", k), ("v", v)):
        if not each.dtype.is_floating_point or each.dtype != v.dtype:
            raise ConfigError(f"is {each.dtype}, v is {v.dtype}", where=name, remedy="Give q, k, v one floating dtype.")
    if g is not None:
        _check_shape("g", g, (B, T, H), "[B, T, H]")
        if g.device.type == "cpu" and bool((g > 0).any()):
            raise ConfigError(
                f"is {float(g.max()):.3g} somewhere, which amplifies",
                where="g",
                remedy="Give log-decays of 0 or less; did beta and g change places?",
            )
    if state is not None:
        _check_shape("state", state, (B if streams is None else streams, H, d_k, v.shape[3]), "[B or N, H, d_k, d_v]")
        exact = torch.float64 if v.dtype == torch.float64 else torch.float32
        if state.dtype != exact:
            raise ConfigError(f"is {state.dtype}", where="state", remedy=f"Keep it in {exact}: rounding adds up.")
    for name, other in (("q", q), ("v", v), ("beta", beta), ("g", g), ("state", state)):
        if other is not None and other.device != k.device:
            raise ConfigError(f"is on {other.device}, k is on {k.device}", where=name, remedy="Use one device.")
        if other is not None and not other.dtype.is_floating_point:
            raise ConfigError(f"is {other.dtype}", where=name, remedy="Give a floating dtype.")


def _check_shape(name: str, tensor: Tensor, wanted: tuple[int | None, ...], letters: str) -> None:
    fits = tensor.dim() == len(wanted) and all(
        want in (None, have) for want, have in zip(wanted, tensor.shape, strict=True)
    )
    if not fits or min(tensor.shape[2:]) < 1:
        text = ", ".join("any" if want is None else str(want) for want in wanted)
        raise ConfigError(f"has shape {tuple(tensor.shape)}, k needs [{text}]", where=name, remedy=f"Give {letters}.")


def _check_mask(mask: Tensor | None, k: Tensor) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool or mask.shape != k.shape[:2] or mask.device != k.device:
        raise ConfigError(
            f"is {mask.dtype}{list(mask.shape)} on {mask.device}, k needs bool{list(k.shape[:2])} on {k.device}",
            where="mask",
            remedy="Give True where a token counts.",
        )


def _lengths(cu_seqlens: Tensor | None, q: Tensor) -> list[int] | None:
    """The lengths of packed sequences, from their boundaries."""
    if cu_seqlens is None:
        return None
    remedy = "Give integers [0, …, T] that never fall, and B = 1."
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype.is_floating_point or cu_seqlens.dtype == torch.bool:
        raise ConfigError(f"is {cu_seqlens.dtype}{list(cu_seqlens.shape)}", where="cu_seqlens", remedy=remedy)
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if not bounds or bounds[0] != 0 or min(lengths, default=0) < 0 or (q.shape[0], bounds[-1]) != (1, q.shape[1]):
        cause = f"runs from {bounds[:1]} to {bounds[-1:]}, the tokens are {list(q.shape[:2])}"
        raise ConfigError(cause, where="cu_seqlens", remedy=remedy)
    return lengths
