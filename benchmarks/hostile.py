"""Hostile clients: what a fifth of them does to the digits task, under every way to bring replies together.

    python benchmarks/hostile.py [--seeds 0 1 2] [--only PATTERN …] [--json]

Twenty clients, four of them hostile in every round. An attack is made of the bytes that an honest client would have
sent, so all that is hostile is their content:

    nan      all numbers NaN                              shape    a message a number too long
    replay   the first round's message again              weight   claims a thousand times its examples
    scale    its change times 1000                        flip     its change times −1
    alie     the others' mean minus one standard deviation of theirs, number by number (Baruch et al. 2019)

Accuracies are of the last round on the test items. "without" is the same federation without an attack.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from cells import origin, with_settings

from nestling.build import Parts, build
from nestling.codec.message import decode, encode, peek, state_digest
from nestling.config.schema import RunConfig
from nestling.core.types import Failure
from nestling.federation.loop import run_rounds

RESULTS = Path(__file__).parent / "results" / "hostile.json"
CLIENTS, HOSTILE = 20, 4
ATTACKS = ["without", "nan", "shape", "replay", "weight", "scale", "flip", "alie"]
CUTS = {"mean, nothing cut": 0.0, "mean": 10.0, "mean, cut at 3": 3.0}
"""`server.outlier` of the rules that are a mean; 10 is the default."""
RULES = [*CUTS, "median", "trimmed", "krum", "rfa", "clipping"]


class Attacked:
    """An engine some of whose clients are hostile: their honest replies are exchanged for others."""

    def __init__(self, parts: Parts, attack: str) -> None:
        self._parts, self._attack, self._first = parts, attack, dict[int, bytes]()

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        replies = self._parts.engine.exchange(messages)
        if self._attack == "without":
            return replies
        read = {c: self._read(c, messages[c], r) for c, r in replies.items() if not isinstance(r, Failure)}
        hostile = [client for client in range(HOSTILE) if client in read]
        vectors = np.stack([vector for client, (_, vector) in read.items() if client not in hostile])
        for client in hostile:
            examples, vector = read[client]
            replies[client] = self._spoilt(client, messages[client], replies[client], examples, vector, vectors)
        return replies

    def _spoilt(
        self, client: int, message: bytes, reply: bytes, examples: int, vector: np.ndarray, others: np.ndarray
    ) -> bytes:
        if self._attack == "replay":
            return self._first.setdefault(client, reply)
        if self._attack == "shape":
            return reply + bytes(4)
        if self._attack == "weight":
            return self._write(client, message, vector, min(1000 * examples, self._parts.agreement.limits.max_examples))
        if self._attack == "nan":
            return reply[:48] + _digest(reply[:48] + _nan(reply[64:])) + _nan(reply[64:])
        if self._attack == "alie":
            return self._write(client, message, others.mean(0) - others.std(0), examples)
        return self._write(client, message, vector * (1000 if self._attack == "scale" else -1), examples)

    def _read(self, client: int, message: bytes, reply: bytes) -> tuple[int, np.ndarray]:
        agreed, round = self._parts.agreement, peek(message).round
        context = agreed.context(state_digest(self._start(message)))
        header, vector = decode(
            reply, direction="uplink", layout=agreed.layout, context=context, round=round, client=client,
            codecs=[agreed.codec.up], limits=agreed.limits,
        )  # fmt: skip
        return header.num_examples, vector

    def _start(self, message: bytes) -> np.ndarray:
        agreed = self._parts.agreement
        return decode(
            message, direction="downlink", layout=agreed.layout, context=agreed.context(), round=peek(message).round,
            client=2**64 - 1, codecs=[agreed.codec.down], limits=agreed.limits,
        )[1]  # fmt: skip

    def _write(self, client: int, message: bytes, vector: np.ndarray, examples: int) -> bytes:
        agreed = self._parts.agreement
        return encode(
            agreed.layout, vector.astype(np.float32), direction="uplink", codec=agreed.codec.up, is_difference=True,
            round=peek(message).round, context=agreed.context(state_digest(self._start(message))), client=client,
            num_examples=examples,
        )  # fmt: skip


def _nan(body: bytes) -> bytes:
    return np.full(len(body) // 4, np.nan, "<f4").tobytes()


def _digest(data: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(data).digest()[:16]


def accuracy(config: RunConfig, attack: str) -> tuple[float, dict[str, int]]:
    """Accuracy after the last round, and how often which reply was refused."""
    torch.set_num_threads(1)
    parts = build(config)
    worker, refused, last = parts.workers[0], dict[str, int](), 0.0
    for done in run_rounds(
        parts.server, Attacked(parts, attack), parts.task.clients(), lambda state: parts.evaluate(worker, state),
        rounds=config.rounds, per_round=0, patience=config.rounds, seed=config.seed,
    ):  # fmt: skip
        last = done.accuracy
        for failure in done.refused.values():
            refused[failure.code] = refused.get(failure.code, 0) + 1
    return last, refused


def settings(rule: str, alpha: float, seed: int) -> RunConfig:
    """FLITE on twenty clients, uniformly weighted but where a claim of examples is the attack."""
    changes = {"task.clients": CLIENTS, "task.alpha": alpha, "seed": seed, "server.hostile_share": HOSTILE / CLIENTS}
    if rule in CUTS:
        changes["server.outlier"] = CUTS[rule]
    else:
        changes |= {"server.aggregate": rule, "server.weighting": "uniform"}
    return with_settings(nestling.load_config("flite-digits"), changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alphas", type=float, nargs="+", default=[100.0, 0.5])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of rules, as of a shell")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args()
    rows = []
    print("| clients | rule | " + " | ".join(ATTACKS) + " |\n|---|---|" + "---:|" * len(ATTACKS))
    for alpha in options.alphas:
        for rule in (r for r in RULES if any(fnmatch(r, pattern) for pattern in options.only)):
            cells = []
            for attack in ATTACKS:
                found = [accuracy(settings(rule, alpha, seed), attack) for seed in options.seeds]
                mean = sum(a for a, _ in found) / len(found)
                rows.append({"alpha": alpha, "rule": rule, "attack": attack, "found": found})
                cells.append(f"{100 * mean:.1f}")
                print(f"α = {alpha:g}, {rule}, {attack}: {100 * mean:.1f} %", file=sys.stderr, flush=True)
            print(f"| α = {alpha:g} | {rule} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        head = {"origin": origin(" ".join(["python benchmarks/hostile.py", *sys.argv[1:]]))}
        RESULTS.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
