"""The folders of a deployment: what stands in a site's and in the server's, and who may read it.

    site/   site.json  pinned  agreed.json  kept/  bases/  bin/  worker.sock  worker.key  worker.alive  worker.log
    fed/    fed.json  certificates/  bases/  runs/  flower/ (run database, bundles)  bin/

Both are made with mode 0700: keys and what a client keeps between rounds are in them.
"""

import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from nestling.config.schema import NeedleConfig, RunConfig
from nestling.core.errors import ConfigError
from nestling.core.files import make_folder, write_atomic
from nestling.runs.files import from_json, printable, read_file, to_json

Settings = TypeVar("Settings", "SiteSettings", "FedSettings")

SITE, FED = "site.json", "fed.json"
LONGEST_SOCKET = 100
"""Bytes of a Unix socket's path that every system allows."""


@dataclass(frozen=True)
class SiteSettings:
    """What a site decides for itself, whatever the server says."""

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


@dataclass(frozen=True)
class FedSettings:
    """What the server decides, whatever a submitted config says."""

    data: str = ""
    """Where the held-out items lie; it stands in the place of `task.path`."""
    device: str = "cpu"
    wait: float = 300.0
    """Seconds to wait for the sites before a run is given up."""
    authenticated: bool = True
    """Nodes have registered keys, each for a client, so a site cannot choose which client it is."""


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
    return kind(**values)


def with_data(config: RunConfig, path: str) -> RunConfig:
    """The settings with this machine's data in the place of `task.path`; a task whose text is packaged has none."""
    if isinstance(config.task, NeedleConfig) and config.task.text != "file":
        return config
    return replace(config, task=replace(config.task, path=path))
