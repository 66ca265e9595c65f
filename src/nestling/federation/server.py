"""The server's half of a round: broadcast the state, judge replies, bring those that pass together, step by the rule.

    reject what is no reply of this round    →    cut outliers    →    mean, or a robust rule    →    step by the rule

A reply is judged before it touches the state, and a bad one costs only itself: it is dropped under a stable code and
the round goes on. Cutting costs honest clients nothing as long as `outlier` is above their spread, and bounds what
one client can do to a mean of n: it counts for at most `outlier` usual ones, and pulls at most `outlier` times as hard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nestling.codec.codecs import decode_body, encode_body
from nestling.codec.message import decode, encode, message_key, state_digest
from nestling.config.schema import PrivacyConfig, ServerConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.seeds import Stream
from nestling.core.types import Failure
from nestling.core.vectors import Vector
from nestling.federation.agreement import EVERYONE, Agreement
from nestling.federation.riders import Measured, measure
from nestling.runs.ledger import Charge, Ledger
from nestling.strategies.diloco import nesterov
from nestling.strategies.fedavg import fraction_bits, weighted_mean
from nestling.strategies.fedopt import adaptive
from nestling.strategies.privacy import mean_noise_multiplier, noised_mean, private_mean
from nestling.strategies.robust import aggregate, bounded_norms, fewest_replies

_CLIP, _SENT = "privacy.clip", "sent"
_CLIP_LR, _COUNT = 0.2, 20.0
"""Andrew et al.'s: how fast a clip follows its quantile, and the cohort over the noise on the count of those below."""


@dataclass(frozen=True)
class Reply:
    """A reply that passed: the vector as sent (a difference or a state), the state it stands for, its weight, and how
    many examples it claims."""

    client: int
    vector: Vector
    state: Vector
    weight: int
    examples: int = 1


