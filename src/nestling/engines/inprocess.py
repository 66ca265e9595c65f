"""The default engine: clients are function calls, a few at a time, in this process.

An engine carries bytes to clients and brings theirs back, and knows nothing of what they mean. A client that raises
costs its own reply, never the round, and neither does one that is too slow: after `deadline` seconds, or when all but
`stragglers` have replied, the exchange is over. A thread cannot be killed, so those still at work are told to stop and
waited for, which takes them a batch; those that have not begun never do.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from threading import Event

from nestling.core.types import Failure, Handler


class InProcessEngine:
    """Runs each client on whichever worker is free. A worker serves one client at a time and is reused by all of them,
    so memory grows with the workers and not with the clients.

    Args:
        handlers: one for each worker.
        deadline: seconds for one exchange; 0: as long as it takes.
        stragglers: so many clients are not waited for once the others have replied.
        stop: set when those at work should give up, and clear again before the next exchange, unless it is set because
            of an interrupt: that is passed on, and waits for the clients that have begun.
        heard: told how many have answered, of how many, each time a client has, in the caller's thread.

    >>> engine = InProcessEngine([lambda client, message: message.upper()])
    >>> engine.exchange({3: b"hello"})
    {3: b'HELLO'}
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        *,
        deadline: float = 0.0,
        stragglers: int = 0,
        stop: Event | None = None,
        heard: Callable[[int, int], object] = lambda answered, asked: None,
    ) -> None:
        self._count, self._stop, self._heard = len(handlers), stop or Event(), heard
        self._deadline, self._stragglers = deadline or None, stragglers
        self._free: SimpleQueue[Handler] = SimpleQueue()
        for handler in handlers:
            self._free.put(handler)

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Replies by client, in the order of the messages. Whoever was cut short is a failure of code `late`."""
        with ThreadPoolExecutor(self._count, thread_name_prefix="client") as pool:
            try:
                waiting = {client: pool.submit(self._call, client, message) for client, message in messages.items()}
                over = self._until_over(list(waiting.values()))
                if not over:
                    return {client: future.result() for client, future in waiting.items()}
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                self._stop.clear()
                return {client: _in_time(client, future, over) for client, future in waiting.items()}
            except BaseException:  # do not start the clients still waiting
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _until_over(self, futures: Sequence[Future[bytes | Failure]]) -> str:
        """Wait. Returns why some are not waited for, or "" when all have answered."""
        enough, replies = len(futures) - self._stragglers if self._stragglers else -1, 0
        finished = as_completed(futures, timeout=self._deadline)
        for answered in range(1, len(futures) + 1):
            try:
                future = next(finished)
            except TimeoutError:
                return f"did not answer within {self._deadline:g} s"
            self._heard(answered, len(futures))  # outside: an error of the listener is not a client's
            replies += not isinstance(future.result(), Failure)
            if replies == enough:
                return f"was slower than the {replies} that were enough"
        return ""

    def _call(self, client: int, message: bytes) -> bytes | Failure:
        handler = self._free.get()
        try:
            return handler(client, message)
        except Exception as error:
            code = str(getattr(error, "code", "client_error"))
            return Failure(code, f"client {client}: {error}", traceback.format_exc())
        finally:
            self._free.put(handler)


def _in_time(client: int, future: Future[bytes | Failure], over: str) -> bytes | Failure:
    """What a client had finished when those at work were stopped; a reply that was ready by then still counts."""
    answer = None if future.cancelled() else future.result()
    if answer is None or (isinstance(answer, Failure) and answer.code == "stopped"):
        return Failure("late", f"client {client} {over}")
    return answer
