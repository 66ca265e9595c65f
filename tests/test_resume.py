"""A run that was cut short and resumed ends as one that never was: state, messages and record, to the bit."""

import dataclasses
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from small import config, images, needle_config, toml

import nestling.adapters.store
import nestling.api
import nestling.resume
from nestling.api import resume, run
from nestling.config.schema import FullConfig, PrivacyConfig, RunConfig
from nestling.core.errors import ConfigError, ContextError, RunError, StorageError, WireError
from nestling.core.types import Progress
from nestling.federation.client import Worker
from nestling.federation.reference import References
from nestling.models.backbones import base_bytes
from nestling.models.resnet import make_resnet
from nestling.private import PrivacyWarning
from nestling.runs.checkpoint import Checkpoint, CheckpointWarning, newest_checkpoint
from nestling.runs.folder import create, read_status, reopen
from nestling.runs.ledger import read_charges
from nestling.runs.recorder import Recorder, read_rows, read_run
from nestling.runs.result import Result
from nestling.strategies.privacy import spent
from nestling.tasks.recall import Recall

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "nesterov": {"server.rule": "nesterov"},
    "adam": {"server.rule": "adam", "server.clients_per_round": 2},
    "optimizer": {"local.keep_optimizer": True},
    "yogi": {"server.rule": "yogi", "codec.down_kind": "rotated", "codec.down_bits": 4},
    "buckets": {"server.aggregate": "clipping", "server.weighting": "uniform", "codec.send": "state"},
    "ala": {"local.rule": "ala"},
    "ssi": {"local.rule": "ssi"},
    "feedback": {"codec.kind": "topk", "codec.share": 0.2, "codec.feedback": True},
    "stochastic": {"codec.bits": 4, "codec.rounding": "stochastic"},
    "powersgd": {"adapter": FullConfig(targets=("*conv*",)), "codec.kind": "powersgd", "codec.rank": 1},
}
"""Whatever keeps something between rounds."""

pytestmark = pytest.mark.filterwarnings("ignore::nestling.private.PrivacyWarning")

KEEPS = {"nesterov": "server", "adam": "server", "optimizer": "clients", "ala": "clients", "ssi": "clients"}
KEEPS |= {"feedback": "clients", "powersgd": "clients"}


def settings(name: str, out: Path, *, rounds: int = 4) -> RunConfig:
    made = config(out, rounds=rounds)
    tables: dict[str, dict[str, object]] = {}
    for key, value in SETTINGS[name].items():
        table, _, entry = key.partition(".")
        tables.setdefault(table, {})[entry] = value
    for table, values in tables.items():
        changed = values[""] if "" in values else dataclasses.replace(getattr(made, table), **values)
        made = dataclasses.replace(made, **{table: changed})
    return made


def stop_after(number: int):
    """A progress function that interrupts the run once round `number` is over."""

    def progress(step: Progress) -> None:
        if step.round == number:
            raise KeyboardInterrupt

    return progress


def interrupted(made: RunConfig, after: int, **options: object) -> Path:
    with pytest.raises(KeyboardInterrupt):
        run(made, progress=stop_after(after), **options)
    (path,) = Path(made.machine.out).iterdir()
    assert read_status(path) == "stopped"
    return path


@cache
def whole(name: str) -> tuple[Result, list, str]:
    from tempfile import mkdtemp

    result = run(settings(name, Path(mkdtemp(prefix="nestling-tests-"))))
    return result, *record(Path(result.run_dir))


