"""A site's calls to its warm worker: a few bytes of header and the body, through a Unix socket that only its owner has.

Flower starts a process for every message; this is all that such a process does. It imports no torch, starts the worker
if there is none, and waits no longer than the site's limit: a worker that hangs ends itself (`warm.py`), or is killed.
One that dies, of whatever kills it, is started anew and asked the same again, which gives the same: what a client keeps
is replaced as a whole, under the number of the round, and a round begins with what was kept before that number.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from nestling.core.types import Failure
from nestling.deploy.folder import SiteSettings, read_settings
from nestling.deploy.process import start
from nestling.runs.files import from_json, to_json

SOCKET, KEY, ALIVE, LOG, STARTING = "worker.sock", "worker.key", "worker.alive", "worker.log", "worker.starting"
GRACE = 30.0
"""Seconds beyond its limit that a worker has to end itself."""
START = 300.0
"""Seconds in which a worker has to listen; importing torch takes most of them on a busy machine. One that is still at
work on a call whose caller is gone is waited for as long."""
TRIES = 3
"""How often a call is made whose worker dies: what kills it each time, memory that runs out say, is not waited out."""
LARGEST_LOG = 8 << 20
STOP = "stop"


def call(site: Path, kind: str, body: bytes) -> bytes | Failure:
    """The worker's answer to one message. A worker that hangs, dies again and again, or cannot be started is a
    `Failure`; all tries together take no longer than one may."""
    limit, worked = read_settings(SiteSettings, site).limit, 0.0
    patience = time.monotonic() + START  # to start it, or to wait for it; what it has worked comes on top
    for _ in range(TRIES):
        connection = _connected(site, patience + worked)
        if isinstance(connection, Failure):
            return connection
        began = time.monotonic()
        try:
            connection.send_bytes(frame({"kind": kind}, body))
            if not connection.poll(limit - worked + GRACE):
                kill(site)
                return Failure("hung", f"did not end within {limit:g} s")
            head, answer = unframe(connection.recv_bytes())
            return Failure(str(head["code"]), str(head["detail"])) if "code" in head else answer
        except (OSError, EOFError):
            worked += time.monotonic() - began
            if worked >= limit:
                return Failure("hung", f"did not end within {limit:g} s")
        finally:
            connection.close()
    return Failure("worker_died", f"the worker ended {TRIES} times while it was at work; see worker.log at the site")


def frame(head: dict[str, str], body: bytes) -> bytes:
    """A header and a body as one message.

    >>> unframe(frame({"kind": "round"}, b"hello"))
    ({'kind': 'round'}, b'hello')
    """
    return to_json(head).encode() + b"\n" + body


def unframe(data: bytes) -> tuple[dict[str, str], bytes]:
    """A header and a body. Raises `WireError` if the header is not JSON."""
    head, _, body = data.partition(b"\n")
    return from_json(head, "worker"), body


def is_alive(site: Path) -> bool:
    """Whether a worker is at work for this site: it holds a lock for as long as it lives."""
    try:
        handle = os.open(site / ALIVE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def kill(site: Path) -> None:
    """End the site's worker at once, if there is one."""
    if is_alive(site):
        with suppress(OSError, ValueError):
            os.kill(int((site / ALIVE).read_text()), signal.SIGKILL)
    until = time.monotonic() + 5
    while is_alive(site) and time.monotonic() < until:
        time.sleep(0.02)


def _connected(site: Path, until: float) -> Connection | Failure:
    with _one_at_a_time(site):
        started: subprocess.Popen[bytes] | None = None
        starts = 0
        while time.monotonic() < until:
            with suppress(OSError, EOFError, AuthenticationError):
                return _shaken(site, until - time.monotonic())
            if started is None and not is_alive(site):
                started, starts = _start(site), starts + 1
            if started is not None and started.poll() is not None and not is_alive(site):
                if starts == TRIES:
                    return Failure("worker_died", "the worker could not be started; see worker.log at the site")
                started = None  # killed before it could listen
            time.sleep(0.05)
    if not starts:
        return Failure("busy", "the worker is still at work on an earlier message")
    return Failure("worker_died", f"the worker did not listen within {START:g} s")


def _shaken(site: Path, timeout: float) -> Connection:
    """A connection whose other side is the worker, and has taken it. Raises `OSError` if it has not within `timeout`:
    the system queues connections to a worker that is busy, and its first words come when it is not."""
    key = (site / KEY).read_bytes()
    with socket.socket(socket.AF_UNIX) as opened:
        opened.settimeout(max(timeout, 0.01))
        opened.connect(str(site / SOCKET))
        opened.settimeout(None)
        connection: Connection = Connection(opened.detach())
    try:
        if not connection.poll(max(timeout, 0.0)):
            raise TimeoutError
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _one_at_a_time(site: Path) -> Iterator[None]:
    handle = os.open(site / STARTING, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _start(site: Path) -> "subprocess.Popen[bytes]":
    """A worker that lives on when this process ends, as it does after every message. A log that has grown large makes
    room for a new one, and is itself kept until that has."""
    with suppress(FileNotFoundError):
        if (site / LOG).lstat().st_size > LARGEST_LOG:
            os.replace(site / LOG, site / f"{LOG}.1")
    log = os.open(site / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return start([sys.executable, "-P", "-m", "nestling.deploy.warm", str(site)], output=log, own_session=True)
    finally:
        os.close(log)
