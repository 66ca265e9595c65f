"""A run is a folder; a file in it is the old one or the new one, never half of one, and one process at a time writes.

The lock is `flock` on `run.lock`: the kernel frees it when the process ends, however it ends. On a network file
system without locks a warning is given and the run goes on unprotected.

`<out>/<name>--<YYYYmmdd-HHMMSS>--<hash4>/` holds what `recorder.py` writes; `status` is one word.
"""

import errno
import fcntl
import os
import re
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from nestling.core.errors import ConfigError, NestlingError, RunError, StorageError, WireError
from nestling.core.files import write_atomic
from nestling.runs.files import DISK, last_line, printable, read_file, row_of, storage_error

Status = Literal["running", "done", "failed", "stopped"]

_NAME = re.compile(r"\w[\w.-]{0,63}")
_RUN_FOLDER = re.compile(r".+--\d{8}-\d{6}--[0-9a-z]{4}(-\d+)?")
# `list_runs` holds a shared lock for an instant; a writer that meets it asks again before it gives up.
_LOCK_TRIES, _LOCK_PAUSE = 10, 0.05
_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunFolder:
    """A run's folder, locked for writing until `close` or the end of the process. Made by `create`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    def write(self, name: str, data: bytes) -> None:
        """Write the file `name`, in a subfolder if it has a slash. Raises `StorageError`."""
        target = self.path / name
        try:
            target.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(target, len(data), error) from error
        write_atomic(target, data)

    def set_status(self, status: Status) -> None:
        """Say whether the run is running, done, failed or stopped. Raises `StorageError`."""
        self.write("status", f"{status}\n".encode())

    def close(self) -> None:
        """Free the lock; closing twice does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        self.close()


def create(out: Path, name: str, digest: str, *, now: datetime | None = None) -> RunFolder:
    """Make `out/<name>--<date>--<hash4>/`, lock it and write its status: a bad place is found before training.

    `digest` is the hexadecimal digest of the configuration. Raises `ConfigError` if the name or the place cannot be
    used, `StorageError` if the disk is full.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here, create(Path(here, "runs"), "demo", "c0ffee00") as folder:
    ...     folder.path.name.startswith("demo--"), folder.path.name.endswith("--c0ff"), read_status(folder.path)
    (True, True, 'running')
    """
    assert re.fullmatch(r"[0-9a-z]{4,}", digest), "a hexadecimal digest"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{printable(name)[:80]!r} cannot name a run",
            where="name",
            remedy="Use up to 64 letters, digits, '.', '_' and '-', and start with a letter, a digit or '_'.",
        )
    stem = f"{name}--{now or datetime.now():%Y%m%d-%H%M%S}--{digest[:4]}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = _new_folder(out, stem)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise _place_error(out, error) from error
    try:
        folder = RunFolder(path, _take_lock(path))
        folder.set_status("running")
    except (OSError, NestlingError) as error:
        for leftover in ("run.lock", "status"):
            with suppress(OSError):
                (path / leftover).unlink()
        with suppress(OSError):
            path.rmdir()
        if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
            error = error.__cause__
        raise (_place_error(out, error) if isinstance(error, OSError) else error) from error
    return folder


def reopen(path: Path) -> RunFolder:
    """Lock the folder of an earlier run, to go on writing in it, and clear away what a killed process half wrote.

    Raises `ConfigError` if `path` is no run folder or cannot be written, `RunError` (exit code 6) if a process is at
    work in it.
    """
    read_status(path)
    try:
        folder = RunFolder(path, _take_lock(path))
    except OSError as error:
        raise _place_error(path, error) from error
    for place in (path, *(p for p in path.iterdir() if p.is_dir() and not p.is_symlink())):
        for leftover in place.glob(".*.tmp.*"):
            with suppress(OSError):
                leftover.unlink()
    return folder


def _new_folder(out: Path, stem: str) -> Path:
    for attempt in range(1, 1000):
        path = out / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise ConfigError("a thousand runs began in one second", where=printable(str(out)))


