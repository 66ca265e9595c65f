"""A run from Python: its folder can be read back, continued from, and trusted, also if the run was cut short."""

import dataclasses
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from small import config, finished

import nestling
from nestling.api import run, settings_digest
from nestling.build import build, resolve
from nestling.codec.message import peek, state_digest
from nestling.config.load import load_config
from nestling.config.schema import CodecConfig, FullConfig, RunConfig, ServerConfig
from nestling.core.errors import ConfigError, ContextError, RunError, StorageError
from nestling.core.types import Failure, Progress
from nestling.federation.reference import References
from nestling.models.backbones import base_hash, load_base
from nestling.models.resnet import make_resnet
from nestling.runs.folder import list_runs, read_status
from nestling.runs.recorder import read_result, read_rows, read_run
from nestling.runs.result import Result


def only_run(out: Path) -> Path:
    (path,) = out.iterdir()
    return path


def accuracy_of(folder: Path, settings: RunConfig) -> float:
    """What a stranger gets who has the folder alone: its base, its adapter, and the data."""
    model = make_resnet(settings.base.model, width=settings.base.width, channels=1, classes=10, seed=99)
    load_base(model, folder / "base.safetensors")
    nestling.from_pretrained(model, folder / "adapter")
    return build(settings).task.evaluate(model).accuracy


# The folder of a finished run.


def test_a_run_learns_and_says_so() -> None:
    settings, result, _ = finished()
    assert result.accuracy > 0.2
    assert result.accuracy_base is not None
    assert (result.method, result.adapter, result.codec, result.task) == ("flite", "latent", "float32", "Fashion-MNIST")
    assert (result.rounds, result.clients, result.test_items, result.classes, result.alpha) == (2, 3, 60, 10, 1.0)
    assert result.rejected == {}
    assert result.settings == settings_digest(resolve(settings))


def test_the_folder_holds_all_that_is_promised() -> None:
    _, result, _ = finished()
    folder = Path(result.run_dir)
    for name in (
        "config.toml", "command.txt", "env.json", "metrics.jsonl", "bytes.jsonl", "log.txt", "status", "result.json",
        "report.html", "base.safetensors", "adapter/adapter.safetensors", "adapter/adapter.json", "adapter/README.md",
        "messages/last-up.msg", "messages/last-down.msg", "accuracy_against_bytes.svg", "accuracy_against_bytes.png",
        "accuracy_against_bytes.csv",
    ):  # fmt: skip
        assert (folder / name).is_file(), name
    assert read_status(folder) == "done"
    assert (folder / "command.txt").read_text().strip() == "nestling run small.toml"
    assert not list(folder.rglob(".*"))  # no temporary file is left


def test_the_settings_can_be_loaded_again() -> None:
    settings, result, _ = finished()
    again = load_config(Path(result.run_dir) / "config.toml")
    assert again == resolve(settings)
    assert again.adapter.seed == settings.seed  # what was left open is written down


def test_the_result_can_be_read_back() -> None:
    _, result, _ = finished()
    folder = Path(result.run_dir)
    assert read_result(folder) == result
    assert Result.from_dict(json.loads((folder / "result.json").read_text())) == result


def test_every_round_and_every_message_has_its_row_and_the_bytes_add_up() -> None:
    settings, result, _ = finished()
    folder = Path(result.run_dir)
    metrics, messages = read_rows(folder / "metrics.jsonl"), read_rows(folder / "bytes.jsonl")
    assert [row["round"] for row in metrics] == [1, 2]
    assert metrics[-1]["accuracy"] == result.accuracy
    assert metrics[-1]["bytes_total"] == result.bytes_up + result.bytes_down
    assert all((row["accepted"], row["asked"], row["used"]) == (3, 3, True) for row in metrics)
    assert len(messages) == settings.rounds * 3 * 2
    for direction, total in (("up", result.bytes_up), ("down", result.bytes_down)):
        rows = [row for row in messages if row["direction"] == direction]
        assert sum(row["wire_bytes"] for row in rows) == total
        assert all(row["accepted"] and not row["reason"] for row in rows)
        assert {(row["round"], row["client"]) for row in rows} == {(r, c) for r in (1, 2) for c in range(3)}
        kept = (folder / "messages" / f"last-{direction}.msg").read_bytes()
        assert len(kept) == rows[-1]["wire_bytes"] == rows[-1]["payload_bytes"] + 64
        assert peek(kept).round == 2


