"""Every method at its bytes: accuracy on the digits task from about two hundred bytes a message to all weights.

    python benchmarks/pareto.py [--only PATTERN …] [--seeds 3 4 5] [--json]

Every method has the same clients, items, rounds, base and tuning budget: three learning rates, tried for four of the
ten rounds with seed 0, chosen on validation items and then fixed; the seeds of the table were not looked at before.
Other settings, such as the server's rate of FedAdam and DiLoCo or FedProx' μ, are not tuned, nor are the reference
rows, which train at the presets' rates.
Runs are kept in runs/pareto.jsonl, so an interrupted table goes on where it stopped.
Up and down are `len(bytes)` of one client's payloads in one round.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import log10
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cells import Cells, Overrides, origin, save_figure, with_settings
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import nestling
from nestling.config.schema import RunConfig
from nestling.core.errors import RunError
from nestling.report.intervals import interval
from nestling.report.tables import Row, to_markdown
from nestling.runs.result import Result

HERE = Path(__file__).parent
RESULTS, FIGURE = HERE / "results" / "pareto.json", HERE.parent / "docs" / "pareto"

SGD, ADAMW = (0.02, 0.04, 0.08), (3e-3, 1e-2, 3e-2)
LATENT = (0.05, 0.1, 0.2)
"""Learning rates that are tried."""
TRIAL = 4
"""Rounds of each trial."""


@dataclass(frozen=True)
class Method:
    """A row: a preset, what is changed in it, and the learning rates among which validation chooses."""

    label: str
    preset: str
    settings: Overrides = field(default_factory=dict)
    rates: tuple[float, ...] = LATENT
    rate: str = "local.lr"

    def config(self, **settings: Any) -> RunConfig:
        """The run with these settings on top."""
        return with_settings(nestling.load_config(self.preset), {**self.settings, **settings})


def flite(label: str, **codec: Any) -> Method:
    return Method(label, "flite-digits", {f"codec.{key}": value for key, value in codec.items()})


def fedavg(label: str, rates: tuple[float, ...] = SGD, **settings: Any) -> Method:
    return Method(label, "fedavg-digits", {key.replace("__", "."): value for key, value in settings.items()}, rates)


EF = {"codec__feedback": True}


def lora(label: str, rates: tuple[float, ...] = ADAMW, **settings: Any) -> Method:
    adapter = nestling.LoraConfig(rank=2, alpha=4.0, targets=("*conv*",), **settings)
    return Method(label, "flite-digits", {"adapter": adapter}, rates)


METHODS = [
    flite("FLITE, rotated 1 bit, feedback", kind="rotated", bits=1, feedback=True),
    flite("FLITE, rotated 2 bits", kind="rotated", bits=2),
    flite("FLITE, int4", bits=4),
    flite("FLITE, rotated 4 bits", kind="rotated", bits=4),
    flite("FLITE, int8", bits=8),
    flite("FLITE", bits=32),
    flite("FLITE, top-k 10 %, feedback", kind="topk", share=0.1, feedback=True),
    Method("FLITE + Nesterov (DiLoCo)", "flite-digits", {"server.rule": "nesterov", "local.keep_optimizer": True}),
    Method("Mapping network", "flite-digits", {"adapter": nestling.MappingConfig(dim=1280, targets=("*conv*",))}),
    lora("FedAvg, LoRA of rank 2"),
    lora("FFA-LoRA of rank 2", ffa=True),
    lora("Latent over LoRA", LATENT, dim=64),
    fedavg("FedAvg, top-k 0.1 %, feedback", codec__kind="topk", codec__share=0.001, **EF),
    fedavg("FedAvg, top-k 1 %, feedback", codec__kind="topk", codec__share=0.01, **EF),
    fedavg("FedAvg, random-k 1 %, feedback", codec__kind="randomk", codec__share=0.01, **EF),
    fedavg("FedAvg, PowerSGD rank 1, feedback", codec__kind="powersgd", codec__rank=1, **EF),
    fedavg("FedAvg, PowerSGD rank 2, feedback", codec__kind="powersgd", codec__rank=2, **EF),
    fedavg("FedAvg, rotated 1 bit, feedback", codec__kind="rotated", codec__bits=1, **EF),
    fedavg("FedAvg, rotated 2 bits", codec__kind="rotated", codec__bits=2),
    fedavg("FedAvg, int4 of weights (naive)", codec__bits=4, codec__down_bits=4, codec__send="state"),
    fedavg("FedAvg, int4 of differences (fair)", codec__bits=4),
    fedavg("FedAvg, int4 of differences a tensor", codec__bits=4, codec__scale="tensor"),
    fedavg("FedAvg", codec__bits=32),
    fedavg("FedAvg, AdamW", ADAMW, local__optimizer="adamw"),
    fedavg("FedProx, μ = 0.01", local__rule="prox", local__mu=0.01),
    fedavg("FedAdam", server__rule="adam", server__lr=0.01),
    fedavg("DiLoCo", ADAMW, server__rule="nesterov", local__optimizer="adamw", local__keep_optimizer=True),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of rows, as of a shell")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name} and the figure")
    options = parser.parse_args()
    if options.json and options.only != ["*"]:
        parser.error("--json writes the whole table: leave out --only")
    cells = Cells(options.out / "pareto.jsonl", runs=options.out / "pareto")
    references = reference_rows(cells, options.seeds)  # first: their runs are also those of a method
    table: list[tuple[Method, float, list[Result]]] = []
    for method in METHODS:
        if any(fnmatch(method.label, pattern) for pattern in options.only):
            rate, results = judged(cells, method, options.seeds)
            table.append((method, rate, results))
    rows = [row_of(method.label, results) for method, _, results in table]
    print(to_markdown(references + sorted(rows, key=lambda row: row.payload_up or 0)))
    print("\n".join(f"{method.label}: learning rate {rate:g}" for method, rate, _ in table))
    if options.json:
        saved = {
            method.label: {"rate": rate, "results": [r.to_dict() for r in results]} for method, rate, results in table
        }
        known = {row.label: row.accuracies for row in references}
        report = {
            "origin": origin(" ".join(["python benchmarks/pareto.py", *sys.argv[1:]])),
            "references": known,
            "methods": saved,
        }
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        draw(rows, references)


def judged(cells: Cells, method: Method, seeds: list[int]) -> tuple[float, list[Result]]:
    """The learning rate that does best on validation, and the results on test with it, one for each seed."""
    bare = {"machine.references": False}
    tried = {}
    for rate in method.rates:
        trial = {"seed": 0, "rounds": TRIAL, "task.evaluate_on": "validation", method.rate: rate}
        config = method.config(**trial, **bare)
        try:
            tried[rate] = cells.run(config, f"{method.label}, validation, rate {rate:g}").accuracy
        except RunError as error:  # a rate at which clients diverge is not chosen, and ends no table
            tried[rate] = 0.0
            print(f"{method.label}, validation, rate {rate:g}: {error}", file=sys.stderr, flush=True)
    best = max(tried, key=lambda rate: tried[rate])
    runs = [
        cells.run(method.config(**{"seed": seed, method.rate: best, **bare}), f"{method.label}, seed {seed}")
        for seed in seeds
    ]
    return best, runs


def reference_rows(cells: Cells, seeds: list[int]) -> list[Row]:
    """The frozen base, and what one client's data, or everybody's in one place, comes to; latents and all weights."""
    rows = []
    for preset, what in (("flite-digits", "latents"), ("fedavg-digits", "all weights")):
        runs = [
            cells.run(with_settings(nestling.load_config(preset), {"seed": seed}), f"references of {what}, seed {seed}")
            for seed in seeds
        ]
        for name in ("base", "local_only", "centralised"):
            found = tuple(float(getattr(r, f"accuracy_{name}")) for r in runs)
            label = "frozen base" if name == "base" else f"{name.replace('_', ' ')} ({what})"
            if label not in {row.label for row in rows}:
                rows.append(Row(label, found, interval(found, runs[0].test_items)))
    return rows


def row_of(label: str, results: list[Result]) -> Row:
    """One line of the table; with one seed, the interval is over items."""
    accuracies, first = tuple(r.accuracy for r in results), results[0]
    count = len(results)
    return Row(
        label,
        accuracies,
        interval(accuracies, first.test_items),
        payload_up=first.payload_bytes_up,
        payload_down=first.payload_bytes_down,
        wire_bytes=sum(r.bytes_up + r.bytes_down for r in results) // count,
        seconds=sum(r.seconds for r in results) / count,
        factor=4 * (first.model_parameters or 0) / first.payload_bytes_up,
    )


def draw(rows: list[Row], references: list[Row]) -> None:
    """Accuracy against the bytes of one message up, with the intervals; the reference rows as lines. What falls below
    the frozen base stands at the lower edge, with its accuracy beside it."""
    lines = {row.label: row.accuracy for row in references if row.accuracy is not None and "local" not in row.label}
    floor = min(lines.values()) - 0.02
    ordered = sorted(rows, key=lambda row: (row.payload_up or 0, row.label))
    with mpl.rc_context({"svg.hashsalt": "nestling", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        axes = FigureCanvasAgg(figure).figure.add_subplot()
        axes.set(xscale="log", xlabel="bytes that a client sends in one round", ylabel="accuracy on test items, %")
        sizes = [row.payload_up or 1 for row in rows]
        axes.set(xlim=(min(sizes) / 2, max(sizes) * 2), ylim=(100 * floor, 100 * max(lines.values()) + 1))
        named: list[tuple[float, float, str]] = []
        for index, row in enumerate(ordered, 1):
            assert row.accuracy is not None
            assert row.interval is not None
            size, (low, high) = row.payload_up or 1, row.interval
            family = next((i for i, key in enumerate(("FLITE", "FedAvg")) if row.label.startswith(key)), 2)
            color, below = ("#0b6e4f", "#8f2d56", "#33658a")[family], row.accuracy < floor
            height = floor + 0.004 if below else row.accuracy
            if not below:
                axes.plot([size, size], [100 * low, 100 * high], color=color, linewidth=0.8, alpha=0.35)
            marker = "v" if below else "os^"[family]
            axes.plot(size, 100 * height, marker, color=color, markersize=5, label=f"{index}  {row.label}")
            named.append((size, height, f"{index} ({100 * row.accuracy:.0f} %)" if below else str(index)))
        column, lowest = 0, 0.0
        for size, height, text in sorted(named, key=lambda one: (round(25 * log10(one[0])), -one[1])):
            # Numbers of points above each other (sizes within 10 %) stand below each other.
            lowest = min(height, lowest - 0.0035) if round(25 * log10(size)) == column else height
            column = round(25 * log10(size))
            axes.annotate(text, (size, 100 * lowest), (6, -3), textcoords="offset points", fontsize=8)
        for label, accuracy in lines.items():
            axes.axhline(100 * accuracy, color="#999999", linewidth=0.8, linestyle=":")
            axes.annotate(label, (0.005, 100 * accuracy), (0, -3), xycoords=("axes fraction", "data"), fontsize=8,
                          textcoords="offset points", color="#666666",
                          bbox={"color": "white", "pad": 1})  # fmt: skip
        axes.grid(axis="y", linewidth=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
        save_figure(figure, FIGURE)


if __name__ == "__main__":
    main()
