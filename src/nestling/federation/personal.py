"""How good each client's own model is for its own kind of data, where clients end with models of their own (FedALA).

    A_k(θ) = Σ_c share_k,c · right_c(θ) / items_c           share_k,c: which part of client k's items is of class c
    personal = Σ_k N_k A_k(θ_k) / Σ N_k                      global = Σ_k N_k A_k(θ) / Σ N_k

right_c of items_c held-out items of class c are answered right; classes without any are left out of the shares. The
held-out items are the run's, the same for all, so clients need none of their own; both numbers weigh them alike, and
differ in the model alone. With as many items of each class everywhere, `global` is the plain accuracy.
"""

from collections.abc import Sequence

import numpy as np

from nestling.core.vectors import Vector
from nestling.federation.client import Worker
from nestling.federation.pool import side_by_side
from nestling.tasks.items import ItemsTask


def personal_accuracies(workers: Sequence[Worker], task: ItemsTask, state: Vector) -> tuple[float, float]:
    """(of each client's own model, of the global state), both weighted by the clients' own class shares.

    `state` is the server's; what makes a client's model its own is in `Worker.kept`.
    """
    clients = [client for client in task.clients() if task.examples(client)]

    def right(worker: Worker, client: int | None) -> np.ndarray:
        worker.load(state, client)
        return task.right_by_class(worker.model)

    of_all, *own = side_by_side(workers, right, [None, *clients])
    shares = [task.class_counts(client) for client in clients]
    return (
        weighted_accuracy(own, shares, task.held_out_by_class),
        weighted_accuracy([of_all] * len(clients), shares, task.held_out_by_class),
    )


def weighted_accuracy(right: Sequence[np.ndarray], counts: Sequence[np.ndarray], items: np.ndarray) -> float:
    """Mean over clients of A_k, by their numbers of items; `right` and `counts` have an entry by class for each client.

    >>> right, counts = [np.array([5, 0]), np.array([5, 1])], [np.array([30, 0]), np.array([5, 5])]
    >>> weighted_accuracy(right, counts, np.array([10, 4]))
    0.46875
    """
    known = items > 0
    total, weight = 0.0, 0
    for of_client, held in zip(right, counts, strict=True):
        if number := int(held[known].sum()):
            total += int(held.sum()) * float((held[known] / number) @ (of_client[known] / items[known]))
            weight += int(held.sum())
    return total / weight if weight else float("nan")
