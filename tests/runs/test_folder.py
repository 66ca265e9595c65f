"""A run's folder: made or refused before training, locked by the kernel, never half written."""

import errno
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.errors import ConfigError, RunError, StorageError, WireError
from nestling.runs import folder as folders
from nestling.runs.files import LineFile, from_json, last_line, printable, read_file, read_lines, row_of, to_json
from nestling.runs.folder import create, list_runs, read_status

HOLD = """
import sys, time
from pathlib import Path
from nestling.runs.folder import create
folder = create(Path(sys.argv[1]), "demo", "c0ffee")
print("held", flush=True)
time.sleep(60)
"""


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    now = datetime(2026, 5, 1, 12, 30, 5)
    paths = [create(tmp_path / "a" / "runs", "demo", "c0ffee", now=now).path for _ in range(2)]
    assert [path.name for path in paths] == ["demo--20260501-123005--c0ff", "demo--20260501-123005--c0ff-2"]
    assert all(read_status(path) == "running" for path in paths)


@pytest.mark.parametrize("name", ["", "-x", "../x", "a/b", "a\nb", "a\0b", ".x", "x" * 65, "a b"])
def test_a_name_that_could_be_a_path_or_an_option_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot name a run"):
        create(tmp_path, name, "c0ffee")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["with space", "unicode-é-日本", "-leading", "new\nline", "s" * 200, "\udcff"])
def test_odd_places_work(tmp_path, part):
    with create(tmp_path / part, "日本", "c0ffee") as folder:
        folder.write("messages/x.msg", b"abc")
    assert [run.name for run in list_runs(tmp_path / part)] == ["日本"]


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_a_config_error(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file") as caught:
        create(tmp_path / "file" / below, "demo", "c0ffee")
    assert caught.value.exit_code == 2


def test_a_path_with_a_zero_byte_is_a_config_error():
    with pytest.raises(ConfigError):
        create(Path("a\0b"), "demo", "c0ffee")


@pytest.mark.parametrize(("code", "exit_code"), [(errno.EROFS, 2), (errno.EACCES, 2), (errno.ENOSPC, 8)])
def test_a_place_that_refuses_the_first_file_leaves_nothing_behind(tmp_path, monkeypatch, code, exit_code):
    def refuse(handle, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises((ConfigError, StorageError)) as caught:
        create(tmp_path / "runs", "demo", "c0ffee")
    assert caught.value.exit_code == exit_code
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    folder = create(tmp_path, "demo", "c0ffee")
    folder.write("result.json", b"old")
    before = sorted(os.listdir(folder.path))

    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="12,345 bytes") as caught:
        folder.write("result.json", bytes(12_345))
    assert str(folder.path / "result.json") in str(caught.value)
    assert (folder.path / "result.json").read_bytes() == b"old"
    assert sorted(os.listdir(folder.path)) == before


def test_a_failed_sync_is_a_failure(tmp_path, monkeypatch):
    folder = create(tmp_path, "demo", "c0ffee")

    def broken(handle):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError):
        folder.write("result.json", b"new")
    assert not (folder.path / "result.json").exists()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:3]))
    with create(tmp_path, "demo", "c0ffee") as folder:
        folder.write("x", b"0123456789")
        LineFile(folder.path / "y").append("0123456789")
    assert (folder.path / "x").read_bytes() == b"0123456789"
    assert (folder.path / "y").read_bytes() == b"0123456789\n"


