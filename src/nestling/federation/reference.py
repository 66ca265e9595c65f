"""The rows to compare with: what each client reaches alone, and what one site with everybody's data would.

Both train the same adapter with the same local rule for as many epochs as the federation, from the same base.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event
from typing import Any

from torch import Tensor, nn

from nestling.core.vectors import Vector
from nestling.federation.client import Worker
from nestling.federation.local import Batches, Declined, train_local


@dataclass(frozen=True)
class References:
    """Accuracies on the run's held-out items; local only is the mean over the clients that hold data."""

    local_only: float
    centralised: float


def train_references(
    workers: Sequence[Worker],
    evaluate: Callable[[Worker, Vector], float],
    *,
    clients: Sequence[int],
    start: Vector,
    epochs: int,
    note: Callable[[str], object] = lambda text: None,
) -> References:
    """Train all references, side by side on the given workers; `note` is told how many are done."""
    stop, done = Event(), list[int | None]()
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def alone(client: int | None) -> float | None:
        worker = free.get()
        try:
            worker.adapter.load_vector(start)
            train_local(
                worker.model, worker.adapter, _Until(worker.task, stop), worker.local,
                client=client, seed=worker.seed, epochs=range(epochs), of=epochs,
            )  # fmt: skip
            return evaluate(worker, worker.adapter.vector())
        except Declined:
            return None
        finally:
            done.append(client)
            note(f"training the rows to compare with, {len(done)} of {len(clients) + 1} done")
            free.put(worker)

    with ThreadPoolExecutor(len(workers), thread_name_prefix="reference") as pool:
        # The pooled one takes as long as all the others together, so it goes first.
        try:
            centralised, *local = pool.map(alone, [None, *clients])
        except BaseException:
            stop.set()
            raise
    reached = [accuracy for accuracy in local if accuracy is not None]
    return References(
        local_only=sum(reached) / len(reached) if reached else float("nan"),
        centralised=float("nan") if centralised is None else centralised,
    )


@dataclass(frozen=True)
class _Until:
    """A task that gives no further batch once the run is interrupted, so that Ctrl-C need not wait for all epochs."""

    task: Batches
    stop: Event

    def examples(self, client: int | None) -> int:
        return self.task.examples(client)

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[Any]:
        for batch in self.task.batches(client, size=size, seed=seed, epoch=epoch):
            if self.stop.is_set():
                raise Declined("stopped", "was interrupted")
            yield batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.task.loss(model, batch)
