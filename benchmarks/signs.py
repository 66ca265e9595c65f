"""Time the sign map's CPU kernels against a matrix product with a stored float32 U.

    python benchmarks/signs.py [--rows 11159232] [--ranks 32 64] [--threads 1 2] [--dense-rank 32] [--json]

The kernels are held to the float64 definition first; if they fail, no time is printed and the exit code is 1.
Default rows: the convolution weights of a CIFAR ResNet-18.
"""

import nestling  # noqa: F401  before torch: it sets how OpenMP threads wait

# isort: split
import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from nestling.kernels.signs import cpu, reference

KEY = (0x5EED, 0x51965)
CHECKED_ROWS = 20_001


def check(g: np.ndarray, base: np.ndarray, rank: int) -> None:
    """Stop unless both products follow their definition on some rows and are each other's adjoint on all of them."""
    y = np.random.default_rng(rank).standard_normal(rank).astype(np.float32)
    some, out = min(CHECKED_ROWS, g.size), np.empty_like(g)
    cpu.expand(KEY, y, base=base, out=out, threads=2)
    expand_error = abs(out[:some] - base[:some] - reference.expand(KEY, y.astype(np.float64), some)).max()
    exact = reference.reduce(KEY, g[:some].astype(np.float64), rank)
    reduce_error = abs(cpu.reduce(KEY, g[:some].copy(), rank, threads=2) - exact).max()
    cpu.expand(KEY, y, base=np.zeros_like(base), out=out, threads=2)
    left = float(
        sum(np.dot(a.astype(np.float64), b) for a, b in zip(np.array_split(out, 9), np.array_split(g, 9), strict=True))
    )
    adjoint_error = abs(left - float(cpu.reduce(KEY, g, rank, threads=2) @ y))
    size = float(np.linalg.norm(g)) * float(np.linalg.norm(y))
    limits = {
        "expand": (expand_error, 1e-6 * (abs(y).sum() + abs(base[:some]).max())),
        "reduce": (reduce_error, 1e-6 * np.linalg.norm(g[:some])),
        "adjoint": (adjoint_error, 1e-6 * size * np.sqrt(rank)),
    }
    for name, (error, limit) in limits.items():
        if not error <= limit:
            sys.exit(f"rank {rank}: {name} differs from its definition by {error:.3g} (limit {limit:.3g}); not timed")


def best_ms(work: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def stored(rows: int, rank: int) -> torch.Tensor:
    """U as float32[rows, rank], filled a slice at a time so that nothing else of its size exists."""
    U, W = np.empty((rows, rank), np.float32), reference.words_per_row(rank)
    column = np.arange(rank)
    for low in range(0, rows, 1 << 18):
        high = min(low + (1 << 18), rows)
        drawn = cpu.words(KEY, low * W // 4, -(-(high - low) * W // 4))[: (high - low) * W].reshape(-1, W)
        U[low:high] = (drawn[:, column // 32] >> (column % 32).astype(np.uint32)) & np.uint32(1)
    U *= 2
    U -= 1
    return torch.from_numpy(U)


def extra_mb(g: np.ndarray, base: np.ndarray, out: np.ndarray, rank: int, threads: int) -> float:
    """By how much both products raise this process's peak memory; to be called before anything large was freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu.expand(KEY, np.ones(rank, np.float32), base=base, out=out, threads=threads)
    cpu.reduce(KEY, g, rank, threads=threads)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # Linux counts in KiB


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """One row a (rank, threads, product): milliseconds, those of the stored matrix where it was built, their ratio."""
    rng = np.random.default_rng(0)
    g, base = (rng.standard_normal(options.rows, dtype=np.float32) for _ in range(2))
    out, results = np.full_like(base, 1), []
    memory = {rank: extra_mb(g, base, out, rank, max(options.threads)) for rank in options.ranks}
    for rank in options.ranks:
        check(g, base, rank)
    for rank in options.ranks:
        y = rng.standard_normal(rank, np.float32)
        for threads in options.threads:
            work = {
                "expand": lambda y=y, threads=threads: cpu.expand(KEY, y, base=base, out=out, threads=threads),
                "reduce": lambda rank=rank, threads=threads: cpu.reduce(KEY, g, rank, threads=threads),
            }
            results += [
                {
                    "product": name,
                    "rank": rank,
                    "threads": threads,
                    "ms": best_ms(one, options.repeats),
                    "extra_mb": memory[rank],
                }
                for name, one in work.items()
            ]
    if options.dense_rank in options.ranks:
        U, y = (
            stored(options.rows, options.dense_rank),
            torch.from_numpy(rng.standard_normal(options.dense_rank, np.float32)),
        )
        base_, g_ = torch.from_numpy(base), torch.from_numpy(g)
        dense = {"expand": lambda: torch.addmv(base_, U, y), "reduce": lambda: U.T @ g_}
        for row in results:
            if row["rank"] == options.dense_rank:
                torch.set_num_threads(row["threads"])
                row["stored_ms"] = best_ms(dense[row["product"]], options.repeats)
                row["ratio"] = row["stored_ms"] / row["ms"]
                row["stored_mb"] = U.nbytes / 2**20
    return results


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=11_159_232)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dense-rank", type=int, default=32, help="rank of the stored matrix; 0 to leave it out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = measure(options)
    if options.json:
        print(json.dumps({"rows": options.rows, "torch": torch.__version__, "results": results}, allow_nan=False))
        return
    print(f"{options.rows:,} rows; shortest of {options.repeats} runs")
    print("product  rank  threads       ms  extra MB  stored ms  stored MB  ratio")
    for row in results:
        line = f"{row['product']:7}  {row['rank']:4}  {row['threads']:7}  {row['ms']:7.1f}  {row['extra_mb']:8.1f}"
        if "ratio" in row:
            line += f"  {row['stored_ms']:9.1f}  {row['stored_mb']:9.0f}  {row['ratio']:4.1f}×"
        print(line)


if __name__ == "__main__":
    main()
