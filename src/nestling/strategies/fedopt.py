"""FedOpt: the server treats the clients' mean change as a gradient and takes an adaptive step along it.

    Δ = Σ p_k w_k − w        m ← β₁ m + (1 − β₁) Δ        w ← w + η m / (√v + τ)
    FedAdam:  v ← β₂ v + (1 − β₂) Δ²            FedYogi:  v ← v − (1 − β₂) Δ² sign(v − Δ²)            v_0 = τ²

Reddi et al., arXiv 2003.00295, Algorithm 2, to the letter: no bias correction, and τ in place of ε, which is what
`torch.optim.Adam` does otherwise (and it has no Yogi). Moments are float64. Their defaults are β₁ = 0.9, β₂ = 0.99,
τ = 1e-3; η wants tuning.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from nestling.core.vectors import Vector


def adaptive(
    state: Vector,
    mean: Vector,
    memory: Mapping[str, np.ndarray],
    *,
    rule: Literal["adam", "yogi"],
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> tuple[Vector, dict[str, np.ndarray]]:
    """The next state, float32[n], and the rule's own state: `m` and `v`, float64[n].

    Args:
        state: w, before the round.
        mean: Σ p_k w_k, what FedAvg would take.
        memory: the rule's own state; empty before the first round.

    >>> settings = {"rule": "adam", "lr": 1.0, "beta1": 0.0, "beta2": 0.5, "tau": 1.0}
    >>> adaptive(np.float32([1.0]), np.float32([2.0]), {}, **settings)
    (array([1.5], dtype=float32), {'m': array([1.]), 'v': array([1.])})
    """
    change = mean.astype(np.float64) - state
    m = beta1 * memory.get("m", 0.0) + (1 - beta1) * change
    v, square = memory.get("v", np.full(state.shape, tau**2)), change**2
    sign = np.sign(v - square)
    v = beta2 * v + (1 - beta2) * square if rule == "adam" else v - (1 - beta2) * square * sign
    return (state + lr * m / (np.sqrt(v) + tau)).astype(np.float32), {"m": m, "v": v}
