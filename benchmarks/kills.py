"""Kills a run with SIGKILL at random instants, resumes it, and compares what comes of it with a run left in peace.

    python benchmarks/kills.py [--kills 100] [--json [FILE]]

The run is FLITE on the packaged digits, eight clients, short rounds, with DiLoCo's server rule and the clients'
optimisers kept, so that every part of a checkpoint matters. A process is killed after a time drawn evenly from what a
whole run takes; then `nestling resume` is started in its place, killed again, and so on, until one ends by itself; then
a new run begins, until there were enough kills. Refused are: a folder that cannot be resumed, a file left half written,
a state that differs by one bit, a record that differs in one row.
"""

import nestling  # noqa: F401  first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from cells import origin

from nestling.runs.recorder import read_result, read_rows

RESULTS = Path(__file__).parent / "results" / "kills.json"
SETTINGS = [
    "--machine.no-references", "--server.rule", "nesterov", "--local.keep-optimizer", "--rounds", "6", "--quiet",
]  # fmt: skip


def start(*command: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "nestling", *command], stdout=subprocess.DEVNULL)


def record(folder: Path) -> tuple[str, list, str]:
    """The digest of the last state, the rows of rounds without their times, and those of messages."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(folder / "metrics.jsonl")]
    return read_result(folder).state_digest, rows, (folder / "bytes.jsonl").read_text()


def left_over(folder: Path) -> list[str]:
    """Files that are neither old nor new."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*.tmp.*")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    options = parser.parse_args()
    instants, began = random.Random(options.seed), time.monotonic()
    with TemporaryDirectory() as here:
        run = ["run", "flite-digits", *SETTINGS, "--machine.out"]
        if start(*run, f"{here}/peace").wait():
            sys.exit("the run left in peace has failed")
        (peace,) = Path(here, "peace").iterdir()
        wanted = record(peace)
        took = time.monotonic() - began
        kills = resumed = runs = early = 0
        while kills < options.kills:
            out, runs = Path(here, f"killed-{runs}"), runs + 1
            process = start(*run, str(out))
            while True:
                try:
                    code = process.wait(instants.uniform(0, took))
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    kills += 1
                folders = list(out.iterdir()) if out.exists() else []
                if not folders or not (folders[0] / "config.toml").exists():  # nothing to resume yet
                    early += 1
                    process = start(*run, str(out := Path(here, f"killed-{runs}-again-{kills}")))
                    continue
                resumed += 1
                process = start("resume", str(folders[0]), "--quiet")
            (folder,) = out.iterdir()
            if code or record(folder) != wanted or left_over(folder):
                sys.exit(f"{kills} kills: a run ended with {code}, or otherwise than in peace {left_over(folder)}")
            print(f"{kills} kills, {runs} runs, all as in peace", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(
        f"{kills} kills at random instants of {runs} runs, {resumed} times resumed, {early} times killed before there "
        f"was anything to resume: all ended in the state and with the record of a run left in peace. {seconds:.0f} s."
    )
    if options.json:
        found = {"kills": kills, "runs": runs, "resumed": resumed, "before": early, "seconds": round(seconds)}
        head = {"origin": origin(" ".join(["python benchmarks/kills.py", *sys.argv[1:]]))}
        options.json.write_text(json.dumps(head | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
