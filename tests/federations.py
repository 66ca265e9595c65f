"""Federations for tests: a server and its sites, each command one that a user types, each process with its log."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from small import images

from nestling.api import run
from nestling.config.load import parse_config
from nestling.runs.folder import list_runs
from nestling.runs.result import Result

NESTLING = str(Path(sys.executable).parent / "nestling")
PATIENCE = float(os.environ.get("NESTLING_TEST_PATIENCE", "240"))
"""Seconds for whatever has to happen; more on a machine that others use, too."""


def until(happened: object, what: str, *, seconds: float = PATIENCE) -> None:
    """Wait until `happened()` is true."""
    end = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.2)


@dataclass
class Federation:
    """The folder in which everything lies, and the processes in it, each the leader of a group of its own."""

    folder: Path
    port: int
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    server: str = "127.0.0.1"
    """How sites and whoever submits reach it."""
    at: Callable[[str], list[str]] = lambda name: []
    """The beginning of a command line that is to run where this process belongs, on a host of its own for example."""

    def start(self, name: str, *args: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.at(name), NESTLING, *args], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def serve(self, *more: str) -> None:
        """Start the server, for the first time or again, and wait until it answers."""
        begun = self.log("serve").count("Uvicorn running")
        line = ("--dir", "fed", "--port", str(self.port), "--data", str(images()), "--wait", str(PATIENCE))
        self.start("serve", "serve", *line, *more)
        until(lambda: self.log("serve").count("Uvicorn running") > begun, "the server does not begin")

    def do(self, *args: str, name: str = "serve") -> "subprocess.CompletedProcess[str]":
        line = [*self.at(name), NESTLING, *args]
        return subprocess.run(line, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text("utf-8", "replace") if path.is_file() else ""

    def until_said(self, name: str, text: str) -> None:
        """Wait until a command that is at work has said this."""

        def said() -> bool:
            ended = self.processes[name].poll()
            assert text in self.log(name) or ended is None, self.log(name)
            return text in self.log(name)

        until(said, f"{name} does not say {text}", seconds=2 * PATIENCE)

    def join(self, number: int, *, key: str = "") -> "subprocess.Popen[bytes]":
        key = key or f"keys/{number}"
        return self.start(
            f"site{number}", "join", "--server", f"{self.server}:{self.port}", "--client", str(number), "--dir",
            f"s{number}", "--ca", "fed/certificates/ca.crt", "--key", key, "--data", str(images()),
        )  # fmt: skip

    def submit(self, name: str, config: str, *more: str) -> "subprocess.Popen[bytes]":
        server = ("--server", f"{self.server}:{self.port}", "--ca", "fed/certificates/ca.crt")
        return self.start(name, "submit", *config.split(), *server, *more)

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """Signal a command and all that it has started, the worker of a site included."""
        process = self.processes[name]
        if number == signal.SIGKILL and name.startswith("site"):
            self.kill_worker(name)
        try:
            signal_group(process.pid, number)
            process.wait(60)
        finally:
            signal_group(process.pid, signal.SIGKILL)

    def kill_worker(self, name: str) -> None:
        """A site's worker is a session of its own, and outlives a site that is killed."""
        worker = self.folder / f"s{name[4:]}" / "worker.alive"
        if worker.is_file() and (pid := worker.read_text()):
            signal_one(int(pid), signal.SIGKILL)

    def end_all(self) -> None:
        """The youngest first. With $NESTLING_TEST_KEEP set, the folder is copied to there."""
        with ExitStack() as every:  # what one raises ends none of the others
            if os.environ.get("NESTLING_TEST_KEEP"):
                keep = {"dirs_exist_ok": True, "ignore": _sockets}
                every.callback(shutil.copytree, self.folder, os.environ["NESTLING_TEST_KEEP"], **keep)
            for name, process in self.processes.items():
                if process.poll() is None:
                    every.callback(self.end, name)
                elif name.startswith("site"):
                    every.callback(self.kill_worker, name)

    def let_in(self, *numbers: int) -> None:
        """Make a key for each of these sites, at the site, and put it on the list."""
        for number in numbers:
            assert self.do("keys", "new", f"keys/{number}", name=f"site{number}").returncode == 0
            added = self.do("keys", "add", f"keys/{number}.pub", "--client", str(number))
            assert added.returncode == 0, added.stderr

    def join_all(self, *numbers: int) -> None:
        """Start these sites, and wait until the server knows them."""
        for number in numbers:
            self.join(number)
        for number in numbers:
            until(lambda n=number: "SuperNode ID" in self.log(f"site{n}"), f"site {number} does not join")


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, nearest first."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
    return False


def signal_one(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def runs(federation: Federation) -> list[Path]:
    """The folders of its runs, the oldest first."""
    folder = federation.folder / "fed" / "runs"
    return [found.path for found in list_runs(folder)] if folder.is_dir() else []


def in_peace(federation: Federation, config: str, out: Path) -> Result:
    """The same run in this process."""
    text = (federation.folder / config).read_text().replace('path = "elsewhere"', f'path = "{images()}"')
    return run(parse_config(text.replace('out = "ignored"', f'out = "{out}"\nreferences = false')))


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]
