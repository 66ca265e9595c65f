"""The one place where a deployment starts processes: programs of this package and of Flower, never through a shell."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def start(
    line: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
    own_session: bool = False,
    with_parent: bool = False,
    keep: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a program; its standard input is empty.

    Args:
        line: the program and its arguments.
        environment: in the place of this process'.
        output: where its output and errors go: a descriptor or `subprocess.PIPE`; None: to those of this process.
        own_session: it lives on when this process ends.
        with_parent: it gets SIGTERM when this process ends, even by SIGKILL (on Linux). Not for threads to call: the
            system counts the end of the thread.
        keep: descriptors that it inherits.
    """
    return subprocess.Popen(  # noqa: S603 Flower's programs and ours, no shell
        list(line), env=None if environment is None else dict(environment), stdin=subprocess.DEVNULL, stdout=output,
        stderr=None if output is None else subprocess.STDOUT, start_new_session=own_session, pass_fds=keep,
        preexec_fn=_tied_to(os.getpid()) if with_parent and _LIBC else None,
    )  # fmt: skip


def end_with(parent: int) -> None:
    """This process gets SIGTERM when that one ends, which is its parent; at once if it has ended. On Linux alone."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _tied_to(parent: int) -> Callable[[], None]:
    return lambda: end_with(parent)
