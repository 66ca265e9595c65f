"""Work for several clients side by side, on a few workers that serve one client at a time."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

Worker, Item, Answer = TypeVar("Worker"), TypeVar("Item"), TypeVar("Answer")


def side_by_side(
    workers: Sequence[Worker],
    call: Callable[[Worker, Item], Answer],
    items: Iterable[Item],
    *,
    interrupted: Callable[[], object] = lambda: None,
) -> list[Answer]:
    """`call` with each item, in order, on whichever worker is free; `interrupted` is told before an error is passed on,
    which waits for the calls that have begun.

    >>> side_by_side([10, 10], lambda worker, item: worker + item, [1, 2, 3])
    [11, 12, 13]
    """
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def on_a_free_one(item: Item) -> Answer:
        worker = free.get()
        try:
            return call(worker, item)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers), thread_name_prefix="client") as pool:
        try:
            return list(pool.map(on_a_free_one, items))
        except BaseException:
            interrupted()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
