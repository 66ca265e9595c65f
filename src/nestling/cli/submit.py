"""`nestling submit`: a config goes to the server, its rounds are shown as they end, and its table at last."""

import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from nestling.cli.run import Switch, read_command, show
from nestling.config.schema import RunConfig
from nestling.core.errors import ConfigError, RemoteError, RunError
from nestling.runs.files import from_json, printable
from nestling.runs.result import Result

_STARTED = re.compile(r"Successfully started run (\d+)")
_USAGE = """usage: nestling submit CONFIG [SETTINGS] --server HOST:PORT --ca ca.crt
       nestling submit --resume FOLDER    --server HOST:PORT --ca ca.crt
       nestling submit --stop NUMBER      --server HOST:PORT --ca ca.crt
       nestling submit --follow NUMBER    --server HOST:PORT --ca ca.crt

CONFIG     a TOML file, or a preset's name; 'nestling submit flite-digits --help' lists all settings
FOLDER     the name of a run's folder at the server, shown once all sites are there
NUMBER     of a run, shown first of all

--server   where 'nestling serve' listens            --ca     the server's ca.crt
--insecure in the place of --ca: no TLS, only to try things on one machine
--json     end with one JSON object on the standard output, progress on the standard error (not with --stop)"""


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

    stop: str
    """The run's number, which 'nestling submit' shows first."""
    server: str = ""
    ca: str = ""
    insecure: bool = False


@dataclasses.dataclass(frozen=True)
class FollowThere:
    """Show a run of the server's again, from its beginning until it ends."""

    follow: str
    """The run's number, which 'nestling submit' shows first."""
    server: str = ""
    ca: str = ""
    insecure: bool = False
    json: bool = False


THERE: dict[str, type[ResumeThere | StopThere | FollowThere]] = {
    "--resume": ResumeThere,
    "--stop": StopThere,
    "--follow": FollowThere,
}
"""What may be asked for in the place of a config."""


