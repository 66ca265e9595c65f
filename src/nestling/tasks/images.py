"""Image classification over clients: what is held out, who holds what, and how an image becomes a network's input."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nestling.config.schema import TaskConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.tasks.augment import crop_flip, draws
from nestling.tasks.data import SHAPES, Images, load_images
from nestling.tasks.items import ItemsTask
from nestling.tasks.items import Score as Score
from nestling.tasks.partition import dirichlet_shares, iid_shares

SPLIT_SEED = 0
"""Which items are held out never depends on a run's seed: every method and seed is judged on the same ones."""


class ImageTask(ItemsTask):
    """Clients' training images and a held-out set. With `augment` the images that are trained on are moved and mirrored
    at random; those held out never are."""

    def __init__(
        self, train: Images, held_out: Images, shares: list[np.ndarray], *, classes: int, device: str,
        augment: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(train, held_out, shares, classes=classes, device=device)
        self.augment = augment

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As of every task; what augmentation makes of each item depends only on (seed, client, epoch), too."""
        if not self.augment:
            yield from super().batches(client, size=size, seed=seed, epoch=epoch)
            return
        order = self._order(client, seed=seed, epoch=epoch)
        drawn = draws(len(order), seed=seed, client=client, epoch=epoch)
        for start in range(0, len(order), size):
            part = self._train.take(order[start : start + size])
            yield self._to_device(Images(crop_flip(part.x, drawn[start : start + size]), part.y))

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
