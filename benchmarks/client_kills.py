"""Kills a site's worker with SIGKILL at random instants of runs over Flower, and compares with a run left in peace.

    python benchmarks/client_kills.py [--kills 100] [--json [FILE]]

`nestling serve`, two times `nestling join`, and runs submitted one after another until there were enough kills. The run
is FLITE on the packaged digits with top-k messages, error feedback and each client's optimiser kept, so that what a
client keeps matters in every round. Client 0's worker is killed wherever it is: starting, idle, training or writing. A
call is made three times at most, so there are at most two kills a round, which no reply may be missed for. Refused are:
a run that does not end by itself, a reply that is missed, a site whose `join` ends, a file left half written, a state
of the server, or anything kept at a site, that differs by one bit from the run in one process.
"""

import nestling  # first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cells import origin, with_settings
from flower_rounds import PATIENCE, Processes, free_port
from safetensors.numpy import load

from nestling.config.load import dump_config
from nestling.config.schema import RunConfig
from nestling.deploy.folder import make_private
from nestling.deploy.proxy import TRIES
from nestling.runs.checkpoint import newest_checkpoint
from nestling.runs.recorder import read_result, read_rows

RESULTS = Path(__file__).parent / "results" / "client_kills.json"
SETTINGS = {
    "machine.references": False, "machine.workers": 1, "local.keep_optimizer": True,
    "codec.kind": "topk", "codec.share": 0.1, "codec.feedback": True,
}  # fmt: skip
COMMAND = (sys.executable, "-m", "nestling")
Kept = dict[str, bytes]


def in_peace(config: RunConfig, here: Path) -> tuple[Any, list[Kept], Path]:
    """The run in one process: its result, what each client keeps after the last round, and the base."""
    result = nestling.run(with_settings(config, {"machine.out": str(here / "peace")}))
    found = newest_checkpoint(Path(result.run_dir))
    assert found is not None
    kept = [{n: a.tobytes() for n, a in found.clients[client].items()} for client in range(config.task.clients)]
    return result, kept, Path(result.run_dir) / "base.safetensors"


def kept_at(site: Path, rounds: int) -> Kept:
    """What the client of a site keeps after the last round of its latest run; every older file must be whole, too."""
    latest = max((site / "kept").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    found = {path.name: load(path.read_bytes()) for path in latest.glob("round-*")}
    return {name: array.tobytes() for name, array in found[f"round-{rounds:010d}.safetensors"].items()}


def workers_of(site: Path) -> list[int]:
    """The processes that are, or are about to be, this site's worker."""
    wanted, found = [b"nestling.deploy.warm", os.fsencode(site)], list[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().rstrip(b"\0").split(b"\0")[-2:] == wanted:
                found.append(int(path.parent.name))
    return found


def rounds_done(runs: Path) -> int:
    """Of all runs together."""
    return sum(len(read_rows(folder / "metrics.jsonl")) for folder in (runs.iterdir() if runs.is_dir() else ()))


def kill_until_ended(process: "subprocess.Popen[bytes]", site: Path, runs: Path, instants: random.Random) -> int:
    """Kill the site's worker until the run has ended, after pauses of up to what a round takes; returns how often."""
    kills, of_round, before, began = 0, 0, rounds_done(runs), time.monotonic()
    number = before
    while process.poll() is None:
        took = time.monotonic() - began
        if took > PATIENCE:
            sys.exit(f"a run with {kills} kills does not end")
        with suppress(subprocess.TimeoutExpired):
            process.wait(instants.uniform(0, 1 + took / (1 + number - before)))
        if (done := rounds_done(runs)) != number:
            number, of_round = done, 0
        if of_round < TRIES - 1 and process.poll() is None:
            for pid in workers_of(site):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills, of_round = kills + 1, of_round + 1
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=6, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    instants, sites = random.Random(options.seed), 2
    config = with_settings(nestling.load_config("flite-digits"), SETTINGS | {"rounds": options.rounds})
    config = with_settings(config, {"task.clients": sites})
    with TemporaryDirectory(prefix="nestling-") as short:  # a short path: a socket's has to be
        here = Path(short)
        peace, wanted, base = in_peace(config, here)
        started, port = Processes(here), free_port()
        server, runs = ("--server", f"127.0.0.1:{port}", "--insecure"), here / "fed" / "runs"
        try:
            wait = ("--wait", PATIENCE)
            started.start("serve", *COMMAND, "serve", "--dir", here / "fed", "--port", port, "--insecure", *wait)
            started.until("serve", "Uvicorn running")
            make_private(here / "fed" / "bases").joinpath("base.safetensors").write_bytes(base.read_bytes())
            (here / "run.toml").write_text(dump_config(with_settings(config, {"base.weights": "base.safetensors"})))
            joined = []
            for n in range(sites):
                joined.append(started.start(f"s{n}", *COMMAND, "join", *server, "--client", n, "--dir", here / f"s{n}"))
                started.until(f"s{n}", "SuperNode ID")
            kills, ended, began = 0, 0, time.monotonic()
            while kills < options.kills:
                submit = started.start("submit", *COMMAND, "submit", here / "run.toml", *server, "--json")
                kills += kill_until_ended(submit, here / "s0", runs, instants)
                ended += 1
                if submit.returncode:
                    sys.exit(f"{kills} kills: a run ended with {submit.returncode}: {started.log('submit')[-3000:]}")
                result = read_result(max(runs.iterdir(), key=lambda run: run.stat().st_mtime_ns))
                told = {"state": result.state_digest == peace.state_digest, "no reply missed": not result.rejected}
                told |= {f"kept at {n}": kept_at(here / f"s{n}", options.rounds) == wanted[n] for n in range(sites)}
                told |= {"joined": all(site.poll() is None for site in joined)}
                told |= {"whole files": not [*here.glob("s*/**/.*.tmp.*"), *here.glob("s*/bases/*.part")]}
                if not all(told.values()):
                    sys.exit(f"{kills} kills: other than in peace: {told}, {dict(result.rejected)}")
                print(f"{kills} kills, {ended} runs, all as in peace", file=sys.stderr, flush=True)
            seconds = time.monotonic() - began
        finally:
            started.end()
    print(
        f"{kills} kills of a site's worker at random instants of {ended} runs over Flower, {kills / seconds * 60:.1f} a"
        f" minute: no reply missed, no half file, all states and all that was kept as in peace. {seconds:.0f} s."
    )
    if options.json:
        found = {"kills": kills, "runs": ended, "rounds": ended * options.rounds, "seconds": round(seconds)}
        head = {"origin": origin(" ".join(["python benchmarks/client_kills.py", *sys.argv[1:]]))}
        options.json.write_text(json.dumps(head | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
