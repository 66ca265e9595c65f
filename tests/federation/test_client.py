"""Bytes in, bytes out: what a client sends depends on its own items and on the message, and on nothing before it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import forge
from torch import Tensor, nn

from nestling.adapters.base import attach
from nestling.codec.form import Limits
from nestling.codec.message import context_id, peek, state_digest
from nestling.config.schema import CodecConfig, FullConfig, LatentConfig, LocalConfig, ServerConfig
from nestling.core.errors import WireError
from nestling.core.seeds import Stream
from nestling.engines.inprocess import InProcessEngine
from nestling.federation.agreement import Agreement
from nestling.federation.client import Worker
from nestling.federation.local import Declined
from nestling.federation.loop import run_rounds
from nestling.federation.server import Server


@dataclass
class Points:
    """Points in the plane in two classes; client k holds `sizes[k]` of them, near a place of its own."""

    sizes: dict[int, int]
    loss_becomes: float | None = None
    steps: int = 0

    def examples(self, client: int | None) -> int:
        return self.sizes[client]

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        n, rng = self.sizes[client], np.random.default_rng(client)
        x, y = rng.normal(client, 1, (n, 4)).astype(np.float32), rng.integers(0, 2, n)
        order = Stream(seed, "batches", f"{client}/{epoch}").permutation(n)
        for start in range(0, n, size):
            items = order[start : start + size]
            yield torch.from_numpy(x[items]), torch.from_numpy(y[items])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.steps += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss if self.loss_becomes is None else loss * self.loss_becomes


SIZES = {0: 20, 1: 7, 2: 0, 3: 1}


LATENT = LatentConfig(seed=3, dim=4)


def make(adapter=LATENT, *, task: Points | None = None, **codec) -> tuple[Worker, Server]:
    """A worker and the server it answers to."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    attached = attach(model, adapter)
    spec = {"base": attached.base_hash, "adapter": attached.spec, "run": "r"}
    agreed = Agreement(attached.layout, CodecConfig(**codec), Limits(max_examples=100), spec)
    worker = Worker(
        model, attached, task or Points(SIZES), LocalConfig(batch_size=5, lr=0.05), agreed, seed=1, rounds=5
    )
    return worker, Server(attached.vector(), agreed, ServerConfig(), total_weight=100)


@pytest.mark.parametrize("adapter", [LatentConfig(seed=3, dim=4), FullConfig()])
@pytest.mark.parametrize("send", ["delta", "state"])
def test_a_reply_carries_what_was_trained(send: str, adapter) -> None:
    worker, server = make(adapter, send=send)
    message = server.broadcast(1)
    start = server.state.copy()
    reply = worker.handle(1, message)
    trained = worker.adapter.vector()
    assert trained.tobytes() != start.tobytes()
    accepted, refused = server.judge(1, {1: reply})
    assert not refused
    assert (accepted[0].client, accepted[0].weight) == (1, SIZES[1])
    np.testing.assert_array_equal(accepted[0].vector, trained - start if send == "delta" else trained)
    assert peek(reply).is_difference == (send == "delta")


@pytest.mark.parametrize("down_bits", [8, 4])
def test_a_client_starts_from_what_it_decoded(down_bits: int) -> None:
    """Two servers whose states differ, but arrive as the same numbers, get the same reply."""
    from small import received

    worker, server = make(down_bits=down_bits)
    state = np.random.default_rng(0).normal(size=server.state.shape).astype(np.float32)
    server.state = state
    message = server.broadcast(1)
    start = received(worker.agreement, message)
    assert start.tobytes() != state.tobytes()
    reply = worker.handle(0, message)
    accepted, refused = server.judge(1, {0: reply})
    assert not refused
    np.testing.assert_allclose(accepted[0].state, worker.adapter.vector(), rtol=0, atol=1e-6)
    assert peek(reply).context == worker.agreement.context(state_digest(start))


@pytest.mark.parametrize("adapter", [LatentConfig(seed=3, dim=4, train_norms=True), FullConfig()])
@pytest.mark.parametrize("bits", [32, 8])
def test_cat_086_nothing_of_one_client_reaches_the_next(bits: int, adapter) -> None:
    worker, server = make(adapter, bits=bits)
    message = server.broadcast(1)
    alone = make(adapter, bits=bits)[0].handle(1, message)
    worker.handle(0, message)
    assert worker.handle(1, message) == alone
    with pytest.raises(Declined):
        worker.handle(2, message)
    assert worker.handle(1, message) == alone


