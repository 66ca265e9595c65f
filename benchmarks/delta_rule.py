"""Time the delta rule against public implementations: forward, and forward with backward.

    python benchmarks/delta_rule.py [--lengths 2048] [--heads 16] [--dim 64] [--gate] [--memory] [--json]

Outputs, last states and gradients are held to the float64 definition at 4,096 tokens first; if they fail, no time is
printed and the exit code is 1. All implementations take the same inputs in turn, in one process, on `--threads`
threads. What counts is the shortest CPU time of the process (other programs hardly add to it); wall time is beside it.

Peers are optional. `transformers` is torch_chunk_gated_delta_rule as shipped, whose backward pass is quadratic in the
length; `transformers, repaired` is the same function with its slices taken by one `unbind`, which makes it linear.
Both always carry a gate. `fla, naive chunk` is the one form in flash-linear-attention that runs on a CPU.
`titans-pytorch` is another function (a chunk's gradients are all taken at its start) and includes its projections.
"""

import nestling  # noqa: F401  before torch: it sets how OpenMP threads wait

# isort: split
import argparse
import ctypes
import importlib.util
import inspect
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor

from nestling.kernels.delta_rule import chunked, compiled, reference
from nestling.kernels.delta_rule.compiled_tiles import CHUNK, floats, multiply_add

Tensors = list[Tensor | None]
INSTALL = {
    "transformers": "pip install transformers",
    "fla": "pip install --no-deps fla-core && pip install einops",
    "titans_pytorch": "pip install titans-pytorch",
}


@dataclass(frozen=True)
class Peer:
    """`run(q, k, v, beta, g)` gives the outputs; `factor` times them is the definition's (0: another function)."""

    name: str
    run: Callable[..., Tensor]
    factor: float = 1.0
    chunk: int = 64
    longest: int = 1 << 30  # tokens it is timed at, at most
    longest_backward: int = 1 << 30


def make(T: int, heads: int, d: int, *, gate: str = "none", keys: str = "random", beta: float | None = None) -> Tensors:
    """q, k, v, beta, g, state for one stream. `keys`: random, near (parallel to about 1 %) or identical."""
    gen = torch.Generator().manual_seed(T + d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    unit = torch.nn.functional.normalize
    k, base = normal(1, T, heads, d), normal(1, 1, heads, d)
    k = {"random": k, "near": base + 0.01 * k, "identical": base.expand_as(k)}[keys]
    g = None if gate == "none" else -0.2 * torch.rand(1, T, heads, generator=gen)
    if gate == "strong":
        g[:, ::7], g[:, 3::7] = -torch.inf, -100.0
    b = torch.rand(1, T, heads, generator=gen) if beta is None else torch.full((1, T, heads), beta)
    q = unit(normal(1, T, heads, d), dim=-1)
    return [q, unit(k, dim=-1), normal(1, T, heads, d), b, g, normal(1, heads, d, d)]


def everything(run: Callable, tensors: Tensors, dtype: torch.dtype) -> list[Tensor]:
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in tensors]
    outputs, state = run(*leaves, additive=False)
    gen = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=gen).to(dtype) for x in (outputs, state)]
    return [outputs, state, *torch.autograd.grad([outputs, state], [x for x in leaves if x is not None], weights)]


def check(T: int, d: int) -> list[dict[str, object]]:
    """The largest relative error of each fast path in each regime; ends the program where one is over its limit."""
    regimes = [
        ("random keys", 1e-6, make(T, 2, d)),
        ("random keys, gate", 1e-6, make(T, 2, d, gate="mild")),
        ("gate down to -inf", 1e-6, make(T, 2, d, gate="strong")),
        ("near-parallel keys", 5e-6, make(T, 2, d, keys="near", beta=0.999)),
        ("identical keys", 5e-6, make(T, 2, d, keys="identical", beta=1.0)),
    ]
    rows: list[dict[str, object]] = []
    for name, limit, tensors in regimes:
        wanted = everything(reference.run, tensors, torch.float64)
        for path in (compiled, chunked):
            got = everything(path.run, tensors, torch.float32)
            pairs = zip(got, wanted, strict=True)
            # A gradient that is zero to rounding (of a state long forgotten) is measured against 1e-3, not itself.
            error = max(float(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).detach()) for a, b in pairs)
            which = path.__name__.rpartition(".")[2]
            if not error <= limit:  # not: NaN counts as a failure
                sys.exit(f"{which}, {name}: relative error {error:.1e} (limit {limit:.0e}); not timed")
            rows.append({"path": which, "regime": name, "error": error, "limit": limit})
    return rows


