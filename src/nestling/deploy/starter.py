"""A site's starter: it has imported what answering a message takes, and is copied for each, so none has to import it.

    bin/flwr-clientapp  →  starter_call.py  →  start.sock  →  a fork of the starter becomes the process of the message

Flower starts a process for every message, which spends a second or more on imports before it can call the warm worker.
The call in its place imports nothing: it hands its arguments, environment and outputs to the starter and waits for the
exit code. Where there is no starter, it becomes the process itself. A starter has one thread and holds nothing of any
run, so that what is forked is as good as new; it ends with the site's node, and its forks with it.
"""

import json
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.deploy.process import end_with

SOCKET = "start.sock"
LARGEST = 1 << 20
"""Bytes of a request: arguments and environment."""
TAKEN = b"+"
"""What a caller is told before its process' exit code: from then on it must not become that process itself."""
_PATIENCE = 5.0
"""Seconds for a whole request."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A process that was forked, a descriptor that tells of its end, and who waits for it."""

    pid: int
    ended: int
    caller: socket.socket


def begin(folder: Path) -> bool:
    """Fork the starter of a site, which listens in its folder. True in a process that has become one for a message:
    its arguments, environment and outputs are those of the call. False in the node, and where there can be no starter.
    """
    if sys.platform != "linux":  # elsewhere a fork may not be used before another program is started
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return False
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        print("nestling: more than one thread; each message starts a process of its own", file=sys.stderr, flush=True)
        return False
    path, parent = folder / SOCKET, os.getpid()
    path.unlink(missing_ok=True)  # of a node that has ended: this one holds the folder's lock
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(64)
    if os.fork():
        listening.close()
        return False
    end_with(parent)
    return _serve(listening)


def _serve(listening: socket.socket) -> bool:
    """Until it is ended. Returns in the processes that are forked only."""
    ready = selectors.DefaultSelector()
    ready.register(listening, selectors.EVENT_READ)
    calls: set[_Call] = set()
    try:
        while True:
            for key, _ in ready.select():
                if key.fileobj is listening:
                    if not _fork(listening, ready, calls):
                        return True
                elif key.data in calls:  # or it has been heard of already
                    _hear(key.fileobj, key.data, ready, calls)
    except KeyboardInterrupt:
        os._exit(0)


def _fork(listening: socket.socket, ready: selectors.BaseSelector, calls: set[_Call]) -> bool:
    """Take a call. False in the process that is to answer it."""
    outputs, pid, own = list[int](), -1, os.getpid()
    try:
        caller, _ = listening.accept()
    except OSError:  # it is gone already, or too many are open
        return True
    try:
        wanted, outputs = _request(caller)
        pid = os.fork()
        if pid:
            caller.sendall(TAKEN)
    except (OSError, ValueError, RecursionError):  # no request, or no process more: the caller becomes one
        if pid < 0:
            caller.close()
    if pid == 0:
        for key in list(ready.get_map().values()):
            os.close(key.fileobj.detach() if isinstance(key.fileobj, socket.socket) else key.fd)
        os.close(caller.detach())
        ready.close()
        _become(wanted, outputs)
        end_with(own)  # or it would wait for hours for a node that has ended
        return False
    for output in outputs:
        os.close(output)
    if pid > 0:
        call = _Call(pid, os.pidfd_open(pid), caller)
        calls.add(call)
        ready.register(call.ended, selectors.EVENT_READ, call)
        ready.register(caller, selectors.EVENT_READ, call)
    return True


def _request(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    until = time.monotonic() + _PATIENCE
    caller.settimeout(_PATIENCE)
    data, outputs, _, _ = socket.recv_fds(caller, 8, 3)
    try:
        size = int.from_bytes(data, "big")
        if len(data) != 8 or len(outputs) != 3 or size > LARGEST:
            raise ValueError("is no request")
        parts, left = list[bytes](), size
        while left and (part := caller.recv(left)):
            parts.append(part)
            left -= len(part)
            caller.settimeout(max(until - time.monotonic(), 1e-3))
        wanted = json.loads(b"".join(parts))
        if not isinstance(wanted, dict) or set(wanted) != {"arguments", "environment", "folder"}:
            raise ValueError("is no request")
        return wanted, outputs
    except BaseException:
        for output in outputs:
            os.close(output)
        raise


def _become(wanted: dict[str, Any], outputs: list[int]) -> None:
    """What a new process would have been."""
    for number, output in enumerate(outputs):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    sys.argv = list(wanted["arguments"])
    random.seed()  # each would draw the same


def _hear(of: Any, call: _Call, ready: selectors.BaseSelector, calls: set[_Call]) -> None:
    """A process has ended, of which its caller is told, or a caller, whose process is then ended."""
    if of is call.caller:
        with suppress(ProcessLookupError):
            os.kill(call.pid, signal.SIGTERM)
        ready.unregister(call.caller)
        call.caller.close()
        return
    code = os.waitstatus_to_exitcode(os.waitpid(call.pid, 0)[1])
    calls.discard(call)
    ready.unregister(call.ended)
    os.close(call.ended)
    if call.caller.fileno() >= 0:
        with suppress(OSError):
            call.caller.sendall(bytes([code if code >= 0 else 128 - code]))
        ready.unregister(call.caller)
        call.caller.close()
