"""Work that ends at the next batch once the run is interrupted: Ctrl-C waits for no epoch, for no client's items."""

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any

from torch import Tensor, nn

from nestling.federation.local import Batches, Declined


def go_on(stop: Event) -> None:
    """Between two batches. Raises `Declined`, with the code `stopped`, after `stop` is set."""
    if stop.is_set():
        raise Declined("stopped", "was interrupted")


@dataclass(frozen=True)
class Until:
    """A task that gives no further batch after `stop` is set: whoever trains declines, with the code `stopped`."""

    task: Batches
    stop: Event

    def examples(self, client: int | None) -> int:
        return self.task.examples(client)

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[Any]:
        for batch in self.task.batches(client, size=size, seed=seed, epoch=epoch):
            go_on(self.stop)
            yield batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.task.loss(model, batch)
