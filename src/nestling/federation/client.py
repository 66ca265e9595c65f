"""The client's half of a round: message in, training, message out. Bytes are all that crosses."""

from dataclasses import dataclass

from torch import nn

from nestling.adapters.base import Adapter
from nestling.codec.message import decode, encode, peek, state_digest
from nestling.config.schema import LocalConfig
from nestling.federation.agreement import EVERYONE, Agreement
from nestling.federation.local import Batches, train_local


@dataclass(frozen=True)
class Worker:
    """One copy of the model's moving parts, which serves one client after another; nothing of a client stays in it."""

    model: nn.Module
    adapter: Adapter
    task: Batches
    local: LocalConfig
    agreement: Agreement
    seed: int
    rounds: int

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
        self.adapter.load_vector(start)
        done = self.local.epochs * (round - 1)
        train_local(
            self.model, self.adapter, self.task, self.local, client=client, seed=self.seed,
            epochs=range(done, done + self.local.epochs), of=self.local.epochs * self.rounds,
        )  # fmt: skip
        trained = self.adapter.vector()
        is_difference = agreed.codec.send == "delta"
        return encode(
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
