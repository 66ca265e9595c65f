"""Free riders named: clients whose replies look as if nothing had been trained. They are reported, never punished.

    of each accepted reply      ‖u‖, and cos(u, g), where g is what the broadcast has changed since the round before
    nothing in a round          ‖u‖ = 0
    next to nothing             ‖u‖ < SMALL · min(1, examples / median examples) · median ‖u‖
    an echo                     1 − cos(u, g) < min(ECHO, NEARER · median (1 − cos(u, g))), examples ≤ LIGHT · all

Lin et al., arXiv 1911.12560, list these attacks (zeros, the global step sent back) and others that pass for training:
noise of the usual length is not found here, nor by any rule that looks at single replies. We differ in that a round is
judged beside the other replies of the same round, since what is usual depends on data, rates and rounds, and in that
nobody is left out: a client that has nothing left to learn looks the same. All is made of the rows of `bytes.jsonl`,
so a resumed run names whom the uninterrupted one would.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np

from nestling.core.vectors import Vector, norm

SMALL = 1e-3
"""Honest clients of one round differ in length by the steps that they take, in proportion to the examples they claim,
and by what a step moves: AdamW's by its rate, SGD's by a gradient that shrinks with the loss. In runs the shortest was
0.1 of the median (ResNet-8, five clients, Dirichlet 0.05 to 1). A thousandth, of examples in proportion, is far from
that, and whoever is below it has cost a mean no more than one that sends zeros."""
ECHO, NEARER = 0.02, 0.1
"""A step sent back by int4 has 1 − cos of about 0.01 (error of a uniform quantiser, scale of the largest of a thousand
normal numbers), by int8 and finer below 0.0001; coarser and sparse codecs hide it. Honest changes have 0.4 to 1.6 at
usual rates, and a client with half of all examples, at a rate so low that every round is the same step, 0.08 (ResNet-8,
five clients, Dirichlet 0.05 to 1, AdamW and SGD). Lower rates bring everybody nearer, which is why an echo must also be
ten times nearer than the median."""
LIGHT = 0.25
"""Share of a round's examples above which nobody is taken for an echo: the step before is then mostly the client's own,
and an honest one with half of all examples, whose training changes slowly, is as near to it as somebody who sends it
back."""
_FEWEST = 3
"""Replies in a round of which one can be told from the others' median."""
_TWICE = 2
"""Rounds; one alone names nobody."""
KINDS = ("zero", "small", "echo")


@dataclass(frozen=True)
class Measured:
    """An accepted reply: the length of its change, its cosine to the step before (None: there is none), its claim."""

    norm: float
    cosine: float | None
    examples: int


def measure(change: Vector, step: Vector | None, *, examples: int) -> Measured:
    """Measure float32[n] `change` beside float32[n] `step`, in float64; both numbers to six digits.

    >>> measure(np.float32([3, 4]), np.float32([6, 8]), examples=7)
    Measured(norm=5.0, cosine=1.0, examples=7)
    """
    length = norm(change)
    cosine = None
    if step is not None and length and (other := norm(step)):
        # Scaled before they are multiplied, so that nothing underflows; no BLAS, so that threads change no bit.
        products = np.multiply(change / length, step / other, dtype=np.float64)
        cosine = max(-1.0, min(1.0, _short(float(products.sum()))))
    return Measured(_short(length), cosine, examples)


def riders(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Clients that look as if they did not train, in more than half of the rounds of which they had an accepted reply,
    and in two at least: by number, how many `rounds` these were, and in how many of them each of `KINDS` was seen.

    Args:
        rows: of `bytes.jsonl`, in order; those without a norm are passed over, as all of a private run.

    >>> row = {"round": 1, "client": 0, "norm": 1.0, "cosine": None, "examples": 5}
    >>> rows = [row | {"round": n, "client": c, "norm": float(c)} for n in (1, 2) for c in (0, 1)]
    >>> riders(rows)
    {'0': {'rounds': 2, 'zero': 2, 'small': 0, 'echo': 0}}
    """
    seen: dict[int, dict[str, int]] = {}
    measured = (row for row in rows if row.get("norm") is not None)
    for _, of_round in groupby(measured, key=lambda row: row["round"]):
        replies = {row["client"]: Measured(row["norm"], row["cosine"], row["examples"]) for row in of_round}
        for client, kind in _kinds(replies).items():
            counts = seen.setdefault(client, {"rounds": 0, **dict.fromkeys(KINDS, 0)})
            counts["rounds"] += 1
            if kind:
                counts[kind] += 1
    found = {client: counts for client, counts in sorted(seen.items()) if _names(counts)}
    return {str(client): counts for client, counts in found.items()}


def _names(counts: Mapping[str, int]) -> bool:
    suspect = sum(counts[kind] for kind in KINDS)
    return suspect >= _TWICE and 2 * suspect > counts["rounds"]


def _kinds(replies: Mapping[int, Measured]) -> dict[int, str]:
    """What each reply of one round looks like: one of `KINDS`, or "" for training."""
    enough = len(replies) >= _FEWEST
    usual = median(reply.norm for reply in replies.values())
    examples = median(reply.examples for reply in replies.values())
    claimed = sum(reply.examples for reply in replies.values())
    apart = [1 - reply.cosine for reply in replies.values() if reply.cosine is not None]
    near = min(ECHO, NEARER * median(apart)) if len(apart) >= _FEWEST else 0.0

    def kind(reply: Measured) -> str:
        if reply.norm == 0:
            return "zero"
        if enough and reply.norm < SMALL * min(1.0, reply.examples / max(examples, 1)) * usual:
            return "small"
        light = reply.examples <= LIGHT * claimed
        return "echo" if light and reply.cosine is not None and 1 - reply.cosine < near else ""

    return {client: kind(reply) for client, reply in replies.items()}


def _short(number: float) -> float:
    """To six digits, which all machines that add up in another order share but for ties; 0 stays alone in being 0."""
    return float(f"{number:.6g}")
