"""Files that are either the old ones or the new ones, never torn.

Write to a temporary file beside the target, fsync, rename over it, fsync the folder: a crash or a full disk leaves
what was there before.
"""

import contextlib
import errno
import os
from pathlib import Path
from secrets import token_hex

from nestling.core.errors import ConfigError, StorageError


def cache_folder() -> Path:
    """Where what can be made again is kept: $NESTLING_CACHE, else $XDG_CACHE_HOME/nestling, else ~/.cache/nestling."""
    if own := os.environ.get("NESTLING_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "nestling"


def make_folder(path: Path) -> Path:
    """`path` as a folder that can be written; parents are made. Raises `ConfigError` if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test.tmp.{token_hex(8)}"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot be written ({reason})", where=repr(str(path)), remedy="Choose another folder."
        ) from error
    return path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, whole or not at all. Raises `StorageError` if the disk refuses."""
    temporary = path.with_name(f".{path.name}.tmp.{token_hex(8)}")
    try:
        # O_EXCL and O_NOFOLLOW: a link planted under that name is not followed.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):  # interrupted
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"could not be written ({error.strerror}; {len(data):,} bytes needed)",
            where=str(path),
            remedy="Free some space; what was there before is intact." if full else "What was there before is intact.",
        ) from error


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names of the files in `path`. Raises `StorageError` if it may not have them."""
    try:
        _sync_folder(path)
    except OSError as error:
        raise StorageError(
            f"could not be written ({error.strerror})", where=str(path), remedy="What was there before is intact."
        ) from error


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
