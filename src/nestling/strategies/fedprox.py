"""FedProx: a client trains with a penalty on how far it moves from the state it was sent.

    min_w  L_k(w) + (μ/2) ‖w − w_global‖²        gradient: ∇L_k(w) + μ (w − w_global)

Li et al., arXiv 1812.06127; the penalty is squared, μ = 0 is FedAvg. The same pull with a strength of its own for every
number is what FedSSI needs, so `add_pull` takes either. A part that never travels has no global value: it is pulled
towards what the client began the round with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def add_pull(parameters: Sequence[Tensor], starts: Sequence[Tensor], strengths: Sequence[float | Tensor]) -> None:
    """Add h (w − w_start) to each parameter's gradient, in place.

    Args:
        parameters: with `grad`, or None where the loss does not depend on it: its gradient is then the pull alone.
        starts: w_start of each, of its shape.
        strengths: h of each, one number or one for every entry.

    >>> w = torch.tensor([3.0, 1.0], requires_grad=True)
    >>> w.grad = torch.tensor([1.0, 1.0])
    >>> add_pull([w], [torch.ones(2)], [0.5])
    >>> w.grad
    tensor([2., 1.])
    """
    for parameter, start, strength in zip(parameters, starts, strengths, strict=True):
        pull = (parameter - start) * strength
        parameter.grad = pull if parameter.grad is None else parameter.grad + pull
