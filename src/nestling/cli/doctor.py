"""`nestling doctor`: what is installed, what will be used, and whether the seeds come out right."""

import dataclasses
import os
from collections.abc import Sequence
from importlib.util import find_spec

import tyro
from rich.console import Console
from rich.table import Table


def doctor(args: Sequence[str]) -> int:
    """Print the findings; raises `SeedError` (exit 4) if the integer stream is wrong on this machine."""

    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """Versions, device, kernels, seed vectors and extras of this installation."""

    tyro.cli(Doctor, args=list(args), prog="nestling doctor")
    import torch

    from nestling.core.seeds import SCHEME, self_test
    from nestling.kernels.signs.dispatch import backend
    from nestling.runs.environment import describe

    table = Table(show_header=False)
    for key, value in describe().items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(key, text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table.add_row("device", f"{device} ({torch.get_num_threads()} threads)")
    table.add_row("sign map", backend(torch.device(device)))
    waiting = all(os.environ.get(k) == v for k, v in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")))
    table.add_row("idle threads", "sleep" if waiting else "spin: training slows down when cores are shared")
    for extra, packages in (("digits", ("mlxtend", "sklearn")), ("hub", ("datasets",))):
        missing = [p for p in packages if find_spec(p) is None]
        table.add_row(
            f"extra [{extra}]",
            f"missing {', '.join(missing)}: pip install 'nestling[{extra}]'" if missing else "installed",
        )
    self_test()
    table.add_row("seed vectors", f"{SCHEME}: as published")
    Console().print(table, markup=False)
    return 0