def test_the_adapter_on_the_base_gives_the_accuracy_of_the_result_exactly() -> None:
    settings, result, _ = finished()
    folder = Path(result.run_dir)
    assert accuracy_of(folder, settings) == result.accuracy
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)
    load_base(model, folder / "base.safetensors")
    assert base_hash(model) == result.base_hash
    assert state_digest(nestling.from_pretrained(model, folder / "adapter").vector()) == result.state_digest


def test_an_adapter_refuses_another_base() -> None:
    _, result, _ = finished()
    with pytest.raises(ContextError):
        nestling.from_pretrained(
            make_resnet("resnet8", width=8, channels=1, classes=10, seed=0), Path(result.run_dir) / "adapter"
        )


def test_the_base_row_is_the_frozen_base() -> None:
    settings, result, _ = finished()
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)
    load_base(model, Path(result.run_dir) / "base.safetensors")
    assert build(settings).task.evaluate(model).accuracy == result.accuracy_base


def test_averaging_latents_is_averaging_weights() -> None:
    _, result, _ = finished()
    assert result.averaging_error is not None
    assert result.averaging_error < 1e-6


def test_progress_is_told_step_by_step() -> None:
    _, result, steps = finished()
    seen = [(p.step, p.round) for p in steps if not p.within]
    assert [step for step in seen if "epoch" not in step[0] and "done" not in step[0]] == [
        ("loading data and base", 0),
        ("training the rows to compare with", 0),
        ("federating", 0),
        ("", 1),
        ("", 2),
    ]
    assert [(p.within, p.round) for p in steps if p.within] == [
        (f"round {number}: {answered} of 3 clients have answered", number - 1)
        for number in (1, 2)
        for answered in (1, 2, 3)
    ]
    assert ("training the rows to compare with, 4 of 4 done", 0) in seen
    assert steps[-1].accuracy == result.accuracy
    assert steps[-1].bytes_so_far == result.bytes_up + result.bytes_down
    assert all(a.seconds <= b.seconds for a, b in pairwise(steps))


def test_making_a_base_is_told_epoch_by_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    notes: list[str] = []
    build(config(tmp_path), note=notes.append)
    assert "training the base, epoch 1 of 16" in notes


def test_the_run_is_listed() -> None:
    settings, result, _ = finished()
    (summary,) = list_runs(Path(settings.machine.out))
    assert (summary.status, summary.round, summary.accuracy) == ("done", 2, result.accuracy)
    assert summary.wire_bytes == result.bytes_up + result.bytes_down
    assert read_run(Path(result.run_dir)).result == result


