"""A real federation on the loopback: a server with TLS and registered keys, three sites, and what can happen to them.

Each command is one that a user types. `make test` runs those in which all goes well or something is refused, and `make
test-flower` those in which processes are killed (`faults`), which take minutes, too.
"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from federations import PATIENCE, Federation, alive, descendants, in_peace, runs, signal_one, until
from small import toml

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.runs.folder import read_status
from nestling.runs.recorder import read_result, read_rows

pytestmark = pytest.mark.flower


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with TemporaryDirectory(prefix="nestling-") as short:  # a socket's path has to be
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Federation(Path(short), port)
        text = toml("ignored", data=Path("elsewhere")).replace("rounds = 2", "rounds = 3")
        (made.folder / "job.toml").write_text(text)
        (made.folder / "long.toml").write_text(
            text.replace("rounds = 3", "rounds = 6") + f"\n[server]\nmin_replies = 2\ndeadline = {PATIENCE * 3 / 8:g}\n"
        )
        try:
            made.serve()
            made.let_in(0, 1, 2)
            assert made.do("keys", "new", "keys/3").returncode == 0
            made.join_all(0, 1, 2)
            yield made
        finally:
            made.end_all()


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


def test_a_second_server_in_the_folder_and_a_second_run_are_refused_and_change_nothing(federation: Federation) -> None:
    second = federation.do("serve", "--dir", "fed", "--port", str(federation.port + 1))
    assert second.returncode == 6
    assert "another 'nestling serve' is at work" in second.stderr
    assert len(federation.do("keys", "list").stdout.splitlines()) == 4  # it still asks the first one
    waits = federation.submit("waits", "job.toml --task.clients 4")
    federation.until_said("waits", "waiting for the sites of clients 3")
    also = federation.submit("also", "job.toml")
    assert also.wait(PATIENCE) == 6
    assert "nestling: server: another run is at work" in federation.log("also")
    number = federation.log("waits").partition("as run ")[2].partition(";")[0]
    stop = ("submit", "--stop", number, "--server", f"{federation.server}:{federation.port}")
    without = federation.do(*stop, "--insecure")
    assert (without.returncode, "speaks TLS" in without.stderr) == (9, True)
    stopped = federation.do(*stop, "--ca", "fed/certificates/ca.crt")
    assert stopped.returncode == 0, stopped.stderr
    assert waits.wait(PATIENCE) == 7
    assert "It had no round yet" in federation.log("waits")


def test_a_key_that_is_not_on_the_list_is_refused(federation: Federation) -> None:
    stranger = federation.join(3)
    until(lambda: stranger.poll() is not None, "the stranger is let in")
    assert stranger.returncode == 9
    assert "client 3 is refused: its key is not on the server's list" in federation.log("site3")
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


@pytest.mark.faults
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
    signal_one(started[0], signal.SIGKILL)
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


@pytest.mark.faults
def test_a_site_that_is_killed_costs_its_own_replies_and_the_run_goes_on(federation: Federation) -> None:
    submitted = federation.submit("long", "long.toml")
    until(lambda: "round=1/6" in federation.log("long"), "the first round does not end")
    federation.end("site2", signal.SIGKILL)
    assert submitted.wait(3 * PATIENCE) == 0, federation.log("long") + federation.log("serve")[-3000:]
    rows = read_rows(runs(federation)[-1] / "metrics.jsonl")
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["accepted"] == 3
    assert rows[-1]["accepted"] == 2
    assert set(read_result(runs(federation)[-1]).rejected) <= {"away", "node_lost", "late", "busy", "client_error"}


@pytest.mark.faults
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
    assert set(read_result(runs(federation)[-1]).rejected) <= {"away", "node_lost", "late", "busy"}
    until(lambda: federation.processes["site2"].poll() is not None, "its site is not told")
    assert federation.processes["site2"].returncode == 9
    assert "client 2 is refused: its key is no longer on the server's list" in federation.log("site2")
    begun = federation.log("site2").count("SuperNode ID")
    again = federation.join(2)
    until(lambda: again.poll() is not None, "it is let in again")
    assert again.returncode == 9
    assert federation.log("site2").count("SuperNode ID") == begun
    assert len(federation.do("keys", "list").stdout.splitlines()) == 3  # a head and two clients