def test_cat_086_not_even_from_one_whose_training_broke() -> None:
    worker, server = make()
    message = server.broadcast(1)
    alone = worker.handle(1, message)
    broken = replace(worker, task=Points(SIZES, loss_becomes=1e3), local=LocalConfig(optimizer="sgd", lr=1e38))
    with pytest.raises((Declined, WireError)):
        broken.handle(0, message)
    assert worker.handle(1, message) == alone


def test_rounds_and_clients_differ() -> None:
    worker, server = make()
    replies = {worker.handle(client, server.broadcast(number)) for client in (0, 1) for number in (1, 2)}
    bodies = {reply[64:] for reply in replies}
    assert len(bodies) == 4


def test_cat_040_a_client_without_items_declines() -> None:
    worker, server = make()
    with pytest.raises(Declined) as caught:
        worker.handle(2, server.broadcast(1))
    assert caught.value.code == "no_data"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_cat_044_045_a_client_whose_loss_is_no_number_declines(loss: float) -> None:
    worker, server = make(task=Points(SIZES, loss_becomes=loss))
    with pytest.raises(Declined) as caught:
        worker.handle(0, server.broadcast(1))
    assert caught.value.code == "loss_not_finite"
    assert "local.lr" in str(caught.value)


def test_cat_045_numbers_that_leave_the_finite_in_the_last_step_are_not_sent() -> None:
    worker, server = make(FullConfig(), task=Points(SIZES, loss_becomes=1e3))
    worker = replace(worker, local=LocalConfig(optimizer="sgd", lr=1e38, batch_size=100))
    with pytest.raises(WireError) as caught:
        worker.handle(0, server.broadcast(1))
    assert caught.value.code == "non_finite"


def test_cat_041_043_one_item_or_fewer_than_a_batch_are_trained_on() -> None:
    worker, server = make()
    for client in (3, 1):
        task = Points(SIZES)
        small = replace(worker, task=task, local=LocalConfig(batch_size=1_000, lr=0.05))
        reply = small.handle(client, server.broadcast(1))
        assert task.steps == 1
        assert peek(reply).num_examples == SIZES[client]
        accepted, _ = server.judge(1, {client: reply})
        assert np.abs(accepted[0].vector).max() > 0


@pytest.mark.parametrize("spoil", ["base", "run", "damaged", "uplink", "state", "another codec", "garbage"])
def test_cat_018_a_broadcast_that_is_not_of_this_run_is_refused_before_any_training(spoil: str) -> None:
    worker, server = make()
    message = server.broadcast(1)
    made_elsewhere = {
        "base": forge(
            message, context=replace(worker.agreement, spec={**worker.agreement.spec, "base": "x"}).context()
        ),
        "run": forge(message, context=context_id({"run": "other"})),
        "damaged": message[:-1] + bytes([message[-1] ^ 1]),
        "uplink": worker.handle(0, message),
        "state": forge(message, body=np.full(server.state.size, np.inf, "<f4").tobytes()),
        "another codec": forge(message, codec=4),
        "garbage": b"x" * 200,
    }[spoil]
    before = worker.adapter.vector()
    task = Points(SIZES)
    with pytest.raises(WireError) as caught:
        replace(worker, task=task).handle(0, made_elsewhere)
    assert caught.value.exit_code == 5
    assert task.steps == 0
    assert worker.adapter.vector().tobytes() == before.tobytes()


def test_a_frozen_model_stays_as_it_is() -> None:
    worker, server = make()
    before = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
    for client in (0, 1):
        worker.handle(client, server.broadcast(1))
    after = worker.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("adapter", [LatentConfig(seed=3, dim=4), FullConfig()])
def test_a_whole_federation_of_these_learns(adapter) -> None:
    worker, server = make(adapter)
    before = server.state.copy()
    rounds = run_rounds(
        server, InProcessEngine([worker.handle]), [0, 1, 2, 3], lambda state: 0.0, rounds=5, per_round=0, patience=1,
        seed=1,
    )  # fmt: skip
    for done in rounds:
        assert {client: failure.code for client, failure in done.refused.items()} == {2: "no_data"}
        assert sum(reply.weight for reply in done.accepted) == 28

    def loss_at(state: np.ndarray) -> float:
        worker.adapter.load_vector(state)
        batches = [b for c in (0, 1, 3) for b in worker.task.batches(c, size=100, seed=0, epoch=0)]
        return sum(float(worker.task.loss(worker.model, b).detach()) * len(b[1]) for b in batches)

    assert loss_at(server.state) < loss_at(before)