def repaired(function: Callable) -> Callable | None:
    """The installed function with `x[:, :, i]` of its chunk loop taken from one `unbind(2)`; None if it has changed."""
    plain = inspect.unwrap(function)
    source = re.sub(r"\A(@.*\n)+", "", inspect.getsource(plain))
    found = re.search(r"\n    for i in range\(num_chunks\):\n(?:        .*\n|\n)+", source)
    written = re.findall(r"(\w+)\[:, :, i\] = ", found[0]) if found else []
    if not found or len(written) != 1:
        return None
    names = sorted(set(re.findall(r"(\w+)\[:, :, i\]", found[0])))
    before = "".join(f"    {name}_parts = list({name}.unbind(2))\n" for name in names)
    after = f"    {written[0]} = torch.stack({written[0]}_parts, 2)\n"
    loop = re.sub(r"(\w+)\[:, :, i\]", r"\1_parts[i]", found[0])
    space = dict(plain.__globals__)
    exec(source[: found.start()] + "\n" + before + loop + after + source[found.end() :], space)
    return space[plain.__name__]


def peers(heads: int, d: int) -> tuple[list[Peer], list[str]]:
    """Our paths, the peers that can be imported, and a line for each that cannot."""
    state = torch.zeros(1, heads, d, d)

    def ours(path: object) -> Callable[..., Tensor]:
        return lambda q, k, v, beta, g: path.run(q, k, v, beta, g, state, additive=False)[0]

    found = [
        Peer("nestling, compiled", ours(compiled), chunk=CHUNK),
        Peer("nestling, chunked", ours(chunked)),
        Peer("naive loop", ours(reference), chunk=0, longest=2048, longest_backward=512),
    ]
    missing = [f"{name}: {how}" for name, how in INSTALL.items() if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("transformers"):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as shipped

        def gated(function: Callable) -> Callable[..., Tensor]:
            return lambda q, k, v, beta, g: function(q, k, v, torch.zeros_like(beta) if g is None else g, beta)[0]

        shipped = inspect.unwrap(shipped)  # without what looks for a replacement on the hub
        found.append(Peer("transformers", gated(shipped), factor=d**0.5))
        linear = repaired(shipped)
        if linear:
            found.append(Peer("transformers, repaired", gated(linear), factor=d**0.5))
        else:
            missing.append("transformers, repaired: the installed version is written differently, nothing to repair")
    if importlib.util.find_spec("fla"):  # its packages need Triton; the file of the naive form needs nothing
        path = Path(importlib.util.find_spec("fla").submodule_search_locations[0], "ops/gated_delta_rule/naive.py")
        spec = importlib.util.spec_from_file_location("fla_naive", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> Tensor:
            g = torch.zeros_like(beta) if g is None else g
            return module.naive_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0)[0]

        found.append(Peer("fla, naive chunk", fla, longest=8192, longest_backward=2048))
    if importlib.util.find_spec("titans_pytorch"):
        found.append(titans(heads, d))
    return found, missing


def titans(heads: int, d: int) -> Peer:
    """A NeuralMemory with a linear memory and no momentum, as near to the delta rule as it comes."""
    from titans_pytorch import MemoryMLP, NeuralMemory

    memory = NeuralMemory(
        dim=heads * d, dim_head=d, heads=heads, chunk_size=64, model=MemoryMLP(d, depth=1), momentum=False
    )
    return Peer("titans-pytorch", lambda q, k, v, beta, g: memory(v.flatten(2))[0], factor=0, longest=2048)


def once(peer: Peer, tensors: Tensors, weights: Tensor, backward: bool) -> tuple[float, float]:
    """CPU and wall seconds of one call; `weights` is what flows back into the outputs."""
    leaves = [None if x is None else x.detach().requires_grad_(backward) for x in tensors[:5]]
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.set_grad_enabled(backward):
        outputs = peer.run(*leaves)
        if backward:
            outputs.view(weights.shape).backward(weights)
    return time.process_time() - cpu, time.perf_counter() - wall


def flops(T: int, heads: int, d: int, chunk: int, backward: bool) -> int:
    """The algorithm's floating-point operations: products only, chunks of `chunk` (0: token by token)."""
    forward = 6 * d * d + 8 * chunk * d
    return T * heads * (forward + (16 * d * d + 26 * chunk * d if backward else 0))


@numba.njit(nogil=True)
def _products(address: int, count: int) -> None:
    w = floats(address)
    for _ in range(count):
        multiply_add(w, 64, 64, 64, 0, 64, 1, 4096, 8192)


def peaks() -> dict[str, float]:
    """GF/s of float32 products on one thread: torch's large ones, and 64 × 64 × 64 in our own tile."""
    a, w = torch.randn(768, 768), np.zeros(3 * 4096, np.float32)
    _products(w.ctypes.data, 1)
    rates = {"torch matmul": 0.0, "own tile": 0.0}
    for _ in range(12):
        start = time.process_time()
        a @ a
        rates["torch matmul"] = max(rates["torch matmul"], 2e-9 * 768**3 / (time.process_time() - start))
        start = time.process_time()
        _products(w.ctypes.data, 2000)
        rates["own tile"] = max(rates["own tile"], 2e-9 * 64**3 * 2000 / (time.process_time() - start))
    return rates


def extra_mb(peer: Peer, tensors: Tensors, weights: Tensor) -> float:
    """By how much one forward and backward raises the peak memory, in a fork of this process (one thread)."""
    ctypes.CDLL(None).malloc_trim(0)  # give back what earlier calls left free, or it would be used again unseen
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        once(peer, tensors, weights, True)
        os.write(write, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read() or "-1") / 1024  # Linux counts in KiB


def measure(options: argparse.Namespace, known: list[Peer], peak: dict[str, float]) -> list[dict[str, object]]:
    """One row for each (length, direction, implementation)."""
    rows = []
    for T, backward in product(options.lengths, (False, True)):
        tensors = make(T, options.heads, options.dim, gate="mild" if options.gate else "none")
        timed = [p for p in known if (min(p.longest, p.longest_backward) if backward else p.longest) >= T]
        with torch.no_grad():
            wanted = timed[0].run(*tensors[:5])
            wrong = [p.name for p in timed if p.factor and (wanted - p.factor * p.run(*tensors[:5])).abs().max() > 1e-3]
        if wrong:
            sys.exit(f"{', '.join(wrong)}: not the same outputs at T = {T}; not timed")
        weights = torch.ones_like(tensors[2])
        direction = "forward + backward" if backward else "forward"
        times: dict[str, list[tuple[float, float]]] = {p.name: [] for p in timed}
        for repeat, peer in product(range(options.repeats), timed):
            if repeat == 0 or sum(cpu for cpu, _ in times[peer.name]) < options.patience:
                times[peer.name].append(once(peer, tensors, weights, backward))
        for peer in timed:
            cpu, wall = (min(column) for column in zip(*times[peer.name], strict=True))
            rate = 1e-9 * flops(T, options.heads, options.dim, peer.chunk, backward) / cpu if peer.factor else None
            memory = options.memory and backward and options.threads == 1
            rows.append(
                {
                    "T": T,
                    "direction": direction,
                    "name": peer.name,
                    "cpu_ms": 1e3 * cpu,
                    "wall_ms": 1e3 * wall,
                    "runs": len(times[peer.name]),
                    "gflops": rate,
                    "of_torch": rate and rate / peak["torch matmul"],
                    "of_tile": rate and rate / peak["own tile"],
                    "extra_mb": extra_mb(peer, tensors, weights) if memory else None,
                }
            )
        base = rows[-len(timed)]["cpu_ms"]
        for row in rows[-len(timed) :]:
            row["against_compiled"] = row["cpu_ms"] / base
    return rows


def report(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    """The table; a ratio is how many times as long as our compiled path an implementation takes."""
    for T, direction in dict.fromkeys((row["T"], row["direction"]) for row in rows):
        print(f"\nT = {T:,}, H = {options.heads}, d = {options.dim}, {direction}, {options.threads} thread(s)")
        print("implementation              CPU ms    wall ms    ratio    GF/s  of matmul  of tile  extra MB")
        for row in rows:
            if (row["T"], row["direction"]) == (T, direction):
                line = f"{row['name']:24} {row['cpu_ms']:9.1f}  {row['wall_ms']:9.1f}  {row['against_compiled']:6.1f}x"
                if row["gflops"] is not None:
                    line += f"  {row['gflops']:6.1f}  {row['of_torch']:8.0%}  {row['of_tile']:7.0%}"
                print(line + (f"  {row['extra_mb']:8.0f}" if row["extra_mb"] is not None else ""))
    both = {
        row["T"]: row["cpu_ms"] for row in rows if row["name"] == "nestling, compiled" and "back" in row["direction"]
    }
    for T in sorted(both):
        if 2 * T in both:
            print(f"\ncompiled, forward + backward: time({2 * T:,}) / time({T:,}) = {both[2 * T] / both[T]:.2f}")


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--gate", action="store_true", help="with log-decays; ours is timed without them otherwise")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--patience", type=float, default=4.0, help="seconds after which an implementation runs no more"
    )
    parser.add_argument("--only", nargs="+", default=[], help="implementations whose name contains one of these words")
    parser.add_argument("--checked-length", type=int, default=4096)
    parser.add_argument("--memory", action="store_true", help="also the extra peak memory; one more run each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    errors = check(options.checked_length, options.dim)
    known, missing = peers(options.heads, options.dim)
    if options.only:
        known = [known[0], *(p for p in known[1:] if any(word in p.name for word in options.only))]
    peak = peaks()
    load = os.getloadavg()[0]
    rows = measure(options, known, peak)
    if options.json:
        facts = {"torch": torch.__version__, "load": [load, os.getloadavg()[0]], "peaks": peak, "missing": missing}
        print(json.dumps(facts | {"options": vars(options), "errors": errors, "results": rows}, allow_nan=False))
        return
    for row in errors:
        print(f"{row['path']:9} {row['regime']:19} relative error {row['error']:.1e} (limit {row['limit']:.0e})")
    print(f"float32 peaks: {', '.join(f'{name} {rate:.0f} GF/s' for name, rate in peak.items())}")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; shortest of up to {options.repeats} runs")
    report(rows, options)
    if missing:
        print("\nNot compared:\n  " + "\n  ".join(missing))


if __name__ == "__main__":
    main()
