"""The client's half of a round: message in, training, message out. Bytes are all that crosses."""

from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
from torch import nn

from nestling.adapters.base import Adapter
from nestling.codec.feedback import compensated, keep_error
from nestling.codec.message import decode, encode, peek, state_digest
from nestling.config.schema import LocalConfig
from nestling.core.vectors import Vector
from nestling.federation.agreement import EVERYONE, Agreement
from nestling.federation.interrupt import Until
from nestling.federation.local import Batches, ClientState, Declined, train_by_rule
from nestling.strategies import fedala

_CODEC = "codec."


@dataclass(frozen=True)
class Worker:
    """One copy of the model's moving parts, which serves one client after another; nothing of a client stays in it.

    `kept` is what each client keeps between rounds: all workers share one dict, for a client may meet another worker in
    the next round. Where an adapter has a part that never travels, `fresh` is that part before training. Once `stop` is
    set, also shared, training ends at its next batch and the client declines.
    """

    model: nn.Module
    adapter: Adapter
    task: Batches
    local: LocalConfig
    agreement: Agreement
    seed: int
    rounds: int
    fresh: Vector | None = None
    kept: dict[int, ClientState] = field(default_factory=dict)
    stop: Event = field(default_factory=Event)

    def load(self, state: Vector, client: int | None) -> None:
        """Set the model to `state` as `client` sees it: with its own part that never travels, and with FedALA blended
        with its own last state. None: the server's view, with the fresh part and no blend."""
        memory = self.kept.get(client, {}) if client is not None else {}
        self._place(state if self.local.rule != "ala" else fedala.blend(state, memory), memory)

    def handle(self, client: int, message: bytes) -> bytes:
        """The reply of `client` to a broadcast. What the client keeps changes only once the reply is made.

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
        memory = self.kept.get(client, {})
        self._place(start, memory)
        done = self.local.epochs * (round - 1)
        kept = train_by_rule(
            self.model, self.adapter, Until(self.task, self.stop), self.local, memory, client=client, seed=self.seed,
            epochs=range(done, done + self.local.epochs), of=self.local.epochs * self.rounds,
        )  # fmt: skip
        if self.fresh is not None:
            local: Any = self.adapter
            kept["adapter"] = local.local_vector()
        _refuse_unless_finite(kept)
        trained = self.adapter.vector()
        of_codec = {name.removeprefix(_CODEC): array for name, array in memory.items() if name.startswith(_CODEC)}
        reply = self._reply(trained, start, of_codec, round=round, client=client)
        kept |= {_CODEC + name: array for name, array in of_codec.items()}
        if kept:
            self.kept[client] = kept
        return reply

    def _place(self, state: Vector, memory: ClientState) -> None:
        """Set the state and, if there is one, the part that never travels: the client's own, or the fresh one."""
        self.adapter.load_vector(state)
        if self.fresh is not None:
            local: Any = self.adapter
            local.load_local_vector(memory.get("adapter", self.fresh))

    def _reply(self, trained: Vector, start: Vector, memory: ClientState, *, round: int, client: int) -> bytes:
        """The message; the codec replaces entries of `memory`, its own, and with error feedback its error is there."""
        agreed = self.agreement
        is_difference = agreed.codec.send == "delta"
        vector = trained - start if is_difference else trained
        if agreed.codec.feedback:
            vector = compensated(vector, memory)
        context = agreed.context(state_digest(start))
        reply = encode(
            agreed.layout,
            vector,
            direction="uplink",
            codec=agreed.codec.up,
            is_difference=is_difference,
            round=round,
            context=context,
            client=client,
            num_examples=self.task.examples(client),
            memory=memory,
            stochastic=agreed.codec.rounding == "stochastic",
        )
        if agreed.codec.feedback:
            _, sent = decode(
                reply, direction="uplink", layout=agreed.layout, context=context, round=round, client=client,
                codecs=[agreed.codec.up], limits=agreed.limits,
            )  # fmt: skip
            keep_error(vector, sent, memory)
        return reply


def _refuse_unless_finite(kept: ClientState) -> None:
    """Were what it keeps not finite, the client could never be served or judged again."""
    for name, array in kept.items():
        if not np.isfinite(array).all():
            raise Declined("local_not_finite", f"what it keeps is no longer finite ({name}); lower local.lr")
