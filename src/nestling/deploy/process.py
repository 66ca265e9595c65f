"""The one place where a deployment starts processes: programs of this package and of Flower, never through a shell."""

import subprocess
from collections.abc import Mapping, Sequence


def start(
    line: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
    own_session: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start a program; its standard input is empty.

    Args:
        line: the program and its arguments.
        environment: in the place of this process'.
        output: where its output and errors go: a descriptor or `subprocess.PIPE`; None: to those of this process.
        own_session: it lives on when this process ends.
    """
    return subprocess.Popen(  # noqa: S603 Flower's programs and ours, no shell
        list(line), env=None if environment is None else dict(environment), stdin=subprocess.DEVNULL, stdout=output,
        stderr=None if output is None else subprocess.STDOUT, start_new_session=own_session,
    )  # fmt: skip
