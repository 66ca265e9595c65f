"""From settings to objects: what is planned is what is built, and workers share all that is frozen."""

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from small import config, images, needle_config

from nestling.adapters.base import InexactAverages
from nestling.adapters.full import FullAdapter
from nestling.adapters.latent import LatentAdapter
from nestling.build import build, check_device, resolve, run_id
from nestling.cli.main import main
from nestling.codec.message import peek
from nestling.config.load import load_config, parse_config
from nestling.config.schema import (
    CodecConfig,
    FullConfig,
    LanguageConfig,
    LatentConfig,
    LocalConfig,
    LoraConfig,
    MappingConfig,
    MemoryConfig,
    NeedleConfig,
    RunConfig,
    TaskConfig,
    deciding,
)
from nestling.core.errors import ConfigError, ContextError, NestlingError
from nestling.core.types import Engine, Failure
from nestling.counts import plan
from nestling.tasks.images import make_task
from nestling.tasks.sets import TRAINED_ON

PAPER = "flite-cifar100-resnet18"


def test_a_part_that_stays_with_clients_elsewhere_is_refused_for_the_server_has_none_to_judge_with() -> None:
    class Elsewhere:
        def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
            return {}

    settings = RunConfig(task=NeedleConfig(), base=LanguageConfig(), adapter=MemoryConfig(share="gates"))
    with pytest.raises(ConfigError, match=r"adapter\.share = gates"):
        build(settings, engine=Elsewhere())


@pytest.mark.parametrize(("bits", "payload", "factor"), [(32, 5120, 8718), (8, 1288, 34656), (4, 648, 68884)])
def test_the_plan_of_the_papers_setting(bits: int, payload: int, factor: int) -> None:
    paper = load_config(PAPER)
    planned = plan(dataclasses.replace(paper, codec=CodecConfig(bits=bits)))
    assert planned.trainable_parameters == 1280
    assert planned.adapted_parameters == 11_159_232
    assert planned.full_payload_bytes == 4 * 11_159_232
    assert planned.payload_bytes_up == payload
    assert planned.wire_bytes_up == payload + 64
    assert planned.payload_bytes_down == 5120
    assert planned.wire_bytes_down == 5184
    assert planned.payload_factor == factor
    assert planned.total_wire_bytes == 50 * 8 * (payload + 64 + 5184)
    assert len(planned.layout) == 20


@pytest.mark.parametrize(
    ("flags", "payload"), [([], 5120), (["--codec.bits", "8"], 1288), (["--codec.bits", "4"], 648)]
)
def test_the_plan_of_the_papers_setting_by_command(
    flags: list[str], payload: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", PAPER, *flags, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    wanted = {
        "trainable_parameters": 1280,
        "payload_bytes_up": payload,
        "payload_bytes_down": 5120,
        "wire_bytes_up": payload + 64,
        "full_payload_bytes": 44_636_928,
        "payload_factor": round(44_636_928 / payload),
        "adapted_parameters": 11_159_232,
        "method": "flite",
    }
    assert {key: planned[key] for key in wanted} == wanted
    assert main(["plan", PAPER, *flags]) == 0
    table = capsys.readouterr().out
    for number in (f"{payload:,} B", "11,159,232", "1,280", "44,636,928 B"):
        assert number in table


def small_configs(tmp_path: Path) -> list[RunConfig]:
    plain = config(tmp_path)
    plain = dataclasses.replace(plain, base=dataclasses.replace(plain.base, pretrain_on="none"))
    adapters = [
        LatentConfig(dim=4, targets=("*conv*",)),
        LatentConfig(dim=3, rank=2, train_norms=True),
        LatentConfig(dim=2, targets=("stages.0.*", "head"), exclude=("*conv2",)),
        FullConfig(),
        FullConfig(targets=("*conv*",), exclude=("stem.*",)),
        LoraConfig(rank=2, targets=("*conv*",)),
        LoraConfig(rank=3, targets=("conv2", "head"), ffa=True),
        LoraConfig(rank=3, targets=("conv?",), layers="upper:0.4", dim=5),
        MappingConfig(dim=50, targets=("*conv*",)),
    ]
    codecs = [CodecConfig(), CodecConfig(bits=4, scale="tensor"), CodecConfig(bits=16, down_bits=8)]
    return [dataclasses.replace(plain, adapter=a, codec=c) for a in adapters for c in codecs]


