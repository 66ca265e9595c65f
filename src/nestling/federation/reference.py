"""The rows to compare with: what each client reaches alone, and what one site with everybody's data would.

Both train the same adapter with the same optimiser for as many epochs as the federation, from the same base; plainly,
for a local rule is about what the server sends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar

from nestling.core.vectors import Vector
from nestling.federation.client import Worker
from nestling.federation.interrupt import Until
from nestling.federation.local import Declined, train_local
from nestling.federation.pool import side_by_side

Judgement = TypeVar("Judgement")


@dataclass(frozen=True)
class References:
    """Accuracies on the run's held-out items; local only is the mean over the clients that hold data.

    `recalls` are the reference rows of a language run, item by item (`federation/recalls.py`); empty for other tasks.
    """

    local_only: float
    centralised: float
    recalls: Mapping[str, list[Any]] = field(default_factory=dict)


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
    reached = train_apart(
        workers,
        lambda worker, client: evaluate(worker, worker.adapter.vector()),
        clients=clients,
        start=start,
        epochs=epochs,
        note=note,
    )
    centralised = reached.pop(None, float("nan"))
    return References(sum(reached.values()) / len(reached) if reached else float("nan"), centralised)


def train_apart(
    workers: Sequence[Worker],
    judge: Callable[[Worker, int | None], Judgement],
    *,
    clients: Sequence[int],
    start: Vector,
    epochs: int,
    note: Callable[[str], object] = lambda text: None,
    stop: Event | None = None,
) -> dict[int | None, Judgement]:
    """What `judge` says of the model that each client has trained alone from `start`, and, under None, of the one
    trained on all clients' items; those that have nothing to train on, or whose loss is no number, are left out.

    On an interrupt `stop` is set, after which no further batch is begun, by `judge` neither if it looks at it.
    """
    stop, done = stop or Event(), list[int | None]()

    def alone(worker: Worker, client: int | None) -> Judgement | None:
        worker.load(start, None)
        try:
            train_local(
                worker.model, worker.adapter, Until(worker.task, stop), worker.local,
                client=client, seed=worker.seed, epochs=range(epochs), of=epochs,
            )  # fmt: skip
            return judge(worker, client)
        except Declined:
            return None
        finally:
            done.append(client)
            note(f"training the rows to compare with, {len(done)} of {len(clients) + 1} done")

    # The pooled one takes as long as all the others together, so it goes first.
    order = [None, *clients]
    judged = side_by_side(workers, alone, order, interrupted=stop.set)
    return {client: judgement for client, judgement in zip(order, judged, strict=True) if judgement is not None}
