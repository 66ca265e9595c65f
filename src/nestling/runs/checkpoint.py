"""Checkpoints: all that outlives a round, in one file that is whole or not there, named by what it must contain.

    checkpoints/round-000007--3f9a0c51d2e48b76.safetensors          the end of the name: SHA-256 of the file, cut

The last two are kept. A file that does not have the content its name says is passed over, aloud, for the one before;
if none is whole the run is not begun again in silence: that is an error. Arrays are named `state`, `server.NAME` and
`client.NUMBER.NAME`; everything else, the settings included, is one JSON object among the file's metadata. No other
name is read or written, so what a stream has in its private memory has no place here.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from nestling.core.errors import WireError
from nestling.core.vectors import Vector
from nestling.runs.files import from_json, printable, read_file, to_json
from nestling.runs.folder import RunFolder

SCHEMA = 1
KEPT = 2
"""Checkpoints that a folder keeps."""

_FOLDER = "checkpoints"
_FILE = re.compile(r"round-(\d{6,})--([0-9a-f]{16})\.safetensors")
_CLIENT = re.compile(r"client\.(\d{1,20})\.(.+)")  # Python would not read a number of any length
_LARGEST = 1 << 36


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an older one is used."""


@dataclass(frozen=True)
class Checkpoint:
    """A federation after a round.

    Args:
        round: how many rounds are done.
        state: float32[n], the server's.
        server: what the server's rule keeps, arrays by name.
        clients: what each client keeps, arrays by name.
        facts: all else, as plain values for JSON.
    """

    round: int
    state: Vector
    server: Mapping[str, np.ndarray] = field(default_factory=dict)
    clients: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


def write_checkpoint(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Write it, then delete all but the last two. Raises `StorageError`; the older ones are then still there.

    >>> from tempfile import TemporaryDirectory
    >>> from nestling.runs.folder import create
    >>> with TemporaryDirectory() as here, create(Path(here), "demo", "c0ffee00") as folder:
    ...     for number in (1, 2, 3):
    ...         write_checkpoint(folder, Checkpoint(number, np.float32([number, 0.5])))
    ...     found = newest_checkpoint(folder.path)
    ...     len(os.listdir(folder.path / "checkpoints")), found.round, found.state
    (2, 3, array([3. , 0.5], dtype=float32))
    """
    arrays = {"state": checkpoint.state}
    arrays |= {f"server.{name}": array for name, array in checkpoint.server.items()}
    for client, kept in checkpoint.clients.items():
        arrays |= {f"client.{client}.{name}": array for name, array in kept.items()}
    facts = {"schema": SCHEMA, "round": checkpoint.round, "facts": dict(checkpoint.facts)}
    data = save({name: array.copy(order="C") for name, array in arrays.items()}, {"nestling": to_json(facts)})
    digest = hashlib.sha256(data).hexdigest()[:16]
    name = f"{_FOLDER}/round-{checkpoint.round:06d}--{digest}.safetensors"
    folder.write(name, data)
    for _, path in _files(folder.path)[KEPT:]:
        if path != folder.path / name:
            with suppress(OSError):
                path.unlink()


def newest_checkpoint(path: Path) -> Checkpoint | None:
    """The newest checkpoint of a run's folder that is whole; None if there is none at all.

    A damaged one is passed over with a `CheckpointWarning`. Raises `WireError` if all are damaged.
    """
    where, reasons = printable(str(path)), list[str]()
    for number, file in _files(path):
        try:
            found = _read(file, number)
        except WireError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warnings.warn(f"{reason} The one of round {number} is used.", CheckpointWarning, stacklevel=2)
        return found
    if reasons:
        raise WireError(
            "checkpoint",
            f"has no checkpoint that is whole: {' '.join(reasons)}".rstrip("."),
            where=where,
            remedy="Put an intact copy back, or begin a new run with 'nestling run'.",
        )
    return None


def _files(path: Path) -> list[tuple[int, Path]]:
    """The folder's checkpoints by their names, newest first; of two of one round, that written last."""
    try:
        names = os.listdir(path / _FOLDER)
    except OSError:
        return []
    found = [(int(m[1]), path / _FOLDER / m[0]) for name in names if (m := _FILE.fullmatch(name))]
    return sorted(found, key=lambda entry: (entry[0], _modified(entry[1])), reverse=True)


def _modified(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path, number: int) -> Checkpoint:
    """One checkpoint. Raises `WireError` unless its content is what its name says and makes sense."""
    where = printable(str(path))
    data = read_file(path, _LARGEST)
    if hashlib.sha256(data).hexdigest()[:16] != path.name.split("--")[1][:16]:
        raise WireError("checkpoint", "is damaged: its name belongs to another content", where=where)
    try:
        arrays = load(data)
        size = int.from_bytes(data[:8], "little")
        header = from_json(data[8 : 8 + size], where)
        facts = from_json(header["__metadata__"]["nestling"], where)
        schema, of_round, rest = facts["schema"], facts["round"], facts["facts"]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise WireError("checkpoint", f"is no checkpoint ({type(error).__name__})", where=where) from error
    if schema != SCHEMA:
        cause = f"has schema {printable(repr(schema))[:40]}, this version reads {SCHEMA}"
        raise WireError("checkpoint", cause, where=where)
    state, server, clients = arrays.pop("state", None), dict[str, np.ndarray](), dict[int, dict[str, np.ndarray]]()
    for name, array in arrays.items():
        if name.startswith("server."):
            server[name.removeprefix("server.")] = array
        elif match := _CLIENT.fullmatch(name):
            clients.setdefault(int(match[1]), {})[match[2]] = array
        else:
            raise WireError("checkpoint", f"has an array of no use, {printable(name)[:40]!r}", where=where)
    if state is None or state.dtype != np.float32 or state.ndim != 1 or not np.isfinite(state).all():
        raise WireError("checkpoint", "has no usable state", where=where)
    if of_round != number or not isinstance(rest, dict):
        raise WireError("checkpoint", "is not of the round that its name says", where=where)
    return Checkpoint(number, state, server, clients, rest)