@pytest.mark.parametrize("number", range(27))
def test_what_is_planned_is_what_travels(number: int, tmp_path: Path) -> None:
    settings = small_configs(tmp_path)[number]
    planned, parts = plan(settings), build(settings)
    assert planned.layout == [(name, list(shape)) for name, shape in parts.agreement.layout]
    assert planned.trainable_parameters == parts.agreement.layout.size == parts.server.state.size
    assert planned.model_parameters == sum(p.numel() for p in parts.base.parameters())
    adapted = parts.workers[0].adapter.weights()
    assert planned.adapted_parameters == sum(tensor.numel() for tensor in adapted.values())
    message = parts.server.broadcast(1)
    assert len(message) == planned.wire_bytes_down
    reply = parts.engine.exchange({0: message})[0]
    assert isinstance(reply, bytes), reply
    assert len(reply) == planned.wire_bytes_up
    assert (peek(reply).codec, peek(message).codec) == (planned.codec_up, planned.codec_down)


def test_a_plan_reads_nothing_and_needs_no_memory_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import nestling.build

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plan reads data or makes a base")

    for name in ("load_images", "make_task", "make_base"):
        monkeypatch.setattr(nestling.build, name, refuse)
    wide = plan(parse_config('base = {model = "resnet34", width = 4096, weights = "/nowhere"}\ntask.path = "/nowhere"'))
    assert wide.model_parameters > 8e10  # 320 GB, were they real


def test_a_plan_asks_as_many_clients_as_a_round_does() -> None:
    ten = parse_config("task.clients = 10\nrounds = 3")
    assert plan(ten).clients_per_round == 10
    four = parse_config("task.clients = 10\nrounds = 3\nserver.clients_per_round = 4")
    assert plan(four).clients_per_round == 4
    assert plan(four).total_wire_bytes * 10 == plan(ten).total_wire_bytes * 4


def test_a_plan_refuses_patterns_that_match_nothing() -> None:
    for text in ('adapter.targets = ["*cnov*"]', 'adapter = {kind = "full", targets = ["*cnov*"]}'):
        with pytest.raises(ConfigError) as caught:
            plan(parse_config(text))
        assert caught.value.where == "adapter.targets"
        assert "conv" in caught.value.remedy


def test_a_plan_refuses_factors_where_there_is_no_matrix() -> None:
    with pytest.raises(ConfigError, match="no matrix") as caught:
        plan(parse_config('codec.kind = "powersgd"'))
    assert caught.value.where == "codec.kind"
    weights = parse_config('adapter = {kind = "full"}\ncodec.kind = "powersgd"')
    assert plan(weights).payload_bytes_up < plan(weights).payload_bytes_down


def test_a_plan_refuses_a_classifier_that_could_not_be_made() -> None:
    narrow = parse_config('task.data = "cifar100"\nbase = {model = "resnet8", width = 8, pretrain_on = "none"}')
    with pytest.raises(ConfigError) as caught:
        plan(narrow)
    assert caught.value.where == "base.width"


# What is left open is filled in.


def test_open_settings_are_resolved_once() -> None:
    config = RunConfig(seed=7)
    resolved = resolve(config)
    assert isinstance(resolved.adapter, LatentConfig)
    assert resolved.adapter.seed == 7
    assert 1 <= resolved.machine.workers <= config.task.clients
    assert resolve(resolved) == resolved
    own = dataclasses.replace(config, adapter=LatentConfig(seed=9))
    assert resolve(own).adapter == own.adapter


def test_no_more_workers_than_clients_that_are_asked() -> None:
    many = parse_config("machine.workers = 64\ntask.clients = 10\nserver.clients_per_round = 3")
    assert resolve(many).machine.workers == 3


def test_a_run_is_named_by_what_decides_its_result_alone(tmp_path: Path) -> None:
    plain = config(tmp_path)
    same = [
        dataclasses.replace(plain, name="other"),
        dataclasses.replace(plain, machine=dataclasses.replace(plain.machine, workers=2, out="elsewhere")),
        dataclasses.replace(plain, base=dataclasses.replace(plain.base, path="elsewhere")),
    ]
    assert {run_id(c) for c in same} == {run_id(plain)}
    others = [
        dataclasses.replace(plain, seed=1),
        dataclasses.replace(plain, rounds=3),
        dataclasses.replace(plain, local=LocalConfig(lr=0.5)),
        dataclasses.replace(plain, codec=CodecConfig(bits=8)),
        dataclasses.replace(plain, adapter=LatentConfig(dim=5)),
        dataclasses.replace(plain, adapter=FullConfig()),
        dataclasses.replace(plain, task=dataclasses.replace(plain.task, augment="crop-flip")),
    ]
    assert len({run_id(c) for c in [plain, *others]}) == 8


