"""The default engine: clients are function calls, a few at a time, in this process.

An engine carries bytes to clients and brings theirs back, and knows nothing of what they mean. A client that raises
costs its own reply, never the round.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from nestling.core.types import Failure, Handler


class InProcessEngine:
    """Runs each client on whichever worker is free. A worker serves one client at a time and is reused by all of them,
    so memory grows with the workers and not with the clients. `interrupted` is told before an interrupt is passed on,
    which waits for the clients that have begun.

    >>> engine = InProcessEngine([lambda client, message: message.upper()])
    >>> engine.exchange({3: b"hello"})
    {3: b'HELLO'}
    """

    def __init__(self, handlers: Sequence[Handler], *, interrupted: Callable[[], object] = lambda: None) -> None:
        self._count, self._interrupted = len(handlers), interrupted
        self._free: SimpleQueue[Handler] = SimpleQueue()
        for handler in handlers:
            self._free.put(handler)

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Replies by client, in the order of the messages."""
        with ThreadPoolExecutor(self._count, thread_name_prefix="client") as pool:
            try:
                waiting = {client: pool.submit(self._call, client, message) for client, message in messages.items()}
                return {client: future.result() for client, future in waiting.items()}
            except BaseException:  # do not start the clients still waiting
                self._interrupted()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _call(self, client: int, message: bytes) -> bytes | Failure:
        handler = self._free.get()
        try:
            return handler(client, message)
        except Exception as error:
            code = str(getattr(error, "code", "client_error"))
            return Failure(code, f"client {client}: {error}", traceback.format_exc())
        finally:
            self._free.put(handler)
