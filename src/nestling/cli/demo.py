"""`nestling demo`: FLITE in float32 and int4 beside FedAvg, from one base, on the same clients and held-out items."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.text import Text

from nestling.cli.run import ProgressLine
from nestling.config.load import load_config
from nestling.config.schema import RunConfig


@dataclasses.dataclass(frozen=True)
class Demo:
    """Adapt a network, trained on 8×8 digits, to MNIST on eight clients with very different shares of the digits."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of the partition, the maps and the order of batches."""
    out: str = "runs"
    """Folder for the runs, the figure and the report."""
    markdown: bool = False
    """Print the table as Markdown as well."""
    json: bool = False
    """End with one JSON object per run."""


def demo(args: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    command = tyro.cli(tyro.conf.FlagCreatePairsOff[Demo], args=list(args), prog="nestling demo")
    from nestling.api import run
    from nestling.core.files import make_folder
    from nestling.federation.reference import References
    from nestling.report.html import write_report
    from nestling.report.plots import accuracy_against_bytes
    from nestling.report.tables import to_markdown, to_rich

    out = make_folder(Path(command.out))
    typed = ["nestling", "demo", *args]
    results = []
    planned = [(seed, methods(seed, str(out))) for seed in command.seeds]  # so that a bad seed is found at once
    for seed, configs in planned:
        known: References | None = None
        for config in configs:
            label = f"seed {seed}, {config.method} {config.codec.up}:"
            shared = known if config.codec.bits == 4 else None
            with ProgressLine(to_stderr=command.json, label=label) as line:
                result = run(config, progress=line.show, references=shared, command=typed)
            if config.method == "flite" and shared is None:
                assert result.accuracy_local_only is not None
                assert result.accuracy_centralised is not None
                known = References(result.accuracy_local_only, result.accuracy_centralised)
            results.append(result)
            Console(stderr=command.json).print(
                f"{label} {result.accuracy:.2%} after {result.seconds:.0f} s of federating", highlight=False
            )
    comparison = write_report([Path(r.run_dir) for r in results], out / "demo.html")
    files = accuracy_against_bytes(
        [r.result for r in comparison.runs], [r.metrics for r in comparison.runs], out / "demo"
    )
    console = Console(stderr=command.json)
    console.print(to_rich(comparison.rows, comparison.caption))
    for path in (out / "demo.html", *files):
        console.print(Text(str(path)), soft_wrap=True)
    if command.markdown:
        print(to_markdown(comparison.rows, comparison.caption))
    if command.json:
        for result in results:
            print(json.dumps(result.to_dict(), allow_nan=False))
    return 0


def methods(seed: int, out: str) -> list[RunConfig]:
    """The runs of the demo for one seed, from the presets. The int4 run differs from the float32 run in its codec alone
    and so shares its reference rows."""
    flite, fedavg = load_config("flite-digits"), load_config("fedavg-digits")
    int4 = dataclasses.replace(flite, name=f"{flite.name}-int4", codec=dataclasses.replace(flite.codec, bits=4))
    machine = dataclasses.replace(flite.machine, out=out)
    return [dataclasses.replace(config, seed=seed, machine=machine) for config in (flite, int4, fedavg)]
