"""One training step of FLITE against one of full fine-tuning: same ResNet-18 of width 64, same batch, one run.

First the gradient of the latents is held to its definition (Uᵀ times the full gradient, in float64); if that fails no
ratio is printed. Times are interleaved and the least of each is taken; peak memory is that of a process of its own.

    python benchmarks/step.py [--batch 32] [--repeats 8] [--threads 2] [--json]
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nestling.kernels.signs import reference
from nestling.models.resnet import make_resnet

OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 1e-3)}
KINDS = {"full": nestling.FullConfig(), "flite": nestling.LatentConfig(seed=7, targets=("*conv*",))}


def make(kind: str, optimizer: str, batch: int) -> tuple[Callable[[], None], nn.Module, nestling.Adapter]:
    """A function that does one training step, and what it trains. `full` is the bare model, without our adapter."""
    model = make_resnet("resnet18", width=64, channels=3, classes=100, seed=0)
    adapter = nestling.attach(model, KINDS[kind]) if kind == "flite" else None
    parameters = adapter.trainable() if adapter else [p for p in model.parameters() if p.requires_grad]
    update = OPTIMIZERS[optimizer](parameters)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(batch, 3, 32, 32, generator=generator), torch.randint(0, 100, (batch,), generator=generator)

    def step() -> None:
        update.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        update.step()

    return step, model, adapter


def check(batch: int) -> float:
    """Largest relative error of the latents' gradient against Uᵀ g in float64, g from the bare model."""
    _, full, _ = make("full", "sgd", batch)
    _, model, adapter = make("flite", "sgd", batch)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(batch, 3, 32, 32, generator=generator), torch.randint(0, 100, (batch,), generator=generator)
    F.cross_entropy(full(x), y).backward()
    F.cross_entropy(model(x), y).backward()
    gradients, worst = dict(full.named_parameters()), 0.0
    for item in (0, 5, 19):
        m, name = adapter._maps[item], adapter.layout.names[item]
        g = gradients[name].grad.reshape(-1).double().numpy()
        wanted = m.factor * reference.reduce(m.key, g, m.rank)
        got = adapter.z.grad[adapter.layout.slice(name)].numpy()
        worst = max(worst, float(np.abs(got - wanted).max() / np.abs(wanted).max()))
    return worst


def peak_memory(kind: str, optimizer: str, batch: int, threads: int) -> int:
    """Bytes that three steps add to a process that has imported everything and made its model's base."""
    code = f"import step; print(step._peak({kind!r}, {optimizer!r}, {batch}, {threads}))"
    folder = __file__.rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return int(done.stdout)


def _peak(kind: str, optimizer: str, batch: int, threads: int) -> int:
    torch.set_num_threads(threads)
    small = make_resnet("resnet8", width=8, channels=3, classes=10, seed=0)  # loads libraries and compiles kernels
    nestling.attach(small, KINDS["flite"])
    small(torch.zeros(1, 3, 32, 32)).sum().backward()
    before = _high_water()
    step, *_ = make(kind, optimizer, batch)
    for _ in range(3):
        step()
    return _high_water() - before


def _high_water() -> int:
    """Peak resident bytes of this process. (`ru_maxrss` would begin with the parent's.)"""
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    error = check(args.batch)
    if not error <= 1e-4:
        sys.exit(f"the latents' gradient is off by {error:.1e} of its largest entry: no ratio is worth printing")
    rows = []
    for optimizer in OPTIMIZERS:
        steps = {kind: make(kind, optimizer, args.batch)[0] for kind in KINDS}
        least = dict.fromkeys(KINDS, float("inf"))
        for repeat in range(args.repeats + 1):
            for kind, step in steps.items():
                start = time.perf_counter()
                step()
                if repeat:  # the first warms up
                    least[kind] = min(least[kind], time.perf_counter() - start)
        del steps
        memory = {kind: peak_memory(kind, optimizer, args.batch, args.threads) for kind in KINDS}
        rows.append(
            {
                "optimizer": optimizer,
                **{f"{kind}_ms": round(1e3 * least[kind], 1) for kind in KINDS},
                "time_ratio": round(least["flite"] / least["full"], 3),
                **{f"{kind}_peak_MB": round(memory[kind] / 1e6) for kind in KINDS},
                "memory_ratio": round(memory["flite"] / memory["full"], 3),
            }
        )
    if args.json:
        print(json.dumps({"gradient_error": error, "batch": args.batch, "threads": args.threads, "rows": rows}))
        return
    print(f"gradient of the latents: relative error {error:.1e}; batch {args.batch}, {args.threads} threads")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
