"""`nestling run`: file, then flags; progress for people or for programs; each way to fail has its code."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small import config, finished, images, toml

from nestling.cli.main import main
from nestling.cli.run import ProgressLine, RunCommand, read_command
from nestling.config.load import load_config
from nestling.config.schema import FullConfig
from nestling.core.types import Progress
from nestling.runs.folder import read_status
from nestling.runs.recorder import read_result, read_rows
from nestling.runs.result import Result

QUICK = ["--rounds", "1", "--machine.no-references"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file of settings."""
    path = tmp_path / "small.toml"
    path.write_text(toml(tmp_path / "runs"))
    return path


def only_run(out: Path) -> Path:
    (path,) = out.iterdir()
    return path


def line_of(err: str) -> str:
    """The error as one line, also if it was put into a box."""
    return " ".join(re.sub(r"[^\x20-\x7e\n…≥é]", " ", err).split())


# Settings.


def test_flags_override_the_file_and_nothing_else(small: Path) -> None:
    command = read_command(
        RunCommand, [str(small), "--rounds", "20", "--codec.bits", "4", "--adapter.dim", "7", "--seed", str(2**64 - 1)],
        verb="run",
    )  # fmt: skip
    file = load_config(small)
    assert command.config == dataclasses.replace(
        file,
        rounds=20,
        seed=2**64 - 1,
        codec=dataclasses.replace(file.codec, bits=4),
        adapter=dataclasses.replace(file.adapter, dim=7),
    )
    assert not command.json
    assert not command.quiet


def test_without_flags_the_file_is_what_runs(small: Path) -> None:
    assert read_command(RunCommand, [str(small)], verb="run").config == load_config(small)
    assert isinstance(read_command(RunCommand, ["fedavg-digits"], verb="run").config.adapter, FullConfig)


@pytest.mark.parametrize("preset", ["flite-digits", "needle-smollm2"])  # whose default is yes, and no
def test_a_setting_of_yes_or_no_can_be_given_either_way_whatever_the_preset_says(preset: str) -> None:
    for flag, said in (("--machine.references", True), ("--machine.no-references", False)):
        assert read_command(RunCommand, [preset, flag], verb="run").config.machine.references is said


