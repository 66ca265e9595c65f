"""The verbs that only look, on good runs and on what is left of bad ones."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from small import finished

from nestling.cli.main import main
from nestling.config.load import load_config, preset_names


@pytest.fixture
def run() -> Path:
    """A finished run, to look at."""
    return Path(finished()[1].run_dir)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A finished run, to spoil."""
    return Path(shutil.copytree(run, tmp_path / "runs" / run.name))


# new


def test_new_without_a_name_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new"]) == 0
    assert capsys.readouterr().out.split() == preset_names()


def test_new_writes_beside_you_and_says_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "flite-digits"]) == 0
    assert "nestling run flite-digits.toml" in capsys.readouterr().out
    assert load_config("flite-digits.toml") == load_config("flite-digits")


def test_new_quotes_a_path_that_a_shell_would_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a b.toml"
    assert main(["new", "flite-digits", str(path)]) == 0
    assert f"nestling run '{path}'" in capsys.readouterr().out


def test_new_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# mine")
    (tmp_path / "link.toml").symlink_to(tmp_path / "elsewhere")
    for taken in (path, tmp_path / "link.toml", tmp_path):
        assert main(["new", "flite-digits", str(taken)]) == 2
        assert str(taken) in capsys.readouterr().err
    assert path.read_text() == "# mine"
    assert not (tmp_path / "elsewhere").exists()


def test_new_says_when_it_cannot_write_or_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "flite-digits", str(tmp_path / "none" / "a.toml")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err
    assert main(["new", "flite-digts", str(tmp_path / "a.toml")]) == 2
    assert "Did you mean 'flite-digits'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ls


def test_ls_shows_a_run_by_its_whole_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run.parent)]) == 0
    out, _ = capsys.readouterr()
    assert run.name in out
    assert "done" in out
    assert f"{finished()[1].accuracy:.1%}" in out


def test_ls_keeps_a_long_name_whole_in_a_pipe(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "flite-cifar100-resnet18--20260101-000000--abcd"
    shutil.copytree(run, tmp_path / name)
    assert main(["ls", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    assert name in out
    assert all(heading in out for heading in ("status", "round", "accuracy", "bytes", "age"))
    assert "…" not in out
    assert len({len(line) for line in out.splitlines()}) == 1


def test_a_name_writes_to_the_terminal_what_can_be_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "a\x1b[31m[b]:cat:--20260101-000000--abcd"))
    shown = "a\\x1b[31m[b]:cat:--20260101-000000--abcd"
    path = folder / "messages" / "a\x1b[31m.msg"
    path.write_bytes((run / "messages" / "last-up.msg").read_bytes())
    for words, code, part in (
        (["ls", str(tmp_path)], 0, shown),
        (["report", str(folder)], 0, shown),
        (["message", str(path)], 0, "a\\x1b[31m.msg"),
        (["message", str(folder / "no\x1b.msg")], 3, "no\\x1b.msg"),
        (["report", str(folder), "--out", str(folder / "no\x1b")], 2, "no\\x1b"),
    ):
        assert main(words) == code
        said = "".join(capsys.readouterr())
        assert part in said
        assert "\x1b" not in said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("status", b"[/bold]\n"),
        ("status", b"\xff\x1b[31m"),
        ("status", b""),
        ("metrics.jsonl", b"[1, 2]\n"),
        ("metrics.jsonl", b'{"round": 1, "accuracy": NaN}\n'),
        ("metrics.jsonl", b"\x00\n"),
        ("metrics.jsonl", b'{"round": 1, "accuracy": "abc"}\n'),
        ("metrics.jsonl", b'{"round": 1, "accuracy": 1' + b"0" * 400 + b"}\n"),
    ],
)
def test_cat_069_ls_shows_a_damaged_run_beside_the_good_one(
    file: str, content: bytes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "spoilt"):
        shutil.copytree(run, tmp_path / f"{name}--20260101-000000--abcd")
    (tmp_path / "spoilt--20260101-000000--abcd" / file).write_bytes(content)
    assert main(["ls", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "damaged" in out
    assert "good--20260101-000000--abcd" in out
    assert "\x1b" not in out
    assert main(["ls", str(tmp_path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["status"] for row in rows] == ["done", "damaged"]
    assert rows[0]["note"] == ""
    assert rows[1]["note"]


def test_ls_of_no_folder_or_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path / "none")]) == 2
    assert "Give the folder that holds the runs." in capsys.readouterr().err
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["ls", str(tmp_path)]) == 0


# report


