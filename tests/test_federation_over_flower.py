"""A real federation on the loopback: a server with TLS and registered keys, three sites, and what can happen to them.

Each command is one that a user types. It takes minutes, for Flower starts a process for every message, so it is not
part of `make test`: `make test-flower` runs it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from small import images, toml

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.api import run
from nestling.config.load import parse_config
from nestling.runs.folder import list_runs, read_status
from nestling.runs.recorder import read_result, read_rows
from nestling.runs.result import Result

pytestmark = pytest.mark.flower

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
    processes: dict[str, "subprocess.Popen[bytes]"]

    def start(self, name: str, *args: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [NESTLING, *args], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def serve(self) -> None:
        """Start the server, for the first time or again, and wait until it answers."""
        begun = self.log("serve").count("Uvicorn running")
        line = ("--dir", "fed", "--port", str(self.port), "--data", str(images()), "--wait", str(PATIENCE))
        self.start("serve", "serve", *line)
        until(lambda: self.log("serve").count("Uvicorn running") > begun, "the server does not begin")

    def do(self, *args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([NESTLING, *args], cwd=self.folder, capture_output=True, text=True)

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
            f"site{number}", "join", "--server", f"127.0.0.1:{self.port}", "--client", str(number), "--dir",
            f"s{number}", "--ca", "fed/certificates/ca.crt", "--key", key, "--data", str(images()),
        )  # fmt: skip

    def submit(self, name: str, config: str, *more: str) -> "subprocess.Popen[bytes]":
        server = ("--server", f"127.0.0.1:{self.port}", "--ca", "fed/certificates/ca.crt")
        return self.start(name, "submit", *config.split(), *server, *more)

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """Signal a command and all that it has started, the worker of a site included."""
        process = self.processes[name]
        if number == signal.SIGKILL and name.startswith("site"):
            worker = self.folder / f"s{name[4:]}" / "worker.alive"
            if worker.is_file():
                _signal(int(worker.read_text()), number)
        _signal_group(process.pid, number)
        process.wait(60)
        _signal_group(process.pid, signal.SIGKILL)


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


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with TemporaryDirectory(prefix="nestling-") as short:  # a socket's path has to be
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Federation(Path(short), port, {})
        text = toml("ignored", data=Path("elsewhere")).replace("rounds = 2", "rounds = 3")
        (made.folder / "job.toml").write_text(text)
        (made.folder / "long.toml").write_text(
            text.replace("rounds = 3", "rounds = 6") + f"\n[server]\nmin_replies = 2\ndeadline = {PATIENCE * 3 / 8:g}\n"
        )
        try:
            made.serve()
            for number in (0, 1, 2, 3):
                assert made.do("keys", "new", f"keys/{number}").returncode == 0
                if number < 3:
                    added = made.do("keys", "add", f"keys/{number}.pub", "--client", str(number))
                    assert added.returncode == 0, added.stderr
            for number in (0, 1, 2):
                made.join(number)
            for number in (0, 1, 2):
                until(lambda n=number: "SuperNode ID" in made.log(f"site{n}"), f"site {number} does not join")
            yield made
        finally:
            for name in [*made.processes][::-1]:
                if made.processes[name].poll() is None:
                    made.end(name)
            if os.environ.get("NESTLING_TEST_KEEP"):
                shutil.copytree(made.folder, os.environ["NESTLING_TEST_KEEP"], dirs_exist_ok=True, ignore=_sockets)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]


def runs(federation: Federation) -> list[Path]:
    folder = federation.folder / "fed" / "runs"
    return [found.path for found in list_runs(folder)] if folder.is_dir() else []


def in_peace(federation: Federation, config: str, out: Path) -> Result:
    """The same run in this process."""
    text = (federation.folder / config).read_text().replace('path = "elsewhere"', f'path = "{images()}"')
    return run(parse_config(text.replace('out = "ignored"', f'out = "{out}"\nreferences = false')))


def test_a_submitted_run_ends_in_the_state_of_one_in_process_to_the_bit(federation: Federation, tmp_path: Path) -> None:
    submitted = federation.submit("submit", "job.toml", "--json")
    assert submitted.wait(2 * PATIENCE) == 0, federation.log("submit") + federation.log("serve")[-3000:]
    said = federation.log("submit")
    assert [f"round={n}/3 clients=3/3" in said for n in (1, 2, 3)] == [True] * 3
    (folder,) = runs(federation)
    there = read_result(folder)
    assert there.to_dict()["state_digest"] in said
    here = in_peace(federation, "job.toml", tmp_path)
    assert there.base_hash == here.base_hash
    assert there.state_digest == here.state_digest
    assert (there.bytes_up, there.bytes_down, there.accuracy) == (here.bytes_up, here.bytes_down, here.accuracy)
    for number in (0, 1, 2):
        assert (federation.folder / f"s{number}" / "pinned").read_text() == here.base_hash


def test_a_key_that_is_not_on_the_list_is_refused(federation: Federation) -> None:
    stranger = federation.join(3)
    until(lambda: stranger.poll() is not None, "the stranger is let in")
    assert stranger.returncode != 0
    assert "SuperNode ID" not in federation.log("site3")
    assert len(federation.do("keys", "list").stdout.splitlines()) == 4  # a head and three clients


EVIL = 'from pathlib import Path\nPath("{place}").write_text("ran")\napp = None\n'


def test_no_code_of_a_bundle_is_run_anywhere(federation: Federation) -> None:
    """Submitted by Flower's own command, a bundle that brings its own apps runs ours, which find no settings in it."""
    from nestling.deploy import programs
    from nestling.deploy.bundle import write_bundle

    evil, place = federation.folder / "evil", federation.folder / "ran"
    write_bundle(evil / "app", None)
    pyproject = evil / "app" / "pyproject.toml"
    pyproject.write_text(
        pyproject.read_text().replace("nestling.deploy.app:server_app", "bad:app").replace(
            "nestling.deploy.app:client_app", "bad:app"
        )
    )  # fmt: skip
    # A module without a package: Flower's command, at whoever submits, looks for it and would import its packages.
    (evil / "app" / "bad.py").write_text(EVIL.format(place=place))
    environment = programs.environment(evil, {})
    programs.write_connection(
        evil / "flower", server=f"127.0.0.1:{federation.port}", ca=federation.folder / "fed/certificates/ca.crt"
    )
    done = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), "run", str(evil / "app"), "nestling", "--stream"],
        env=environment, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert "nestling-error: " in done.stdout, done.stdout + done.stderr
    assert "config: is empty" in done.stdout
    assert not place.exists()