def test_a_link_at_the_target_is_replaced_and_one_at_a_log_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = create(tmp_path / "runs", "demo", "c0ffee")
    for name in ("result.json", "log.txt"):
        (folder.path / name).symlink_to(victim)
    folder.write("result.json", b"new")
    assert (folder.path / "result.json").read_bytes() == b"new"
    assert not (folder.path / "result.json").is_symlink()
    with pytest.raises(StorageError):
        LineFile(folder.path / "log.txt")
    assert victim.read_text() == "mine"


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = create(tmp_path / "runs", "demo", "c0ffee")
    open_file, planted = os.open, []

    def plant_first(path, flags, *mode, **more):
        if ".tmp." in str(path) and not planted:
            planted.append(path)
            os.symlink(victim, path)
        return open_file(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", plant_first)
    with pytest.raises(StorageError):
        folder.write("result.json", b"new")
    assert planted
    assert victim.read_text() == "mine"


def test_files_respect_the_umask(tmp_path):
    mask = os.umask(0o027)
    try:
        with create(tmp_path, "demo", "c0ffee") as folder:
            folder.write("result.json", b"x")
    finally:
        os.umask(mask)
    assert (folder.path / "result.json").stat().st_mode & 0o777 == 0o640
    assert (folder.path / "run.lock").stat().st_mode & 0o777 == 0o600


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "held"
        (run,) = list_runs(tmp_path)
        assert run.status == "running"
        with pytest.raises(RunError, match=f"process {holder.pid}") as caught:
            folders._take_lock(run.path)
        assert caught.value.exit_code == 6
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert list_runs(tmp_path)[0].status == "stopped"
    os.close(folders._take_lock(run.path))


def test_closing_a_run_frees_it(tmp_path):
    folder = create(tmp_path, "demo", "c0ffee")
    folder.close()
    folder.close()
    os.close(folders._take_lock(folder.path))


def test_a_file_system_without_locks_warns(tmp_path, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="no locks"):
        create(tmp_path, "demo", "c0ffee").close()


def test_list_runs_shows_damage_and_passes_over_strangers(tmp_path):
    for number, damage in enumerate(["none", "status", "metrics", "missing"]):
        with create(tmp_path, f"run-{number}", "c0ffee", now=datetime(2026, 1, 1 + number)) as folder:
            folder.set_status("done")
            LineFile(folder.path / "metrics.jsonl").append('{"round": 4, "accuracy": 0.5, "bytes_total": 90}')
            if damage == "status":
                (folder.path / "status").write_bytes(b"\xff\x1b[31m")
            if damage == "metrics":
                (folder.path / "metrics.jsonl").write_text('{"round": NaN}\n')
            if damage == "missing":
                (folder.path / "status").unlink()
    (tmp_path / "somebody's folder").mkdir()
    (tmp_path / "a file").write_text("x")
    runs = list_runs(tmp_path)
    assert [run.status for run in runs] == ["done", "damaged", "damaged", "damaged"]
    assert (runs[0].round, runs[0].accuracy, runs[0].wire_bytes) == (4, 0.5, 90)
    assert all(run.note and "\x1b" not in run.note for run in runs[1:])


def test_no_folder_is_a_config_error(tmp_path):
    for call in (list_runs, read_status):
        with pytest.raises(ConfigError):
            call(tmp_path / "nowhere")


def test_a_torn_last_line_is_cut_and_a_failed_one_undone(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.write_text("one\ntw")
    file = LineFile(path)
    file.append("two")
    write = os.write

    def half(handle, data):
        write(handle, bytes(data)[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StorageError):
        file.append("three")
    assert path.read_text() == "one\ntwo\n"


@given(st.lists(st.binary().map(lambda line: line.replace(b"\n", b"")), max_size=4), st.binary(max_size=5))
def test_last_line_is_the_last_whole_one(tmp_path_factory, lines, torn):
    path = tmp_path_factory.mktemp("rows") / "rows"
    torn = torn.replace(b"\n", b"")
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(whole + torn)
    assert last_line(path) == (lines[-1] if lines else b"", len(whole))


def test_last_line_longer_than_one_read(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b"a\n" + b"x" * 200_000 + b"\n" + b"torn" * 50_000)
    assert last_line(path) == (b"x" * 200_000, 200_003)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        "1e999",
        "-1e999",
        "{",
        "",
        b"\xff",
        "[" * 100_000,
        str(2**64),
        str(-(2**63) - 1),
        "9" * 5000,
        "[" * 500 + "]" * 500,
    ],
)
def test_what_is_not_strict_json_is_refused(text):
    with pytest.raises(WireError):
        from_json(text, "here")


def test_a_seed_may_be_the_largest_word():
    assert from_json(str(2**64 - 1), "here") == 2**64 - 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_json_text_never_holds_what_is_not_finite(number):
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": [number]})


@given(st.text())
def test_printable_text_can_be_written_and_moves_no_cursor(text):
    shown = printable(text)
    shown.encode()
    assert shown.isprintable() or all(c.isprintable() or c.isspace() for c in shown)
    assert not any(ord(c) < 32 or ord(c) == 127 or 0x202A <= ord(c) <= 0x202E for c in shown)


def test_a_second_opener_waits_less_than_two_seconds(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(folders.time, "sleep", waits.append)
    folder = create(tmp_path, "demo", "c0ffee")
    with pytest.raises(RunError):
        folders._take_lock(folder.path)
    assert 0 < sum(waits) < 1


# A run of somebody else's


@pytest.fixture
def traps(tmp_path):
    """What may lie in the place of a file: each would be followed, waited for or read without end."""
    (tmp_path / "secret").write_text("done\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # takes no space
    names = ("link", "dangling", "endless", "pipe", "folder", "large", "absent", "zero\0byte", "x" * 300)
    return [tmp_path / name for name in names]


def test_only_a_regular_file_within_its_bound_is_read(traps, tmp_path):
    for trap in traps:
        for read in (lambda path: read_file(path, 5), lambda path: list(read_lines(path)), last_line):
            with pytest.raises(WireError) as caught:
                read(trap)
            assert caught.value.code == "damaged"
    assert read_file(tmp_path / "secret", 5) == b"done\n"
    with pytest.raises(WireError, match="at most 4 bytes"):
        read_file(tmp_path / "secret", 4)


@pytest.mark.parametrize("name", ["status", "metrics.jsonl", "run.lock"])
def test_a_trap_damages_one_run_and_hides_no_other(tmp_path, traps, name):
    out = tmp_path / "runs"
    for number, trap in enumerate([None, *traps[:6]]):
        with create(out, f"run-{number}", "c0ffee", now=datetime(2026, 1, 1 + number)) as folder:
            LineFile(folder.path / "metrics.jsonl").append('{"round": 1}')
            if trap:
                (folder.path / name).unlink()
                trap.rename(folder.path / name)
    assert [run.name for run in list_runs(out)] == [f"run-{number}" for number in range(7)]
    assert {run.status for run in list_runs(out)[1:]} == {"stopped" if name == "run.lock" else "damaged"}
    assert list_runs(out)[0].status == "stopped"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_end_is_refused_before_it_is_read(tmp_path, end):
    path = tmp_path / "rows"
    path.write_bytes(b"a\n" + b"x" * 2**23 + end)
    for read in (last_line, lambda path: list(read_lines(path))):
        with pytest.raises(WireError, match="a line of over"):
            read(path)


@pytest.mark.parametrize(
    "columns",
    [
        {"round": None}, {"round": True}, {"round": -1}, {"round": 10**30}, {"accuracy": "abc"}, {"accuracy": [1]},
        {"accuracy": 1.5}, {"accuracy": 10**400}, {"bytes_up": "x"}, {"bytes_up": -1}, {"bytes_down": None},
        {"bytes_total": 10**400}, {"bytes_total": 2.5}, {"wire_bytes": 2**64},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_computed_with_is_refused_and_hides_no_run(tmp_path, columns):
    line = to_json({"round": 1, **columns})
    with pytest.raises(WireError):
        row_of(line.encode(), "here")
    for name in ("bad", "good"):
        with create(tmp_path, name, "c0ffee", now=datetime(2026, 1, 1)) as folder:
            LineFile(folder.path / "metrics.jsonl").append(line if name == "bad" else '{"round": 1, "accuracy": null}')
    assert [run.status for run in list_runs(tmp_path)] == ["damaged", "stopped"]


def test_json_may_be_wide_but_not_deep():
    assert from_json("[" + "[{}]," * 5_000 + "0]", "here")[-1] == 0
    assert from_json(f'["{"[" * 5_000}\\"{"{" * 5_000}"]', "here")
    for text in ("[" * 101 + "]" * 101, "[[]," * 101 + "]" * 101, '["\\"]", ' + "[" * 101, "[" * 10**6):
        with pytest.raises(WireError):
            from_json(text, "here")


def test_a_hostile_text_of_quotes_is_refused_without_delay():
    with pytest.raises(WireError):
        from_json("[" * 101 + '"' + '\\"' * 10**6, "here")