class Server:
    """Holds the global state between rounds, and `memory`, what the server's rule keeps: plain arrays by name.

    Args:
        state: float32[layout.size] to begin with.
        total_weight: the largest sum of weights that honest replies of one round reach, for the fixed-point sum.
        asked: how many clients a round asks; only a robust rule and privacy need to know.
        privacy: with noise, `ledger` must be set before the first update: every round is charged there before.
        sampling_rate: below 1 where each client was drawn with that probability, in secret, `asked` on average.

    Raises `ConfigError` if a robust rule could not withstand the share of hostile clients among so many, or so few
    cannot tell a quantile in private.
    """

    def __init__(
        self,
        state: Vector,
        agreement: Agreement,
        config: ServerConfig,
        *,
        total_weight: int,
        asked: int = 0,
        privacy: PrivacyConfig | None = None,
        sampling_rate: float = 1.0,
    ) -> None:
        self.state = state
        self.memory: dict[str, np.ndarray] = {}
        self._agreement, self._config = agreement, config
        self._sent, self._round = state, 0
        self._moved: Vector | None = None
        """What the last broadcast differs by from that of the round before, as clients decode them."""
        # `fewest`: so many usable replies a round needs. Of a secret draw few or none are a round like any other:
        # to abandon it would tell how few were drawn.
        self._sampling_rate = sampling_rate
        self._asked, self.fewest = asked, config.min_replies if sampling_rate == 1 else 0
        if config.aggregate != "mean":
            needed = fewest_replies(config.aggregate, hostile_share=config.hostile_share, asked=asked)
            self.fewest = max(self.fewest, needed)
            if asked - config.stragglers < needed:
                raise ConfigError(
                    f"leaves {asked - config.stragglers} replies, {config.aggregate} needs {needed} of {asked}",
                    where="server.stragglers",
                    remedy="Ask more clients, or wait for more of them.",
                )
        self.ledger: Ledger | None = None
        self._privacy = privacy if privacy is not None and privacy.noise else None
        if self._privacy is not None and self._privacy.quantile:
            mean_noise_multiplier(self._privacy.noise, asked / _COUNT)
        self._total_weight = total_weight
        self._bits = fraction_bits(total_weight=total_weight, max_abs=config.max_abs)

    def restore(self, state: Vector, memory: Mapping[str, np.ndarray], *, round: int) -> None:
        """Go on after `round` with this state, and with what `kept` was then."""
        self.state, self.memory, self._round = state, dict(memory), round
        self._sent = self.memory.pop(_SENT, state)

    def kept(self) -> dict[str, np.ndarray]:
        """What outlives a round besides the state, arrays by name: `memory`, and the last broadcast as clients decode
        it, with which the changes of the next round are compared."""
        return self.memory if self._privacy is not None else self.memory | {_SENT: self._sent}

    def broadcast(self, round: int) -> bytes:
        """The message that starts a round, the same bytes for every client."""
        agreed, context = self._agreement, self._agreement.context()
        before = self._sent if 0 < self._round < round else None
        self._round = round
        message = encode(
            agreed.layout, self.state, direction="downlink", codec=agreed.codec.down, is_difference=False,
            round=round, context=context, client=EVERYONE, num_examples=0,
        )  # fmt: skip
        # With a lossy codec the clients start from what arrives, and so do their differences.
        _, self._sent = decode(
            message, direction="downlink", layout=agreed.layout, context=context, round=round,
            client=EVERYONE, codecs=[agreed.codec.down], limits=agreed.limits,
        )  # fmt: skip
        self._moved = None if before is None else self._sent - before
        return message

    def judge(self, round: int, replies: Mapping[int, bytes | Failure]) -> tuple[list[Reply], dict[int, Failure]]:
        """The usable replies, and the reason for each of the others."""
        agreed = self._agreement
        context = agreed.context(state_digest(self._sent))
        accepted: list[Reply] = []
        refused: dict[int, Failure] = {}
        for client, reply in sorted(replies.items()):
            if isinstance(reply, Failure):
                refused[client] = self._told(reply)
                continue
            try:
                header, vector = decode(
                    reply, direction="uplink", layout=agreed.layout, context=context, round=round,
                    client=client, codecs=[agreed.codec.up], limits=agreed.limits,
                )  # fmt: skip
                if header.is_difference != (agreed.codec.send == "delta"):
                    raise WireError("flags", "says state where a difference was agreed, or the reverse")
            except WireError as error:
                refused[client] = self._told(Failure(error.code, f"client {client}: {error}"))
                continue
            weight = header.num_examples if self._config.weighting == "examples" else 1
            state = self._sent + vector if header.is_difference else vector
            accepted.append(Reply(client, vector, state, weight, header.num_examples))
        return accepted, refused

    def _told(self, failure: Failure) -> Failure:
        """What is told of a refusal: logs and errors name the client, which a secret draw must not."""
        return failure if self._sampling_rate == 1 else Failure(failure.code, "a client drawn in secret is not named")

    def measure(self, accepted: list[Reply]) -> dict[int, Measured]:
        """What is recorded of each reply's change, by client, to name free riders; nothing of a private run's."""
        if self._privacy is not None:
            return {}
        return {r.client: measure(c, self._moved, examples=r.examples) for r, c in self._changes(accepted)}

    def _changes(self, accepted: list[Reply]) -> list[tuple[Reply, Vector]]:
        """Each reply with what it would change."""
        is_difference = self._agreement.codec.send == "delta"
        return [(r, r.vector if is_difference else r.vector - self._sent) for r in accepted]

    def bound(self, accepted: list[Reply]) -> tuple[list[Reply], list[int]]:
        """The replies with outliers cut down, and which clients' they were: the length of what a client would change,
        and its number of examples, to `outlier` times the round's median."""
        times = self._config.outlier
        if not times or not accepted or self._privacy is not None:  # whose own clip does not look at other replies
            return accepted, []
        is_difference = self._agreement.codec.send == "delta"
        changes = [change for _, change in self._changes(accepted)]
        most = max(1, int(times * float(np.median([r.weight for r in accepted]))))
        bounded, cut = list[Reply](), list[int]()
        for reply, change, short in zip(accepted, changes, bounded_norms(changes, times=times), strict=True):
            kept = replace(reply, weight=most) if reply.weight > most else reply
            if short is not change:
                state = self._sent + short
                kept = replace(kept, vector=short if is_difference else state, state=state)
            bounded.append(kept)
            if kept is not reply:
                cut.append(reply.client)
        return bounded, cut

    def update(self, accepted: list[Reply]) -> bool:
        """Bring the replies together and take the rule's step; False, and state and memory as they were, if there are
        too few of them or clients would refuse the state it leads to."""
        kept = self._charged()
        if len(accepted) < self.fewest:
            return False
        mean = self._together(accepted, kept)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is not taken
            mean = self.state + mean if self._agreement.codec.send == "delta" else mean
            state, memory = self._step(mean)
        memory = memory | kept
        # A mean out of bounds would spoil the memory, though an adaptive step along it is bounded.
        if not all(self._can_be_sent(vector) for vector in ([mean] if state is mean else [mean, state])):
            return False
        if not all(np.isfinite(array).all() for array in memory.values()):
            return False
        self.state, self.memory = state, memory
        return True

    def _charged(self) -> dict[str, np.ndarray]:
        """Charge a private round, whatever will come of it; returns its clip if that is kept from round to round."""
        p = self._privacy
        if p is None:
            return {}
        if self.ledger is None:
            raise ContextError(
                "a private round has no ledger to be charged in", where="server", remedy="Set its ledger."
            )
        clip = float(self.memory.get(_CLIP, p.clip))
        self.ledger.charge(Charge(self._round, p.noise, clip, self._asked, self._sampling_rate, p.delta))
        return {_CLIP: np.array(clip)} if p.quantile else {}

    def _together(self, accepted: list[Reply], kept: dict[str, np.ndarray]) -> Vector:
        """The mean of the replies, with noise or by a robust rule if that is set; a clip in `kept` becomes the next."""
        c, weights = self._config, [r.weight for r in accepted]
        if self._privacy is not None:
            p, vectors = self._privacy, [r.vector for r in accepted]
            usual: dict[str, Any] = {"size": self.state.size, "noise_multiplier": p.noise, "cohort": self._asked}
            if not p.quantile:
                return noised_mean(vectors, clip=p.clip, **usual)
            mean, after = private_mean(
                vectors, {"clip": kept[_CLIP]}, clip=p.clip, quantile=p.quantile, clip_lr=_CLIP_LR,
                count_noise=self._asked / _COUNT, **usual,
            )  # fmt: skip
            kept[_CLIP] = after["clip"]
            return mean
        if c.aggregate == "mean":
            # Clients that claim too many items would overflow the fixed-point sum: it gives up that many fraction bits.
            bits = self._bits - (sum(weights) // (self._total_weight + 1)).bit_length()
            return weighted_mean([r.vector for r in accepted], weights, bits=bits)
        stream = Stream(int.from_bytes(self._agreement.context()[:8], "little"), "buckets", str(self._round))
        return aggregate(
            np.stack([r.vector for r in accepted]), weights, c.aggregate, hostile_share=c.hostile_share,
            order=stream.permutation(len(accepted)), asked=self._asked,
        )  # fmt: skip

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
