"""What every local rule and every server rule promises. A new rule adds one line to `LOCAL` or `SERVER`."""

import io
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import config
from torch import Tensor, nn

from nestling.adapters.base import attach
from nestling.api import run
from nestling.codec.form import Limits
from nestling.config.schema import (
    CodecConfig,
    FullConfig,
    LatentConfig,
    LocalConfig,
    LoraConfig,
    MappingConfig,
    ServerConfig,
)
from nestling.core.seeds import Stream
from nestling.core.types import Failure
from nestling.engines.inprocess import InProcessEngine
from nestling.federation.agreement import Agreement
from nestling.federation.client import Worker
from nestling.federation.server import Reply, Server
from nestling.runs.recorder import read_result

PLAIN = LocalConfig(lr=3e-2)
LOCAL = {
    "plain": PLAIN,
    "prox": LocalConfig(lr=3e-2, rule="prox", mu=1.0),
    "ssi": LocalConfig(lr=3e-2, rule="ssi", ssi_strength=10.0),
    "ala": LocalConfig(lr=3e-2, rule="ala", ala_layers=0, ala_rate=100.0),
    "kept optimiser": LocalConfig(lr=3e-2, keep_optimizer=True),
    "kept momentum": LocalConfig(lr=1e-3, optimizer="sgd", keep_optimizer=True),
    "all at once": LocalConfig(lr=3e-2, rule="ssi", keep_optimizer=True, clip=1.0, warmup=1, epochs=2),
}
NEUTRAL_LOCAL = {
    "prox": LocalConfig(lr=3e-2, rule="prox", mu=0.0),
    "ssi": LocalConfig(lr=3e-2, rule="ssi", ssi_strength=0.0),
    "ala": LocalConfig(lr=3e-2, rule="ala", ala_layers=0, ala_rate=0.0),
}
MEAN = ServerConfig()
SERVER = {
    "mean": MEAN,
    "nesterov": ServerConfig(rule="nesterov"),
    "adam": ServerConfig(rule="adam", lr=0.01),
    "yogi": ServerConfig(rule="yogi", lr=0.01),
}
NEUTRAL_SERVER = {"nesterov": ServerConfig(rule="nesterov", lr=1.0, momentum=0.0)}
ADAPTERS = {
    "latent": LatentConfig(dim=4, targets=("*conv*",)),
    "full": FullConfig(),
    "lora": LoraConfig(rank=2, targets=("*conv*",)),
    "mapping": MappingConfig(dim=8, targets=("*conv*",)),
}


CLIENTS = [0, 1, 2]


