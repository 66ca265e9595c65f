"""The heart: a federated run, round by round.

    broadcast the state → clients train on their own data → judge the replies → cut outliers → average → evaluate

What travels is bytes, both ways; whose bytes they are and what is done with them is decided in the four calls below.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nestling.core.errors import RunError
from nestling.core.types import Engine, Failure
from nestling.core.vectors import Vector
from nestling.federation.riders import Measured
from nestling.federation.sampling import cohort, poisson_cohort
from nestling.federation.server import Reply, Server


@dataclass(frozen=True)
class Round:
    """What happened in one round. `used` is False if it was abandoned and the state stayed as it was; `abandoned`
    counts the rounds in a row of which that is true, this one included.

    `bounded` are the accepted clients whose reply was an outlier and was cut down; `measured` says how far each reply
    would have moved the state, and whereto, before that, and is empty where that is private. `state` is what was
    judged: the server's state as clients would receive it next (`Server.received`).
    """

    number: int
    broadcast: bytes = field(repr=False)
    replies: dict[int, bytes | Failure] = field(repr=False)
    accepted: list[Reply] = field(repr=False)
    refused: dict[int, Failure]
    bounded: list[int]
    measured: dict[int, Measured]
    used: bool
    abandoned: int
    state: Vector = field(repr=False)
    accuracy: float

    @property
    def bytes_up(self) -> int:
        """All bytes that clients sent, usable or not."""
        return sum(len(r) for r in self.replies.values() if not isinstance(r, Failure))

    @property
    def bytes_down(self) -> int:
        """All bytes that the server sent."""
        return len(self.broadcast) * sum(not isinstance(r, Failure) or r.sent for r in self.replies.values())


def run_rounds(
    server: Server,
    engine: Engine,
    clients: Sequence[int],
    evaluate: Callable[[Vector], float],
    *,
    rounds: int,
    per_round: int,
    patience: int,
    seed: int,
    secret: bool = False,
    first: int = 1,
    abandoned: int = 0,
) -> Iterator[Round]:
    """Yield every round as it ends.

    Args:
        server: holds the state.
        engine: carries the messages.
        clients: all that can be asked.
        evaluate: accuracy of a state on held-out data.
        per_round: how many clients to ask; 0 for all.
        secret: ask so many on average, each on its own (`poisson_cohort`), in place of the seed's draw.
        patience: abandoned rounds in a row after which `RunError` (exit code 7) is raised.
        first, abandoned: where a resumed run goes on, and how many rounds in a row were abandoned just before.
    """
    for number in range(first, rounds + 1):
        if secret:
            asked = poisson_cohort(clients, count=per_round)
        else:
            asked = cohort(clients, count=per_round, seed=seed, round=number)
        message = server.broadcast(number)
        answers = engine.exchange(dict.fromkeys(asked, message))
        silent = Failure("no_reply", "did not answer in time")
        replies = {client: answers.get(client, silent) for client in asked}
        accepted, refused = server.judge(number, replies)
        measured = server.measure(accepted)
        accepted, bounded = server.bound(accepted)
        used = server.update(accepted)
        state = server.received
        abandoned = 0 if used else abandoned + 1
        yield Round(
            number, message, replies, accepted, refused, bounded, measured, used, abandoned, state, evaluate(state)
        )  # fmt: skip

        if abandoned >= patience:
            reasons = "; ".join(sorted({f.detail for f in refused.values()})[:2]) or "the mean was out of bounds"
            raise RunError(
                f"{abandoned} rounds in a row had too few usable replies ({reasons})",
                where=f"round {number}",
                remedy="See log.txt in the run's folder; the last good state is kept.",
            )
