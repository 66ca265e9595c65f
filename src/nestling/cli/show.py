"""The verbs that only look: `new`, `plan`, `ls`, `report`, `message`."""

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestling.cli.run import Switch, read_command
from nestling.config.load import preset_names, preset_text
from nestling.config.schema import RunConfig
from nestling.core.errors import ConfigError, ContextError

Positional = tyro.conf.Positional


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Count what CONFIG would train and send; reads no data, trains nothing."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    json: Switch = False
    """Print one JSON object."""


def show_plan(args: Sequence[str]) -> int:
    """`nestling plan CONFIG [SETTINGS]`."""
    command = read_command(PlanCommand, args, verb="plan")
    from nestling.counts import plan
    from nestling.report.tables import human_bytes

    p = plan(command.config)
    if command.json:
        print(json.dumps(dataclasses.asdict(p), indent=2, allow_nan=False))
        return 0
    table = Table(title=f"{command.config.name}: {p.method}, {p.codec_up} up, {p.codec_down} down", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in (
        ("trained and sent numbers", f"{p.trainable_parameters:,}"),
        ("numbers of a memory's rules" if p.stream_bytes else "weights they adapt", f"{p.adapted_parameters:,}"),
        ("weights of the model", f"{p.model_parameters:,}"),
        ("payload up, per client and round", f"{p.payload_bytes_up:,} B"),
        ("payload down", f"{p.payload_bytes_down:,} B"),
        ("on the wire up (with the header)", f"{p.wire_bytes_up:,} B"),
        ("these as float32", f"{p.full_payload_bytes:,} B"),
        ("times smaller", f"{p.payload_factor:,}"),
        (f"in all: {p.rounds} rounds, {p.clients_per_round} clients, both ways", human_bytes(p.total_wire_bytes)),
    ):
        table.add_row(label, value)
    if p.steps is not None:
        table.add_row("steps in all, of all clients together", f"{p.steps:,}")
    table.add_row("held in memory: the model's weights", human_bytes(p.weights_bytes))
    table.add_row("and what is trained, with its optimiser", human_bytes(p.training_bytes))
    if p.local_parameters:
        table.add_row("trained numbers that stay with a client", f"{p.local_parameters:,}")
    if p.stream_bytes:
        window, memory = p.stream_bytes["window"], p.stream_bytes["memory"]
        table.add_row("kept while a text is read, however long: memory", f"{memory:,} B")
        table.add_row("and the window" if window else "(no window: attention grows with the text)", f"{window:,} B")
    Console().print(table)
    return 0


def new(args: Sequence[str]) -> int:
    """`nestling new PRESET [FILE]`."""

    @dataclasses.dataclass(frozen=True)
    class New:
        """Copy a preset to a file, every setting commented; without a name, list the presets."""

        preset: Positional[str] = ""
        file: Positional[str] = ""

    command = tyro.cli(New, args=list(args), prog="nestling new")
    if not command.preset:
        print("\n".join(preset_names()))
        return 0
    text = preset_text(command.preset)
    path = Path(command.file or f"{command.preset}.toml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError("exists already", where=str(path), remedy="Give another file name.") from error
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror})", where=str(path), remedy="Choose another place."
        ) from error
    typed = shlex.quote(str(path))
    print(f"{path}: edit it, then: nestling plan {typed} && nestling run {typed}")
    return 0


def ls(args: Sequence[str]) -> int:
    """`nestling ls [FOLDER]`."""

    @dataclasses.dataclass(frozen=True)
    class Ls:
        """List the runs in a folder."""

        folder: Positional[str] = "runs"
        json: bool = False
        """One JSON object per line."""

    command = tyro.cli(tyro.conf.FlagCreatePairsOff[Ls], args=list(args), prog="nestling ls")
    from nestling.report.tables import human_bytes, human_seconds
    from nestling.runs.files import printable
    from nestling.runs.folder import list_runs

    if command.folder == "runs" and not os.path.lexists("runs"):
        print("No runs here yet. Start one with: nestling run flite-digits", file=sys.stderr)
        return 0
    runs = list_runs(Path(command.folder))
    if command.json:
        for run in runs:
            print(json.dumps({**dataclasses.asdict(run), "path": str(run.path)}, allow_nan=False))
        return 0
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", no_wrap=True, overflow="fold")  # what `report` is given: whole, also in a narrow terminal
    for heading in ("status", "round", "accuracy", "bytes", "age"):
        table.add_column(heading, overflow="fold")
    for run in runs:
        table.add_row(
            Text(printable(run.path.name)),
            Text(f"{run.status}{f' ({run.note})' if run.note else ''}"),
            "–" if run.round is None else str(run.round),
            "–" if run.accuracy is None else f"{run.accuracy:.1%}",
            "–" if run.wire_bytes is None else human_bytes(run.wire_bytes),
            human_seconds(max(0.0, time.time() - run.modified)),
        )
    console = Console()
    if not console.is_terminal:  # a program reads this: a line per run, nothing cut
        console.width = 1 << 14
    console.print(table)
    return 0


