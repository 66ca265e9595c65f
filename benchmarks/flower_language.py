"""The memory's job over Flower: one frozen SmolLM2-135M in each site's warm worker, loaded once a run.

    python benchmarks/flower_language.py [--rounds 3] [--items 8] [--json]

`needle-smollm2-short` with fewer items, by `nestling serve`, `join` and `submit` as they are: two sites, one kind of
fact each, on this machine over the loopback without TLS. Each process computes with one thread. Printed are

round      seconds from one state's accuracy to the next, and of them what each site's worker took to train;
memory     of each site's worker and of the run's server at their largest, Rss; and Pss after the last round, in which
           pages that processes share are counted in parts: weights are mapped out of one file;
bytes      per client and round, by Flower's own counters (messages and objects, without HTTP's heads), which include
           what is sent once: settings, greetings.

No table is printed and the exit code is 1 unless the state is that of `nestling run` to the bit, both sites replied in
every round, and each worker has loaded the model once.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import os
import re
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cells import origin, with_settings
from flower_rounds import Processes, free_port, wire

from nestling.config.load import dump_config
from nestling.deploy import programs
from nestling.deploy.folder import make_private
from nestling.runs.recorder import read_rows

RESULTS = Path(__file__).parent / "results" / "flower_language.json"
HELD = re.compile(r"^[-+: \d]+ holds base (\w+)", re.MULTILINE)
TRAINED = re.compile(r"^[-+: \d]+ round (\d+): ([\d,]+) B came, ([\d,]+) B go, ([\d.]+) s$", re.MULTILINE)


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process that lives: its largest Rss, and its Pss now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    (pss,) = re.findall(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return {"rss_bytes": 1024 * int(status["VmHWM"].split()[0]), "pss_bytes": 1024 * int(pss)}


def server_memory(folder: Path) -> int:
    """The largest Rss of a process of the run's server, which ends with the run: it is asked while it lives."""
    most = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().decode("utf-8", "replace")
            if "serverapp" in line and str(folder) in (path / "environ").read_bytes().decode("utf-8", "replace"):
                most = max(most, memory(int(path.name))["rss_bytes"])
        except (OSError, KeyError, ValueError):  # it has ended
            continue
    return most


def measure(rounds: int, items: int, here: Path) -> dict[str, Any]:
    """The run in process, then over Flower; ends the program unless they did the same."""
    changed = {"rounds": rounds, "task.train_items": items, "task.test_items": 2, "task.round_items": 2}
    changed |= {"machine.references": False, "machine.workers": 1}
    config = with_settings(nestling.load_config("needle-smollm2-short"), changed)
    (here / "job.toml").write_text(dump_config(config))
    command, port, clients = (sys.executable, "-m", "nestling"), free_port(), len(config.task.templates)
    server, started, most = ("--server", f"127.0.0.1:{port}", "--insecure"), Processes(here), 0
    try:
        started.run("alone", *command, "run", here / "job.toml", "--machine.out", here / "alone", "--json")
        alone = json.loads(started.log("alone").splitlines()[-1])
        started.start("serve", *command, "serve", "--dir", here / "fed", "--port", port, "--insecure")
        started.until("serve", "Uvicorn running")
        for n in range(clients):
            started.start(f"site{n}", *command, "join", *server, "--client", n, "--dir", make_private(here / f"s{n}"))
            started.until(f"site{n}", "SuperNode ID")
        submitted = started.start("job", *command, "submit", here / "job.toml", *server, "--json")
        while submitted.poll() is None:
            most = max(most, server_memory(here / "fed"))
            time.sleep(0.5)
        if submitted.returncode:
            sys.exit(f"submit ended with {submitted.returncode}:\n{started.log('job')[-3000:]}")
        result = json.loads(started.log("job").splitlines()[-1])
        sites = [site(here / f"s{n}") for n in range(clients)]
        ((down, up),) = wire(programs.environment(here / "fed", {}), "nestling").values()
    finally:
        started.end()
    rows = read_rows(Path(result["run_dir"]) / "metrics.jsonl")
    if result["state_digest"] != alone["state_digest"]:
        sys.exit("the state over Flower is not that of the run in process")
    if [row["accepted"] for row in rows] != rounds * [clients]:
        sys.exit(f"{[row['accepted'] for row in rows]} replies in its rounds, of {clients} each")
    if any(len(found["loaded"]) != 1 or len(found["rounds"]) != rounds for found in sites):
        sys.exit(f"a worker has not loaded its model once, or not answered every round: {sites}")
    if not most:
        sys.exit("the run's server was not found among the processes")
    ends = [row["seconds"] for row in rows]
    return {
        "settings": changed,
        "state_digest": result["state_digest"],
        "round_seconds": [ends[0], *(after - before for before, after in pairwise(ends))],
        "server_rss_bytes": most,
        "sites": sites,
        "payload_bytes_up": result["payload_bytes_up"],
        "wire_bytes": {"down": down / rounds / clients, "up": up / rounds / clients},
    }


def site(folder: Path) -> dict[str, Any]:
    """What a site's log says, and the memory of its worker."""
    log = (folder / "worker.log").read_text("utf-8", "replace")
    answered = [(int(number), float(seconds)) for number, _, _, seconds in TRAINED.findall(log)]
    found: dict[str, Any] = {"loaded": HELD.findall(log), "rounds": answered}
    return found | memory(int((folder / "worker.alive").read_text()))


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| process | largest Rss | Pss | models loaded | seconds of training, by round |",
        "|---|---:|---:|---:|---:|",
    ]
    for number, found in enumerate(report["sites"]):
        seconds = ", ".join(f"{seconds:.1f}" for _, seconds in found["rounds"])
        cells = (f"{found['rss_bytes'] / 1e6:,.0f} MB", f"{found['pss_bytes'] / 1e6:,.0f} MB", len(found["loaded"]))
        lines.append(f"| site {number}'s worker | {' | '.join(map(str, cells))} | {seconds} |")
    lines.append(f"| the run's server | {report['server_rss_bytes'] / 1e6:,.0f} MB | – | – | – |")
    seconds, sent = ", ".join(f"{s:.1f}" for s in report["round_seconds"]), report["wire_bytes"]
    return "\n".join(lines) + (
        f"\n\nSeconds of each round: {seconds}. Bytes per client and round: {sent['down']:,.0f} down, "
        f"{sent['up']:,.0f} up; of these {report['payload_bytes_up']:,} are numbers, each way. "
        "The same state as in process, to the bit."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=8, help="to train on, of each client")
    parser.add_argument("--json", action="store_true", help=f"also write results/{RESULTS.name}")
    options = parser.parse_args()
    if min(options.rounds, options.items) < 1:
        parser.error("--rounds and --items must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory(prefix="nestling-") as here:  # a short path: a socket's has to be
        report = measure(options.rounds, options.items, Path(here))
    if options.json:
        head = origin(" ".join(["python benchmarks/flower_language.py", *sys.argv[1:]]))
        RESULTS.write_text(json.dumps({"origin": head, **report}, indent=1, allow_nan=False) + "\n", "utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
