"""The client's half of a round: message in, training, message out. Bytes are all that crosses."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from nestling.adapters.base import Adapter
from nestling.codec.message import decode, encode, peek, state_digest
from nestling.config.schema import LocalConfig
from nestling.core.vectors import Vector
from nestling.federation.agreement import EVERYONE, Agreement
from nestling.federation.local import Batches, Declined, train_local


@dataclass(frozen=True)
class Worker:
    """One copy of the model's moving parts, which serves one client after another; nothing of a client stays in it.

    Where an adapter has a part that never travels, `fresh` is that part before training, and `kept` holds what each
    client has made of it: all workers share one dict, for a client may meet another worker in the next round.
    """

    model: nn.Module
    adapter: Adapter
    task: Batches
    local: LocalConfig
    agreement: Agreement
    seed: int
    rounds: int
    fresh: Vector | None = None
    kept: dict[int, Vector] = field(default_factory=dict)

    def load(self, state: Vector, client: int | None) -> None:
        """Set the state and, if there is one, the part that never travels: the client's own, or the fresh one."""
        self.adapter.load_vector(state)
        if self.fresh is not None:
            local: Any = self.adapter
            local.load_local_vector(self.fresh if client is None else self.kept.get(client, self.fresh))

    def handle(self, client: int, message: bytes) -> bytes:
        """The reply of `client` to a broadcast.

        Raises `WireError` if the message is not one of this run, `Declined` if the client has nothing to send.
        """
        agreed = self.agreement
        round = peek(message).round
        _, start = decode(
            message,
            direction="downlink",
            layout=agreed.layout,
            context=agreed.context(),
            round=round,
            client=EVERYONE,
            codecs=[agreed.codec.down],
            limits=agreed.limits,
        )
        self.load(start, client)
        done = self.local.epochs * (round - 1)
        train_local(
            self.model, self.adapter, self.task, self.local, client=client, seed=self.seed,
            epochs=range(done, done + self.local.epochs), of=self.local.epochs * self.rounds,
        )  # fmt: skip
        own = self._own_part()
        trained = self.adapter.vector()
        is_difference = agreed.codec.send == "delta"
        reply = encode(
            agreed.layout,
            trained - start if is_difference else trained,
            direction="uplink",
            codec=agreed.codec.up,
            is_difference=is_difference,
            round=round,
            context=agreed.context(state_digest(start)),
            client=client,
            num_examples=self.task.examples(client),
        )
        if own is not None:
            self.kept[client] = own
        return reply

    def _own_part(self) -> Vector | None:
        """What the client keeps; were it not finite, the client could never be served or judged again."""
        if self.fresh is None:
            return None
        local: Any = self.adapter
        own: Vector = local.local_vector()
        if not np.isfinite(own).all():
            raise Declined("local_not_finite", "what it keeps is no longer finite; lower local.lr")
        return own
