"""Copies of a model for workers that serve side by side: modules of their own, since adapters hook into those."""

import copy

from torch import nn


def working_copy(model: nn.Module, *, share: bool) -> nn.Module:
    """A copy with its own modules; with `share` the tensors are the original's, which nobody changes.

    >>> model = nn.Linear(2, 2)
    >>> working_copy(model, share=True).weight is model.weight, working_copy(model, share=False).weight is model.weight
    (True, False)
    """
    tensors = [*model.parameters(), *model.buffers()] if share else []
    return copy.deepcopy(model, {id(t): t for t in tensors})