def test_a_setting_that_came_later_leaves_older_runs_their_names() -> None:
    """Rotations and rounding are drawn from the name: another one would be other bits."""
    settings = parse_config('name = "pinned"\ntask = {data = "cifar10"}\nbase.pretrain_on = "none"')
    assert "augment" not in deciding(settings)["task"]
    assert run_id(settings) == "8f5d411f44cdd1b03837dee1a499fcd6"
    moved = dataclasses.replace(settings, task=dataclasses.replace(settings.task, augment="crop-flip"))
    assert deciding(moved)["task"]["augment"] == "crop-flip"


# Workers.


def with_workers(settings: RunConfig, count: int) -> RunConfig:
    task = dataclasses.replace(settings.task, clients=max(count, settings.task.clients))
    return dataclasses.replace(settings, task=task, machine=dataclasses.replace(settings.machine, workers=count))


def test_cat_081_workers_share_every_frozen_tensor(tmp_path: Path) -> None:
    settings = small_configs(tmp_path)[0]
    parts = build(with_workers(settings, 5))
    assert len(parts.workers) == 5
    frozen = {t.data_ptr() for t in [*parts.base.parameters(), *parts.base.buffers()]}
    for worker in parts.workers:
        assert isinstance(worker.adapter, LatentAdapter)
        assert {t.data_ptr() for t in [*worker.model.parameters(), *worker.model.buffers()]} == frozen
        assert worker.task is parts.task
    models = {id(module) for worker in parts.workers for module in worker.model.modules()}
    assert len(models) == 5 * len(list(parts.base.modules()))  # but no module, for adapters hook into those
    assert len({worker.adapter.z.data_ptr() for worker in parts.workers}) == 5


def test_cat_081_clients_cost_no_memory_of_their_own(tmp_path: Path) -> None:
    settings = small_configs(tmp_path)[0]
    sizes = []
    for clients in (3, 60):
        task = dataclasses.replace(settings.task, clients=clients, partition="iid")
        parts = build(dataclasses.replace(settings, task=task))
        tensors = {t.data_ptr(): t.numel() for w in parts.workers for t in [*w.model.parameters(), w.adapter.z]}
        sizes.append((len(parts.workers), sum(tensors.values())))
    assert sizes[0] == sizes[1]


def test_full_workers_train_tensors_of_their_own_and_leave_the_base(tmp_path: Path) -> None:
    settings = dataclasses.replace(small_configs(tmp_path)[0], adapter=FullConfig())
    parts = build(with_workers(settings, 2))
    before = [t.clone() for t in parts.base.parameters()]
    first, second = parts.workers
    assert isinstance(first.adapter, FullAdapter)
    assert not {t.data_ptr() for t in first.model.parameters()} & {t.data_ptr() for t in second.model.parameters()}
    other = second.adapter.vector()
    first.handle(0, parts.server.broadcast(1))
    assert second.adapter.vector().tobytes() == other.tobytes()
    assert all(torch.equal(a, b) for a, b in zip(before, parts.base.parameters(), strict=True))


def test_the_parts_fit_each_other(tmp_path: Path) -> None:
    settings = small_configs(tmp_path)[0]
    parts = build(settings)
    engine: Engine = parts.engine
    assert callable(engine.exchange)
    assert parts.task.clients() == [0, 1, 2]
    assert parts.agreement.spec["base"] == parts.base_hash
    assert parts.agreement.limits.max_examples == len(parts.task) == parts.task.examples(None)
    parts.workers[0].load(parts.server.state, None)
    score = parts.task.evaluate(parts.workers[0].model)
    assert score.items == parts.task.held_out_items == 60
    assert parts.evaluate(parts.workers[0], parts.server.state) == score.right / 60


def test_cat_018_another_base_is_another_context(tmp_path: Path) -> None:
    settings = small_configs(tmp_path)[0]
    here = build(settings)
    there = build(dataclasses.replace(settings, base=dataclasses.replace(settings.base, seed=1)))
    assert here.base_hash != there.base_hash
    with pytest.raises(NestlingError):
        there.workers[0].handle(0, here.server.broadcast(1))