def submit(args: Sequence[str]) -> int:
    """`nestling submit CONFIG …`, `--resume RUN …`, `--stop NUMBER …` or `--follow NUMBER …`; returns the exit code of
    the run."""
    command: SubmitCommand | ResumeThere | StopThere | FollowThere
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if args else 2
    asked = [arg.partition("=")[0] for arg in args]
    if there := next((THERE[arg] for arg in asked if arg in THERE), None):
        command = tyro.cli(there, args=list(args), prog="nestling submit", config=(tyro.conf.FlagCreatePairsOff,))
    else:
        command = read_command(SubmitCommand, args, verb="submit")
    from nestling.deploy import bundle, programs, reach
    from nestling.engines import flower_compat

    flower_compat.require()
    from nestling.deploy.keys import answer

    if not command.server:
        raise ConfigError("is missing", where="--server", remedy="Give HOST:PORT of 'nestling serve'.")
    programs.check_secure(programs.split_address(command.server)[0], insecure=command.insecure)
    if not command.insecure and not Path(command.ca).is_file():
        what = f"{command.ca!r} is no file" if command.ca else "is missing"
        raise ConfigError(what, where="--ca", remedy="Give the server's ca.crt.")
    number = _number(command)
    ca = None if command.insecure else Path(command.ca).resolve()
    reach.check_reached(command.server, ca)
    with tempfile.TemporaryDirectory(prefix="nestling-") as folder:
        here = Path(folder)
        programs.environment(here, {})  # makes Flower's home
        programs.write_connection(here / "flower", server=command.server, ca=ca)
        if isinstance(command, StopThere):
            said = programs.flwr(here, ["stop", number, "nestling", "--format", "json"])
            answer(said, remedy="Give the number of a run that has not ended: 'nestling submit' shows it first.")
            print(f"nestling: run {number} is stopped")
            return 0

        def ended(number: str) -> str:
            """How a run did, in Flower's word; empty if nobody says."""
            try:
                reach.check_reached(command.server, ca)
                found = answer(programs.flwr(here, ["list", "nestling", "--run-id", number, "--format", "json"]))
                return str(found["runs"][0]["status"])
            except (RemoteError, LookupError, TypeError):
                return ""

        resumed = command.resume if isinstance(command, ResumeThere) else ""
        if isinstance(command, FollowThere):
            process = programs.follow(here, ["log", number, "nestling", "--stream"])
        else:
            bundle.write_bundle(here / "run", None if resumed else command.config, resume=resumed)  # type: ignore[union-attr]
            process = programs.follow(here, ["run", str(here / "run"), "nestling", "--stream"])
        assert process.stdout is not None
        if isinstance(command, SubmitCommand) and command.config.machine.references:
            print("nestling: no rows of reference: nobody has the data of all sites", file=sys.stderr)
        try:
            result = followed(process.stdout, to_stderr=command.json, folder=resumed, ended=ended, begun=number)
        except KeyboardInterrupt:
            what = "'nestling submit --follow NUMBER …' shows it again, --stop ends it"
            print(f"nestling: the run goes on at the server; {what}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()
    show(result, as_json=command.json)
    return 0


def _number(command: object) -> str:
    """That of the run that is meant; empty for a new one."""
    for name in ("stop", "follow"):
        number = getattr(command, name, None)
        if number is not None:
            if not number.isascii() or not number.isdigit():
                raise ConfigError(
                    f"{number!r} is no number of a run",
                    where=f"--{name}",
                    remedy="Give the number that 'nestling submit' shows first; --resume alone takes a folder's name.",
                )
            return str(number)
    return ""


def followed(
    lines: Iterable[bytes],
    *,
    to_stderr: bool,
    folder: str = "",
    ended: Callable[[str], str] = lambda number: "",
    begun: str = "",
) -> Result:
    """Show what a run says of itself until it has ended; returns its result.

    Args:
        lines: its log, between Flower's own lines.
        to_stderr: where to show it.
        folder: that of a run gone on with.
        ended: how the run of a number did, as the server says when its log has ended; empty if it says nothing.
        begun: the run's number, if it was begun before.

    Raises `RunError`, with the exit code that the run would have had here, if it failed, and if it was stopped;
    `RemoteError` if this machine may not submit, or if the server has gone.
    """
    from nestling.deploy.said import ERROR, FOLDER, LINE, RESULT, plain, uncoloured

    stream, last, named = sys.stderr if to_stderr else sys.stdout, "", False
    for raw in lines:
        line = uncoloured(raw.decode("utf-8", "replace"))
        if line.startswith(RESULT):
            values = from_json(line.removeprefix(RESULT), "the server's result")
            return Result.from_dict(values if isinstance(values, dict) else {}, where="server")
        if line.startswith(ERROR):
            told = from_json(line.removeprefix(ERROR), "the server's error")
            raise _error_of(told)
        if line.startswith(FOLDER):
            if named:
                continue
            named = True
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
        elif words := plain(line):
            last = f"{last} {words}"[-300:].lstrip()
    raise _without_result(begun, folder, last, ended(begun) if begun else "")


def _without_result(begun: str, folder: str, last: str, status: str) -> RunError | RemoteError:
    """What to raise where a log has ended before its run: it was stopped, has failed, or is not heard of any more."""
    from nestling.deploy.said import forbidden, is_forbidden

    said = f" ({last})" if last else ""
    if not begun:
        return forbidden() if is_forbidden(last) else RemoteError(f"has not taken the run{said}", where="the server")
    where = f"run {begun}"
    on = f"'nestling submit --resume {folder} …' goes on with it." if folder else ""
    if status.endswith(":stopped"):
        return RunError("was stopped", where=where, remedy=on or "It had no round yet: submit it anew.")
    if status.startswith("finished"):
        return RunError(f"ended without a result{said}", where=where, remedy=on or "See the server's output.")
    if status:
        return RemoteError(
            f"goes on at the server, whose connection was lost{said}",
            where=where,
            remedy=f"'nestling submit --stop {begun} …' ends it. {on}".strip(),
        )
    return RemoteError(
        f"is not heard of any more, for its server has gone{said}",
        where=where,
        remedy=on or f"If it had not begun it will when the server is back; 'submit --stop {begun}' ends it then.",
    )


def _error_of(told: object) -> RunError:
    values = told if isinstance(told, dict) else {}
    text = printable(str(values.get("error", "failed"))).rstrip(".")
    error = RunError(text.removeprefix("server: "), where="server")
    code = values.get("exit_code")
    error.exit_code = code if isinstance(code, int) and 0 < code < 256 else 1
    return error
