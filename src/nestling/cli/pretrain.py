"""`nestling pretrain`: the base that a config asks for, trained once and written with where it comes from.

A run makes its base by itself; this is for bases that take long, are trained on another machine, or are handed on.
"""

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from nestling.cli.run import ProgressLine, Switch, read_command
from nestling.config.checks import is_text
from nestling.config.schema import RunConfig
from nestling.core.errors import ConfigError
from nestling.core.types import Progress


@dataclasses.dataclass(frozen=True)
class PretrainCommand:
    """Train the base that CONFIG asks for under [base], on machine.device, and write it for base.weights to name."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: str = "base.safetensors"
    """The file to write; one that is there already is never replaced."""
    json: Switch = False
    """End with one JSON object on the standard output; progress goes to the standard error."""
    quiet: Switch = False
    """Show no progress."""


def pretrain(args: Sequence[str]) -> int:
    """`nestling pretrain CONFIG [SETTINGS] --out FILE`; returns the exit code."""
    command = read_command(PretrainCommand, args, verb="pretrain")
    is_text("--out", command.out)
    path = Path(command.out)
    _refuse_existing(path)
    from nestling.build import pretrain_base  # torch is imported here, after the settings have been read
    from nestling.core.files import make_folder, write_atomic
    from nestling.models.backbones import base_bytes, base_hash
    from nestling.runs.files import printable

    make_folder(path.parent)  # hours later would be too late to find out
    began, where = time.perf_counter(), printable(str(path))
    with ProgressLine(quiet=command.quiet, to_stderr=command.json) as line:

        def note(text: str) -> None:
            line.show(Progress(text, 0, 1, float("nan"), 0, 0, 0, time.perf_counter() - began))

        note("looking for the base")
        model, provenance = pretrain_base(command.config, note=note)
    _refuse_existing(path)
    data, hashed, said = base_bytes(model, provenance), base_hash(model), json.loads(provenance)
    write_atomic(path, data)
    if command.json:
        print(json.dumps({"path": where, "bytes": len(data), "base_hash": hashed, "provenance": said}, allow_nan=False))
        return 0
    accuracy = said.get("held_out_accuracy")
    learnt = f", {accuracy:.1%} right on held-out items of {said['base']['pretrain_on']}" if accuracy else ""
    print(f"{where}: {len(data):,} B, base {hashed[:12]}{learnt}")
    print(f"use it with: nestling run {shlex.quote(args[0])} --base.weights {shlex.quote(where)}")
    return 0


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise ConfigError("exists already", where=repr(str(path)), remedy="Give another file name as --out.")
