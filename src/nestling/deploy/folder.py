"""The folders of a deployment: what stands in a site's and in the server's, and who may read it.

    site/   site.json  pinned  agreed.json  kept/RUN/  bases/  bin/  worker.sock  worker.key  worker.alive  worker.log
    fed/    fed.json  certificates/  bases/  runs/  flower/ (run database, bundles)  bin/

Both are made with mode 0700: keys and what a client keeps between rounds are in them. Under plain Flower they lie in
Flower's home, as nestling/site-0 and nestling/fed, and have no bin/.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from nestling.config.schema import NeedleConfig, RunConfig
from nestling.core.errors import ConfigError, RunError
from nestling.core.files import make_folder, write_atomic
from nestling.runs.files import from_json, printable, read_file, to_json

Settings = TypeVar("Settings", bound="SiteSettings | FedSettings")

SITE, FED = "site.json", "fed.json"
LONGEST_SOCKET = 100
"""Bytes of a Unix socket's path that every system allows."""
LONGEST_CALL = 7 * 24 * 3600
"""Seconds that a site may give a call, and its worker to wait for the next."""


@dataclass(frozen=True)
class SiteSettings:
    """What a site decides for itself, whatever the server says. Raises `ConfigError` for numbers that cannot be."""

    client: int
    data: str = ""
    """Where its data lies; it stands in the place of `task.path`."""
    whole: bool = False
    """All items there are this client's; else its share of a set that all sites hold."""
    model: str = ""
    """Of a language run: the model on this machine, in the place of `base.model`."""
    device: str = "cpu"
    limit: float = 3600.0
    """Seconds after which a call hangs and is ended."""
    idle: float = 1800.0
    """Seconds without a call after which the worker ends and frees its memory."""
    threads: int = 1
    """Threads of the worker. More are faster for a large model, and may give other bits than one process would."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("client", 0, 2**31), ("limit", 1, LONGEST_CALL), ("idle", 1, LONGEST_CALL), ("threads", 1, 1024),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"is {getattr(self, name)}", where=f"--{name}", remedy=f"Give {low} to {high}.")


@dataclass(frozen=True)
class FedSettings:
    """What the server decides, whatever a submitted config says. Raises `ConfigError` for a wait that cannot be."""

    data: str = ""
    """Where the held-out items lie; it stands in the place of `task.path`."""
    device: str = "cpu"
    wait: float = 300.0
    """Seconds to wait for the sites before a run is given up."""
    authenticated: bool = True
    """Nodes have registered keys, each for a client, so a site cannot choose which client it is."""
    model: str = ""
    """Of a language run: the model on this machine, in the place of `base.model`."""

    def __post_init__(self) -> None:
        if not 0 <= self.wait <= LONGEST_CALL:
            raise ConfigError(f"is {self.wait}", where="--wait", remedy=f"Give 0 to {LONGEST_CALL} seconds.")


def make_private(path: Path) -> Path:
    """`path` as a folder that only its owner can enter. Raises `ConfigError` if it is somebody else's, or a link."""
    make_folder(path)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise ConfigError("belongs to somebody else, or is a link", where=str(path), remedy="Give a folder of yours.")
    path.chmod(0o700)
    return path


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on. Raises `StorageError`."""
    before = os.umask(0o077)
    try:
        write_atomic(path, data)
    finally:
        os.umask(before)


def write_settings(folder: Path, settings: SiteSettings | FedSettings) -> None:
    """Keep them in the folder, for the processes that Flower starts."""
    name = SITE if isinstance(settings, SiteSettings) else FED
    write_private(folder / name, to_json(asdict(settings), indent=2).encode())


def read_settings(kind: type[Settings], folder: Path) -> Settings:
    """What `write_settings` kept. Raises `ConfigError` if there is nothing of the kind.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here:
    ...     write_settings(Path(here), SiteSettings(client=2))
    ...     read_settings(SiteSettings, Path(here)).client
    2
    """
    path = folder / (SITE if kind is SiteSettings else FED)
    if not path.is_file():
        remedy = "It is made by 'nestling join'." if kind is SiteSettings else "It is made by 'nestling serve'."
        raise ConfigError("is no such folder", where=printable(str(folder)), remedy=remedy)
    values: Any = from_json(read_file(path, 1 << 16), str(path))
    if not isinstance(values, dict) or values.keys() != {f.name for f in fields(kind)}:
        raise ConfigError("has other entries than this version writes", where=str(path), remedy="Delete it.")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError("has an entry of another type", where=str(path), remedy="Mend or delete it.") from error


@contextmanager
def only_one(
    lock: Path,
    said: str,
    *,
    where: str,
    name: str = "",
    wait: float = 0.0,
    note: Callable[[], object] = lambda: None,
) -> Iterator[int]:
    """Nobody else is in a block with this lock; the kernel frees it when the process ends, however it ends. Gives the
    lock's descriptor: a process that inherits it holds the lock as well.

    Raises `RunError` (exit code 6), which says `said` and the `name` that the other one has given itself, if another
    process is there, and after `wait` seconds still is. `note` is called once if there is something to wait for.
    """
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until, told = time.monotonic() + wait, False
        while not _taken(handle):
            if time.monotonic() >= until:
                other = printable(os.pread(handle, 100, 0).decode("utf-8", "replace"))
                said = f"{said} ({other})" if other else said
                raise RunError(said, where=where, remedy="Wait for it to end, or stop it.", locked=True)
            if not told:
                note()
            told = True
            time.sleep(0.2)
        os.truncate(handle, 0)
        os.pwrite(handle, name.encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def home_folder(name: str, settings: SiteSettings | FedSettings) -> tuple[Path, bool]:
    """A folder in Flower's home, for a machine on which nobody typed a command of ours.

    It is made with `settings` on first use. From then on only where the data lies is taken from them, for that is said
    anew with every start of Flower's programs; what else stands in its file is its owner's to change.

    Returns the folder, and whether its data lies elsewhere than before. Raises `ConfigError` if it cannot be made.
    """
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    folder = make_private(home.absolute() / "nestling" / name)
    if not (folder / (SITE if isinstance(settings, SiteSettings) else FED)).is_file():
        write_settings(folder, settings)
    kept = read_settings(type(settings), folder)
    moved = kept.data != settings.data
    if moved:
        write_settings(folder, replace(kept, data=settings.data))
    return folder, moved


def with_data(config: RunConfig, path: str) -> RunConfig:
    """The settings with this machine's data in the place of `task.path`; a task whose text is packaged has none."""
    if isinstance(config.task, NeedleConfig) and config.task.text != "file":
        return config
    return replace(config, task=replace(config.task, path=path))
