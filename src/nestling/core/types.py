"""The seams around the loop: what carries its messages, and what it tells of its progress."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Handler = Callable[[int, bytes], bytes]
"""Answers one client's message: (client, message) -> reply."""


@dataclass(frozen=True)
class Failure:
    """Instead of a reply: a stable code to count, one line for people, and a traceback for the log."""

    code: str
    detail: str
    trace: str = ""


@runtime_checkable
class Engine(Protocol):
    """Carries a message to each client and brings back its reply, or the reason why there is none."""

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Replies by client; a client that is missing from the answer did not reply in time."""
        ...


@dataclass(frozen=True)
class Progress:
    """Told to the caller of `nestling.run` when a step begins (`round` is 0) or a round ends."""

    step: str
    round: int
    rounds: int
    accuracy: float
    accepted: int
    asked: int
    bytes_so_far: int
    seconds: float

    def __str__(self) -> str:
        """One line with stable keys, or the step where no round has ended.

        >>> print(Progress("federating", 1, 10, 0.5, 3, 4, 1024, 2.5))
        round=1/10 clients=3/4 accuracy=0.5000 bytes=1024 seconds=2.5
        """
        if not self.round:
            return self.step
        return (
            f"round={self.round}/{self.rounds} clients={self.accepted}/{self.asked} accuracy={self.accuracy:.4f} "
            f"bytes={self.bytes_so_far} seconds={self.seconds:.1f}"
        )