def test_averages_that_are_not_exact_are_said_once_and_in_one_plain_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a run's adapter says is tested here; that the command shows it without a line of code, too."""
    monkeypatch.setattr("nestling.adapters.base._WARNED", set())
    settings = small_configs(tmp_path)[0]
    build(settings)
    exact = [dataclasses.replace(settings, adapter=a) for a in (MappingConfig(dim=9), FullConfig())]
    squashed = dataclasses.replace(settings, adapter=MappingConfig(dim=9, squash=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in exact:
            build(each)
        with pytest.raises(InexactAverages):
            build(squashed)
        build(squashed)
    monkeypatch.setattr("nestling.adapters.base._WARNED", set())
    monkeypatch.setattr("nestling.cli.main._dispatch", lambda args: build(squashed) and 0)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        # What Python itself does with a warning, in the place of what pytest does.
        monkeypatch.setattr(
            warnings, "showwarning", lambda *args: print(warnings.formatwarning(*args[:4]), end="", file=sys.stderr)
        )
        assert main(["run"]) == 0
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("nestling: the mean of clients' mapping vectors is not the mean of their models")


# What does not fit is said before anything is trained.


def test_a_base_of_another_number_of_colours_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build(parse_config(f'task = {{data = "fashion", path = "{images()}"}}\nbase.pretrain_on = "cifar10"'))
    assert caught.value.where == "base.pretrain_on"
    assert "3 colour channels" in str(caught.value)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:999", "meta", "cpu:x", "mps", "\u202e"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_device(device)
    assert caught.value.where == "machine.device"
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process to cores")
def test_workers_are_as_many_as_the_cores_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert resolve(load_config("flite-digits")).machine.workers == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert resolve(load_config("flite-digits")).machine.workers == min(len(mine), 8)


def test_the_cpu_is_always_there() -> None:
    check_device("cpu")


def test_cat_040_data_that_is_not_there_is_exit_3(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(ContextError) as caught:
        build(dataclasses.replace(settings, task=dataclasses.replace(settings.task, path=str(tmp_path / "none"))))
    assert caught.value.exit_code == 3
    assert "task.path" in caught.value.remedy


def test_more_clients_than_items_are_refused(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(dataclasses.replace(settings, task=dataclasses.replace(settings.task, clients=2**32 - 1)))
    assert caught.value.where == "task.clients"


def test_cat_082_numbers_that_would_overflow_the_sum_are_refused_at_the_start(tmp_path: Path) -> None:
    settings = small_configs(tmp_path)[0]
    server = dataclasses.replace(settings.server, max_abs=1e15)
    with pytest.raises(ConfigError) as caught:
        build(dataclasses.replace(settings, server=server))
    assert caught.value.where == "server.max_abs"


def test_planned_steps_are_those_that_are_taken(tmp_path: Path) -> None:
    needles = needle_config(tmp_path, rounds=2)
    task, size = build(needles).task, needles.local.batch_size
    taken = [len(list(task.batches(client, size=size, seed=0, epoch=0))) for client in task.clients()]
    assert plan(needles).steps == 2 * sum(taken)
    digits = load_config("flite-digits")
    assert isinstance(digits.task, TaskConfig)
    images = make_task(digits.task, seed=0)
    assert len(images) == TRAINED_ON["digits"]
    shares = [images.examples(client) for client in images.clients()]
    taken = [-(-share // digits.local.batch_size) for share in shares]
    planned = plan(digits).steps
    assert planned is not None
    assert 0 <= digits.rounds * sum(taken) - planned <= digits.rounds * len(shares)
    fewer = dataclasses.replace(digits, server=dataclasses.replace(digits.server, clients_per_round=4))
    assert plan(fewer).steps == digits.rounds * -(-1750 // digits.local.batch_size)
    assert plan(load_config("flite-wikitext2-tinygpt")).steps is None


@pytest.mark.parametrize(("optimizer", "arrays"), [("adamw", 4), ("sgd", 3)])
def test_planned_memory_is_weights_and_what_an_optimiser_keeps(optimizer: str, arrays: int) -> None:
    digits = load_config("flite-digits")
    planned = plan(dataclasses.replace(digits, local=dataclasses.replace(digits.local, optimizer=optimizer)))
    assert planned.weights_bytes == 4 * planned.model_parameters
    assert planned.training_bytes == 4 * arrays * planned.trainable_parameters
