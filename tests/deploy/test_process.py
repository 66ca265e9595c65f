"""A program that is tied to the process that started it does not outlive it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

STARTS = """
import sys, time
from nestling.deploy.process import start
print(start([sys.executable, "-c", "import time; time.sleep(60)"], with_parent=len(sys.argv) > 1).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_program_ends_with_its_parent_even_if_that_is_killed(tied: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS, *["tied"] * tied], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until = time.monotonic() + (30 if tied else 0.3)
    while _lives(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert _lives(child) == (not tied)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    parent.stdout.close()


def _lives(process: int) -> bool:
    """Also False for one that has ended and that nobody has waited for."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
