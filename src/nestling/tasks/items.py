"""Labelled items over clients: who holds which, seeded batches, the loss, and the score on those held out.

A task of this kind is a network that answers each item with one of `classes`, or each place of an item, as a language
model does each token: images (`images.py`) and blocks of text (`wikitext.py`) differ in what a batch is made of.
"""

import hashlib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.core.seeds import Stream


@runtime_checkable
class Items(Protocol):
    """Items and their labels: for each one label, or one for each of its places."""

    @property
    def x(self) -> np.ndarray: ...
    @property
    def y(self) -> np.ndarray: ...
    def take(self, items: np.ndarray) -> Any: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Score:
    """Right answers among all, and the mean loss of an answer in nats where the task is judged by it."""

    right: int
    items: int
    loss: float | None = None

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.right / self.items

    @property
    def perplexity(self) -> float | None:
        """exp of the mean loss; infinity if that is too large a number, None where there is no loss.

        >>> Score(1, 2, 0.0).perplexity, Score(1, 2, 1e9).perplexity, Score(1, 2).perplexity
        (1.0, inf, None)
        """
        return None if self.loss is None else exp(self.loss) if self.loss < 700 else inf


class ItemsTask:
    """Clients' training items and a held-out set.

    `client=None` stands for all clients' items pooled, for the centralised reference.
    """

    chance: float | None = None
    """Accuracy of always the same guess, where that is not 1 / classes."""

    def __init__(
        self, train: Items, held_out: Items, shares: list[np.ndarray], *, classes: int, device: str = "cpu"
    ) -> None:
        self.classes, self.device = classes, torch.device(device)
        self._train, self._held_out = train, held_out
        self._shares = shares

    def clients(self) -> list[int]:
        """Numbers of the clients, those without items included."""
        return list(range(len(self._shares)))

    def examples(self, client: int | None) -> int:
        """How many training items a client holds."""
        return len(self._train) if client is None else len(self._shares[client])

    def whole(self, client: int) -> "ItemsTask":
        """The same items, all of them `client`'s: where a client's data is what lies on its own machine."""
        task, nothing = copy(self), np.arange(0)
        task._shares = [np.arange(len(self._train)) if each == client else nothing for each in self.clients()]
        return task

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches of at most `size`, each item once; the last one may be smaller. The order depends only on
        (seed, client, epoch)."""
        order = self._order(client, seed=seed, epoch=epoch)
        for start in range(0, len(order), size):
            yield self._to_device(self._train.take(order[start : start + size]))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of one batch."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of all items, and of who holds which."""
        found = hashlib.sha256()
        for part in (self._train.x, self._train.y, self._held_out.x, self._held_out.y, *self._shares):
            found.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        return found.hexdigest()[:32]

    def evaluate(self, model: nn.Module) -> Score:
        """Accuracy on the held-out items."""
        return Score(int(self.right_by_class(model).sum()), self.held_out_items)

    @torch.no_grad()
    def right_by_class(self, model: nn.Module) -> np.ndarray:
        """How many held-out answers of each class are right, int64[classes]."""
        right = np.zeros(self.classes, np.int64)
        for logits, y in self._answers(model):
            right += np.bincount(y[logits.argmax(-1) == y].cpu().numpy(), minlength=self.classes)
        return right

    @property
    def held_out_by_class(self) -> np.ndarray:
        """How many held-out answers there are of each class, int64[classes]."""
        return np.bincount(self._held_out.y.ravel(), minlength=self.classes)

    def class_counts(self, client: int) -> np.ndarray:
        """How many training answers of each class a client holds, int64[classes]."""
        return np.bincount(self._train.y[self._shares[client]].ravel(), minlength=self.classes)

    def __len__(self) -> int:
        """Number of all training items."""
        return len(self._train)

    @property
    def held_out_items(self) -> int:
        """Number of answers in the held-out set: its items or, where each has several, their places."""
        return int(self._held_out.y.size)

    def _order(self, client: int | None, *, seed: int, epoch: int) -> np.ndarray:
        own = np.arange(len(self._train)) if client is None else self._shares[client]
        return own[Stream(seed, "batches", f"{client}/{epoch}").permutation(len(own))]

    def _answers(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of the held-out items, 256 items at a time."""
        model.eval()
        for start in range(0, len(self._held_out), 256):
            x, y = self._to_device(self._held_out.take(np.arange(start, min(start + 256, len(self._held_out)))))
            yield model(x), y

    def _to_device(self, part: Any) -> tuple[Tensor, Tensor]:
        """What the network is given and what it should answer."""
        raise NotImplementedError
