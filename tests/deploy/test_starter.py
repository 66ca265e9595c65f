"""A process that is forked for a message is what one of its own would have been, and none of it is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nestling.deploy import starter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a starter forks, which only Linux takes well")

CALL = Path(starter.__file__).with_name("starter_call.py")
PROGRAM = """
import json, os, random, sys, time
from pathlib import Path
from nestling.deploy import starter
if starter.begin(Path(sys.argv[1])):
    said = {"arguments": sys.argv, "drawn": random.random(), "folder": os.getcwd(),
            "open": len(os.listdir("/proc/self/fd")), "name": os.environ.get("NAME"),
            "extra": os.environ.get("EXTRA"), "input": sys.stdin.read()}
    print(json.dumps(said), flush=True)
    print("to the errors", file=sys.stderr, flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
    sys.exit(7)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A node, as long as its input is open, whose starter listens in `folder`."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"EXTRA": "the starter's"},
    ) as node:  # fmt: skip
        assert node.stdout is not None
        assert node.stdout.readline() == "ready\n"
        yield node
        node.kill()


def call(folder: Path, *arguments: str, **more: object) -> "subprocess.Popen[str]":
    environment = {"NAME": "the call's", "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(CALL), str(folder / starter.SOCKET), *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=environment, **more,  # type: ignore[call-overload]
    )  # fmt: skip


def ends(pid: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} is still there")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in found.read_text().split()] if found.exists() else []


def test_a_fork_has_the_calls_arguments_environment_folder_outputs_and_exit_code(tmp_path: Path) -> None:
    with started(tmp_path):
        drawn = set[float]()
        calls = [call(tmp_path, "flwr-clientapp", "--token", f"ü{number}") for number in range(3)]
        for number, each in enumerate(calls):
            out, err = each.communicate(timeout=30)
            assert each.returncode == 7, err
            assert err == "to the errors\n"
            said = json.loads(out)
            drawn.add(said.pop("drawn"))
            assert said.pop("open") == 4, "the three outputs, and the folder that is being listed"
            assert said == {
                "arguments": ["flwr-clientapp", "--token", f"ü{number}"],
                "folder": str(tmp_path),
                "name": "the call's",
                "extra": None,
                "input": "",
            }
    assert len(drawn) == 3


def test_a_call_that_is_ended_ends_its_process_and_the_next_is_answered(tmp_path: Path) -> None:
    with started(tmp_path) as node:
        (process,) = children(node.pid)
        long = call(tmp_path, "wait")
        assert long.stdout is not None
        long.stdout.readline()
        (worker,) = children(process)
        long.terminate()
        assert long.wait(20) == 128 + signal.SIGTERM
        ends(worker)
        again = call(tmp_path, "x")
        again.communicate(timeout=30)
        assert again.returncode == 7
        assert children(process) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_starter_ends_with_its_node_however_that_ends(number: int, tmp_path: Path) -> None:
    with started(tmp_path) as node:
        (process,) = children(node.pid)
        node.send_signal(number)
        node.wait(20)
        ends(process)


def test_one_whose_starter_dies_meanwhile_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    """The message may have been answered: what asks for a second answer is the server's to say."""
    with started(tmp_path) as node:
        (process,) = children(node.pid)
        long = call(tmp_path, "wait")
        assert long.stdout is not None
        long.stdout.readline()
        (worker,) = children(process)
        os.kill(process, signal.SIGKILL)
        assert long.wait(20) == 1
        ends(worker)


def test_without_a_starter_a_call_is_the_process_itself(tmp_path: Path) -> None:
    """Here one that refuses its name, and so says that it is ours."""
    done = call(tmp_path, "flwr-agentapp")
    _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "settings, and no code" in err


NESTED = (1 << 19).to_bytes(8, "big") + b"[" * (1 << 19)


@pytest.mark.parametrize(
    "sent", [b"", bytes(8), (1 << 40).to_bytes(8, "big"), (3).to_bytes(8, "big") + b"[1]", NESTED],
    ids=["nothing", "empty", "too-long", "a-list", "nested"],
)  # fmt: skip
def test_what_is_no_request_is_hung_up_on_and_the_next_is_answered(sent: bytes, tmp_path: Path) -> None:
    with started(tmp_path):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / starter.SOCKET))
            if sent:
                socket.send_fds(stranger, [sent[:8]], [0, 1, 2])
                stranger.sendall(sent[8:])
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
        done = call(tmp_path, "x")
        done.communicate(timeout=30)
        assert done.returncode == 7


def test_a_node_with_more_than_one_thread_has_no_starter(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    import threading

    wait = threading.Event()
    thread = threading.Thread(target=wait.wait)
    thread.start()
    try:
        assert starter.begin(tmp_path) is False
    finally:
        wait.set()
        thread.join()
    assert "each message starts a process of its own" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_node_imports_its_client_without_threads_that_would_forbid_a_starter(tmp_path: Path) -> None:
    """With as many as NumPy's linear algebra likes, and what a worker is told is not changed by it."""
    pytest.importorskip("flwr", reason="needs the extra nestling[flower]")
    program = """
import os, sys
from nestling.deploy import starter, task
task.compat.run_super_node = lambda told: print("a node", os.environ.get("OPENBLAS_NUM_THREADS"), flush=True)
usual = starter.begin
starter.begin = lambda folder: usual(folder) or print("begun", (folder / starter.SOCKET).exists(), flush=True)
sys.argv = ["task", "flower-supernode", "0", sys.argv[1]]
task.main()
"""
    several = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
    for environment, number in ((several, "2"), ({}, "None")):
        kept = {name: value for name, value in os.environ.items() if name not in several}
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=kept | environment
        )
        assert done.stdout == f"begun True\na node {number}\n", done.stderr
        assert done.stderr == ""


def test_a_call_under_nohup_lives_on_when_the_terminal_goes(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started(tmp_path):
            long = call(tmp_path, "wait")
            assert long.stdout is not None
            long.stdout.readline()
            long.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                long.wait(0.5)
            long.terminate()
            assert long.wait(20) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_end_that_was_heard_of_ends_no_other_call(tmp_path: Path) -> None:
    """All in one look: a process has ended, its caller has gone, and another calls, which may get the same number."""
    with started(tmp_path) as node:
        (process,) = children(node.pid)
        first = call(tmp_path, "wait")
        assert first.stdout is not None
        first.stdout.readline()
        (worker,) = children(process)
        os.kill(process, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        first.kill()
        first.wait(20)
        second = call(tmp_path, "x")
        time.sleep(0.5)
        os.kill(process, signal.SIGCONT)
        out, _ = second.communicate(timeout=30)
        assert (second.returncode, bool(out)) == (7, True)
