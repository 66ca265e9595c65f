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
    sent: bool = True
    """Whether the message left at all: False if there was nobody to send it to."""


@runtime_checkable
class Engine(Protocol):
    """Carries a message to each client and brings back its reply, or the reason why there is none."""

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Replies by client; a client that is missing from the answer did not reply in time."""
        ...


@dataclass(frozen=True)
class Progress:
    """Told to the caller of `nestling.run` when a step begins, which `step` names, when a client of a round has
    answered (`within` says how many have), and when a round ends: then both are empty. `round` is the last that ended.
    """

    step: str
    round: int
    rounds: int
    accuracy: float
    accepted: int
    asked: int
    bytes_so_far: int
    seconds: float
    within: str = ""
    run_dir: str = ""
    """Where the run is recorded."""

    def __str__(self) -> str:
        """What is being done, or of a round that has ended one line with stable keys.

        >>> print(Progress("", 1, 10, 0.5, 3, 4, 1024, 2.5))
        round=1/10 clients=3/4 accuracy=0.5000 bytes=1024 seconds=2.5
        """
        if self.step or self.within:
            return self.step or self.within
        return (
            f"round={self.round}/{self.rounds} clients={self.accepted}/{self.asked} accuracy={self.accuracy:.4f} "
            f"bytes={self.bytes_so_far} seconds={self.seconds:.1f}"
        )
