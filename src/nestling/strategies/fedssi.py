"""FedSSI: a client is held back where earlier rounds found its weights important, number by number.

    surrogate:   v ← v − η [∇L(v) + ((1 − λ)/2λ)(v − w_global)],  v = w_global at first,  0 < λ ≤ 1
    importance:  s = −Σ_steps g · δv,   Ω ← 0.9 Ω + max(s, 0) / (Δ² + ξ),   g = ∇L(v),  Δ = v_end − v_start,  ξ = 1e-3
    training:    min_w  L(w) + a Σ_i Ω_i (w_i − w_global,i)²

Reconstructed: the body of arXiv 2412.13779 was not readable to us; the path integral is that of Synaptic Intelligence
(Zenke et al., arXiv 1703.04200). Where we differ: every round counts as a task, and what earlier rounds said decays by
0.9 a round; the surrogate takes the steps of the client's own optimiser rather than of plain gradient descent (with sgd
and no momentum it is the formula). Ω of a round counts from the next one on, so with a single task Ω = 0 and FedSSI is
FedAvg. Training the surrogate doubles a client's time.

Ω lies in a client's memory as ``rule.omega.0``, ``rule.omega.1``, …, one array for each trained parameter.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

DECAY = 0.9
XI = 1e-3


def surrogate_pull(ssi_lambda: float) -> float:
    """How strongly the surrogate is pulled to the server's state: (1 − λ)/2λ.

    >>> surrogate_pull(0.5), surrogate_pull(1.0)
    (0.5, 0.0)
    """
    return (1 - ssi_lambda) / (2 * ssi_lambda)


class Path:
    """s = −Σ g · δv along a training, number by number, in float64.

    >>> v = torch.zeros(2, requires_grad=True)
    >>> path = Path([v])
    >>> path.before_step([torch.tensor([3.0, -1.0])])
    >>> _ = v.data.add_(torch.tensor([-0.5, -0.5]))
    >>> path.after_step()
    >>> path.importance()
    [array([ 5.97609562, -1.99203187])]
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._start = [p.detach().clone() for p in parameters]
        self._sum = [torch.zeros_like(start, dtype=torch.float64) for start in self._start]
        self._gradients: list[Tensor | None] = []
        self._before: list[Tensor] = []

    def before_step(self, gradients: Sequence[Tensor | None]) -> None:
        """Remember g, the gradients of the loss alone, and where v is."""
        self._gradients = [None if g is None else g.detach().clone() for g in gradients]
        self._before = [p.detach().clone() for p in self._parameters]

    def after_step(self) -> None:
        """Add −g · δv of the step just taken."""
        for total, g, before, now in zip(self._sum, self._gradients, self._before, self._parameters, strict=True):
            if g is not None:
                total -= g.double() * (now.detach().double() - before.double())

    def importance(self) -> list[np.ndarray]:
        """s / (Δ² + ξ) of each parameter, float64, not yet cut off at 0."""
        return [
            (total / ((end.detach().double() - start.double()) ** 2 + XI)).cpu().numpy()
            for total, start, end in zip(self._sum, self._start, self._parameters, strict=True)
        ]


def next_omega(memory: Mapping[str, np.ndarray], importance: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Ω after this round, float32: 0.9 Ω + max(s, 0)/(Δ² + ξ).

    >>> next_omega({"rule.omega.0": np.float32([1, 1])}, [np.array([2.0, -2.0])])
    {'rule.omega.0': array([2.9, 0.9], dtype=float32)}
    """
    return {
        f"rule.omega.{i}": (DECAY * memory.get(f"rule.omega.{i}", 0.0) + np.maximum(found, 0)).astype(np.float32)
        for i, found in enumerate(importance)
    }


def pulls(memory: Mapping[str, np.ndarray], parameters: Sequence[Tensor], *, strength: float) -> list[float | Tensor]:
    """2aΩ of each parameter, the strength of its pull; none before the first task has ended, or without strength.

    >>> pulls({"rule.omega.0": np.float32([1, 3])}, [torch.zeros(2)], strength=0.5)
    [tensor([1., 3.])]
    >>> pulls({}, [torch.zeros(2)], strength=0.5)
    []
    """
    if not strength or "rule.omega.0" not in memory:
        return []
    return [
        2 * strength * torch.from_numpy(memory[f"rule.omega.{i}"]).to(p.device, p.dtype)
        for i, p in enumerate(parameters)
    ]