def report(args: Sequence[str]) -> int:
    """`nestling report RUN [RUN ...]`."""

    @dataclasses.dataclass(frozen=True)
    class Report:
        """Set runs side by side: table, warnings, figure and one HTML page."""

        runs: Positional[tuple[str, ...]]
        format: tyro.conf.EnumChoicesFromValues[str] = "table"
        """table, markdown, latex or csv: how the table is printed."""
        out: str = ""
        """Folder for the page and the figure; empty: the run's own, or the one that holds the first of several."""

    command = tyro.cli(Report, args=list(args), prog="nestling report")
    from nestling.report import tables
    from nestling.report.html import write_report
    from nestling.report.plots import accuracy_against_bytes
    from nestling.report.recalls import recalls_to_markdown, recalls_to_rich
    from nestling.runs.files import printable

    printers = {"markdown": tables.to_markdown, "latex": tables.to_latex}
    if command.format not in ("table", "csv", *printers):
        raise ConfigError(
            f"{command.format!r} is not a format", where="--format", remedy="Give table, markdown, latex or csv."
        )
    if not command.runs:
        raise ConfigError("no run was given", where="report", remedy="See 'nestling ls'.")
    folders = [Path(run) for run in command.runs]
    out = Path(command.out) if command.out else folders[0] if len(folders) == 1 else folders[0].parent
    if command.out and not out.is_dir():
        raise ConfigError("is not a folder", where=printable(str(out)), remedy="Make it first.")
    comparison = write_report(folders, out / "report.html")
    files = accuracy_against_bytes(
        [run.result for run in comparison.runs],
        [run.metrics for run in comparison.runs],
        out / "accuracy_against_bytes",
    )
    console = Console()
    if command.format == "table":
        console.print(tables.to_rich(comparison.rows, comparison.caption))
    elif command.format == "csv":
        print(tables.to_csv(comparison.rows), end="")
    else:
        print(printers[command.format](comparison.rows, comparison.caption), end="")
    for result in (run.result for run in comparison.runs if run.result.recalls):
        if command.format == "table":
            console.print(recalls_to_rich(result))
        elif command.format == "markdown":
            print(f"\n{recalls_to_markdown(result)}", end="")
    for warning in comparison.warnings:
        Console(stderr=True).print(f"note: {warning}", style="yellow", markup=False)
    if command.format == "table":
        for path in (out / "report.html", *files):
            print(printable(str(path)))
    return 0


def message(args: Sequence[str]) -> int:
    """`nestling message FILE`."""

    @dataclasses.dataclass(frozen=True)
    class Message:
        """Take a message apart: its header, checked, and the size of its body."""

        file: Positional[str]
        json: bool = False
        """Print one JSON object."""

    command = tyro.cli(tyro.conf.FlagCreatePairsOff[Message], args=list(args), prog="nestling message")
    from nestling.codec.message import HEADER_SIZE, LARGEST, peek
    from nestling.runs.files import printable, read_file

    path = Path(command.file)
    if not os.path.isfile(path):  # Path.is_file raises on names that are too long
        raise ContextError(
            "there is no such file", where=printable(str(path)), remedy="See messages/ in a run's folder."
        )
    data = read_file(path.resolve(), LARGEST)  # resolved: the caller may name a link
    header = dataclasses.asdict(peek(data))
    for key in ("context", "digest"):
        header[key] = header[key].hex()
    header["payload_bytes"] = len(data) - HEADER_SIZE
    if command.json:
        print(json.dumps(header, allow_nan=False))
        return 0
    table = Table(title=Text(printable(path.name)), show_header=False)
    for key, value in header.items():
        table.add_row(key, f"{value:,}" if type(value) is int and key != "client" else str(value))
    Console().print(table)
    return 0
