"""Accuracy against ε: what client-level noise costs latents and all weights, at one cohort and one rule for the clip.

    python benchmarks/privacy.py [--only PATTERN …] [--noises 1e-5 0.5 4] [--seeds 3 4 5] [--json]

1,000 clients hold four MNIST digits each (4,000, shared out equally). A round asks each with probability 1/5, in
secret, 200 on average, and a client takes one step on its items; 20 rounds from the base of the other tables. ε is at
δ = 1e-5, for adding or removing one client, from the run's ledger: it hangs on noise, probability and rounds alone.

The clip begins at the median length of a client's change in the first round and then follows the median, in private
(`privacy.quantile` 0.5). That first length is `Method.length` times the learning rate. AdamW's first step moves every
number by the rate, so its length is √n and needs no data; SGD's was measured on clients of the validation split, and
`--lengths` prints both. Learning rates are tuned: three for each method and noise, tried with seed 0 for the whole 20
rounds, judged on validation items, then fixed. Neither is accounted for. The seeds of the table were not looked at
before. A seed decides partition, maps and batches; cohorts and noise have none, so a run done again is another.

Noise is of standard deviation z C in each number of the sum, so its length over the clip, on the mean of m = 200
planned clients, is z √n / m: the table's fourth column. Runs are kept in runs/privacy.jsonl.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib as mpl
import torch
from cells import Cells, Overrides, origin, save_figure, with_settings
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nestling.build import build
from nestling.config.schema import RunConfig
from nestling.core.errors import RunError
from nestling.core.vectors import norm
from nestling.report.intervals import interval
from nestling.runs.result import Result

HERE = Path(__file__).parent
RESULTS, FIGURE = HERE / "results" / "privacy.json", HERE.parent / "docs" / "privacy"

CLIENTS, COHORT = 1000, 200
CLIPPED = 1e-5
"""The smallest noise there is: clipping alone, for all that can be seen; its ε says nothing."""
NOISES = (CLIPPED, 0.5, 1.0, 2.0, 4.0)
SHARED: dict[str, Any] = {
    "rounds": 20,
    "task.clients": CLIENTS,
    "task.partition": "iid",
    "local.epochs": 1,
    "local.batch_size": 4,
    "server.clients_per_round": COHORT,
    "server.weighting": "uniform",
    "privacy.sampling": "poisson",
    "privacy.quantile": 0.5,
    "privacy.delta": 1e-5,
    "machine.references": False,
}


@dataclass(frozen=True)
class Method:
    """A line of the figure: a preset, what is changed in it, the learning rates among which validation chooses, and the
    median length of a client's first change per unit of learning rate."""

    label: str
    preset: str
    rates: tuple[float, ...]
    length: float
    settings: Overrides = field(default_factory=dict)

    def config(self, rate: float, noise: float, **settings: Any) -> RunConfig:
        """The run at this learning rate and noise."""
        clip = float(f"{self.length * rate:.2g}")
        chosen = {"local.lr": rate, "privacy.noise": noise, "privacy.clip": clip}
        return with_settings(nestling.load_config(self.preset), {**SHARED, **self.settings, **chosen, **settings})


FFA = nestling.LoraConfig(rank=2, alpha=4.0, targets=("*conv*",), ffa=True)
METHODS = [
    Method("FLITE, 160 latents", "flite-digits", (0.05, 0.1, 0.2), 160**0.5, {"adapter.budget": 160}),
    Method("FFA-LoRA of rank 2", "flite-digits", (0.01, 0.03, 0.1), 672**0.5, {"adapter": FFA}),
    Method("FLITE, 1,280 latents", "flite-digits", (0.02, 0.05, 0.1), 1280**0.5),
    Method("FedAvg, all weights", "fedavg-digits", (0.01, 0.025, 0.05), 9.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of methods, as of a shell")
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES, help="standard deviations, in clips")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--lengths", action="store_true", help="measure the lengths of first changes, and no more")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name} and the figure")
    options = parser.parse_args()
    methods = [m for m in METHODS if any(fnmatch(m.label, pattern) for pattern in options.only)]
    if options.lengths:
        for method in methods:
            print(f"{method.label}: {', '.join(f'{r:g}: {first_length(method, r):.4g}' for r in method.rates)} a rate")
        return
    cells = Cells(options.out / "privacy.jsonl", runs=options.out / "privacy")
    points = [judged(cells, method, noise, options.seeds) for method in methods for noise in options.noises]
    print(to_markdown(points))
    if options.json:
        saved = [
            {"method": p.method.label, "noise": p.noise, "rate": p.rate, "results": [r.to_dict() for r in p.results]}
            for p in points
        ]
        head = origin(" ".join(["python benchmarks/privacy.py", *sys.argv[1:]]))
        RESULTS.write_text(json.dumps({"origin": head, "points": saved}, indent=1) + "\n")
        draw(points)