def test_the_callers_threads_and_random_numbers_are_left_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    torch.set_num_threads(2)
    try:
        run(config(tmp_path, rounds=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


# Other ways to run.


def test_a_base_made_by_one_run_serves_another(tmp_path: Path) -> None:
    settings, result, _ = finished()
    base = dataclasses.replace(settings.base, weights=str(Path(result.run_dir) / "base.safetensors"))
    again = run(config(tmp_path, base=base, rounds=1))
    assert again.base_hash == result.base_hash
    assert again.accuracy_base == result.accuracy_base
    assert not (Path(again.run_dir) / "base.safetensors").exists()  # it is kept where it came from


def test_references_that_are_given_are_used_and_none_are_trained(tmp_path: Path) -> None:
    steps: list[Progress] = []
    given = References(local_only=0.125, centralised=0.875)
    result = run(config(tmp_path, references=True, rounds=1), references=given, progress=steps.append)
    assert (result.accuracy_local_only, result.accuracy_centralised) == (0.125, 0.875)
    assert result.seconds_references is None
    assert "training the rows to compare with" not in {p.step for p in steps}


def test_without_references_their_rows_are_unknown(tmp_path: Path) -> None:
    result = run(config(tmp_path, rounds=1))
    assert (result.accuracy_local_only, result.accuracy_centralised, result.seconds_references) == (None, None, None)


def test_fedavg_in_int4_keeps_its_adapter_too(tmp_path: Path) -> None:
    settings = config(tmp_path, adapter=FullConfig(), codec=CodecConfig(bits=4, down_bits=16), rounds=1)
    result = run(settings)
    assert (result.method, result.codec) == ("fedavg", "int4-message")
    assert result.bytes_up == 3 * (result.payload_bytes_up + 64)
    assert accuracy_of(Path(result.run_dir), settings) == result.accuracy


def test_what_is_saved_is_what_was_judged_and_what_clients_would_receive(tmp_path: Path) -> None:
    settings = config(tmp_path, codec=CodecConfig(down_bits=2), rounds=1)
    result = run(settings)
    assert accuracy_of(Path(result.run_dir), settings) == result.accuracy
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)
    load_base(model, Path(result.run_dir) / "base.safetensors")
    saved = nestling.from_pretrained(model, Path(result.run_dir) / "adapter").vector()
    assert state_digest(saved) == result.state_digest
    assert len(np.unique(saved)) <= 4  # two bits a number


def test_seeds_and_places_share_a_digest_of_settings_and_nothing_else_does(tmp_path: Path) -> None:
    plain = config(tmp_path)
    same = [
        dataclasses.replace(plain, seed=3, name="other"),
        dataclasses.replace(plain, machine=dataclasses.replace(plain.machine, workers=2, out="elsewhere")),
        dataclasses.replace(plain, base=dataclasses.replace(plain.base, weights="here.safetensors")),
        dataclasses.replace(plain, task=dataclasses.replace(plain.task, path="there")),
    ]
    (digest,) = {settings_digest(resolve(c)) for c in [plain, *same]}
    assert len(digest) == 8
    others = [
        dataclasses.replace(plain, codec=CodecConfig(bits=4)),
        dataclasses.replace(plain, codec=CodecConfig(bits=4, feedback=True)),
        dataclasses.replace(plain, codec=CodecConfig(down_bits=16)),
        dataclasses.replace(plain, local=dataclasses.replace(plain.local, mu=0.5)),
        dataclasses.replace(plain, task=dataclasses.replace(plain.task, evaluate_on="validation")),
        dataclasses.replace(plain, base=dataclasses.replace(plain.base, head="random")),
        dataclasses.replace(plain, adapter=dataclasses.replace(plain.adapter, seed=9)),
    ]
    assert len({settings_digest(resolve(c)) for c in [plain, *others]}) == 8


# Runs that end early.


def test_cat_056_an_interrupted_run_keeps_its_last_finished_round(tmp_path: Path) -> None:
    settings = config(tmp_path, rounds=5)
    accuracies = []

    def interrupt(progress: Progress) -> None:
        if progress.round and not progress.within:
            accuracies.append(progress.accuracy)
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, progress=interrupt)
    folder = only_run(tmp_path)
    assert read_status(folder) == "stopped"
    assert not (folder / "result.json").exists()
    assert [row["round"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2]
    assert "'nestling resume' goes on after the last finished round" in (folder / "log.txt").read_text()
    assert accuracy_of(folder, settings) == accuracies[-1]


def test_cat_056_an_interrupt_within_a_round_keeps_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nestling.engines.inprocess import InProcessEngine

    real, calls, accuracies = InProcessEngine.exchange, [], []

    def exchange(self: InProcessEngine, messages: dict) -> dict:
        calls.append(messages)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, messages)

    monkeypatch.setattr(InProcessEngine, "exchange", exchange)
    settings = config(tmp_path, rounds=5)
    with pytest.raises(KeyboardInterrupt):
        run(settings, progress=lambda p: accuracies.append(p.accuracy))
    folder = only_run(tmp_path)
    assert read_status(folder) == "stopped"
    assert accuracy_of(folder, settings) == accuracies[-1]