@pytest.mark.parametrize("name", ["flite-digits", "fedavg-digits"])
def test_every_setting_is_a_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", name, "--help"]) == 0
    text = capsys.readouterr().out
    settings = load_config(name)
    for table in dataclasses.fields(settings):
        value = getattr(settings, table.name)
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else [table]:
            flag = field.name if field is table else f"{table.name}.{field.name}"
            assert re.search(rf"--{re.escape(flag.replace('_', '-'))}[ ,]", text), flag


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--roundz", "3"], "--rounds"),
        (["--rounds", "-1"], "rounds: -1 is not allowed. Give at least 1."),
        (["--rounds", "1e9"], "--rounds"),
        (["--rounds", "true"], "--rounds"),
        (["--rounds"], "--rounds"),
        (["--seed", "-1"], "seed: -1 is not an integer from 0 to 2^64 - 1."),
        (["--seed", str(2**64)], "seed: 18446744073709551616 is not an integer"),
        (["--seed", "1e3"], "--seed"),
        (["--seed", "0xff"], "--seed"),
        (["--adapter.seed", "-1"], "adapter.seed: -1"),
        (["--local.lr", "nan"], "local.lr: nan is not allowed. Give more than 0."),
        (["--local.lr", "inf"], "local.lr: inf is not allowed."),
        (["--local.lr", "-1"], "local.lr: -1.0 is not allowed."),
        (["--local.momentum", "1"], "local.momentum"),
        (["--codec.bits", "7"], "--codec.bits"),
        (["--task.data", "mnist"], "--task.data"),
        (["--base.width", "12"], "base.width: 12 is not a multiple of 8."),
        (["--server.clients_per_round", "99"], "server.clients_per_round: asks for 99 of 3 clients."),
        (["--adapter.rank", "5"], "rank 5 is larger than dim 4"),
        (["--name", "a/b"], "name: 'a/b' is not allowed."),
        (["--machine.device", "gpu"], "machine.device: 'gpu' cannot be used"),
        (["--adapter.targets", "*cnov*"], "adapter.targets: pattern '*cnov*' matches no"),
        (["stray"], "stray"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_cat_076_a_flag_that_cannot_be_used_is_exit_2_and_named(
    flags: list[str], said: str, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", str(small), *flags]) == 2
    out, err = capsys.readouterr()
    assert said in line_of(err)
    assert "round=" not in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("round = 3", "round: is not a setting. Did you mean 'rounds'?"),
        ("rounds = -1", "rounds: -1 is not allowed. Give at least 1."),
        ("rounds = true", "rounds: True is bool, not int. Give a whole number."),
        ('local.lr = "1e-3"', "local.lr: '1e-3' is str, not float. Give a number."),
        ("rounds = 1\nrounds = 2\n", "small.toml: is not valid TOML (Cannot overwrite a value (at line 2"),
        ("seed = -1", "seed: -1 is not an integer from 0 to 2^64 - 1."),
    ],
)
def test_cat_076_a_file_that_cannot_be_used_is_exit_2_in_one_line(
    line: str, said: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.write_text(line)
    assert main(["run", str(small)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nestling: ")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [[], ["--json"], ["--rounds", "3"], ["no-such.toml"], ["flite-digit"], ["."], ["x" * 5000]]
)
def test_a_file_that_is_not_there_is_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert "CONFIG" in out + err or "flite-digits" in err


# What a run tells.


def test_json_is_one_object_on_the_last_line_and_nothing_else(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(small), "--json", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    result = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    wanted = {
        "method", "seed", "rounds", "accuracy", "accuracy_base", "accuracy_local_only", "accuracy_centralised",
        "bytes_up", "bytes_down", "run_dir",
    }  # fmt: skip
    assert wanted <= result.keys()
    assert all(result[key] is not None for key in wanted)
    assert (result["method"], result["seed"], result["rounds"]) == ("flite", 0, 1)
    assert result["bytes_up"] == result["bytes_down"] == 3 * (4 * result["trainable_parameters"] + 64)
    assert Result.from_dict(result) == read_result(Path(result["run_dir"]))
    assert "round=1/1" in err  # progress is for people, who read the standard error
    recorded = (Path(result["run_dir"]) / "command.txt").read_text()
    assert recorded.startswith("nestling run ")
    assert recorded.endswith("--json --rounds 1\n")


def test_without_references_json_says_null(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(small), "--json", "--quiet", *QUICK]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["accuracy_local_only"] is None
    assert result["accuracy_centralised"] is None
    assert err == ""


def test_a_pipe_gets_one_line_a_round_and_the_table(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(small)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rounds = re.findall(r"^round=(\d)/2 clients=3/3 accuracy=0\.\d{4} bytes=(\d+) seconds=\d+\.\d$", out, re.MULTILINE)
    assert [number for number, _ in rounds] == ["1", "2"]
    assert int(rounds[1][1]) == 2 * int(rounds[0][1])
    for label in ("frozen base", "local only", "flite, float32", "centralised"):
        assert label in out
    run = only_run(small.parent / "runs")
    assert out.splitlines()[-1] == f"{run}/report.html"  # whole, however narrow the terminal


def test_quiet_shows_the_table_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(small), "--quiet", *QUICK]) == 0
    out, _ = capsys.readouterr()
    assert "round=" not in out
    assert "federating" not in out
    assert "flite, float32" in out


def test_the_largest_seed_works_by_command(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = str(2**64 - 1)
    assert main(["run", str(small), "--json", "--seed", seed, "--base.pretrain-on", "none", *QUICK]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["seed"] == 2**64 - 1
    assert load_config(Path(result["run_dir"]) / "config.toml").seed == 2**64 - 1


def step(number: int, within: str = "") -> Progress:
    return Progress("" if number or within else "federating", number, 4, 0.5, 2, 3, 1000 * number, 1.5, within)


def test_progress_in_a_pipe_has_stable_keys_and_no_repetition(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(label="seed 0:") as line:
        for number in (0, 0, 1, 1, 2):
            line.show(step(number))
    out, _ = capsys.readouterr()
    assert out.splitlines() == [
        "seed 0: federating",
        "seed 0: round=1/4 clients=2/3 accuracy=0.5000 bytes=1000 seconds=1.5",
        "seed 0: round=2/4 clients=2/3 accuracy=0.5000 bytes=2000 seconds=1.5",
    ]


def test_progress_on_a_terminal_is_one_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with ProgressLine(to_stderr=True) as line:
        line.show(step(2))
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" * 12 in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
    assert "round=2/4" in err


def test_within_a_long_round_a_pipe_is_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("nestling.cli.run.time.monotonic", lambda: now[0])
    with ProgressLine() as line:
        for seconds, told in [(0, step(1)), (59, step(1, "1 of 4")), (61, step(1, "2 of 4")), (100, step(1, "3 of 4"))]:
            now[0] = seconds
            line.show(told)
    out, _ = capsys.readouterr()
    assert out.splitlines() == [str(step(1)), "2 of 4"]


def test_within_a_round_the_terminal_still_shows_the_round_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with ProgressLine(label="seed 0:") as line:
        line.show(step(2))
        line.show(step(2, "round 3: 1 of 4 clients have answered"))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"seed 0: round=2/4 .* seconds=1\.5  round 3: 1 of 4 clients have answered", shown)


# What goes wrong outside the settings.


@pytest.mark.parametrize("flags", [["--task.path", "/nowhere"], ["--base.weights", "/nowhere/base.safetensors"]])
def test_cat_018_data_or_weights_that_are_missing_are_exit_3(
    flags: list[str], small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(small), *flags]) == 3
    _, err = capsys.readouterr()
    assert "/nowhere" in err
    assert "Traceback" not in err
    assert read_status(only_run(small.parent / "runs")) == "failed"


def test_cat_018_weights_of_another_network_are_exit_3(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(Path(finished()[1].run_dir) / "base.safetensors")
    for flags in (["--base.width", "16"], ["--base.model", "resnet18"]):
        assert main(["run", str(small), "--base.weights", weights, *flags]) == 3
        assert "Check base.model, base.width" in capsys.readouterr().err


def test_cat_069_weights_that_are_damaged_are_exit_5(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (Path(finished()[1].run_dir) / "base.safetensors").read_bytes()
    weights = tmp_path / "base.safetensors"
    for data in (good[:-1], good[: len(good) // 2], b"", b"x" * 100):
        weights.write_bytes(data)
        assert main(["run", str(small), "--base.weights", str(weights)]) == 5
        assert str(weights) in capsys.readouterr().err


def test_cat_069_data_that_is_damaged_is_exit_5(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(images(), data)
    file = data / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["run", str(small), "--task.path", str(data)]) == 5
    assert str(file) in capsys.readouterr().err


def test_cat_066_a_folder_that_cannot_be_written_is_exit_2_before_any_training(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        assert main(["run", str(small), "--machine.out", str(out)]) == 2
        printed, err = capsys.readouterr()
        assert printed == ""
        assert str(tmp_path / "file") in err
    assert (tmp_path / "file").read_text() == "mine"


def test_cat_049_no_usable_reply_is_exit_7(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A learning rate at which the first step leaves the finite numbers, on every client.
    flags = ["--local.lr", "1e38", "--local.optimizer", "sgd", "--rounds", "9", "--machine.no-references"]
    assert main(["run", str(small), *flags]) == 7
    out, err = capsys.readouterr()
    assert "3 rounds in a row had too few usable replies" in err
    assert "log.txt" in err
    assert out.count("clients=0/3") == 3


def test_cat_056_control_c_ends_a_run_with_130_and_keeps_the_round(small: Path) -> None:
    command = [sys.executable, "-m", "nestling", "run", str(small), "--machine.no-references", "--rounds", "100000"]
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process inherits it where it is ignored
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, heard)
        assert process.stdout
        for line in process.stdout:
            if line.startswith("round=2"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "nestling: interrupted\n")
    run = only_run(small.parent / "runs")
    assert read_status(run) == "stopped"
    assert len(read_rows(run / "metrics.jsonl")) >= 2
    assert (run / "adapter" / "adapter.safetensors").is_file()


def test_cat_075_a_run_whose_reader_has_gone_is_finished_all_the_same(small: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nestling", "run", str(small), *QUICK]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_status(only_run(small.parent / "runs")) == "done"


# The demo is three such runs.


def test_the_demo_is_flite_twice_and_fedavg_on_one_federation() -> None:
    from nestling.cli.demo import methods

    flite, int4, fedavg = methods(3, "here")
    assert [c.method for c in (flite, int4, fedavg)] == ["flite", "flite", "fedavg"]
    assert (flite.codec.bits, int4.codec.bits, fedavg.codec.bits) == (32, 4, 32)
    assert {(c.seed, c.task, c.base, c.rounds, c.machine.out) for c in (flite, int4, fedavg)} == {
        (3, flite.task, flite.base, flite.rounds, "here")
    }
    assert len({c.name for c in (flite, int4, fedavg)}) == 3


def test_the_demo_ends_with_a_table_a_page_and_one_object_per_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import nestling.cli.demo

    def methods(seed: int, out: str) -> list:
        flite = config(out, references=True, rounds=1, seed=seed)
        int4 = dataclasses.replace(flite, codec=dataclasses.replace(flite.codec, bits=4))
        return [flite, int4, dataclasses.replace(flite, adapter=FullConfig())]

    monkeypatch.setattr(nestling.cli.demo, "methods", methods)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["demo", "--out", str(tmp_path / "runs"), "--json", "--markdown"]) == 0
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(r["method"], r["codec"]) for r in results] == [
        ("flite", "float32"), ("flite", "int4-message"), ("fedavg", "float32"),
    ]  # fmt: skip
    assert results[0]["accuracy_local_only"] == results[1]["accuracy_local_only"]
    assert results[1]["seconds_references"] is None  # shared, not trained again
    assert "| method |" in out
    assert "flite, int4-message" in err
    for name in ("demo.html", "demo.svg", "demo.png", "demo.csv"):
        assert (tmp_path / "runs" / name).is_file()


def test_a_seed_of_the_demo_that_is_none_is_found_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seeds", "0", "-1", "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "seed: -1 is not an integer" in err
    assert out == ""