def first_length(method: Method, rate: float) -> float:
    """Median length of the changes that a cohort's clients would send in the first round, per unit of learning rate."""
    torch.set_num_threads(1)
    parts = build(method.config(rate, CLIPPED, **{"seed": 0, "task.evaluate_on": "validation"}))
    message = parts.server.broadcast(1)
    accepted, _ = parts.server.judge(1, parts.engine.exchange(dict.fromkeys(parts.task.clients()[:COHORT], message)))
    return median(norm(reply.vector) for reply in accepted) / rate


@dataclass(frozen=True)
class Point:
    """A method at one noise: the learning rate that validation chose, and the results on test, one for each seed."""

    method: Method
    noise: float
    rate: float
    results: list[Result]

    @property
    def epsilon(self) -> float:
        """Of one run; all have the same."""
        (spent,) = {result.epsilon for result in self.results}
        assert spent is not None
        return spent

    @property
    def accuracy(self) -> float:
        return fmean(r.accuracy for r in self.results)

    @property
    def interval(self) -> tuple[float, float]:
        found = interval([r.accuracy for r in self.results], self.results[0].test_items)
        assert found is not None
        return found


def judged(cells: Cells, method: Method, noise: float, seeds: list[int]) -> Point:
    """The learning rate that does best on validation at this noise, and the results on test with it."""
    tried = {}
    for rate in method.rates:
        label = f"{method.label}, z = {noise:g}, validation, rate {rate:g}"
        config = method.config(rate, noise, **{"seed": 0, "task.evaluate_on": "validation"})
        try:
            tried[rate] = cells.run(config, label).accuracy
        except RunError as error:  # a rate at which the state leaves its bounds is not chosen, and ends no table
            tried[rate] = 0.0
            print(f"{label}: {error}", file=sys.stderr, flush=True)
    best = max(tried, key=lambda rate: tried[rate])
    runs = [
        cells.run(method.config(best, noise, seed=seed), f"{method.label}, z = {noise:g}, seed {seed}")
        for seed in seeds
    ]
    return Point(method, noise, best, runs)


def table(saved: dict[str, Any]) -> str:
    """That of a file that `--json` wrote."""
    methods = {method.label: method for method in METHODS}
    return to_markdown(
        [
            Point(methods[p["method"]], p["noise"], p["rate"], [Result.from_dict(entry) for entry in p["results"]])
            for p in saved["points"]
        ]
    )


def to_markdown(points: list[Point]) -> str:
    """The table; the base, which knows nothing of any client, is below it."""
    lines = [
        "| method | numbers | noise z | noise / clip | ε | rate | accuracy, % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for p in points:
        numbers, (low, high) = p.results[0].trainable_parameters, p.interval
        clipped = p.noise == CLIPPED
        noise, spent = ("none", "∞") if clipped else (f"{p.noise:g}", f"{p.epsilon:.3g}")
        over_clip = 0.0 if clipped else p.noise * sqrt(numbers) / COHORT
        lines.append(
            f"| {p.method.label} | {numbers:,} | {noise} | {over_clip:.2f} | {spent} | {p.rate:g} | "
            f"{100 * p.accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}] |"
        )
    return "\n".join([*lines, "", f"Frozen base: {100 * base_accuracy(points):.1f} %."])


def base_accuracy(points: list[Point]) -> float:
    found = points[0].results[0].accuracy_base
    assert found is not None
    return found


def draw(points: list[Point]) -> None:
    """Accuracy against ε with the intervals, a line a method; without noise as a dotted level of the same colour."""
    colours = dict(zip((m.label for m in METHODS), ("#2a9d8f", "#0b6e4f", "#33658a", "#8f2d56"), strict=True))
    with mpl.rc_context({"svg.hashsalt": "nestling", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = FigureCanvasAgg(figure).figure.add_subplot()
        axes.set(xscale="log", xlabel="ε at δ = 1e-5 (left: more private)", ylabel="accuracy on test items, %")
        for method in (m for m in METHODS if any(p.method is m for p in points)):
            colour, own = colours[method.label], [p for p in points if p.method is method]
            noised = sorted((p for p in own if p.noise != CLIPPED), key=lambda p: p.epsilon)
            heights = [100 * p.accuracy for p in noised]
            around = [
                [100 * (p.accuracy - p.interval[0]) for p in noised],
                [100 * (p.interval[1] - p.accuracy) for p in noised],
            ]
            label = f"{method.label} ({own[0].results[0].trainable_parameters:,} numbers)"
            axes.errorbar(
                [p.epsilon for p in noised], heights, yerr=around, fmt="o-", color=colour, markersize=4, linewidth=1.2,
                elinewidth=0.8, label=label,
            )  # fmt: skip
            for p in own:
                if p.noise == CLIPPED:
                    axes.axhline(100 * p.accuracy, color=colour, linewidth=0.8, linestyle=":")
        axes.axhline(100 * base_accuracy(points), color="#999999", linewidth=0.8)
        axes.annotate("frozen base", (0.005, 100 * base_accuracy(points)), (0, 2), xycoords=("axes fraction", "data"),
                      textcoords="offset points", fontsize=8, color="#666666")  # fmt: skip
        axes.grid(axis="y", linewidth=0.3)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        save_figure(figure, FIGURE)


if __name__ == "__main__":
    main()
