"""How much each kind of work does in a second on one device: a table to set a GPU beside a CPU, and forms beside forms.

    python benchmarks/throughput.py [--device cuda:0] [--threads 2] [--repeats 5] [--json FILE]

images      a training step of ResNet-18 of width 64, FLITE and all weights (AdamW), and of all weights in bfloat16
tokens      the delta rule forward and backward at T = 4,096 (16 heads of 64), every form the device has; held to the
            float64 recurrence first, and where one is off nothing is printed and the exit code is 1
words       SmolLM2-135M reads 4 × 512 tokens: as it is, and with the window and memories of the preset needle-smollm2

All forms of one kind take their turn in one process; the least wall time of each counts. On a GPU the clock is read
when the device has finished.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nestling.kernels.delta_rule import delta_rule, dispatch, reference
from nestling.models.language import load_language_model
from nestling.models.resnet import make_resnet

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def least(works: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each, the least of the repeats after one that warms up."""
    best = dict.fromkeys(works, float("inf"))
    for repeat in range(options.repeats + 1):
        for name, work in works.items():
            settle(options.device)
            start = time.perf_counter()
            work()
            settle(options.device)
            if repeat:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def settle(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def images(options: argparse.Namespace) -> dict[str, float]:
    """Images a second of a training step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.batch, 3, 32, 32, generator=generator).to(options.device)
    y = torch.randint(0, 100, (options.batch,), generator=generator).to(options.device)

    def step(*, latent: bool, half: bool = False) -> Callable[[], None]:
        model = make_resnet("resnet18", width=64, channels=3, classes=100, seed=0).to(options.device)
        adapter = nestling.attach(model, nestling.LatentConfig(seed=7, targets=("*conv*",))) if latent else None
        optimizer = torch.optim.AdamW(adapter.trainable() if adapter else model.parameters(), 1e-3)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=half):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        return run

    works = {
        "FLITE": step(latent=True),
        "all weights": step(latent=False),
        "all weights, bfloat16": step(latent=False, half=True),
    }
    return {name: options.batch / seconds for name, seconds in least(works, options).items()}


def streams(length: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Inputs of the delta rule, keys of length one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 16, 64, generator=generator) for _ in range(3))
    beta = torch.sigmoid(torch.randn(1, length, 16, generator=generator))
    made = {"q": F.normalize(q, dim=-1) / 8, "k": F.normalize(k, dim=-1), "v": v, "beta": beta}
    return {name: x.to(device, dtype).requires_grad_() for name, x in made.items()}


def forms(device: str) -> list[tuple[str, torch.dtype]]:
    """What can compute the delta rule there."""
    if device == "cpu":
        return [("chunked", torch.float32), *([("compiled", torch.float32)] if dispatch._compiled() else [])]
    return [("chunked", torch.float32), *([("fla", torch.bfloat16)] if dispatch._fla() else [])]


def worst_error(impl: str, dtype: torch.dtype, device: str) -> float:
    """The largest error of outputs and gradients against the recurrence in float64, relative to the largest entry."""
    given = streams(256, dtype, device)
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in given.items()}
    got, _ = delta_rule(**given, impl=impl)
    wanted, _ = reference.run(**exact, g=None, state=torch.zeros(1, 16, 64, 64).double(), additive=False)
    pairs = [(got, wanted)]
    for outputs in (got, wanted):
        (outputs.double() ** 2).sum().backward()
    pairs += [(given[name].grad, exact[name].grad) for name in given]
    return max(float((a.detach().cpu().double() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)


def tokens(options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of the delta rule forward and backward; ends the program where a form is wrong."""
    works = {}
    for impl, dtype in forms(options.device):
        name = f"{impl}, {str(dtype).removeprefix('torch.')}"
        error = worst_error(impl, dtype, options.device)
        if not error <= LIMITS[dtype]:
            sys.exit(f"{name}: relative error {error:.1e}; nothing is timed")
        long = streams(options.length, dtype, options.device)

        def run(long: dict[str, torch.Tensor] = long, impl: str = impl) -> None:
            outputs, _ = delta_rule(**long, impl=impl)
            outputs.float().square().sum().backward()

        works[name] = run
    return {name: options.length / seconds for name, seconds in least(works, options).items()}


def words(options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second that a language model reads."""
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    models = {name: load_language_model(options.model, dtype=dtype)[0] for name in ("plain", "window and memory")}
    nestling.attach(models["window and memory"], nestling.load_config("needle-smollm2").adapter)
    ids = torch.randint(1000, (4, 512), generator=torch.Generator().manual_seed(0)).to(options.device)

    def work(model: Any) -> Callable[[], object]:
        model.to(options.device)
        return lambda: model(ids, use_cache=False, logits_to_keep=1)

    with torch.no_grad():
        times = least({f"{name}, {dtype}": work(model) for name, model in models.items()}, options)
    return {name: ids.numel() / seconds for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0")
    parser.add_argument(
        "--kinds", nargs="+", default=["images", "tokens", "words"], choices=["images", "tokens", "words"]
    )
    parser.add_argument("--batch", type=int, default=128, help="of images")
    parser.add_argument("--length", type=int, default=4096, help="of the delta rule's streams")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.cuda.get_device_name(options.device) if options.device != "cpu" else f"{options.threads} CPU threads"
    measured = {
        kind: work(options)
        for kind, work in (("images", images), ("tokens", tokens), ("words", words))
        if kind in options.kinds
    }
    print(f"| {device}, torch {torch.__version__} | a second |\n|---|---:|")
    for kind, rates in measured.items():
        for name, rate in rates.items():
            print(f"| {kind}: {name} | {rate:,.0f} |")
    if options.json:
        options.json.write_text(json.dumps({"device": device, "torch": torch.__version__, **measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