def record(path: Path) -> tuple[list, str]:
    """The rows of rounds without their times, and those of messages."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(path / "metrics.jsonl")]
    return rows, (path / "bytes.jsonl").read_text()


def agrees(result: Result, other: Result) -> bool:
    own = {"seconds", "seconds_references", "run_dir", "name"}
    a, b = result.to_dict(), other.to_dict()
    return {k: v for k, v in a.items() if k not in own} == {k: v for k, v in b.items() if k not in own}


@pytest.mark.parametrize("name", SETTINGS)
def test_cat_054_a_resumed_run_is_the_run_to_the_bit(name: str, tmp_path: Path) -> None:
    path = interrupted(settings(name, tmp_path), 2)
    result = resume(path)
    expected, rows, messages = whole(name)
    assert agrees(result, expected)
    assert record(path) == (rows, messages)
    assert read_status(path) == "done"


@pytest.mark.parametrize("name", KEEPS)
def test_cat_061_what_is_kept_is_needed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = interrupted(settings(name, tmp_path), 2)

    def without(folder: Path) -> Checkpoint:
        found = newest_checkpoint(folder)
        assert found is not None
        assert getattr(found, KEEPS[name])
        return dataclasses.replace(found, **{KEEPS[name]: {}})

    monkeypatch.setattr("nestling.api.newest_checkpoint", without)
    assert resume(path).state_digest != whole(name)[0].state_digest


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Recorder, "message", 11),
        (Recorder, "round", 3),
        (nestling.adapters.store, "write_atomic", 8),
        (nestling.api, "write_checkpoint", 3),
    ],
)
def test_cat_054_killed_between_two_files_of_a_round(
    owner: object, name: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), []

    def killed(*args: object, **named: object) -> object:
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run(settings("plain", tmp_path))
    (path,) = tmp_path.iterdir()
    assert len(read_rows(path / "metrics.jsonl")) in (1, 2, 3)
    result = resume(path)
    expected, rows, messages = whole("plain")
    assert agrees(result, expected)
    assert record(path) == (rows, messages)


def test_a_run_ended_before_its_first_round_begins_with_it_and_says_so(tmp_path: Path) -> None:
    def at_once(step: Progress) -> None:
        if step.step == "federating":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings("plain", tmp_path), progress=at_once)
    (path,) = tmp_path.iterdir()
    assert agrees(resume(path), whole("plain")[0])
    assert "resumed after round 0" in (path / "log.txt").read_text()


def test_cat_058_twice_in_a_row_and_after_the_end(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 1)
    with pytest.raises(KeyboardInterrupt):
        resume(path, progress=stop_after(3))
    result = resume(path)
    assert agrees(result, whole("plain")[0])
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert resume(path) == result
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_after_the_last_round_only_the_result_is_missing(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 4)
    result = resume(path)
    assert agrees(result, whole("plain")[0])
    assert result.averaging_error is not None


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("lr = 0.03", "lr = 0.02", "local.lr was 0.03 and is 0.02"),
        ("seed = 0", "seed = 1", "seed was 0 and is 1"),
        ("rounds = 4", "rounds = 5", "rounds was 4 and is 5"),
        ("clients = 3", "clients = 2", "task.clients was 3 and is 2"),
    ],
)
def test_cat_059_changed_settings_are_named(old: str, new: str, named: str, tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 1)
    text = (path / "config.toml").read_text()
    assert old in text
    (path / "config.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=named):
        resume(path)
    (path / "config.toml").write_text(text)  # put back, as advised
    assert agrees(resume(path), whole("plain")[0])


def test_cat_060_other_workers_change_nothing(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 2)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("workers = 1", "workers = 3"))
    assert agrees(resume(path), whole("plain")[0])


def test_cat_059_another_base_is_refused(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 1)
    base = path / "base.safetensors"
    data = bytearray(base.read_bytes())
    data[-1] ^= 1
    base.write_bytes(data)
    with pytest.raises(WireError, match="not those that were saved"):
        resume(path)
    base.write_bytes(base_bytes(make_resnet("resnet8", width=8, channels=1, classes=10, seed=5)))
    with pytest.raises(ContextError, match="base was") as error:
        resume(path)
    assert error.value.exit_code == 3


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="not a run folder"):
            resume(path)


def test_cat_067_a_second_process_is_kept_out(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 1)
    with reopen(path), pytest.raises(RunError, match="in use") as error:
        resume(path)
    assert error.value.exit_code == 6
    assert agrees(resume(path), whole("plain")[0])


def test_cat_069_a_damaged_checkpoint_means_the_one_before(tmp_path: Path) -> None:
    path = interrupted(settings("nesterov", tmp_path), 3)
    newest = max((path / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-3])
    with pytest.warns(CheckpointWarning, match="round 2 is used"):
        result = resume(path)
    expected, rows, messages = whole("nesterov")
    assert agrees(result, expected)
    assert record(path) == (rows, messages)


def test_cat_069_without_a_whole_checkpoint_nothing_is_overwritten(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 2)
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(b"")
    before = record(path)
    with pytest.raises(WireError, match="no checkpoint that is whole"):
        resume(path)
    assert record(path) == before
    reopen(path).close()  # it is not locked


def test_the_rows_to_compare_with_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings("plain", tmp_path)
    made = dataclasses.replace(made, machine=dataclasses.replace(made.machine, references=True))
    path = interrupted(made, 1)
    monkeypatch.setattr("nestling.api.train_references", lambda *a, **k: pytest.fail("trained again"))
    result = resume(path)
    assert result.accuracy_local_only is not None
    assert result.seconds_references is not None
    given = References(0.25, float("nan"))
    other = interrupted(settings("plain", tmp_path / "given"), 1, references=given)
    assert (resume(other).accuracy_local_only, resume(other).accuracy_centralised) == (0.25, None)


@pytest.mark.parametrize("text", ["{}", "[]", '{"local_only": "x", "centralised": 0, "seconds": 1, "recalls": {}}'])
def test_damaged_references_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "references.json").write_text(text)
    with pytest.raises(WireError, match="damaged"):
        nestling.resume.read_references(tmp_path)


def test_a_run_out_of_patience_is_given_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: object, client: int, message: bytes) -> bytes:
        raise RuntimeError("away")

    with monkeypatch.context() as patched:
        patched.setattr("nestling.federation.client.Worker.handle", absent)
        with pytest.raises(RunError, match="rounds in a row"):
            run(settings("plain", tmp_path, rounds=6))
    (path,) = tmp_path.iterdir()
    assert read_status(path) == "failed"
    result = resume(path)
    assert [row["used"] for row in read_rows(path / "metrics.jsonl")] == [False] * 3 + [True] * 3
    assert result.rejected == {"client_error": 9}


def test_a_needle_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    made = needle_config(tmp_path / "whole", references=True)
    expected = run(made)
    cut = dataclasses.replace(made, machine=dataclasses.replace(made.machine, out=str(tmp_path / "cut")))
    result = resume(interrupted(cut, 1))
    assert agrees(result, expected)


def private(out: Path) -> RunConfig:
    made = settings("plain", out)
    server = dataclasses.replace(made.server, weighting="uniform")
    return dataclasses.replace(made, server=server, privacy=PrivacyConfig(noise=1.0))


def test_cat_094_a_private_run_charges_a_repeated_round_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    path = interrupted(private(tmp_path), 2)
    with monkeypatch.context() as patched:
        patched.setattr("nestling.api.write_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            resume(path)
    result = resume(path)
    assert [charge.round for charge in read_charges(path)] == [1, 2, 3, 3, 4]
    assert result.epsilon == spent([(1.0, 1.0)] * 5, 1e-5)
    assert read_run(path).result == result


def sampled(out: Path) -> RunConfig:
    """One of three clients on average, drawn in secret."""
    made = private(out)
    server = dataclasses.replace(made.server, clients_per_round=1)
    return dataclasses.replace(made, server=server, privacy=PrivacyConfig(noise=1.0, sampling="poisson"))


def test_a_secret_draw_spends_less_and_is_written_down_nowhere(tmp_path: Path) -> None:
    result = run(sampled(tmp_path))
    path = Path(result.run_dir)
    assert result.epsilon == spent([(1.0, 1 / 3)] * 4, 1e-5)
    assert result.epsilon < spent([(1.0, 1.0)] * 4, 1e-5)
    assert result.sampling_rate == 1 / 3
    assert [charge.mechanism for charge in read_charges(path)] == [(1.0, 1 / 3)] * 4
    rows = read_rows(path / "metrics.jsonl")
    assert [row["used"] for row in rows] == [True] * 4  # those of nobody, too
    assert all("client" not in name for row in rows for name in row)
    messages = read_rows(path / "bytes.jsonl")
    assert len(messages) == 2 * sum(row["asked"] for row in rows)
    assert all(message["client"] is None for message in messages)
    assert not (path / "messages" / "last-up.msg").exists()
    log = (path / "log.txt").read_text()
    assert "each client drawn with probability 0.3333" in log
    assert "client " not in log.replace("each client ", "")
    assert "drawn in secret" in (path / "report.html").read_text()
    assert read_run(path).result == result


def test_a_secret_draw_names_nobody_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: object, client: int, message: bytes) -> bytes:
        raise ValueError(f"client number {client}")

    monkeypatch.setattr("nestling.federation.client.Worker.handle", handle)
    monkeypatch.setattr("nestling.federation.loop.poisson_cohort", lambda clients, *, count: [2])
    result = run(sampled(tmp_path))
    assert result.rejected == {"client_error": 4}
    log = (Path(result.run_dir) / "log.txt").read_text()
    assert "dropped [client_error]" in log
    assert "client 2" not in log
    assert "client number" not in log


def test_a_run_whose_secret_draws_were_empty_is_noise_and_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestling.federation.loop.poisson_cohort", lambda clients, *, count: [])
    result = run(sampled(tmp_path))
    assert (result.bytes_up, result.bytes_down, result.rejected) == (0, 0, {})
    assert result.epsilon == spent([(1.0, 1 / 3)] * 4, 1e-5)
    digests = {path.name.rpartition("--")[2] for path in (Path(result.run_dir) / "checkpoints").iterdir()}
    assert len(digests) == 2  # the state moves all the same
    assert (Path(result.run_dir) / "report.html").exists()


def test_cat_094_a_resumed_run_draws_anew_in_secret_and_is_charged_for_the_round_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    drawn = []

    def draw(clients: Sequence[int], *, count: int) -> list[int]:
        drawn.append((list(clients), count))
        return [len(drawn) % 3]

    monkeypatch.setattr("nestling.federation.loop.poisson_cohort", draw)
    path = interrupted(sampled(tmp_path), 2)
    with monkeypatch.context() as patched:
        patched.setattr("nestling.api.write_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            resume(path)
    result = resume(path)
    assert drawn == [([0, 1, 2], 1)] * 5
    assert [charge.round for charge in read_charges(path)] == [1, 2, 3, 3, 4]
    assert result.epsilon == spent([(1.0, 1 / 3)] * 5, 1e-5)


def test_cat_094_a_ledger_that_lost_a_charge_ends_the_run(tmp_path: Path) -> None:
    path = interrupted(private(tmp_path), 2)
    ledger = path / "privacy.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(lines[0])
    with pytest.raises(WireError, match="1 of 2 charges"):
        resume(path)
    ledger.write_bytes(b"".join(lines))
    assert resume(path).epsilon == spent([(1.0, 1.0)] * 4, 1e-5)


def test_cat_046_privacy_for_few_clients_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(PrivacyWarning, match="3 clients a round"):
        result = run(private(tmp_path))
    assert "epsilon" in (Path(result.run_dir) / "report.html").read_text()


def test_a_private_run_writes_down_nothing_of_a_single_reply_but_what_it_says(tmp_path: Path) -> None:
    result = run(private(tmp_path))
    assert result.averaging_error is None
    assert not (Path(result.run_dir) / "messages" / "last-up.msg").exists()
    assert (Path(result.run_dir) / "messages" / "last-down.msg").exists()
    page = (Path(result.run_dir) / "report.html").read_text()
    assert "Not covered: how many replied and when, log.txt, checkpoints" in page


def test_other_data_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(images(), data)
    made = settings("plain", tmp_path / "runs")
    path = interrupted(dataclasses.replace(made, task=dataclasses.replace(made.task, path=str(data))), 2)
    labels = data / "train-labels-idx1-ubyte.gz"
    content = gzip.decompress(labels.read_bytes())
    labels.write_bytes(gzip.compress(content[:8] + bytes((x + 1) % 10 for x in content[8:])))
    with pytest.raises(ContextError, match="items"):
        resume(path)
    labels.write_bytes(gzip.compress(content))
    assert resume(path).state_digest == whole("plain")[0].state_digest


def test_a_report_that_cannot_be_written_is_written_by_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space left", where="report.html")

    with monkeypatch.context() as patched:
        patched.setattr("nestling.api.accuracy_against_bytes", full)
        with pytest.raises(StorageError) as error:
            run(settings("plain", tmp_path))
    assert error.value.exit_code == 8
    (path,) = tmp_path.iterdir()
    assert read_status(path) == "failed"
    assert agrees(resume(path), whole("plain")[0])
    assert (path / "accuracy_against_bytes.svg").exists()


def test_a_loss_that_is_no_number_is_kept_as_such(tmp_path: Path) -> None:
    row = Recall(0, "mk", 1, 0, 0, float("nan"), {0.1: (0, 1)}, [False], [False])
    with create(tmp_path, "run", "c0ffee00") as folder:
        nestling.resume.write_references(folder, References(0.0, 0.0, {"local only": [row]}), None)
        found = nestling.resume.read_references(folder.path)
        assert found is not None
        assert repr(found[0].recalls["local only"]) == repr([row])
        text = (folder.path / "references.json").read_text()
        (folder.path / "references.json").write_text(text.replace("[0, 1]", "1"))
        with pytest.raises(WireError, match="damaged"):
            nestling.resume.read_references(folder.path)


def test_a_run_that_ended_out_of_patience_is_not_done_by_resuming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Worker.handle, []

    def away(self: Worker, client: int, message: bytes) -> bytes:
        calls.append(client)
        if len(calls) > 3:
            raise RuntimeError("away")
        return original(self, client, message)

    monkeypatch.setattr("nestling.federation.client.Worker.handle", away)
    with pytest.raises(RunError, match="rounds in a row"):
        run(settings("plain", tmp_path))
    (path,) = tmp_path.iterdir()
    with pytest.raises(RunError, match="no round is left") as error:
        resume(path)
    assert error.value.exit_code == 7


def test_a_folder_without_settings_says_so(tmp_path: Path) -> None:
    path = interrupted(settings("plain", tmp_path), 1)
    (path / "config.toml").unlink()
    with pytest.raises(ConfigError, match="before its settings were written"):
        resume(path)


def test_gates_that_stay_with_clients_are_resumed_too(tmp_path: Path) -> None:
    made = needle_config(tmp_path / "whole")
    made = dataclasses.replace(made, adapter=dataclasses.replace(made.adapter, share="gates"))
    expected = run(made)
    cut = dataclasses.replace(made, machine=dataclasses.replace(made.machine, out=str(tmp_path / "cut")))
    path = interrupted(cut, 1)
    found = newest_checkpoint(path)
    assert found is not None
    assert all("adapter" in kept for kept in found.clients.values())
    assert agrees(resume(path), expected)


@pytest.mark.slow
def test_cat_054_kill_9_at_any_instant(tmp_path: Path) -> None:
    """A few of the instants; `benchmarks/kills.py` tries a hundred."""
    out = tmp_path / "runs"
    file = tmp_path / "small.toml"
    file.write_text(toml(out, data=images()).replace("rounds = 2", "rounds = 4"))
    command = [sys.executable, "-m", "nestling"]
    process = subprocess.Popen([*command, "run", str(file), "--machine.no-references"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"round=2"):
            process.kill()
            break
    process.wait()
    (path,) = out.iterdir()
    done = subprocess.run([*command, "resume", str(path), "--json"], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["state_digest"] == whole("plain")[0].state_digest
    assert record(path) == whole("plain")[1:]


def test_cat_057_a_terminated_run_exits_143_and_can_be_resumed(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(toml(tmp_path / "runs").replace("rounds = 2", "rounds = 100000"))
    command = [sys.executable, "-m", "nestling", "run", str(file), "--machine.no-references"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("round=1"):
                break
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, "nestling: terminated\n")
    (path,) = (tmp_path / "runs").iterdir()
    assert read_status(path) == "stopped"
    assert newest_checkpoint(path) is not None
