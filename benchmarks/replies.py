"""How fast a server takes in replies of 162 numbers, and how much memory it needs for a million of them.

    python benchmarks/replies.py [--count 1000000] [--clients 1000] [--json [FILE]]

Every reply goes the server's way: `decode` with all its checks, the bound on its norm, `RunningMean.add`. The messages
(712 bytes: a header of 64, 162 float32 numbers) are made beforehand, one for each client, and come round again, for
encoding is the clients' work. One in fifty is hostile, a hundred times longer than the others. The mean is held to the
float64 definition over the same replies first; if it fails, no time is printed and the exit code is 1. "Best" is the
quickest round of all clients: what a reply costs while nobody else has the processor.
"""

import nestling  # noqa: F401  first: it sets how idle OpenMP threads wait

# isort: split
import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from nestling.codec.form import Limits
from nestling.codec.message import context_id, decode, encode
from nestling.core.vectors import Layout
from nestling.strategies.fedavg import RunningMean, fraction_bits
from nestling.strategies.robust import shortened

RESULTS = Path(__file__).parent / "results" / "replies.json"
LAYOUT = Layout.of([("latent", (162,))])
LIMITS = Limits(max_examples=1000, max_abs=512.0)
CONTEXT, ROUND, CODEC = context_id({"run": "benchmark"}), 1, "float32"
LONGEST = 2 * LAYOUT.size**0.5  # twice the length of an honest reply


def vectors(clients: int) -> tuple[np.ndarray, list[int]]:
    """float32[clients, 162], one in fifty of them too long, and the examples each claims."""
    random = np.random.default_rng(0)
    x = random.standard_normal((clients, LAYOUT.size)) + 0.5
    x[::50] *= 100
    return np.clip(x, -500, 500).astype(np.float32), random.integers(1, 1001, clients).tolist()


def definition(x: np.ndarray, examples: list[int], count: int) -> np.ndarray:
    """Σ n_k x_k min(1, C / ‖x_k‖) / Σ n_k over `count` replies that come round, float64."""
    wide = x.astype(np.float64)
    wide *= np.minimum(1.0, LONGEST / np.linalg.norm(wide, axis=1))[:, None]
    whole, rest = divmod(count, len(x))
    weights = np.array(examples) * (whole + (np.arange(len(x)) < rest))
    return weights @ wide / weights.sum()


def resident() -> int:
    """Bytes of memory in use by this process (Linux; elsewhere 0)."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def measure(count: int, clients: int) -> dict[str, Any]:
    """Take in `count` replies; seconds and bytes."""
    x, examples = vectors(clients)
    messages = [
        encode(
            LAYOUT, vector, direction="uplink", codec=CODEC, is_difference=True, round=ROUND, context=CONTEXT,
            client=client, num_examples=claimed,
        )
        for client, (vector, claimed) in enumerate(zip(x, examples, strict=True))
    ]  # fmt: skip
    most = LIMITS.max_examples * count
    mean = RunningMean(LAYOUT.size, fraction_bits(total_weight=most, max_abs=LONGEST))
    clock, decoding, shortenings = time.perf_counter, 0.0, 0
    rounds: list[tuple[float, float]] = []  # when each ended, and the seconds spent decoding until then
    before = most_memory = resident()
    begin, begin_cpu = clock(), time.process_time()
    for number in range(count):
        client = number % clients
        start = clock()
        header, vector = decode(
            messages[client], direction="uplink", layout=LAYOUT, context=CONTEXT, round=ROUND, client=client,
            codecs=[CODEC], limits=LIMITS,
        )  # fmt: skip
        decoding += clock() - start
        bounded = shortened(vector, limit=LONGEST)
        shortenings += bounded is not vector
        mean.add(bounded, header.num_examples)
        if client == clients - 1:
            rounds.append((clock(), decoding))
            most_memory = max(most_memory, resident())
    taken, cpu = clock() - begin, time.process_time() - begin_cpu
    most_memory = max(most_memory, resident())
    best_reply, best_decode = np.diff([(begin, 0.0), *rounds], axis=0).min(axis=0) * 1e6 / clients
    error = float(np.abs(mean.mean() - definition(x, examples, count)).max())
    limit = 1e-7 * LONGEST
    if not error <= limit:
        sys.exit(f"the mean differs from its definition by {error:.3g} (limit {limit:.3g}); not timed")
    return {
        "replies": count,
        "message_bytes": len(messages[0]),
        "seconds": taken,
        "cpu_seconds": cpu,
        "us_decode": 1e6 * decoding / count,
        "us_decode_best": float(best_decode),
        "us_reply": 1e6 * taken / count,
        "us_reply_cpu": 1e6 * cpu / count,
        "us_reply_best": float(best_reply),
        "shortened": shortenings,
        "error": error,
        "memory_growth": most_memory - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=1000, help="how many different messages come round")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    options = parser.parse_args()
    if options.count < options.clients:
        parser.error("--count must not be less than --clients")
    row = measure(options.count, options.clients)
    if options.json:
        options.json.write_text(json.dumps({"numpy": np.__version__, **row}, indent=1, allow_nan=False) + "\n", "utf-8")
    print("| replies | bytes each | s | CPU s | µs decode (best) | µs reply (CPU, best) | MB of memory more |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {row['replies']:,} | {row['message_bytes']} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} | "
        f"{row['us_decode']:.1f} ({row['us_decode_best']:.1f}) | "
        f"{row['us_reply']:.1f} ({row['us_reply_cpu']:.1f}, {row['us_reply_best']:.1f}) | "
        f"{row['memory_growth'] / 2**20:.1f} |"
    )


if __name__ == "__main__":
    main()
