"""`nestling run` and `nestling resume`: settings from the file and the flags, progress, and what came of it.

Progress is one live bar on a terminal; in a pipe it is one line a round, and within a long round one a
minute at most, when a client has answered.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from nestling.config.load import load_config, preset_names
from nestling.config.schema import RunConfig
from nestling.core.errors import ConfigError
from nestling.core.types import Progress

if TYPE_CHECKING:
    from nestling.runs.result import Result

Command = TypeVar("Command")
Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag without a --no-… beside it; settings have both, since a preset may say either."""


@dataclasses.dataclass(frozen=True)
class RunCommand:
    """Run the federation of CONFIG and write its folder."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    json: Switch = False
    """End with one JSON object on the standard output; progress goes to the standard error."""
    quiet: Switch = False
    """Show no progress."""


def read_command(kind: type[Command], args: Sequence[str], *, verb: str) -> Command:
    """CONFIG first, then flags that override it: an instance of `kind`, which has a field `config`."""
    if not args or args[0] in ("-h", "--help"):
        print(
            f"usage: nestling {verb} CONFIG [SETTINGS]\n\nCONFIG: a TOML file, or one of {', '.join(preset_names())}."
        )
        print(f"'nestling {verb} flite-digits --help' lists all settings.")
        raise SystemExit(0 if args else 2)
    if args[0].startswith("-"):
        raise ConfigError("comes before CONFIG", where=args[0], remedy=f"Write nestling {verb} CONFIG {args[0]} …")
    default = kind(load_config(args[0]))  # type: ignore[call-arg]
    settings: object = tyro.conf.AvoidSubcommands[kind]  # type: ignore[misc, valid-type]
    command = tyro.cli(settings, default=default, args=list(args[1:]), prog=f"nestling {verb} {args[0]}")  # type: ignore[call-overload]
    assert isinstance(command, kind)
    return command


def run(args: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    command = read_command(RunCommand, args, verb="run")
    from nestling.api import run as run_config  # torch is imported here, after the settings have been read

    with ProgressLine(quiet=command.quiet, to_stderr=command.json) as line:
        result = run_config(command.config, progress=line.show, command=["nestling", "run", *args])
    show(result, as_json=command.json)
    return 0


@dataclasses.dataclass(frozen=True)
class ResumeCommand:
    """Go on with a run that was interrupted, killed or failed, after its last finished round."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    json: bool = False
    """End with one JSON object on the standard output; progress goes to the standard error."""
    quiet: bool = False
    """Show no progress."""


def resume(args: Sequence[str]) -> int:
    """`nestling resume RUN`; returns the exit code."""
    command = tyro.cli(tyro.conf.FlagCreatePairsOff[ResumeCommand], args=list(args), prog="nestling resume")
    from nestling.api import resume as resume_run

    with ProgressLine(quiet=command.quiet, to_stderr=command.json) as line:
        result = resume_run(command.run, progress=line.show, command=["nestling", "resume", *args])
    show(result, as_json=command.json)
    return 0


def show(result: "Result", *, as_json: bool) -> None:
    """What a run has come to: its table, or one JSON object."""
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
        return
    from nestling.report.recalls import recalls_to_rich
    from nestling.report.riders import rider_lines
    from nestling.report.tables import caption_of, privacy_of, rows_of, to_rich

    console = Console()
    if result.recalls:
        console.print(recalls_to_rich(result))
    else:
        console.print(to_rich(rows_of([result]), caption_of([result])))
    if result.accuracy_personal is not None and result.accuracy_personal_global is not None:
        console.print(
            f"by each client's own classes: its own model {100 * result.accuracy_personal:.1f} %, "
            f"the global state {100 * result.accuracy_personal_global:.1f} %"
        )
    if result.recalls and result.epsilon is not None:  # the other table's caption says it
        console.print(privacy_of(result))
    if result.averaging_error is not None:
        console.print(f"averaging latents or weights: differ by {result.averaging_error:.1e} of the largest weight")
    for line in rider_lines(result):
        console.print(f"note: {line}", style="yellow", markup=False)
    console.print(Text(f"{result.run_dir}/report.html", style="bold"), soft_wrap=True)


class ProgressLine:
    """Shows a run's progress: redrawn in place on a terminal, otherwise a line for each round with stable keys, and how
    far a round is when a client has answered and nothing was said for `patience` seconds."""

    patience = 60.0

    def __init__(self, *, quiet: bool = False, to_stderr: bool = False, label: str = "") -> None:
        self._console = Console(file=sys.stderr if to_stderr else sys.stdout)
        self._quiet, self._label = quiet, f"{label} " if label else ""
        self._live: Live | None = None
        self._last, self._round, self._said = "", "", time.monotonic()

    def __enter__(self) -> "ProgressLine":
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Draw one step."""
        if self._quiet:
            return
        text = f"{self._label}{progress}"
        if self._live:
            beside = f"{self._round}  {progress}" if progress.within and self._round else text
            self._live.update(_bar(progress, beside))  # the last round's line stays in sight
        elif text != self._last and not (progress.within and time.monotonic() - self._said < self.patience):
            try:
                print(text, file=self._console.file, flush=True)
            except BrokenPipeError:  # nobody reads on: the run itself is worth finishing
                self._quiet = True
            self._said = time.monotonic()
        self._last = text
        if not progress.within:
            self._round = "" if progress.step else text


def _bar(p: Progress, text: str) -> Text:
    done = round(24 * p.round / p.rounds)
    return Text.assemble(("━" * done, "green"), ("━" * (24 - done), "bright_black"), "  ", text)