def test_cat_050_clients_that_are_always_too_slow_end_the_run_with_what_they_were_too_slow_for(tmp_path: Path) -> None:
    settings = config(tmp_path, rounds=5, server=ServerConfig(deadline=1e-6, patience=2))
    with pytest.raises(RunError, match=r"2 rounds in a row .*did not answer within 1e-06 s") as raised:
        run(settings)
    assert raised.value.exit_code == 7
    rows = read_rows(only_run(tmp_path) / "metrics.jsonl")
    assert [(row["accepted"], row["asked"], row["used"]) for row in rows] == [(0, 3, False)] * 2


def test_a_round_ends_without_its_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nestling.federation.client import Worker

    real = Worker.handle

    def handle(self: Worker, client: int, message: bytes) -> bytes:
        if client == 1:
            assert self.stop.wait(timeout=60), "the round waits for its slowest client"
        return real(self, client, message)

    monkeypatch.setattr(Worker, "handle", handle)
    settings = config(tmp_path, rounds=2, server=ServerConfig(stragglers=1))
    result = run(dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, workers=2)))
    assert result.rejected == {"late": 2}


def test_cat_056_an_interrupt_before_the_first_round_promises_nothing(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), progress=interrupt)
    folder = only_run(tmp_path)
    assert read_status(folder) == "stopped"
    assert not (folder / "adapter").exists()
    assert "adapter/" not in (folder / "log.txt").read_text()


def test_cat_049_a_run_that_gets_no_usable_reply_fails_with_its_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nestling.federation.client import Worker
    from nestling.federation.local import Declined

    def decline(self: Worker, client: int, message: bytes) -> bytes:
        raise Declined("loss_not_finite", "loss became nan in epoch 1; lower local.lr")

    monkeypatch.setattr(Worker, "handle", decline)
    settings = config(tmp_path, rounds=9)
    with pytest.raises(RunError) as caught:
        run(settings)
    assert caught.value.exit_code == 7
    assert "lower local.lr" in str(caught.value)
    folder = only_run(tmp_path)
    assert read_status(folder) == "failed"
    assert len(read_rows(folder / "metrics.jsonl")) == settings.server.patience
    assert accuracy_of(folder, settings) == read_rows(folder / "metrics.jsonl")[-1]["accuracy"]
    log = (folder / "log.txt").read_text()
    assert "[loss_not_finite]" in log
    assert "failed: " in log


def test_cat_030_a_client_that_breaks_is_named_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nestling.federation.client import Worker

    real = Worker.handle

    def handle(self: Worker, client: int, message: bytes) -> bytes:
        if client == 1:
            raise RuntimeError("disk on fire")
        reply = real(self, client, message)
        return reply[:-1] if client == 2 else reply

    monkeypatch.setattr(Worker, "handle", handle)
    result = run(config(tmp_path))
    assert result.rejected == {"client_error": 2, "length": 2}
    folder = Path(result.run_dir)
    rows = read_rows(folder / "bytes.jsonl")
    assert sum(row["wire_bytes"] for row in rows) == result.bytes_up + result.bytes_down
    up = [(row["client"], row["accepted"], row["reason"]) for row in rows if row["direction"] == "up"]
    assert (
        up == [(0, True, ""), (2, False, "length")] * 2
    )  # what was refused has cost its bytes, what was not sent none
    log = (folder / "log.txt").read_text()
    assert "disk on fire" in log
    assert "RuntimeError" in log


def test_cat_066_a_place_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    steps: list[Progress] = []
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError) as caught:
            run(config(out), progress=steps.append)
        assert caught.value.exit_code == 2
    assert steps == []


