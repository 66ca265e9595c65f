"""The rows to compare with: each client alone, and all of them in one place, by the same rule from the same start."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from test_client import SIZES, Points, make

import nestling.federation.pool
from nestling.federation.reference import References, train_apart, train_references


class Pooled(Points):
    """Client None is everybody."""

    def examples(self, client: int | None) -> int:
        return sum(self.sizes.values()) if client is None else self.sizes[client]

    def batches(self, client, *, size, seed, epoch):
        for one in self.sizes if client is None else [client]:
            yield from super().batches(one, size=size, seed=seed, epoch=epoch)


def workers(count: int, sizes: dict[int, int] = SIZES):
    return [replace(make()[0], task=Pooled(sizes)) for _ in range(count)]


def reached(worker, state: np.ndarray) -> float:
    """Stands for an accuracy: any number that tells two states apart."""
    return float(np.abs(state).sum())


def references(count: int = 1, sizes: dict[int, int] = SIZES, *, epochs: int = 2, evaluate=reached) -> References:
    made = workers(count, sizes)
    start = np.full(made[0].adapter.layout.size, 0.01, np.float32)
    return train_references(made, evaluate, clients=list(sizes), start=start, epochs=epochs)


def test_local_only_is_the_mean_over_clients_that_hold_items() -> None:
    both = references()
    alone = [references(sizes={client: SIZES[client]}).local_only for client in (0, 1, 3)]
    assert len(set(alone)) == 3
    assert both.local_only == pytest.approx(sum(alone) / 3)


def test_pooling_one_client_is_that_client_alone_but_for_the_names_of_its_batches() -> None:
    one = references(sizes={0: 5}, epochs=1)
    assert one.local_only != reached(None, np.full(8, 0.01, np.float32))  # it trained
    assert one.centralised == pytest.approx(one.local_only, rel=1e-5)  # five items are one batch


def test_a_later_epoch_is_of_the_same_training() -> None:
    assert references(epochs=1) != references(epochs=2)


@pytest.mark.parametrize("count", [2, 5])
def test_how_many_workers_there_are_changes_no_bit(count: int) -> None:
    assert references(count) == references(1)


def test_cat_040_nobody_with_items_is_no_number() -> None:
    nobody = references(sizes={0: 0, 1: 0})
    assert math.isnan(nobody.local_only)
    assert math.isnan(nobody.centralised)


def test_workers_are_given_back_after_a_client_declined() -> None:
    made = workers(1, {0: 0, 1: 0, 2: 3})
    start = made[0].adapter.vector()
    result = train_references(made, reached, clients=[0, 1, 2], start=start, epochs=1)
    assert result.local_only > 0


def test_cat_056_an_interrupt_does_not_wait_for_the_remaining_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, begun = [], threading.Event()

    class Counted(Pooled):
        def loss(self, model, batch):
            steps.append(1)
            if len(steps) == 5:
                begun.set()
            return super().loss(model, batch)

    class Interrupted(ThreadPoolExecutor):
        """Ctrl-C reaches the main thread while it waits for the first result."""

        def map(self, call, items):
            for item in items:
                self.submit(call, item)
            assert begun.wait(60)
            raise KeyboardInterrupt

    monkeypatch.setattr(nestling.federation.pool, "ThreadPoolExecutor", Interrupted)
    made = [replace(worker, task=Counted(SIZES)) for worker in workers(1)]
    with pytest.raises(KeyboardInterrupt):
        train_references(made, reached, clients=[0], start=made[0].adapter.vector(), epochs=300)
    assert len(steps) < 1_000  # of 2,100 for the pooled one alone


def test_each_training_is_judged_on_the_worker_that_did_it_and_those_without_items_are_left_out() -> None:
    made = workers(2)
    start = made[0].adapter.vector()
    judged = train_apart(
        made, lambda worker, client: worker.adapter.vector(), clients=list(SIZES), start=start, epochs=1
    )
    assert list(judged) == [None, 0, 1, 3]
    assert len({vector.tobytes() for vector in [start, *judged.values()]}) == 5