KEEPS = '[codec]\nkind = "topk"\nshare = 0.2\nfeedback = true\n\n[server]\nrule = "nesterov"\nlr = 0.7\n'


def test_cat_054_a_server_killed_in_mid_run_and_started_again_goes_on_to_the_same_bits(
    federation: Federation, tmp_path: Path
) -> None:
    """Flower's server is killed; what it had started notices and ends, and the sites find the new one by themselves.
    The server's rule has a memory, and each site what its client keeps: error feedback."""
    text = (federation.folder / "job.toml").read_text().replace("rounds = 3", "rounds = 5")
    (federation.folder / "cut.toml").write_text(f"{text}\n{KEEPS}")
    cut = federation.submit("cut", "cut.toml")
    federation.until_said("cut", "round=2/5")
    server = federation.processes["serve"]
    started = descendants(server.pid)
    _signal(started[0], signal.SIGKILL)
    assert server.wait(PATIENCE) != 0
    until(lambda: not any(map(alive, started)), "what the server had started lives on")
    assert cut.wait(PATIENCE) != 0  # whoever has submitted is told
    folder = runs(federation)[-1]
    assert read_status(folder) != "done"
    federation.serve()
    resumed = federation.submit("resumed", f"--resume {folder.name}", "--json")
    assert resumed.wait(3 * PATIENCE) == 0, federation.log("resumed") + federation.log("serve")[-3000:]
    there, here = read_result(folder), in_peace(federation, "cut.toml", tmp_path)
    assert there.rejected == {}
    assert [row["round"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert there.state_digest == here.state_digest
    assert (there.bytes_up, there.bytes_down, there.accuracy) == (here.bytes_up, here.bytes_down, here.accuracy)
    assert (folder / "bytes.jsonl").read_text() == (Path(here.run_dir) / "bytes.jsonl").read_text()


def test_a_site_that_is_killed_costs_its_own_replies_and_the_run_goes_on(federation: Federation) -> None:
    submitted = federation.submit("long", "long.toml")
    until(lambda: "round=1/6" in federation.log("long"), "the first round does not end")
    federation.end("site2", signal.SIGKILL)
    assert submitted.wait(3 * PATIENCE) == 0, federation.log("long") + federation.log("serve")[-3000:]
    rows = read_rows(runs(federation)[-1] / "metrics.jsonl")
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["accepted"] == 3
    assert rows[-1]["accepted"] == 2
    assert set(read_result(runs(federation)[-1]).rejected) <= {"node_lost", "late", "busy", "client_error"}


def test_a_key_that_is_revoked_in_mid_run_is_refused_from_then_on_and_the_run_goes_on(federation: Federation) -> None:
    """First the site that was killed comes back, which the server lets it once it has missed two of its heartbeats."""
    begun = federation.log("site2").count("SuperNode ID")
    if federation.processes["site2"].poll() is not None:
        end = time.monotonic() + PATIENCE
        while federation.log("site2").count("SuperNode ID") == begun:
            assert time.monotonic() < end, "a site that was killed does not come back"
            if federation.processes["site2"].poll() is not None:
                federation.join(2)
            time.sleep(1)
    submitted = federation.submit("revoked", "long.toml")
    federation.until_said("revoked", "round=1/6")
    revoked = federation.do("keys", "revoke", "--client", "2")
    assert revoked.returncode == 0, revoked.stderr
    assert submitted.wait(3 * PATIENCE) == 0, federation.log("revoked") + federation.log("serve")[-3000:]
    rows = read_rows(runs(federation)[-1] / "metrics.jsonl")
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["accepted"] == 3
    assert rows[-1]["accepted"] == 2
    assert set(read_result(runs(federation)[-1]).rejected) <= {"node_lost", "late", "busy"}
    until(lambda: federation.processes["site2"].poll() is not None, "its site is not told")
    begun = federation.log("site2").count("SuperNode ID")
    again = federation.join(2)
    until(lambda: again.poll() is not None, "it is let in again")
    assert again.returncode != 0
    assert federation.log("site2").count("SuperNode ID") == begun
    assert len(federation.do("keys", "list").stdout.splitlines()) == 3  # a head and two clients
