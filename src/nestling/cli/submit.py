"""`nestling submit`: a config goes to the server, its rounds are shown as they end, and its table at last."""

import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from nestling.cli.run import Switch, read_command, show
from nestling.config.schema import RunConfig
from nestling.core.errors import ConfigError, RemoteError, RunError
from nestling.runs.files import from_json, printable
from nestling.runs.result import Result

_STARTED = re.compile(r"Successfully started run (\d+)")
_REFUSED = re.compile(r"error '403 Forbidden' for url '\S+/control/")


@dataclasses.dataclass(frozen=True)
class SubmitCommand:
    """Run CONFIG on the server, over the sites that have joined it. The run's folder lies there, under FED/runs."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    server: str = ""
    """HOST:PORT of 'nestling serve'."""
    ca: str = ""
    """The server's ca.crt."""
    insecure: Switch = False
    """No TLS: only to try things on one machine."""
    json: Switch = False
    """End with one JSON object on the standard output; progress goes to the standard error."""


@dataclasses.dataclass(frozen=True)
class ResumeThere:
    """Go on with a run of the server's that was interrupted, killed or failed."""

    resume: str
    """The name of its folder under FED/runs."""
    server: str = ""
    ca: str = ""
    insecure: bool = False
    json: bool = False


@dataclasses.dataclass(frozen=True)
class StopThere:
    """End a run on the server; its last finished round is kept, and --resume goes on from there."""

    stop: int
    """The run's number, which 'nestling submit' shows first."""
    server: str = ""
    ca: str = ""
    insecure: bool = False


def submit(args: Sequence[str]) -> int:
    """`nestling submit CONFIG …`, `--resume RUN …` or `--stop NUMBER …`; returns the exit code of the run."""
    command: SubmitCommand | ResumeThere | StopThere
    if args and args[0] == "--resume":
        command = tyro.cli(tyro.conf.FlagCreatePairsOff[ResumeThere], args=list(args), prog="nestling submit")
    elif args and args[0] == "--stop":
        command = tyro.cli(tyro.conf.FlagCreatePairsOff[StopThere], args=list(args), prog="nestling submit")
    else:
        command = read_command(SubmitCommand, args, verb="submit")
    from nestling.deploy import bundle, programs, reach
    from nestling.engines import flower_compat

    if not command.server:
        raise ConfigError("is missing", where="--server", remedy="Give HOST:PORT of 'nestling serve'.")
    programs.check_secure(programs.split_address(command.server)[0], insecure=command.insecure)
    if not command.insecure and not Path(command.ca).is_file():
        raise ConfigError(f"{command.ca!r} is no file", where="--ca", remedy="Give the server's ca.crt.")
    flower_compat.require()
    ca = None if command.insecure else Path(command.ca).resolve()
    reach.check_reached(command.server, ca)
    with tempfile.TemporaryDirectory(prefix="nestling-") as folder:
        here = Path(folder)
        programs.environment(here, {})  # makes Flower's home
        programs.write_connection(here / "flower", server=command.server, ca=ca)
        if isinstance(command, StopThere):
            from nestling.deploy.keys import answer

            said = programs.flwr(here, ["stop", str(command.stop), "nestling", "--format", "json"])
            answer(said, remedy="Give the number of a run that has not ended: 'nestling submit' shows it first.")
            print(f"nestling: run {command.stop} is stopped")
            return 0
        resumed = command.resume if isinstance(command, ResumeThere) else ""
        bundle.write_bundle(here / "run", None if resumed else command.config, resume=resumed)  # type: ignore[union-attr]
        process = programs.follow(here, ["run", str(here / "run"), "nestling", "--stream"])
        assert process.stdout is not None
        if not resumed and command.config.machine.references:  # type: ignore[union-attr]
            print("nestling: no rows of reference: nobody has the data of all sites", file=sys.stderr)
        try:
            result = followed(process.stdout, to_stderr=command.json, folder=resumed)
        except KeyboardInterrupt:
            print("nestling: the run goes on at the server; 'nestling submit --stop' ends it", file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()
    show(result, as_json=command.json)
    return 0


def followed(lines: Iterable[bytes], *, to_stderr: bool, folder: str = "") -> Result:
    """Show what a run says of itself until it has ended; returns its result. `folder` is that of a run gone on with.

    Raises `RunError`, with the exit code that the run would have had here, if it fails, and if its log ends before;
    `RemoteError` if this machine may not submit.
    """
    from nestling.deploy.said import ERROR, FOLDER, LINE, RESULT, plain, uncoloured

    stream, last, begun = sys.stderr if to_stderr else sys.stdout, "", ""
    for raw in lines:
        line = uncoloured(raw.decode("utf-8", "replace"))
        if line.startswith(RESULT):
            values = from_json(line.removeprefix(RESULT), "the server's result")
            return Result.from_dict(values if isinstance(values, dict) else {}, where="server")
        if line.startswith(ERROR):
            told = from_json(line.removeprefix(ERROR), "the server's error")
            raise _error_of(told)
        if line.startswith(FOLDER):
            folder = shlex.quote(printable(line.removeprefix(FOLDER))[:200])  # it stands in a command to be typed
            print(
                f"in {folder}; 'nestling submit --resume {folder} …' goes on if it is cut short",
                file=stream,
                flush=True,
            )
        elif line.startswith(LINE):
            print(printable(line.removeprefix(LINE)), file=stream, flush=True)
        elif started := _STARTED.search(line):
            begun = started[1]
            print(
                f"submitted as run {started[1]}; 'nestling submit --stop {started[1]} …' ends it",
                file=stream, flush=True,
            )  # fmt: skip
        elif (words := plain(line)) and not words.startswith(("INFO ", "Using SuperLink")):
            last = f"{last} {words}"[-300:].lstrip()
    if not begun and _REFUSED.search(last):
        raise RemoteError(
            f"takes no orders from this machine's address ({last})",
            where="server",
            remedy="Submit on the server's machine, or let 'nestling serve' have --control with this address.",
        )
    if folder:
        remedy = f"'nestling submit --resume {folder} …' goes on with it."
    else:
        remedy = "See the server's output."
        if begun:
            remedy = f"It had no round yet: unless it still waits ('submit --stop {begun}' ends it), submit it anew."
    said = f" ({last})" if last else ""
    raise RunError(f"the run's log ended without a result{said}", where="server", remedy=remedy)


def _error_of(told: object) -> RunError:
    values = told if isinstance(told, dict) else {}
    text = printable(str(values.get("error", "failed"))).rstrip(".")
    error = RunError(text.removeprefix("server: "), where="server")
    code = values.get("exit_code")
    error.exit_code = code if isinstance(code, int) and 0 < code < 256 else 1
    return error
