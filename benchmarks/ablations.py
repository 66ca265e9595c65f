"""What FLITE claims, one change at a time, on the digits task: accuracy over seeds for each.

    python benchmarks/ablations.py [--only PATTERN …] [--seeds 3 4 5] [--json]

Nothing is tuned anew: every row is the preset with the settings it names, so a row that is worse may want another
learning rate. Runs are kept in runs/ablations.jsonl, so an interrupted table goes on where it stopped. The averaging
identity has a benchmark of its own (averaging.py).
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from cells import Cells, Overrides, origin, with_settings

import nestling
from nestling.report.tables import accuracy_text
from nestling.runs.result import Result

from pareto import row_of  # isort: skip

RESULTS = Path(__file__).parent / "results" / "ablations.json"


@dataclass(frozen=True)
class Change:
    """A row: which claim it belongs to, what it is called, and what is changed in a preset."""

    claim: str
    label: str
    settings: Overrides = field(default_factory=dict)
    preset: str = "flite-digits"


FLITE = Change("the method", "FLITE: 1,280 latents, frozen orthonormal head")
CHANGES = [
    FLITE,
    Change("head", "random rows, frozen", {"base.head": "random"}),
    Change("head", "orthonormal rows, adapted too", {"adapter.targets": ("*conv*", "head")}),
    Change("from scratch", "FLITE on a random base", {"base.pretrain_on": "none"}),
    Change("from scratch", "FedAvg on a random base", {"base.pretrain_on": "none"}, "fedavg-digits"),
    *(Change("latents in all", f"{n:,}", {"adapter.budget": n}) for n in (160, 320, 640, 2560, 5120)),
    *(
        Change("latents in all", f"2,560, {name}", {"adapter.budget": 2560, "codec.kind": kind, "codec.bits": bits})
        for name, kind, bits in (("int4", "plain", 4), ("rotated 2 bits", "rotated", 2))
    ),
    Change("latents a layer, alike", "64 each (576)", {"adapter.budget": 0}),
    *(Change("rank", f"64 each, rank {r}", {"adapter.budget": 0, "adapter.rank": r}) for r in (32, 16, 8)),
    Change("bits", "int8", {"codec.bits": 8}),
    Change("bits", "int4", {"codec.bits": 4}),
    Change("bits", "int2", {"codec.bits": 2}),
    Change("bits", "rotated 4 bits", {"codec.kind": "rotated", "codec.bits": 4}),
    Change("bits", "rotated 2 bits", {"codec.kind": "rotated", "codec.bits": 2}),
    Change("bits", "rotated 2 bits, feedback", {"codec.kind": "rotated", "codec.bits": 2, "codec.feedback": True}),
    *(
        Change("clients' shares", f"{name}, {where}", settings, preset)
        for where, settings in (
            ("IID", {"task.partition": "iid"}),
            ("α = 1.0", {"task.alpha": 1.0}),
            ("α = 0.5", {"task.alpha": 0.5}),
        )
        for name, preset in (("FLITE", "flite-digits"), ("FedAvg", "fedavg-digits"))
    ),
    *(
        Change("local epochs", f"{name}, 2 a round", {"local.epochs": 2}, preset)
        for name, preset in (("FLITE", "flite-digits"), ("FedAvg", "fedavg-digits"))
    ),
    Change("the method", "FedAvg", {}, "fedavg-digits"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of claims, as of a shell")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args()
    if options.json and options.only != ["*"]:
        parser.error("--json writes the whole table: leave out --only")
    cells = Cells(options.out / "ablations.jsonl", runs=options.out / "ablations")
    chosen = [c for c in CHANGES if any(fnmatch(c.claim, pattern) for pattern in options.only)]
    table: list[tuple[Change, list[Result]]] = []
    for change in chosen:
        config = with_settings(nestling.load_config(change.preset), {**change.settings, "machine.references": False})
        label = f"{change.claim}: {change.label}"
        runs = [cells.run(with_settings(config, {"seed": s}), f"{label}, seed {s}") for s in options.seeds]
        table.append((change, runs))
    print("| claim | setting | accuracy % ↑ | frozen base % | numbers sent | up ↓ |\n|---|---|---:|---:|---:|---:|")
    for change, runs in table:
        first, frozen = runs[0], 100 * sum(r.accuracy_base or 0 for r in runs) / len(runs)
        print(
            f"| {change.claim} | {change.label} | {accuracy_text(row_of(change.label, runs))} | {frozen:.1f} "
            f"| {first.trainable_parameters:,} | {first.payload_bytes_up:,} B |"
        )
    if options.json:
        kept = [[r.to_dict() | {"run_dir": Path(r.run_dir).name} for r in runs] for _, runs in table]
        rows = [{"claim": c.claim, "setting": c.label, "results": k} for (c, _), k in zip(table, kept, strict=True)]
        report = {"origin": origin(" ".join(["python benchmarks/ablations.py", *sys.argv[1:]])), "rows": rows}
        RESULTS.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
