"""The one place where errors become exit codes, whatever the terminal, the pipe and the words typed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import finished, toml

from nestling.cli.main import COMMANDS, HELP, main
from nestling.core.errors import (
    ConfigError,
    ContextError,
    NestlingError,
    RemoteError,
    RunError,
    SeedError,
    StorageError,
    WireError,
)  # fmt: skip

NESTLING = [sys.executable, "-m", "nestling"]


def typed(*words: object, env: dict[str, str] | None = None, **kwargs) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    command = [*NESTLING, *(os.fspath(word) if isinstance(word, os.PathLike) else word for word in words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, **kwargs)


def test_help_answers_without_what_takes_long_to_import() -> None:
    program = """
import sys
from nestling.cli.main import main
codes = [main([word]) for word in ("--help", "-h", "help", "--version")]
heavy = {"torch", "numba", "numpy", "scipy", "matplotlib", "jinja2", "tyro", "rich", "safetensors", "sklearn"}
print(codes, sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] []", done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [["run", "-h"], ["plan", "--help"], ["run", "flite-digits", "--help"], ["new", "nonsense"], ["nonsense"]],
)
def test_reading_settings_needs_no_torch(words: list[str]) -> None:
    program = f"""
import sys
from nestling.cli.main import main
code = main({words!r})
assert not {{"torch", "numba", "matplotlib"}} & set(sys.modules), sorted(sys.modules)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == (2 if "nonsense" in words else 0), done.stderr


def test_help_names_every_command_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == HELP
    for command in COMMANDS:
        assert f"\n  {command} " in HELP
    kinds = (
        ConfigError("x"),
        ContextError("x"),
        SeedError("x"),
        WireError("x", "x"),
        StorageError("x"),
        RemoteError("x"),
    )
    codes = {kind.exit_code for kind in (*kinds, RunError("x"), RunError("x", locked=True))} | {130}
    assert codes == {2, 3, 4, 5, 6, 7, 8, 9, 130}
    text = " ".join(HELP.partition("exit codes:")[2].split())
    for code in codes:
        assert f" {code} " in text
    assert max(len(line) for line in HELP.splitlines()) <= 120


def test_no_command_shows_the_help_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: nestling" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "near"), [("rum", "run"), ("plann", "plan"), ("list", "ls"), ("messages", "message")])
def test_an_unknown_command_is_exit_2_with_the_near_one(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nestling: {word!r} is not a command.")
    assert f"Did you mean {near!r}?" in err


@pytest.mark.parametrize("word", ["--bogus", "", "-x", "\n", "日本"])
def test_anything_else_is_exit_2_with_the_commands_there_are(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert "Known: new, plan, pretrain, run" in capsys.readouterr().err


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("run", "plan")])
def test_every_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: nestling {command}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ConfigError, ContextError, SeedError, StorageError, RunError, RemoteError])
def test_an_error_is_one_line_on_the_standard_error_and_its_code(
    error: type[NestlingError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: list[str]) -> int:
        raise error("is wrong", where="here", remedy="Mend it.")

    monkeypatch.setattr("nestling.cli.show.ls", fail)
    assert main(["ls"]) == error("x").exit_code
    assert capsys.readouterr() == ("", "nestling: here: is wrong. Mend it.\n")


def test_cat_056_an_interrupt_is_exit_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("nestling.cli.show.ls", interrupted)
    assert main(["ls"]) == 130
    assert capsys.readouterr() == ("", "nestling: interrupted\n")


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("nestling.cli.show.ls", broken)
    with pytest.raises(ZeroDivisionError):
        main(["ls"])


# Pipes, terminals and languages.


@pytest.fixture(scope="module")
def runs() -> Path:
    """A folder with a finished run."""
    return Path(finished()[1].run_dir).parent


LOOKS = [
    ["--help"],
    ["new"],
    ["plan", "flite-digits"],
    ["ls", "RUNS"],
    ["run", "-h"],
]


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_cat_075_a_reader_that_has_gone_is_no_error(words: list[str], runs: Path) -> None:
    read, write = os.pipe()
    os.close(read)  # surer than `| head -1`, which may come too late
    words = [str(runs) if word == "RUNS" else word for word in words]
    done = subprocess.run([*NESTLING, *words], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_cat_075_head_leaves_no_traceback(runs: Path) -> None:
    shell = shutil.which("sh")
    assert shell
    line = f"'{sys.executable}' -m nestling plan flite-digits --json | head -1"
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("words", [["--help"], ["new"], ["ls", "RUNS"], ["run", "-h"], ["nonsense"]], ids=" ".join)
def test_cat_075_a_closed_standard_output_is_no_error(words: list[str], runs: Path) -> None:
    words = [str(runs) if word == "RUNS" else word for word in words]
    shell = shutil.which("sh")
    assert shell
    quoted = " ".join(f"'{word}'" for word in [*NESTLING, *words])
    done = subprocess.run([shell, "-c", f"{quoted} >&-"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == (2 if "nonsense" in words else 0), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["ls", "RUNS"], ["report", "RUN"], ["run", "nönsense"]], ids=" ".join)
def test_cat_075_a_terminal_of_plain_letters_is_served(words: list[str], runs: Path, tmp_path: Path) -> None:
    run = next(runs.iterdir())
    words = [{"RUNS": str(runs), "RUN": str(run)}.get(word, word) for word in words]
    words += ["--out", str(tmp_path)] if words[0] == "report" else []
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = typed(*words, env=env)
    assert done.returncode == (2 if "nönsense" in words else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()


def test_cat_075_no_color_and_pipes_get_no_escapes(runs: Path) -> None:
    for env in ({"NO_COLOR": "1", "FORCE_COLOR": ""}, {"TERM": "dumb"}, {}):
        done = typed("ls", runs, env=env)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout


def test_cat_074_a_path_that_cannot_be_printed_is_printed_somehow(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xe9.toml"
    done = subprocess.run([*NESTLING, "new", "flite-digits", path], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert os.path.isfile(path)
    done = subprocess.run([*NESTLING, "plan", "flite-digits", "--machine.out", b"\xff"], capture_output=True)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_cat_074_spaces_and_any_alphabet_in_every_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "mit leer é 日本 [bold] $x"
    place.mkdir()
    data = place / "my data"
    shutil.copytree(finished()[0].task.path, data)
    settings = place / "a b.toml"
    settings.write_text(toml(place / "my runs", data=data), "utf-8")
    assert main(["run", str(settings), "--json", "--rounds", "1", "--machine.no-references"]) == 0
    result = json.loads(capsys.readouterr().out)
    run = Path(result["run_dir"])
    assert run.parent == place / "my runs"
    assert main(["ls", str(run.parent)]) == 0
    assert run.name in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert main(["message", str(run / "messages" / "last-up.msg")]) == 0


def test_python_dash_m_is_the_same_command() -> None:
    from nestling import __version__

    done = typed("--version")
    assert (done.returncode, done.stdout) == (0, f"nestling {__version__}\n")
    assert typed("nonsense").returncode == 2


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=lambda kind: kind.name)
def test_cat_056_057_a_second_signal_ends_the_process_at_once(kind: signal.Signals) -> None:
    program = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import nestling.cli.show
from nestling.cli.main import main

def slow(args):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("saving", flush=True)
        time.sleep(60)

nestling.cli.show.ls = slow
sys.exit(main(["ls"]))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for said in ("begun", "saving"):
            assert process.stdout.readline().strip() == said
            process.send_signal(kind)
            asked = time.monotonic()
        process.wait(timeout=50)
    assert process.returncode == -kind
    assert time.monotonic() - asked < 10  # a tenth of a second, but for a machine that is busy
