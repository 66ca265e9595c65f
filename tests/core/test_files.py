"""Files are the old ones or the new ones, folders can be written or are refused, and errors read as promised."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core import errors, files
from nestling.core.errors import ConfigError, NestlingError, RunError, StorageError, WireError
from nestling.core.files import make_folder, write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 100_000])
def test_a_file_is_made_and_replaced(tmp_path, data) -> None:
    write_atomic(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data
    write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_writes_that_are_cut_short_go_on(tmp_path, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data[:7])))
    write_atomic(tmp_path / "file", bytes(range(100)))
    assert (tmp_path / "file").read_bytes() == bytes(range(100))


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EIO, "intact")]
)
def test_a_disk_that_refuses_leaves_the_old_file(tmp_path, monkeypatch, call, number, advice) -> None:
    write_atomic(tmp_path / "file", b"old")
    descriptors = len(os.listdir("/proc/self/fd"))
    done = []

    def refuse(*args: object) -> int:
        if call == "write" and not done:  # the first part still fits
            done.append(os.pwrite(args[0], bytes(args[1][:2]), 0))
            return 2
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=advice) as caught:
        write_atomic(tmp_path / "file", b"newer")
    monkeypatch.undo()
    assert caught.value.exit_code == 8
    assert isinstance(caught.value, OSError)
    assert os.strerror(number) in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_cat_072_links_are_replaced_and_not_followed(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"keep")
    (tmp_path / "file").symlink_to(precious)
    write_atomic(tmp_path / "file", b"new")
    assert precious.read_bytes() == b"keep"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file", "precious"]


def test_cat_072_a_link_planted_under_the_temporary_name_is_not_followed(tmp_path, monkeypatch) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"keep")
    monkeypatch.setattr(files, "token_hex", lambda n: "guessed")
    (tmp_path / ".file.tmp.guessed").symlink_to(precious)
    with pytest.raises(StorageError, match="exists"):
        write_atomic(tmp_path / "file", b"new")
    assert precious.read_bytes() == b"keep"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o027, 0o640)])
def test_cat_073_a_file_has_the_mode_that_the_umask_leaves_it(tmp_path, mask, mode) -> None:
    before = os.umask(mask)
    try:
        write_atomic(tmp_path / "file", b"old")
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode
        (tmp_path / "file").chmod(0o777)
        write_atomic(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode  # not that of what stood there before


def test_two_writers_of_one_file_do_not_meet(tmp_path) -> None:
    path = tmp_path / "file"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write_atomic(path, bytes([i]) * 1000), range(100)))
    assert len(set(path.read_bytes())) == 1
    assert names(tmp_path) == ["file"]


def test_a_place_that_is_not_there_is_a_storage_error(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "file", tmp_path / "file" / "below", tmp_path / "folder", tmp_path / ("n" * 300)):
        with pytest.raises(StorageError):
            write_atomic(path, b"new")
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"x"


def test_folders_are_made_with_their_parents_and_left_empty(tmp_path) -> None:
    path = tmp_path / "a" / "b"
    assert make_folder(path) == path
    assert names(path) == []
    (path / "kept").touch()
    make_folder(path)
    assert names(path) == ["kept"]


def test_folders_that_cannot_be_written_are_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), Path("a\0b"), Path("n" * 300)):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            make_folder(path)
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)

    def read_only(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(ConfigError, match=r"Permission denied.*Choose another folder"):
        make_folder(tmp_path)


def test_exit_codes_are_the_documented_ones() -> None:
    table = {"ConfigError": 2, "ContextError": 3, "SeedError": 4, "WireError": 5, "RunError": 7, "StorageError": 8}
    table |= {"PrivateStateError": 2, "RemoteError": 9}
    kinds = {k: v for k, v in vars(errors).items() if isinstance(v, type) and issubclass(v, NestlingError)}
    assert {name: kind.exit_code for name, kind in kinds.items() if kind is not NestlingError} == table
    assert RunError("is in use", locked=True).exit_code == 6
    assert RunError.exit_code == 7


@given(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9))
def test_an_error_reads_place_cause_remedy(cause: str, where: str, remedy: str) -> None:
    error = ConfigError(cause, where=where, remedy=remedy)
    assert str(error) == (f"{where}: " if where else "") + cause + "." + (f" {remedy}" if remedy else "")
    assert (error.cause, error.where, error.remedy) == (cause, where, remedy)


def test_errors_are_also_what_callers_of_plain_python_expect() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(WireError, ValueError)
    assert issubclass(StorageError, OSError)
    assert str(WireError("crc", "does not match")) == "message [crc]: does not match."
    assert str(WireError("crc", "does not match", where="file")) == "file: does not match."
