"""The server's half of a round: broadcast the state, judge every reply, average those that pass, step by the rule.

A reply is judged before it touches the state, and a bad one costs only itself: it is dropped under a stable code and
the round goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nestling.codec.codecs import decode_body, encode_body
from nestling.codec.message import decode, encode, message_key, state_digest
from nestling.config.schema import ServerConfig
from nestling.core.errors import WireError
from nestling.core.types import Failure
from nestling.core.vectors import Vector
from nestling.federation.agreement import EVERYONE, Agreement
from nestling.strategies.diloco import nesterov
from nestling.strategies.fedavg import fraction_bits, weighted_mean
from nestling.strategies.fedopt import adaptive


@dataclass(frozen=True)
class Reply:
    """A reply that passed: the vector as sent (a difference or a state), the state it stands for, and its weight."""

    client: int
    vector: Vector
    state: Vector
    weight: int


class Server:
    """Holds the global state between rounds, and `memory`, what the server's rule keeps: plain arrays by name.

    Args:
        state: float32[layout.size] to begin with.
        total_weight: the largest sum of weights that honest replies of one round reach, for the fixed-point sum.
    """

    def __init__(self, state: Vector, agreement: Agreement, config: ServerConfig, *, total_weight: int) -> None:
        self.state = state
        self.memory: dict[str, np.ndarray] = {}
        self._agreement, self._config = agreement, config
        self._sent, self._round = state, 0
        self._total_weight = total_weight
        self._bits = fraction_bits(total_weight=total_weight, max_abs=config.max_abs)

    def broadcast(self, round: int) -> bytes:
        """The message that starts a round, the same bytes for every client."""
        agreed, self._round = self._agreement, round
        context = agreed.context()
        message = encode(
            agreed.layout, self.state, direction="downlink", codec=agreed.codec.down, is_difference=False,
            round=round, context=context, client=EVERYONE, num_examples=0,
        )  # fmt: skip
        # With a lossy codec the clients start from what arrives, and so do their differences.
        _, self._sent = decode(
            message, direction="downlink", layout=agreed.layout, context=context, round=round,
            client=EVERYONE, codecs=[agreed.codec.down], limits=agreed.limits,
        )  # fmt: skip
        return message

    def judge(self, round: int, replies: Mapping[int, bytes | Failure]) -> tuple[list[Reply], dict[int, Failure]]:
        """The usable replies, and the reason for each of the others."""
        agreed = self._agreement
        context = agreed.context(state_digest(self._sent))
        accepted: list[Reply] = []
        refused: dict[int, Failure] = {}
        for client, reply in sorted(replies.items()):
            if isinstance(reply, Failure):
                refused[client] = reply
                continue
            try:
                header, vector = decode(
                    reply, direction="uplink", layout=agreed.layout, context=context, round=round,
                    client=client, codecs=[agreed.codec.up], limits=agreed.limits,
                )  # fmt: skip
                if header.is_difference != (agreed.codec.send == "delta"):
                    raise WireError("flags", "says state where a difference was agreed, or the reverse")
            except WireError as error:
                refused[client] = Failure(error.code, f"client {client}: {error}")
                continue
            weight = header.num_examples if self._config.weighting == "examples" else 1
            state = self._sent + vector if header.is_difference else vector
            accepted.append(Reply(client, vector, state, weight))
        return accepted, refused

    def update(self, accepted: list[Reply]) -> bool:
        """Average the replies and take the rule's step; False, and state and memory as they were, if there are too few
        of them or clients would refuse the state it leads to."""
        if len(accepted) < self._config.min_replies:
            return False
        # Clients that claim too many items would overflow the fixed-point sum: it gives up that many fraction bits.
        claimed = sum(r.weight for r in accepted)
        bits = self._bits - (claimed // (self._total_weight + 1)).bit_length()
        mean = weighted_mean([r.vector for r in accepted], [r.weight for r in accepted], bits=bits)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is not taken
            mean = self.state + mean if self._agreement.codec.send == "delta" else mean
            state, memory = self._step(mean)
        # A mean out of bounds would spoil the memory, though an adaptive step along it is bounded.
        if not all(self._can_be_sent(vector) for vector in ([mean] if state is mean else [mean, state])):
            return False
        if not all(np.isfinite(array).all() for array in memory.values()):
            return False
        self.state, self.memory = state, memory
        return True

    def _step(self, mean: Vector) -> tuple[Vector, dict[str, np.ndarray]]:
        """The next state and the rule's memory, given the mean that FedAvg would take."""
        c = self._config
        if c.rule == "nesterov":
            return nesterov(self.state, mean, self.memory, lr=c.rate, momentum=c.momentum)
        if c.rule == "adam" or c.rule == "yogi":
            return adaptive(
                self.state, mean, self.memory, rule=c.rule, lr=c.rate, beta1=c.beta1, beta2=c.beta2, tau=c.tau
            )
        return mean, {}

    @property
    def received(self) -> Vector:
        """float32[layout.size]: the state as clients get it by the next broadcast; with float32 down, `state` itself.

        Raises `WireError` if they would refuse it.
        """
        return self._as_received(self.state)

    def _as_received(self, state: Vector) -> Vector:
        agreed = self._agreement
        key = message_key(agreed.context(), self._round + 1, EVERYONE)  # of the broadcast to come
        body = encode_body(agreed.codec.down, agreed.layout, state, key=key)
        return decode_body(agreed.codec.down, agreed.layout, body, agreed.limits, key=key)

    def _can_be_sent(self, state: Vector) -> bool:
        """Whether clients would accept this state: they judge a broadcast as the server judges replies."""
        try:
            self._as_received(state)
        except WireError:
            return False
        return True
