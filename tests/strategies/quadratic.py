"""A model that is one number, or a few, and the loss (w − c)²/2 summed, whose steps can be worked out by hand."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.base import attach
from nestling.adapters.full import FullAdapter
from nestling.config.schema import FullConfig


class Quadratic:
    """One batch for each of `centres`: the loss is Σ (w − c)²/2, its gradient w − c."""

    def __init__(self, centres: Sequence[float]) -> None:
        self.centres = list(centres)

    def examples(self, client: int | None) -> int:
        return len(self.centres)

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[float]:
        yield from self.centres

    def loss(self, model: nn.Module, batch: float) -> Tensor:
        return sum(((p - batch) ** 2).sum() for p in model.parameters()) / 2


class Numbers(nn.Module):
    """Parameters of the given values, one a number."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.tensor([v]) for v in values)


def number(*values: float) -> FullAdapter:
    """An adapter that trains numbers, from these values."""
    adapter = attach(Numbers(values), FullConfig())
    assert isinstance(adapter, FullAdapter)
    return adapter


def value(adapter: FullAdapter) -> float:
    """The first number now."""
    return float(adapter.vector()[0])


def values(adapter: FullAdapter) -> list[float]:
    """All numbers now."""
    return np.asarray(adapter.vector(), np.float64).tolist()
