"""Runs of a benchmark's table, each made once: a cell is a run's settings, its result is kept under their digest.

A table of a hundred runs takes an hour on two cores, so it must survive being stopped: every finished run is a line of
a JSON-lines file, and only what is missing is run. A result is found again by the settings that decide it (`run_id`)
and those of its base, so that a changed setting is never answered with an old number. A changed program is: each line
says which one made it, and those of another are counted aloud, to be deleted if the change moves numbers.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nestling.build import resolve, run_id
from nestling.config.schema import RunConfig
from nestling.runs.files import LineFile, read_lines
from nestling.runs.result import Result

Overrides = Mapping[str, Any]
"""Settings by dotted name, as on the command line: {"codec.bits": 4, "local.lr": 0.1}."""


def with_settings(config: RunConfig, overrides: Overrides) -> RunConfig:
    """The same run with some settings changed; every value is checked as usual once all are set."""
    tables: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in overrides.items():
        table, _, key = name.rpartition(".")
        (tables.setdefault(table, {}) if table else plain)[key] = value
    for table, values in tables.items():
        plain[table] = dataclasses.replace(plain.get(table, getattr(config, table)), **values)
    return dataclasses.replace(config, **plain)


class Cells:
    """Results by settings, in memory and in a file that only grows."""

    def __init__(self, path: Path, *, runs: Path) -> None:
        self._path, self._runs = path, runs
        self._known: dict[str, dict[str, Any]] = {}
        self._program, old = program(), 0
        for line in read_lines(path) if path.exists() else ():
            entry = json.loads(line)
            self._known[entry["cell"]] = entry["result"]
            old += entry["program"] != self._program
        if old:
            print(f"{old} results in {path} were made by another state of the program", file=sys.stderr, flush=True)

    def run(self, config: RunConfig, label: str) -> Result:
        """The result of a run: the kept one, or a new one, which takes seconds to minutes. One that was made with rows
        to compare with serves as well where none are asked for."""
        config = resolve(dataclasses.replace(config, machine=dataclasses.replace(config.machine, out=str(self._runs))))
        base = json.dumps(dataclasses.asdict(config.base), sort_keys=True)
        cell, with_rows = (f"{run_id(config)}/{base}/{rows}" for rows in (config.machine.references, True))
        if cell not in self._known and with_rows in self._known:
            cell = with_rows
        if cell not in self._known:
            result = nestling.run(config)
            self._known[cell] = result.to_dict()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            entry = {"cell": cell, "label": label, "program": self._program, "result": self._known[cell]}
            file = LineFile(self._path)  # cuts off what a killed table has left of a line
            file.append(json.dumps(entry))
            file.close()
            print(f"{label}: {result.accuracy:.2%} in {result.seconds:.0f} s", file=sys.stderr, flush=True)
        return Result.from_dict(self._known[cell])


def program() -> str:
    """A digest of the package's source as it lies there now."""
    package = Path(nestling.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def origin(command: str) -> dict[str, str]:
    """Where numbers come from, for the head of a results file."""
    return {"command": command, "python": platform.python_version(), "machine": platform.machine()}


def save_figure(figure: Figure, path: Path) -> None:
    """As path.svg and path.png; the same picture is the same file."""
    for ending in ("svg", "png"):
        undated = {"Date": None} if ending == "svg" else {}
        figure.savefig(path.with_suffix(f".{ending}"), dpi=150, metadata=undated)
    print(f"{path}.png")
