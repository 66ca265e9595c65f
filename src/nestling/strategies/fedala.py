"""FedALA: each client begins a round between its own last state and the server's, where that suits its own data best.

    ŵ = w_local + (w_global − w_local) ⊙ W                       W ∈ [0, 1], at first 1
    W ← clip(W − η ∇_ŵ L(ŵ) ⊙ (w_global − w_local), 0, 1)        η = 1, on a share of the client's own data

Zhang et al., arXiv 2212.01197. Only the last p tensors of what is trained are blended (the authors' p also counts
tensors), the others take the server's values. W is learnt for one pass a round; the first time, until the last ten
passes' mean losses differ by less than 0.1 (standard deviation), for at most 30 passes. W and w_local stay with the
client. The model of a client is its own blend, so evaluation is personalised.
Where we differ: ŵ is computed as w_global + (w_local − w_global) ⊙ (1 − W), the same number, which at W = 1 is the
server's state to the bit, so that FedALA that learns nothing is FedAvg. A client's first round has no w_local yet and
begins from the server's state.

A client's memory holds ``rule.local`` and, from its second round on, ``rule.weights``, float32 of the shared vector's
length each.
"""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np

from nestling.core.vectors import Layout, Vector

LOSSES = 10
SETTLED = 0.1
MOST_PASSES = 30


def top_part(layout: Layout, layers: int) -> slice:
    """Where the last `layers` tensors lie in the flat vector; 0 stands for all of them.

    >>> top_part(Layout.of([("a", (3,)), ("b", (2,))]), 1)
    slice(3, 5, None)
    """
    kept = layout.sizes[-layers:] if layers else layout.sizes
    return slice(layout.size - sum(kept), layout.size)


def blend(start: Vector, memory: Mapping[str, np.ndarray]) -> Vector:
    """ŵ, where a client begins: float32[n]; `start`, the server's state, for a client that has not trained yet.

    >>> blend(np.float32([2, 2]), {"rule.local": np.float32([0, 0]), "rule.weights": np.float32([1, 0.25])})
    array([2. , 0.5], dtype=float32)
    """
    if "rule.local" not in memory or "rule.weights" not in memory:
        return start
    weights = memory["rule.weights"]
    return np.where(weights == 1, start, start + (memory["rule.local"] - start) * (1 - weights))


def learn_weights(
    start: Vector,
    memory: Mapping[str, np.ndarray],
    batches: Callable[[], Iterable[Any]],
    slope: Callable[[Vector, Any], tuple[float, Vector]],
    *,
    top: slice,
    rate: float,
) -> Vector:
    """W after this round's passes over `batches`, float32[n], for a client that has trained before.

    Args:
        start: w_global.
        memory: of the client, with its last state; without W, the first use is now.
        batches: gives the client's share of its data, anew for each pass.
        slope: loss and its gradient float32[n] of a state on one batch.
        top: which part of the vector is blended.
        rate: η.

    A loss that is not finite ends it, with W as it was: training will find the same.
    """
    first = "rule.weights" not in memory
    weights: Vector = np.ones_like(start) if first else memory["rule.weights"]
    away = (start - memory["rule.local"])[top]
    means: list[float] = []
    while not means or (first and len(means) < MOST_PASSES and not has_settled(means)):
        losses = []
        for batch in batches():
            loss, gradient = slope(blend(start, {**memory, "rule.weights": weights}), batch)
            if not (isfinite(loss) and np.isfinite(gradient[top]).all()):
                return weights
            weights = weights.copy()
            weights[top] = np.clip(weights[top] - np.float32(rate) * gradient[top] * away, 0, 1)
            losses.append(loss)
        if not losses:
            return weights
        means.append(sum(losses) / len(losses))
    return weights


def has_settled(losses: list[float]) -> bool:
    """Whether the last ten losses differ by less than 0.1.

    >>> has_settled([5.0] + [1.0] * 10), has_settled([1.0] * 9)
    (True, False)
    """
    return len(losses) >= LOSSES and float(np.std(losses[-LOSSES:])) < SETTLED
