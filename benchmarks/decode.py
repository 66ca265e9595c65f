"""One token of decoding: the memory's step against attention over a cache of keys and values, at growing contexts.

    python benchmarks/decode.py [--contexts 1024 4096 16384 65536] [--heads 16] [--dim 64] [--json]

The memory's state and its time do not depend on the context; the cache and the time to read it grow with it. The step
is held to the float64 definition first; if it fails, no time is printed and the exit code is 1. Attention is PyTorch's
scaled_dot_product_attention on one query per head, the same heads, its cache in float32 and in bfloat16. Projections
are outside both. Times are the shortest of many calls in turn, CPU and wall; the crossover is the shortest context of a
doubling series at which attention takes longer.
"""

import nestling  # noqa: F401  before torch: it sets how OpenMP threads wait

# isort: split
import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from nestling.kernels.delta_rule import compiled, delta_rule_step, reference

CROSSOVER = [2**n for n in range(3, 14)]  # contexts at which the crossover is looked for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def token(heads: int, d: int) -> list[Tensor]:
    """q, k, v [1, H, d], beta [1, H] and a state [1, H, d, d]."""
    gen = torch.Generator().manual_seed(heads + d)
    q, k, v = (torch.randn(1, heads, d, generator=gen) for _ in range(3))
    beta, state = torch.rand(1, heads, generator=gen), torch.randn(1, heads, d, d, generator=gen)
    return [normalize(q, dim=-1), normalize(k, dim=-1), v, beta, state]


def steps(heads: int, d: int) -> dict[str, Callable[..., Tensor]]:
    """Each form of the step as run(q, k, v, beta, state)."""
    return {
        "memory, compiled": lambda q, k, v, beta, state: compiled.step(q, k, v, beta, None, state),
        "memory, public": lambda q, k, v, beta, state: delta_rule_step(q, k, v, beta=beta, state=state),
    }


def check(heads: int, d: int) -> None:
    """Stop unless each form gives the definition's output and state."""
    for name, run in steps(heads, d).items():
        q, k, v, beta, state = token(heads, d)
        exact = [x[:, None].double() for x in (q, k, v, beta)]
        wanted, last = reference.run(*exact, None, state.double(), additive=False)
        error = float((run(q, k, v, beta, state) - wanted[:, 0]).abs().max() / wanted.abs().max())
        error = max(error, float((state - last).abs().max() / last.abs().max()))
        if not error <= 1e-6:
            sys.exit(f"{name}: relative error {error:.1e} (limit 1e-06); not timed")


def microseconds(works: dict[str, Callable[[], object]], seconds: float) -> dict[str, tuple[float, float]]:
    """CPU and wall time of a call, the shortest of many rounds in which all take their turn."""
    counts, best = {}, dict.fromkeys(works, (float("inf"), float("inf")))
    for name, work in works.items():
        work()
        start = time.perf_counter()
        work()
        counts[name] = max(1, min(200, round(2e-3 / (time.perf_counter() - start))))  # rounds of about 2 ms
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(counts[name]):
                work()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            best[name] = tuple(min(a, 1e6 * b / counts[name]) for a, b in zip(best[name], (cpu, wall), strict=True))
    return best


def attention(context: int, heads: int, d: int, dtype: torch.dtype) -> tuple[Callable[[], Tensor], int]:
    """A call that reads a cache of `context` tokens, and the cache's bytes."""
    gen = torch.Generator().manual_seed(context)
    keys, values = (torch.randn(1, heads, context, d, generator=gen).to(dtype) for _ in range(2))
    q = torch.randn(1, heads, 1, d, generator=gen).to(dtype)
    return lambda: scaled_dot_product_attention(q, keys, values), keys.nbytes + values.nbytes


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each context")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    H, d = options.heads, options.dim
    check(H, d)
    given = token(H, d)
    memory = {name: lambda run=run: run(*given) for name, run in steps(H, d).items()}
    rows, crossover = [], dict.fromkeys(DTYPES)
    with torch.no_grad():
        for context in sorted({*CROSSOVER, *options.contexts}):
            wanted = context in options.contexts
            if not wanted and all(crossover.values()):
                continue
            caches = {f"attention, {name}": attention(context, H, d, dtype) for name, dtype in DTYPES.items()}
            works = memory | {name: work for name, (work, _) in caches.items()}
            taken = microseconds(works, options.seconds if wanted else 0.3)
            for name in DTYPES:
                if crossover[name] is None and taken[f"attention, {name}"][0] > taken["memory, compiled"][0]:
                    crossover[name] = context
            if wanted:
                rows += [
                    {
                        "context": context,
                        "name": name,
                        "cpu_us": cpu,
                        "wall_us": wall,
                        "bytes": given[4].nbytes if name in memory else caches[name][1],
                        "against_compiled": cpu / taken["memory, compiled"][0],
                    }
                    for name, (cpu, wall) in taken.items()
                ]
    same_bytes = {name: H * d * d * 4 // (2 * H * d * dtype.itemsize) for name, dtype in DTYPES.items()}
    if options.json:
        facts = {"torch": torch.__version__, "load": os.getloadavg()[0], "options": vars(options)}
        print(json.dumps(facts | {"crossover": crossover, "equal_bytes": same_bytes, "results": rows}, allow_nan=False))
        return
    print(f"one token, batch 1, H = {H}, d = {d}, {options.threads} thread(s), load average {os.getloadavg()[0]:.1f}")
    print("context  what                   CPU us    wall us        bytes     ratio")
    for row in rows:
        line = f"{row['context']:7,}  {row['name']:20} {row['cpu_us']:8.1f}  {row['wall_us']:9.1f}  {row['bytes']:11,}"
        print(f"{line}  {row['against_compiled']:7.1f}x")
    for name in DTYPES:
        when = f"from {crossover[name]} tokens on" if crossover[name] else "at none of the contexts"
        print(f"attention over a {name} cache is slower {when}; it takes more bytes beyond {same_bytes[name]} tokens")


if __name__ == "__main__":
    main()
