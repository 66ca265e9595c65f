"""Padding of a batch of streams, left, right or in between: each row's real tokens come first while attention works.

    align: row b becomes its real tokens, in their own order, then the rest      restore: back to the given columns

With the real tokens in front, causality alone keeps the rest from being seen, and a window counts what is real.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.models.streams import StreamCache


@dataclass(frozen=True)
class Rows:
    """Where the real tokens of a padded batch are: `order` lists each row's real tokens first, in their own order."""

    order: Int64[Tensor, "b t"]
    lengths: Int64[Tensor, " b"]

    @property
    def mask(self) -> Bool[Tensor, "b t"]:
        """True where a row, put in order, still has real tokens."""
        return torch.arange(self.order.shape[1], device=self.order.device) < self.lengths[:, None]

    def align(self, x: Tensor) -> Tensor:
        """[B, T, …] with each row's real tokens first."""
        return x.gather(1, _like(self.order, x))

    def restore(self, x: Tensor) -> Tensor:
        """The opposite of `align`."""
        return torch.zeros_like(x).scatter(1, _like(self.order, x), x)


def rows_of(mask: object, tokens: int) -> Rows | None:
    """Where the real tokens of the last `tokens` columns are; None if all are real."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < tokens:
        raise ConfigError(
            f"has no column for each of the {tokens} tokens", where="attention_mask", remedy="Give [batch, tokens]."
        )
    real = mask[:, -tokens:].bool()
    if bool(real.all()):
        return None
    return Rows((~real).to(torch.uint8).argsort(dim=1, stable=True), real.sum(1))


def _like(order: Tensor, x: Tensor) -> Tensor:
    return order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x)


def positions(given: Tensor, rows: Rows | None, stream: StreamCache | None) -> Int64[Tensor, "b t"]:
    """Of each token among the real ones of its row; transformers would count padding."""
    positions = torch.arange(given.shape[1], device=given.device).expand(given.shape[:2])
    if stream is not None and stream.layers[0].count is not None:
        positions = positions + stream.layers[0].count[:, None]
    return positions if rows is None else rows.restore(positions)