def _place_error(out: Path, error: OSError | ValueError) -> NestlingError:
    where = printable(str(out))
    if isinstance(error, OSError) and error.errno in DISK:
        return StorageError(f"the disk refused a first file ({error.strerror})", where=where, remedy="Free some space.")
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return ConfigError("is a file, or lies below one", where=where, remedy="Give a folder for the runs.")
    reason = error.strerror if isinstance(error, OSError) else "not a path"
    return ConfigError(f"cannot be written ({reason})", where=where, remedy="Give a folder that you may write to.")


def _take_lock(path: Path) -> int:
    handle = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for attempt in range(1, _LOCK_TRIES + 1):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == _LOCK_TRIES:
                    holder = os.pread(handle, 20, 0).strip()
                    raise RunError(
                        f"is in use by process {int(holder) if holder.isdigit() else 'unknown'}",
                        where=printable(str(path)),
                        remedy="Wait for it to end, or stop it.",
                        locked=True,
                    ) from error
                time.sleep(_LOCK_PAUSE)
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                warnings.warn("this file system has no locks: do not run two processes here", stacklevel=3)
                break
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_status(path: Path) -> Status:
    """What the folder says of its run. Raises `ConfigError` if `path` is no run folder, `WireError` if it is damaged.

    A run whose process was killed still says "running" here; `list_runs` knows better.
    """
    where = printable(str(path))
    if not os.path.lexists(path / "status"):
        raise ConfigError("is not a run folder", where=where, remedy="See 'nestling ls' for the runs.")
    word = read_file(path / "status", 20).decode("ascii", "replace").strip()
    for status in get_args(Status):
        if word == status:
            return status  # type: ignore[no-any-return]
    raise WireError("status", f"has the unknown status {printable(word)!r}", where=where)


@dataclass(frozen=True)
class RunSummary:
    """One line of `nestling ls`. `status` is "damaged" if the folder cannot be read; `note` then says why."""

    path: Path
    name: str
    status: Literal["running", "done", "failed", "stopped", "damaged"]
    round: int | None = None
    accuracy: float | None = None
    wire_bytes: int | None = None
    modified: float = 0.0
    note: str = ""


def list_runs(out: Path) -> list[RunSummary]:
    """The runs in a folder, oldest first; other folders are passed over. Raises `ConfigError` if `out` is no folder.

    A run that says "running" but whose lock is free was killed, and is shown as "stopped".

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here:
    ...     create(Path(here), "demo", "c0ffee00").close()
    ...     [(run.name, run.status) for run in list_runs(Path(here))]
    [('demo', 'stopped')]
    """
    try:
        folders = [Path(e.path) for e in os.scandir(out) if e.is_dir(follow_symlinks=False)]
    except (OSError, ValueError) as error:
        remedy = "Give the folder that holds the runs."
        raise ConfigError("is not a folder that can be read", where=printable(str(out)), remedy=remedy) from error
    runs = [
        _summary(path) for path in folders if _RUN_FOLDER.fullmatch(path.name) or os.path.lexists(path / "run.lock")
    ]
    return sorted(runs, key=lambda run: (run.path.name.split("--")[-2:-1], run.path.name))


def _summary(path: Path) -> RunSummary:
    name = path.name.rsplit("--", 2)[0]
    try:
        modified = path.stat().st_mtime
        status = read_status(path)
        if status == "running" and not _is_locked(path):
            status = "stopped"
        rows = path / "metrics.jsonl"
        line = b""
        if os.path.lexists(rows):
            line, modified = last_line(rows)[0], max(modified, rows.lstat().st_mtime)
        row = row_of(line, str(rows)) if line else {}
    except (OSError, NestlingError) as error:
        return RunSummary(path, name, "damaged", note=printable(str(error)))
    return RunSummary(path, name, status, row.get("round"), row.get("accuracy"), row.get("bytes_total"), modified)


def _is_locked(path: Path) -> bool:
    try:
        handle = os.open(path / "run.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
