"""The delta rule as it is defined, one token at a time: read what the memory holds under a key, write the difference.

    S_t = a_t S_{t−1} + k_t (β_t (v_t − (a_t S_{t−1})ᵀ k_t))ᵀ      o_t = S_tᵀ q_t      a_t = exp(g_t)

The additive (Hebbian) update writes β_t v_t k_tᵀ whatever the memory held. Sources: DeltaNet (arXiv 2406.06484), its
gated form (arXiv 2412.06464) and FedNL's memory; S here is d_k × d_v, the transpose of theirs. Every fast path is held
to this file.
"""

import torch
from jaxtyping import Float
from torch import Tensor


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
    """Outputs and the state after the last token, in the one floating dtype of all inputs; T ≥ 1.

    Query head i reads the memory of head i // (Hq/H). Differentiable through plain operations, in every input.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> o, S = run(one, one, 3 * one, 0.5 * one[..., 0], None, one, additive=False)
    >>> S.item()  # 1 + ½ (3 − 1)
    2.0
    """
    B, _, Hq, d_k = q.shape
    H, d_v = v.shape[2:]
    S, outputs = state, []
    decays = [None] * k.shape[1] if g is None else g.exp().unbind(1)
    for q_t, k_t, v_t, b_t, a_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), beta.unbind(1), decays, strict=True):
        if a_t is not None:
            S = a_t[..., None, None] * S
        held = 0 if additive else (S * k_t[..., None]).sum(-2)
        u_t = b_t[..., None] * (v_t - held)
        S = S + k_t[..., None] * u_t[..., None, :]
        outputs.append((q_t.reshape(B, H, Hq // H, d_k) @ S).reshape(B, Hq, d_v))
    return torch.stack(outputs, 1), S
