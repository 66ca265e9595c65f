"""The same federation on five hosts: a server, three sites and a desk, each in a network namespace of its own.

They have addresses on one Ethernet and know the server by its name; what reaches whom, and what a pulled cable does, is
as between machines. It takes minutes and root's rights: `make test-flower` runs it where it may.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import rmtree, which
from tempfile import TemporaryDirectory

import pytest
from federations import PATIENCE, Federation, in_peace, runs, until
from small import toml

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.runs.recorder import read_result, read_rows

pytestmark = [pytest.mark.flower, pytest.mark.faults]

SERVER = "fed.example.org"
HOSTS = {
    "serve": "10.77.0.1",
    "site0": "10.77.0.10",
    "site1": "10.77.0.11",
    "site2": "10.77.0.12",
    "desk": "10.77.0.20",
}
PREFIX = f"nestling-{os.getpid()}"
LAN = f"{PREFIX}-lan"
DEADLINE = PATIENCE / 6


def ip(*words: str, inside: str = "") -> None:
    """`ip`, in one of the namespaces."""
    line = ["ip", *(("-n", f"{PREFIX}-{inside}") if inside else ()), *words]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(line)}: {done.stderr}"


def at(name: str) -> list[str]:
    """Commands that are no host's run on the server's."""
    return ["ip", "netns", "exec", f"{PREFIX}-{name if name in HOSTS else 'serve'}"]


def network() -> None:
    """The hosts, and between them a switch."""
    ip("netns", "add", LAN)
    ip("link", "add", "switch", "type", "bridge", inside="lan")
    ip("link", "set", "switch", "up", inside="lan")
    for name, address in HOSTS.items():
        ip("netns", "add", f"{PREFIX}-{name}")
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", f"{PREFIX}-{name}", inside="lan")
        ip("link", "set", name, "master", "switch", "up", inside="lan")
        ip("address", "add", f"{address}/24", "dev", "eth0", inside=name)
        for device in ("lo", "eth0"):
            ip("link", "set", device, "up", inside=name)
        own = Path("/etc/netns") / f"{PREFIX}-{name}"  # `ip netns exec` puts its files in the place of those in /etc
        own.mkdir(parents=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{HOSTS['serve']} {SERVER}\n")


def no_network() -> None:
    """Takes down whatever there is of it."""
    for name in ("lan", *HOSTS):
        subprocess.run(["ip", "netns", "delete", f"{PREFIX}-{name}"], capture_output=True)
        rmtree(Path("/etc/netns") / f"{PREFIX}-{name}", ignore_errors=True)
    with suppress(OSError):
        Path("/etc/netns").rmdir()  # if nobody else has anything there


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    if os.geteuid() != 0 or which("ip") is None:
        pytest.skip("needs root's rights and the command ip")
    with TemporaryDirectory(prefix="nestling-") as short, ExitStack() as after:
        after.callback(no_network)
        try:
            network()
            subprocess.run([*at("desk"), "true"], check=True, capture_output=True)
        except (AssertionError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine makes no network namespaces: {error}")
        made = Federation(Path(short), 8443, server=SERVER, at=at)
        after.callback(made.end_all)
        text = toml("ignored", data=Path("elsewhere")).replace("rounds = 2", "rounds = 3")
        (made.folder / "job.toml").write_text(text)
        more = f"\n[server]\nmin_replies = 2\ndeadline = {DEADLINE:g}\n"
        (made.folder / "long.toml").write_text(text.replace("rounds = 3", "rounds = 200") + more)
        made.serve("--host", "0.0.0.0", "--name", SERVER, "--control", HOSTS["desk"])
        made.let_in(0, 1, 2)
        made.join_all(0, 1, 2)
        yield made


def test_a_run_over_five_hosts_ends_in_the_state_of_one_in_process_to_the_bit(
    federation: Federation, tmp_path: Path
) -> None:
    """Submitted from the desk, whose address the server was told of."""
    submitted = federation.submit("desk", "job.toml", "--json")
    assert submitted.wait(2 * PATIENCE) == 0, federation.log("desk") + federation.log("serve")[-3000:]
    (folder,) = runs(federation)
    there, here = read_result(folder), in_peace(federation, "job.toml", tmp_path)
    assert there.state_digest == here.state_digest
    assert (there.bytes_up, there.bytes_down, there.accuracy) == (here.bytes_up, here.bytes_down, here.accuracy)


def test_a_sites_host_may_not_submit(federation: Federation) -> None:
    before = runs(federation)
    at_site = ("--server", f"{SERVER}:{federation.port}", "--ca", "fed/certificates/ca.crt")
    done = federation.do("submit", "job.toml", *at_site, name="site0")
    assert done.returncode == 9
    assert "takes no orders from this machine's address" in done.stderr
    assert runs(federation) == before


def test_a_site_whose_cable_is_pulled_costs_its_replies_and_comes_back_by_itself(federation: Federation) -> None:
    before = runs(federation)
    server = ("--server", f"{SERVER}:{federation.port}", "--ca", "fed/certificates/ca.crt")
    federation.start("desk", "submit", "long.toml", *server)

    def replied() -> list[set[int]]:
        """Which clients' replies were taken in each round that has ended."""
        new = [folder for folder in runs(federation) if folder not in before]
        if not new or not (new[0] / "metrics.jsonl").is_file():
            return []
        ended = len(list(read_rows(new[0] / "metrics.jsonl")))
        sets = [set[int]() for _ in range(ended)]
        for row in read_rows(new[0] / "bytes.jsonl"):
            if row["direction"] == "up" and row["accepted"] and row["round"] <= ended:
                sets[row["round"] - 1].add(row["client"])
        return sets

    until(lambda: {0, 1, 2} in replied(), "no round ends with three sites")
    ip("link", "set", "site2", "down", inside="lan")
    until(lambda: replied()[-1] == {0, 1}, "no round ends without it alone")
    ip("link", "set", "site2", "up", inside="lan")
    begun = time.monotonic()
    until(lambda: replied()[-1] == {0, 1, 2}, "it does not come back")
    print(f"back after {time.monotonic() - begun:.0f} s: {replied()}")
    assert all({0, 1} <= clients for clients in replied())  # the others missed no round
    assert federation.processes["site2"].poll() is None  # the same process, which nobody has started anew
    assert federation.processes["desk"].poll() in (None, 0)
