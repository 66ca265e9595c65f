"""What the server's work takes of a round of the main job: judging, cutting, averaging, and all it writes down.

    python benchmarks/overhead.py [--repetitions 50] [--rounds 2] [--json [FILE]]

FLITE on the packaged digits, eight clients, is run for a few rounds by `run_rounds`, and the time of the last exchange,
which is the clients' training, is taken. Then the server's half of that round is repeated on the very messages, step by
step, with a run's own folder, files and `fsync`: the median of each step. A charge to the ledger of a private run is
among the steps though this run is not private. If a repetition's broadcast, state, checkpoint or record is another than
the run's, no time is printed and the exit code is 1. The share is to stay below 1 %.
"""

import nestling  # first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from nestling.api import _record
from nestling.build import build, resolve, run_id
from nestling.config.load import dump_config
from nestling.core.types import Failure
from nestling.engines.inprocess import InProcessEngine
from nestling.federation.loop import run_rounds
from nestling.resume import Tally, snapshot
from nestling.runs.checkpoint import newest_checkpoint, write_checkpoint
from nestling.runs.folder import create
from nestling.runs.ledger import Charge, Ledger
from nestling.runs.recorder import Recorder, read_rows

RESULTS = Path(__file__).parent / "results" / "overhead.json"
PRESET = "flite-digits"
STEPS = ("broadcast", "judge", "measure", "cut outliers", "average", "ledger", "record", "adapter file", "checkpoint")


class Timed:
    """The engine, and how long its last exchange took."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine, self.seconds = engine, 0.0

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        begin = time.perf_counter()
        replies = self._engine.exchange(messages)
        self.seconds = time.perf_counter() - begin
        return replies


def check(same: bool, what: str) -> None:
    if not same:
        sys.exit(f"{what} differs from the run's; not timed")


def measure(rounds: int, repetitions: int, here: Path) -> dict[str, Any]:
    """Seconds of a round's training, and the median of each step of the server's half of it."""
    config = dataclasses.replace(nestling.load_config(PRESET), rounds=rounds)
    config = resolve(dataclasses.replace(config, machine=dataclasses.replace(config.machine, references=False)))
    torch.set_num_threads(1)  # as in a run
    parts, tally, done = build(config), Tally(), None
    server, worker, engine = parts.server, parts.workers[0], Timed(parts.engine)
    before, memory = server.state, server.kept()
    for done in run_rounds(
        server, engine, parts.task.clients(), lambda state: 0.5, rounds=rounds,
        per_round=config.server.clients_per_round, patience=config.server.patience, seed=config.seed,
    ):  # fmt: skip
        tally.add(done, seconds=engine.seconds)
        if done.number < rounds:
            before, memory = server.state, server.kept()
    assert done is not None
    after, clock = server.state, time.perf_counter
    taken = np.empty((repetitions, len(STEPS)))
    with create(here, config.name, run_id(config)) as folder:
        recorder = Recorder.start(folder, config=dump_config(config), command=["overhead.py"])
        ledger = Ledger(folder.path)
        charge = Charge(rounds, 1.0, 1.0, config.task.clients, 1.0, 1e-5)
        for repetition in range(repetitions):
            server.restore(before, memory, round=rounds - 1)
            at = [clock()]
            message = server.broadcast(rounds)
            at.append(clock())
            accepted, refused = server.judge(rounds, done.replies)
            at.append(clock())
            measured = server.measure(accepted)
            at.append(clock())
            accepted, bounded = server.bound(accepted)
            at.append(clock())
            used = server.update(accepted)
            received = server.received
            at.append(clock())
            ledger.charge(charge)
            at.append(clock())
            again = dataclasses.replace(
                done, broadcast=message, accepted=accepted, refused=refused, bounded=bounded, measured=measured
            )
            _record(again, parts, config, recorder, seconds=tally.seconds)
            at.append(clock())
            worker.adapter.load_vector(received)
            worker.adapter.save_pretrained(folder.path / "adapter")
            at.append(clock())
            write_checkpoint(folder, snapshot(config, parts, tally))
            at.append(clock())
            taken[repetition] = np.diff(at)
            check(message == done.broadcast, "the broadcast")
            check(measured == done.measured, "what is measured of a reply")
            check(used and server.state.tobytes() == after.tobytes(), "the state")
            check(received.tobytes() == done.state.tobytes(), "the state as received")
        found = newest_checkpoint(folder.path)
        check(found is not None and found.state.tobytes() == after.tobytes(), "the checkpoint")
        rows = read_rows(folder.path / "metrics.jsonl")
        check(len(rows) == repetitions == len(ledger.charges), "the record")
        check(all(row["bytes_up"] == done.bytes_up and row["accepted"] == len(done.accepted) for row in rows), "a row")
        ledger.close()
        recorder.close()
    steps = dict(zip(STEPS, np.median(taken, axis=0).tolist(), strict=True))
    total = float(np.median(taken.sum(axis=1)))
    return {
        "clients": config.task.clients,
        "workers": config.machine.workers,
        "message_bytes": len(done.broadcast),
        "repetitions": repetitions,
        "training_seconds": engine.seconds,
        "server_seconds": total,
        "share": total / engine.seconds,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2, help="of which the last is measured")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    options = parser.parse_args()
    if min(options.repetitions, options.rounds) < 1:
        parser.error("--repetitions and --rounds must be at least 1")
    with TemporaryDirectory(dir=Path.cwd()) as here:  # a disk like a run's: elsewhere may be a memory without fsync
        row = measure(options.rounds, options.repetitions, Path(here))
    if options.json:
        versions = {"torch": torch.__version__, "numpy": np.__version__}
        options.json.write_text(json.dumps(versions | row, indent=1, allow_nan=False) + "\n", "utf-8")
    print(f"| of a round, {row['clients']} clients, {row['workers']} at a time | ms | % of the training |")
    print("|---|---:|---:|")
    for name, seconds in [*row["steps"].items(), ("the server's work together", row["server_seconds"])]:
        print(f"| {name} | {1e3 * seconds:.3f} | {100 * seconds / row['training_seconds']:.3f} |")
    print(f"| the clients' training | {1e3 * row['training_seconds']:.0f} | 100 |")


if __name__ == "__main__":
    main()
