"""Several items on a few workers: in order, one at a time each, and an interrupt is told before anything waits."""

import threading

import pytest

from nestling.federation.pool import side_by_side


def test_answers_come_in_order_and_no_worker_serves_two_at_once() -> None:
    busy: dict[str, threading.Lock] = {name: threading.Lock() for name in "ab"}
    used = set()

    def call(worker: str, item: int) -> int:
        assert busy[worker].acquire(blocking=False)
        used.add(worker)
        busy[worker].release()
        return item * item

    assert side_by_side(["a", "b"], call, range(50)) == [n * n for n in range(50)]
    assert used <= {"a", "b"}


def test_an_error_is_passed_on_and_its_worker_freed_for_the_calls_that_wait() -> None:
    told, done = [], []

    def call(worker: str, item: int) -> None:
        if item == 0:
            raise ZeroDivisionError
        done.append(item)

    with pytest.raises(ZeroDivisionError):
        side_by_side(["only"], call, range(3), interrupted=lambda: told.append(True))
    assert told == [True]
