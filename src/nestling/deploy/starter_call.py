"""`python -I -S starter_call.py SOCKET PROGRAM …`: a process of Flower's, which the site's starter forks for this one.

It is run as a file and imports nothing of this package, so that it is there within some hundredths of a second. Without
a starter it becomes the program itself, which imports all that it needs.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Hand over arguments, environment and outputs, and end with the exit code that comes back."""
    path, *arguments = sys.argv[1:]
    taken = code = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as starter:
            starter.connect(path)
            request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
            data = json.dumps(request, allow_nan=False).encode()
            socket.send_fds(starter, [len(data).to_bytes(8, "big")], [0, 1, 2])
            starter.sendall(data)
            taken = starter.recv(1)
            code = starter.recv(1) if taken else b""
    except OSError:
        pass
    if taken:
        sys.exit(code[0] if code else 1)
    line = [sys.executable, "-P", "-m", "nestling.deploy.task", *arguments]
    os.execv(line[0], line)  # noqa: S606 our own program, and no shell


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: os._exit(128 + number))
    main()