def test_missing_data_leaves_a_folder_that_says_why(tmp_path: Path) -> None:
    settings = config(tmp_path / "runs")
    settings = dataclasses.replace(settings, task=dataclasses.replace(settings.task, path=str(tmp_path)))
    with pytest.raises(ContextError):
        run(settings)
    folder = only_run(tmp_path / "runs")
    assert read_status(folder) == "failed"
    assert "Fashion-MNIST is not there" in (folder / "log.txt").read_text()


def test_cat_064_a_full_disk_ends_the_run_as_failed_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nestling.adapters.latent import LatentAdapter

    def full(self: LatentAdapter, folder: Path) -> None:
        raise StorageError("could not be written", where=str(folder), remedy="Free some space.")

    monkeypatch.setattr(LatentAdapter, "save_pretrained", full)
    with pytest.raises(StorageError) as caught:
        run(config(tmp_path))
    assert caught.value.exit_code == 8
    assert read_status(only_run(tmp_path)) == "failed"


def test_a_bug_of_a_callers_callback_is_passed_on_and_written_down(tmp_path: Path) -> None:
    def broken(progress: Progress) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        run(config(tmp_path), progress=broken)
    folder = only_run(tmp_path)
    assert read_status(folder) == "failed"
    assert "ZeroDivisionError: mine" in (folder / "log.txt").read_text()


def test_names_of_the_package_are_all_there() -> None:
    for name in nestling.__all__:
        assert getattr(nestling, name) is not None
    assert set(nestling.__all__) <= set(dir(nestling))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        nestling.nonsense  # noqa: B018


def test_cat_016_of_many_bad_replies_a_few_are_logged_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nestling.federation.client import Worker

    real = Worker.handle

    def handle(self: Worker, client: int, message: bytes) -> bytes:
        reply = real(self, client, message)
        return reply if client == 0 else reply[:-client]

    monkeypatch.setattr(Worker, "handle", handle)
    monkeypatch.setattr("nestling.api.LOGGED", 1)
    result = run(config(tmp_path))
    assert result.rejected == {"length": 4}
    log = (Path(result.run_dir) / "log.txt").read_text()
    assert log.count("dropped [length]") == 2  # one a round
    for number in (1, 2):
        assert f"round {number}: 2 dropped in all, [('length', 2)]" in log


def test_an_engine_that_is_given_carries_the_messages_and_the_state_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Its clients are other objects than those of the run, as if they were on other machines."""
    settings = config(tmp_path / "here")
    here = run(settings)
    sites = build(settings)
    asked: list[int] = []

    class Elsewhere:
        def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
            asked.extend(messages)
            return sites.engine.exchange(messages)

    many = dataclasses.replace(settings.machine, workers=3, out=str(tmp_path / "there"))
    parts = build(dataclasses.replace(settings, machine=many), engine=Elsewhere())
    assert len(parts.workers) == 1
    there = run(dataclasses.replace(settings, machine=many), engine=Elsewhere(), examples=len(sites.task))
    assert asked == [0, 1, 2] * settings.rounds
    assert there.state_digest == here.state_digest
    assert there.bytes_up == here.bytes_up


def test_what_was_sent_to_nobody_is_counted_in_no_file(tmp_path: Path) -> None:
    settings = config(tmp_path)
    sites = build(settings)

    class OneIsAway:
        def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
            return sites.engine.exchange(messages) | {1: Failure("away", "client 1: is not connected", sent=False)}

    done = run(settings, engine=OneIsAway(), examples=len(sites.task))
    rows = read_rows(Path(done.run_dir) / "bytes.jsonl")
    assert {row["client"] for row in rows} == {0, 2}
    down = sum(row["wire_bytes"] for row in rows if row["direction"] == "down")
    assert down == done.bytes_down == sum(row["bytes_down"] for row in read_rows(Path(done.run_dir) / "metrics.jsonl"))
    assert done.rejected == {"away": settings.rounds}


def test_clients_elsewhere_may_hold_more_items_than_the_data_here(tmp_path: Path) -> None:
    parts = build(config(tmp_path), engine=build(config(tmp_path)).engine, examples=10**6)
    assert parts.agreement.limits.max_examples == 10**6