def test_report_of_one_run_lies_in_its_folder(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "report.html").unlink()
    assert main(["report", str(copied)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "flite, float32" in out
    assert str(copied / "report.html") in out.splitlines()
    assert (copied / "report.html").is_file()


def test_report_of_two_seeds_is_one_row_with_its_spread(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = finished(seed=1)[1].run_dir
    monkeypatch.chdir(tmp_path)
    first = tmp_path / run.name
    shutil.copytree(run, first)
    assert main(["report", str(first), other, "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # seeds may differ without a note
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(out))}
    assert list(rows) == ["frozen base", "local only", "flite, float32", "centralised"]
    assert rows["flite, float32"]["seeds"] == "2"
    accuracies = [finished()[1].accuracy, finished(seed=1)[1].accuracy]
    assert float(rows["flite, float32"]["accuracy"]) == pytest.approx(sum(accuracies) / 2)
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "accuracy_against_bytes.svg").is_file()


@pytest.mark.parametrize(
    ("name", "begins"), [("markdown", "| method |"), ("latex", "\\begin{table}"), ("csv", "method,")]
)
def test_report_prints_for_papers_and_programs(
    name: str, begins: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--format", name, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(begins)
    assert err == ""
    assert "report.html" not in out  # nothing but the table, so that it can be redirected
    assert (tmp_path / "report.html").is_file()


def test_report_notes_what_else_differs(
    copied: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = copied / "config.toml"
    settings.write_text(settings.read_text().replace("alpha = 1.0", "alpha = 9.0"))
    assert main(["report", str(run), str(copied), "--format", "markdown", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| method |")
    assert "note: the runs also differ in task.alpha: 1.0, 9.0" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nosuch"], 2, "nosuch: is not a run folder. See 'nestling ls'"),
        (["RUN", "nosuch"], 2, "nosuch: is not a run folder."),
        (["RUN", "--out", "nosuch"], 2, "nosuch: is not a folder. Make it first."),
        (["RUN", "--format", "pdf"], 2, "--format: 'pdf' is not a format. Give table, markdown, latex or csv."),
        ([], 2, ""),
    ],
)
def test_report_says_what_is_missing(
    words: list[str], code: int, said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(str(run) if word == "RUN" else word for word in words)]) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cat_069_a_run_without_a_result_or_with_a_damaged_one(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = copied / "result.json"
    result.write_text(result.read_text()[:-40])
    assert main(["report", str(copied)]) == 5
    assert "result.json" in capsys.readouterr().err
    result.unlink()
    assert main(["report", str(copied)]) == 3
    assert "no run to show has a result" in capsys.readouterr().err


def test_report_shows_nothing_from_outside_the_folder(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("root:x:0")
    (copied / "config.toml").unlink()
    (copied / "config.toml").symlink_to(tmp_path / "secret")
    (copied / "report.html").unlink()
    assert main(["report", str(copied)]) == 5
    assert "config.toml: cannot be read" in capsys.readouterr().err
    assert not (copied / "report.html").exists()


# message


def test_message_takes_a_message_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = finished()[1]
    for name, direction in (("last-up.msg", "uplink"), ("last-down.msg", "downlink")):
        path = run / "messages" / name
        assert main(["message", str(path), "--json"]) == 0
        header = json.loads(capsys.readouterr().out)
        assert header["direction"] == direction
        assert (header["round"], header["codec"], header["version"]) == (2, "float32", 1)
        assert header["payload_bytes"] == result.payload_bytes_up
        assert header["total_len"] == path.stat().st_size
        assert main(["message", str(path)]) == 0
        table = capsys.readouterr().out
        assert direction in table
        assert name in table
        assert header["digest"] in table


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 100, -1])
def test_cat_004_a_truncated_message_is_exit_5(
    keep: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.msg"
    path.write_bytes((run / "messages" / "last-up.msg").read_bytes()[:keep])
    assert main(["message", str(path)]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nestling: message [")
    assert "cut off" in err


def test_cat_003_a_changed_message_or_another_file_is_exit_5(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray((run / "messages" / "last-up.msg").read_bytes())
    data[80] ^= 1
    path = tmp_path / "[red]x[bold].msg"
    for content, code in ((bytes(data), "digest"), ((run / "result.json").read_bytes(), "magic")):
        path.write_bytes(content)
        assert main(["message", str(path)]) == 5
        assert f"[{code}]" in capsys.readouterr().err
    path.write_bytes((run / "messages" / "last-up.msg").read_bytes())
    assert main(["message", str(path)]) == 0
    assert "[red]x[bold].msg" in capsys.readouterr().out


def test_a_message_that_is_not_there_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for missing in (tmp_path / "none.msg", tmp_path, tmp_path / ("x" * 5000)):
        assert main(["message", str(missing)]) == 3
        assert "there is no such file. See messages/ in a run's folder." in capsys.readouterr().err
    assert main(["message"]) == 2


def test_a_file_larger_than_any_message_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "large.msg").open("wb") as file:
        file.truncate(2**32)  # takes no space
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("was read"))
    assert main(["message", str(tmp_path / "large.msg")]) == 5
    assert "at most 4,294,967,295 bytes" in capsys.readouterr().err


def test_a_message_behind_a_link_is_shown_and_a_pipe_is_not_waited_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link.msg").symlink_to(run / "messages" / "last-up.msg")
    os.mkfifo(tmp_path / "pipe.msg")
    assert main(["message", str(tmp_path / "link.msg")]) == 0
    assert main(["message", str(tmp_path / "pipe.msg")]) == 3