def test_a_client_whose_own_part_is_not_finite_declines_and_keeps_what_it_had() -> None:
    """Otherwise that part could not be loaded again, and the client never be served or judged."""
    worker, server = make()
    broken = np.array([np.inf], np.float32)
    object.__setattr__(worker.adapter, "local_vector", lambda: broken)
    object.__setattr__(worker.adapter, "load_local_vector", lambda vector: None)
    worker = replace(worker, fresh=np.zeros(1, np.float32))
    with pytest.raises(Declined) as caught:
        worker.handle(0, server.broadcast(1))
    assert caught.value.code == "local_not_finite"
    assert worker.kept == {}


# What a client keeps.


def test_a_plain_client_keeps_nothing() -> None:
    worker, server = make()
    worker.handle(0, server.broadcast(1))
    assert worker.kept == {}


def test_what_clients_keep_is_their_own_and_shared_by_all_workers() -> None:
    worker, server = make()
    worker = replace(worker, local=replace(worker.local, rule="ala", ala_layers=0, keep_optimizer=True))
    message = server.broadcast(1)
    for client in (0, 1):
        worker.handle(client, message)
    assert set(worker.kept) == {0, 1}
    assert worker.kept[0]["rule.local"].tobytes() != worker.kept[1]["rule.local"].tobytes()
    other = replace(make()[0], local=worker.local, kept=worker.kept)
    assert other.handle(0, server.broadcast(2)) == worker_at(worker, 0, server)
    assert "rule.weights" in worker.kept[0]


def worker_at(worker: Worker, client: int, server: Server) -> bytes:
    """The reply of a worker whose client has the memory of after round 1 only."""
    again = replace(worker, kept={})
    again.handle(client, server.broadcast(1))
    return again.handle(client, server.broadcast(2))


def test_each_client_is_judged_by_its_own_blend_and_the_server_by_none() -> None:
    worker, server = make()
    worker = replace(worker, local=replace(worker.local, rule="ala"))
    state, own = server.state, server.state + np.float32(1)
    weights = np.linspace(0, 1, state.size).astype(np.float32)
    worker.kept[1] = {"rule.local": own, "rule.weights": weights}
    worker.load(state, 1)
    np.testing.assert_allclose(worker.adapter.vector(), state + 1 - weights, rtol=0, atol=1e-6)
    for client in (0, None):
        worker.load(state, client)
        assert worker.adapter.vector().tobytes() == state.tobytes()


def test_error_feedback_adds_up_to_what_was_trained() -> None:
    """Messages and the last error together are all that was trained, whatever the codec lost in between."""
    worker, server = make(bits=4, feedback=True)
    sent = trained = np.zeros(server.state.size)
    for number in (1, 2, 3):
        message, before = server.broadcast(number), server.state.copy()
        accepted, refused = server.judge(number, {0: worker.handle(0, message)})
        assert not refused
        trained = trained + (worker.adapter.vector() - before)
        sent = sent + accepted[0].vector
        assert set(worker.kept[0]) == {"codec.error"}
        server.update(accepted)
    error = worker.kept[0]["codec.error"]
    assert np.abs(error).max() > 0
    np.testing.assert_allclose(sent + error, trained, rtol=0, atol=1e-6)


def test_cat_052_a_client_that_was_away_starts_from_the_state_of_now_and_its_old_error_stays_small() -> None:
    worker, server = make(bits=4, feedback=True)
    worker = replace(worker, rounds=8)
    assert server.update(server.judge(1, {c: worker.handle(c, server.broadcast(1)) for c in (0, 1)})[0])
    kept = worker.kept[0]["codec.error"].copy()
    for number in range(2, 7):  # it is asked no more
        assert server.update(server.judge(number, {1: worker.handle(1, server.broadcast(number))})[0])
    assert worker.kept[0]["codec.error"].tobytes() == kept.tobytes()
    message = server.broadcast(7)
    accepted, refused = server.judge(7, {0: worker.handle(0, message)})
    assert not refused
    fresh = replace(worker, kept={})
    fresh.handle(0, message)
    trained = fresh.adapter.vector() - server.state
    # What it sends is what anyone would have trained from here, but for its old error and the step of the new message.
    step = 2 * np.abs(trained + kept).max() / 15
    assert np.abs(accepted[0].vector - (trained + kept)).max() <= step
    assert np.linalg.norm(accepted[0].vector) <= 2 * np.linalg.norm(trained)
