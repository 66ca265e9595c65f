"""Image classification over clients: the items of each client, seeded batches, and accuracy on held-out items."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.config.schema import TaskConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.tasks.augment import crop_flip, draws
from nestling.tasks.data import SHAPES, Images, load_images
from nestling.tasks.partition import dirichlet_shares, iid_shares

SPLIT_SEED = 0
"""Which items are held out never depends on a run's seed: every method and seed is judged on the same ones."""


@dataclass(frozen=True)
class Score:
    """Right answers among all."""

    right: int
    items: int

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.right / self.items


class ImageTask:
    """Clients' training images and a held-out set. Raises `ConfigError` if there are more clients than items.

    `client=None` stands for all clients' items pooled, for the centralised reference. With `augment` the images that
    are trained on are moved and mirrored at random; those held out never are.
    """

    def __init__(
        self, train: Images, held_out: Images, shares: list[np.ndarray], *, classes: int, device: str,
        augment: bool = False,
    ) -> None:  # fmt: skip
        self.classes, self.device, self.augment = classes, torch.device(device), augment
        self._train, self._held_out = train, held_out
        self._shares = shares

    def clients(self) -> list[int]:
        """Numbers of the clients, those without items included."""
        return list(range(len(self._shares)))

    def examples(self, client: int | None) -> int:
        """How many training items a client holds."""
        return len(self._train) if client is None else len(self._shares[client])

    def whole(self, client: int) -> "ImageTask":
        """The same items, all of them `client`'s: where a client's data is what lies on its own machine."""
        nothing, all_of_them = np.arange(0), np.arange(len(self._train))
        shares = [all_of_them if each == client else nothing for each in self.clients()]
        return ImageTask(
            self._train, self._held_out, shares, classes=self.classes, device=str(self.device), augment=self.augment
        )

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches of at most `size`, each item once; the last one may be smaller. The order, and what
        augmentation makes of each item, depend only on (seed, client, epoch)."""
        own = np.arange(len(self._train)) if client is None else self._shares[client]
        order = own[Stream(seed, "batches", f"{client}/{epoch}").permutation(len(own))]
        drawn = draws(len(order), seed=seed, client=client, epoch=epoch) if self.augment else None
        for start in range(0, len(order), size):
            part = self._train.take(order[start : start + size])
            if drawn is not None:
                part = Images(crop_flip(part.x, drawn[start : start + size]), part.y)
            yield self._to_device(part)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of one batch."""
        return F.cross_entropy(model(batch[0]), batch[1])

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of all items, and of who holds which."""
        found = hashlib.sha256()
        for part in (self._train.x, self._train.y, self._held_out.x, self._held_out.y, *self._shares):
            found.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        return found.hexdigest()[:32]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Score:
        """Accuracy on the held-out items."""
        return Score(int(self.right_by_class(model).sum()), len(self._held_out))

    @torch.no_grad()
    def right_by_class(self, model: nn.Module) -> np.ndarray:
        """How many held-out items of each class are answered right, int64[classes]."""
        model.eval()
        right = np.zeros(self.classes, np.int64)
        for start in range(0, len(self._held_out), 256):
            x, y = self._to_device(self._held_out.take(np.arange(start, min(start + 256, len(self._held_out)))))
            right += np.bincount(y[model(x).argmax(1) == y].cpu().numpy(), minlength=self.classes)
        return right

    @property
    def held_out_by_class(self) -> np.ndarray:
        """How many held-out items there are of each class, int64[classes]."""
        return np.bincount(self._held_out.y, minlength=self.classes)

    def class_counts(self, client: int) -> np.ndarray:
        """How many training items of each class a client holds, int64[classes]."""
        return np.bincount(self._train.y[self._shares[client]], minlength=self.classes)

    def __len__(self) -> int:
        """Number of all training items."""
        return len(self._train)

    @property
    def held_out_items(self) -> int:
        """Number of items of the held-out set."""
        return len(self._held_out)

    def _to_device(self, part: Images) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(part.x).to(self.device).float().div_(255)  # 0 … 1, as the base was trained
        return x, torch.from_numpy(part.y).to(self.device)


def make_task(config: TaskConfig, *, seed: int, device: str = "cpu") -> ImageTask:
    """The task of a run: data, the fixed held-out items, and the seed's partition.

    Raises `ContextError` if the data is missing, `ConfigError` if it cannot be divided as asked.
    """
    train, test = load_images(config.data, config.path)
    test_size = len(train) // 5 if test is None else 0
    order = Stream(SPLIT_SEED, "held-out", config.data).permutation(len(train))
    for_test, for_validation, rest = np.split(order, [test_size, test_size + len(train) // 10])
    if config.evaluate_on == "validation":
        held_out = train.take(for_validation)
    else:
        held_out = test if test is not None else train.take(for_test)
    own = train.take(np.sort(rest))
    if config.clients > len(own):
        raise ConfigError(
            f"{config.clients} clients for {len(own)} items", where="task.clients", remedy="Give fewer clients."
        )
    if config.partition == "iid":
        shares = iid_shares(len(own), clients=config.clients, seed=seed)
    else:
        shares = dirichlet_shares(own.y, clients=config.clients, alpha=config.alpha, seed=seed)
    augment = config.augment == "crop-flip"
    return ImageTask(own, held_out, shares, classes=SHAPES[config.data][2], device=device, augment=augment)
