"""DiLoCo: clients keep their optimiser between rounds, and the server takes a Nesterov step along their mean change.

    Δ = w − Σ p_k w_k        m ← μ m + Δ        w ← w − η (Δ + μ m)        η = 0.7, μ = 0.9

Douillard et al., arXiv 2311.08105. The server's form is that of `torch.optim.SGD(nesterov=True)`, to which tests hold
it; it is four lines of NumPy in float64 here because its state is then one plain array, so that saving it is resuming,
and because written from the mean, w ← mean − (η − 1) Δ − η μ m, it is FedAvg to the bit at η = 1, μ = 0.
The client's half is any optimiser of torch: its state as plain arrays by dotted name, and back.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nestling.core.vectors import Vector


def nesterov(
    state: Vector, mean: Vector, memory: Mapping[str, np.ndarray], *, lr: float, momentum: float
) -> tuple[Vector, dict[str, np.ndarray]]:
    """The next state, float32[n], and the rule's own state: `momentum`, float64[n].

    Args:
        state: w, before the round.
        mean: Σ p_k w_k, what FedAvg would take.
        memory: the rule's own state; empty before the first round.

    >>> state, memory = nesterov(np.float32([1.0]), np.float32([0.0]), {}, lr=0.5, momentum=0.5)
    >>> state, memory
    (array([0.25], dtype=float32), {'momentum': array([1.])})
    """
    change = state.astype(np.float64) - mean
    m = momentum * memory.get("momentum", 0.0) + change
    return (mean - (lr - 1) * change - lr * momentum * m).astype(np.float32), {"momentum": m}


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """An optimiser's state as plain float32 arrays: ``optimizer.0.exp_avg`` for the first parameter, and so on.

    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> sgd = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    >>> w.grad = torch.tensor([2.0])
    >>> sgd.step()
    >>> optimizer_arrays(sgd)
    {'optimizer.0.momentum_buffer': array([2.], dtype=float32)}
    """
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{name}": value.detach().float().cpu().numpy().copy()
        for index, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def load_optimizer_arrays(optimizer: torch.optim.Optimizer, memory: Mapping[str, np.ndarray]) -> None:
    """Put back what `optimizer_arrays` gave; learning rates stay as they are, and so do other entries of `memory`."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, array in memory.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, entry = rest.partition(".")
            state.setdefault(int(index), {})[entry] = torch.from_numpy(array.copy())
    if state:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