class Drawn:
    """Images of 6 × 6 in three classes; client k holds 10 + k of them, most of class k."""

    def examples(self, client: int | None) -> int:
        return 33 if client is None else 10 + client

    def batches(self, client: int, *, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        rng, n = np.random.default_rng(client), self.examples(client)
        y = np.where(rng.random(n) < 0.6, client, rng.integers(0, 3, n))
        x = (rng.normal(size=(n, 1, 6, 6)) + y[:, None, None, None]).astype(np.float32)
        order = Stream(seed, "batches", f"{client}/{epoch}").permutation(n)
        for start in range(0, n, size):
            items = order[start : start + size]
            yield torch.from_numpy(x[items]), torch.from_numpy(y[items])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Loud(Drawn):
    """The same, with gradients beyond all measure."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * 1e9


@cache
def base() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return network().state_dict()


def network() -> nn.Module:
    first, second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
    layers = [
        ("conv1", first),
        ("act", nn.Tanh()),
        ("conv2", second),
        ("flat", nn.Flatten()),
        ("head", nn.Linear(16, 3)),
    ]
    return nn.Sequential(OrderedDict(layers))


class Federation:
    """A federation in steps: `states` and the `bodies` of all messages, round by round."""

    def __init__(
        self,
        adapter: str = "latent",
        local: LocalConfig = PLAIN,
        server: ServerConfig = MEAN,
        codec: CodecConfig | None = None,
        workers: int = 1,
    ) -> None:
        self.kept: dict = {}
        self.workers: list[Worker] = []
        for _ in range(workers):
            model = network()
            model.load_state_dict(base())
            attached = attach(model, ADAPTERS[adapter])
            spec = {"base": attached.base_hash, "adapter": attached.spec, "run": "r"}
            agreed = Agreement(attached.layout, codec or CodecConfig(), Limits(max_examples=100), spec)
            local = replace(local, batch_size=5)
            self.workers.append(Worker(model, attached, Drawn(), local, agreed, seed=1, rounds=3, kept=self.kept))
        self.engine = InProcessEngine([worker.handle for worker in self.workers])
        self.server = Server(self.workers[0].adapter.vector(), agreed, server, total_weight=100)
        self.states: list[bytes] = []
        self.bodies: list[bytes] = []

    def round(self, number: int) -> None:
        message = self.server.broadcast(number)
        replies = self.engine.exchange(dict.fromkeys(CLIENTS, message))
        accepted, refused = self.server.judge(number, replies)
        assert not refused
        assert self.server.update(accepted)
        self.states.append(self.server.state.tobytes())
        self.bodies += [message[64:], *(r[64:] for r in replies.values() if not isinstance(r, Failure))]

    def rounds(self, count: int) -> "Federation":
        for number in range(1, count + 1):
            self.round(number)
        return self


def saved(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Written with np.savez and read back, refusing anything but plain arrays."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    with np.load(file, allow_pickle=False) as read:
        return {name: read[name] for name in read.files}


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].shape == other[n].shape and one[n].tobytes() == other[n].tobytes()
        for n in one
    )


CASES = [pytest.param(local, MEAN, id=f"local {name}") for name, local in LOCAL.items()]
CASES += [pytest.param(PLAIN, server, id=f"server {name}") for name, server in SERVER.items()]
CASES += [pytest.param(LOCAL["ala"], SERVER["nesterov"], id="both")]


@pytest.mark.parametrize(("local", "server"), CASES)
def test_it_is_deterministic_its_state_is_data_and_saving_it_is_resuming(
    local: LocalConfig, server: ServerConfig
) -> None:
    whole = Federation(local=local, server=server).rounds(3)
    first = Federation(local=local, server=server, workers=2).rounds(2)
    assert whole.states[:2] == first.states
    second = Federation(local=local, server=server)
    second.server.state = first.server.state
    second.server.memory = saved(first.server.memory)
    second.kept.update({client: saved(state) for client, state in first.kept.items()})
    assert same(second.server.memory, first.server.memory)
    for client, state in first.kept.items():
        assert same(second.kept[client], state)
        for name, array in state.items():
            assert type(array) is np.ndarray
            assert array.dtype in (np.float32, np.float64, np.int64)
            assert name.split(".")[0] in ("adapter", "rule", "optimizer", "codec")
    second.round(3)
    assert second.states[-1] == whole.states[-1]
    assert second.bodies == whole.bodies[-4:]
    assert whole.kept.keys() == second.kept.keys()
    assert all(same(whole.kept[client], second.kept[client]) for client in whole.kept)
    assert same(whole.server.memory, second.server.memory)


NEUTRAL = [pytest.param(local, MEAN, id=f"local {name}") for name, local in NEUTRAL_LOCAL.items()]
NEUTRAL += [pytest.param(PLAIN, server, id=f"server {name}") for name, server in NEUTRAL_SERVER.items()]


@pytest.mark.parametrize("send", ["delta", "state"])
@pytest.mark.parametrize(("local", "server"), NEUTRAL)
def test_a_rule_that_does_nothing_is_fedavg_to_the_bit(local: LocalConfig, server: ServerConfig, send: str) -> None:
    codec = CodecConfig(send=send)
    plain = Federation(codec=codec).rounds(3)
    neutral = Federation(local=local, server=server, codec=codec).rounds(3)
    assert neutral.states == plain.states
    assert neutral.bodies == plain.bodies


@cache
def fedavg(adapter: str) -> Federation:
    return Federation(adapter).rounds(2)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", [name for name in LOCAL if name not in ("plain", "kept momentum")])
def test_each_local_rule_works_with_each_adapter_and_does_something(name: str, adapter: str) -> None:
    plain, ruled = fedavg(adapter), Federation(adapter, local=LOCAL[name]).rounds(2)
    assert ruled.states[1] != plain.states[1]
    assert np.isfinite(ruled.server.state).all()
    assert plain.kept == {}
    assert (ruled.kept == {}) == (name == "prox")


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", [name for name in SERVER if name != "mean"])
def test_each_server_rule_works_with_each_adapter_and_does_something(name: str, adapter: str) -> None:
    plain, ruled = fedavg(adapter), Federation(adapter, server=SERVER[name]).rounds(2)
    assert ruled.states[0] != plain.states[0]
    assert np.isfinite(ruled.server.state).all()
    assert all(array.dtype == np.float64 for array in ruled.server.memory.values())


@pytest.mark.parametrize("name", LOCAL)
def test_a_client_that_fails_keeps_what_it_had(name: str) -> None:
    federation = Federation(local=LOCAL[name]).rounds(1)
    [worker] = federation.workers
    before = {client: dict(state) for client, state in federation.kept.items()}
    local = replace(LOCAL[name], optimizer="sgd", lr=1e38, momentum=0.0, keep_optimizer=False, clip=0.0)
    broken = replace(worker, local=local, task=Loud())
    with pytest.raises(Exception) as caught:  # noqa: PT011
        broken.handle(0, federation.server.broadcast(2))
    assert getattr(caught.value, "code", "") in ("loss_not_finite", "local_not_finite", "non_finite")
    assert worker.kept.keys() == before.keys()
    assert all(same(worker.kept[client], before[client]) for client in before)


@pytest.mark.parametrize("name", SERVER)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_step_that_cannot_be_sent_takes_neither_state_nor_memory(name: str, bad: float) -> None:
    federation = Federation(server=SERVER[name], codec=CodecConfig(send="state")).rounds(1)
    server = federation.server
    state, memory = server.state.copy(), {n: a.copy() for n, a in server.memory.items()}
    server.broadcast(2)
    vector = np.full(state.shape, bad, np.float32)
    with np.errstate(invalid="ignore"):
        assert not server.update([Reply(0, vector, vector, 1)])
    assert server.state.tobytes() == state.tobytes()
    assert same(server.memory, memory)


def test_error_feedback_keeps_what_a_message_lost_and_sends_it_later() -> None:
    federation = Federation(codec=CodecConfig(bits=4, feedback=True)).rounds(1)
    first = federation.kept[0]["codec.error"].copy()
    assert np.abs(first).max() > 0
    plain = Federation(codec=CodecConfig(bits=4)).rounds(1)
    assert plain.kept == {}
    assert federation.bodies == plain.bodies  # nothing was lost before the first message
    federation.round(2)
    plain.round(2)
    assert federation.bodies[4:] != plain.bodies[4:]
    assert federation.kept[0]["codec.error"].tobytes() != first.tobytes()


RUNS = {  # every rule once
    "flite+fedprox+diloco": {"local": replace(LOCAL["prox"], keep_optimizer=True), "server": SERVER["nesterov"]},
    "fedssi+fedadam": {"adapter": FullConfig(), "local": LOCAL["ssi"], "server": SERVER["adam"]},
    "flite+fedala+fedyogi": {"local": LOCAL["ala"], "server": SERVER["yogi"]},
}


@pytest.mark.parametrize("method", RUNS)
def test_a_run_from_end_to_end(method: str, tmp_path: Path) -> None:
    result = run(config(tmp_path, **RUNS[method]))
    assert result.method == method
    assert result.rejected == {}
    written = json.loads((Path(result.run_dir) / "result.json").read_text())
    personal = {key: value for key, value in written.items() if key.startswith("accuracy_personal")}
    if "fedala" not in method:
        assert personal == {}
        assert result.accuracy_personal is None
        return
    assert set(personal) == {"accuracy_personal", "accuracy_personal_global"}
    assert personal["accuracy_personal"] == result.accuracy_personal
    assert 0 < result.accuracy_personal_global <= 1
    assert read_result(Path(result.run_dir)) == result
