"""A whole needle run: every row on the same items, in its record, its table and its page."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from small import needle_config, needle_toml

import nestling
from nestling.adapters.memory import MemoryAdapter
from nestling.api import run
from nestling.build import build
from nestling.cli.main import main
from nestling.config.load import load_config
from nestling.config.schema import FullConfig, LocalConfig, LoraConfig, MemoryConfig
from nestling.core.types import Progress
from nestling.runs.folder import read_status
from nestling.runs.recorder import read_rows, read_run

MEMORY_ROWS = ["full attention", "local only", "centralised", "trained", "memory off", "window off"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """One run with its reference rows, for all tests that only look: (settings, result, progress)."""
    steps: list[Progress] = []
    settings = needle_config(tmp_path_factory.mktemp("needles"), references=True)
    return settings, run(settings, progress=steps.append), steps


def test_a_run_of_a_memory_has_all_rows_on_the_same_items(finished: tuple) -> None:
    _, result, steps = finished
    assert list(result.recalls) == MEMORY_ROWS
    for name, clients in result.recalls.items():
        assert [(c["client"], c["template"], c["items"]) for c in clients] == [
            (0, "mk", 5), (1, "passkey", 5), (2, "mv", 5)
        ], name  # fmt: skip
    trained = [c["loss"] for c in result.recalls["trained"]]
    assert trained != [c["loss"] for c in result.recalls["memory off"]]  # it learned something
    assert trained != [c["loss"] for c in result.recalls["window off"]]
    assert trained != [c["loss"] for c in result.recalls["local only"]]
    assert (result.method, result.task, result.test_items) == ("fednl", "facts in 320 tokens", 15)
    assert [p.round for p in steps if not p.step and not p.within] == [1, 2]


def test_without_its_memory_the_model_is_the_frozen_base_with_its_window(finished: tuple) -> None:
    settings, result, _ = finished
    base = build(settings).recalls.of_base(window=settings.adapter.window, sinks=settings.adapter.sinks)
    off = result.recalls["memory off"]
    assert [(c["exact"], c["chosen"]) for c in off] == [(r.exact, r.chosen) for r in base]
    assert [c["loss"] for c in off] == pytest.approx([r.loss for r in base], rel=1e-4)
    assert [c["loss"] for c in off] != [c["loss"] for c in result.recalls["full attention"]]


def test_accuracies_and_gains_are_those_of_the_rows(finished: tuple) -> None:
    _, result, _ = finished

    def exact(row: str) -> float:
        return sum(c["exact"] for c in result.recalls[row]) / 15

    assert result.accuracy == exact("trained")
    assert result.accuracy_base == exact("memory off")
    assert result.accuracy_local_only == exact("local only")
    assert result.accuracy_centralised == exact("centralised")
    chosen = {row: sum(c["chosen"] for c in result.recalls[row]) for row in ("trained", "memory off")}
    mean, low, high = result.gains["choice"]
    assert mean == pytest.approx((chosen["trained"] - chosen["memory off"]) / 15)
    assert low <= mean <= high


def test_the_record_holds_every_item_and_the_state_that_was_judged(finished: tuple) -> None:
    settings, result, _ = finished
    folder = Path(result.run_dir)
    assert read_status(folder) == "done"
    assert read_run(folder).result == result
    assert load_config(folder / "config.toml").adapter.seed == settings.seed
    assert not (folder / "base.safetensors").exists()  # a language model is named, not copied
    rows = read_rows(folder / "metrics.jsonl")
    parts = build(settings)
    model = parts.workers[0]
    loaded = nestling.from_pretrained(parts.recalls.base, folder / "adapter")
    assert loaded.vector().shape == model.adapter.vector().shape
    assert parts.evaluate(model, loaded.vector()) == rows[-1]["accuracy"]
    again = parts.recalls.of_state(loaded.vector())
    assert [r.loss for r in again] == [c["loss"] for c in result.recalls["trained"]]


def test_the_number_of_workers_changes_no_bit(finished: tuple, tmp_path: Path) -> None:
    settings, result, _ = finished
    machine = dataclasses.replace(settings.machine, workers=3, out=str(tmp_path))
    again = run(dataclasses.replace(settings, machine=machine))
    assert (again.state_digest, again.recalls) == (result.state_digest, result.recalls)


def test_the_page_and_the_report_show_the_rows(finished: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, result, _ = finished
    page = (Path(result.run_dir) / "report.html").read_text()
    for text in ("Facts recalled", "frozen base, full attention", "fednl, memory off", "1 passkey", "chance is 25 %"):
        assert text in page
    assert main(["report", result.run_dir, "--format", "markdown", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| fednl, window off |" in shown
    assert "Exact answers on 15 test items" in shown


@pytest.mark.parametrize(
    ("adapter", "method", "rows"),
    [
        (MemoryConfig(layers="all", rank=2, window=0, dim=4), "fednl-latent", ["trained", "memory off", "window off"]),
        (LoraConfig(rank=2), "fedavg-lora", ["trained"]),
        (FullConfig(targets=("*q_proj*",)), "fedavg", ["trained"]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_other_adapters_without_references(adapter, method: str, rows: list[str], tmp_path: Path) -> None:
    result = run(needle_config(tmp_path, adapter=adapter, rounds=1))
    assert (result.method, list(result.recalls)) == (method, ["full attention", *rows])
    assert (result.accuracy_local_only, result.seconds_references) == (None, None)
    assert (result.gains != {}) == isinstance(adapter, MemoryConfig)
    assert result.accuracy_base is not None  # the frozen base is read in every run


@pytest.mark.parametrize("window", [0, 32])
def test_a_lora_run_has_the_frozen_base_with_its_window_if_there_is_one(window: int, tmp_path: Path) -> None:
    result = run(needle_config(tmp_path, adapter=LoraConfig(rank=2, window=window), rounds=1, references=True))
    frozen = ["full attention", "window"] if window else ["full attention"]
    assert list(result.recalls) == [*frozen, "local only", "centralised", "trained"]
    assert result.accuracy_base == sum(c["exact"] for c in result.recalls[frozen[-1]]) / 15


# What stays with a client.


def gates_run(out: Path, rounds: int = 2):
    adapter = MemoryConfig(layers="all", rank=2, window=32, share="gates", seed=0)
    local = LocalConfig(batch_size=2, lr=3e-2, gate_lr=0.3)
    return build(needle_config(out, adapter=adapter, rounds=rounds, local=local))


def test_with_shared_gates_each_client_goes_on_with_its_own_part(tmp_path: Path) -> None:
    parts = gates_run(tmp_path)
    [worker] = parts.workers
    assert isinstance(worker.adapter, MemoryAdapter)
    message = parts.server.broadcast(1)
    parts.engine.exchange(dict.fromkeys([0, 1], message))
    first, second = worker.kept[0]["adapter"].copy(), worker.kept[1]["adapter"].copy()
    assert len({v.tobytes() for v in (worker.fresh, first, second)}) == 3
    worker.load(parts.server.state, 0)
    assert worker.adapter.local_vector().tobytes() == first.tobytes()
    worker.load(parts.server.state, 2)  # has not trained yet
    assert worker.adapter.local_vector().tobytes() == worker.fresh.tobytes()
    worker.load(parts.server.state, None)
    assert worker.adapter.local_vector().tobytes() == worker.fresh.tobytes()
    parts.engine.exchange({0: parts.server.broadcast(2)})
    assert worker.kept[0]["adapter"].tobytes() != first.tobytes()
    assert worker.kept[1]["adapter"].tobytes() == second.tobytes()


def test_a_client_is_judged_with_its_own_part_and_not_with_anothers(tmp_path: Path) -> None:
    parts = gates_run(tmp_path)
    [worker] = parts.workers
    accepted, _ = parts.server.judge(1, parts.engine.exchange(dict.fromkeys([0, 1, 2], parts.server.broadcast(1))))
    parts.server.update(accepted)
    own = [r.loss for r in parts.recalls.of_state(parts.server.state)]
    kept = dict(worker.kept)
    worker.kept.update({0: kept[1], 1: kept[1]})
    swapped = [r.loss for r in parts.recalls.of_state(parts.server.state)]
    assert own[0] != swapped[0]
    assert own[1:] == swapped[1:]


def test_a_run_with_shared_gates_ends_well_whatever_the_workers(tmp_path: Path) -> None:
    digests = set()
    for workers in (1, 3):
        adapter = MemoryConfig(layers="all", rank=2, window=32, share="gates")
        settings = needle_config(tmp_path, adapter=adapter)
        machine = dataclasses.replace(settings.machine, workers=workers)
        result = run(dataclasses.replace(settings, machine=machine))
        digests.add((result.state_digest, json.dumps(result.recalls)))
        assert not (Path(result.run_dir) / "adapter").exists()  # it would lack what the clients keep
    assert len(digests) == 1


# By command.


def test_by_command_with_flags_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(needle_toml(tmp_path / "runs"))
    flags = ["--rounds", "1", "--task.templates", "mk", "date", "--task.length", "420", "--adapter.rank", "1"]
    flags += ["--base.dtype", "bfloat16", "--machine.no-references", "--local.gate-lr", "0.1"]
    flags += ["--local.clip", "1", "--local.warmup", "2"]
    assert main(["run", str(path), *flags]) == 0
    shown = capsys.readouterr().out
    for text in ("of four %", "fednl, memory off", "10 held-out items of 2 clients", "chance is 25 %"):
        assert text in " ".join(shown.split())
    [folder] = (tmp_path / "runs").iterdir()
    config = load_config(folder / "config.toml")
    assert config.task.templates == ("mk", "date")
    assert (config.task.length, config.adapter.rank, config.base.dtype) == (420, 1, "bfloat16")
    assert (config.local.gate_lr, config.local.clip, config.local.warmup) == (0.1, 1.0, 2)


def test_a_model_that_is_not_here_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(needle_toml(tmp_path / "runs"))
    assert main(["run", str(path), "--base.model", "./no/such"]) == 3
    assert "neither a folder" in capsys.readouterr().err
