"""Results that were measured before, read from benchmarks/results, and how they are written into a page."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nestling.runs.result import Result

FOLDER = Path(__file__).parent / "results"


class Missing(Exception):
    """Results that were not made yet; says which command makes them."""


@cache
def read(name: str, command: str = "") -> Any:
    """What lies in results/NAME.json. Raises `Missing`."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise Missing(f"not measured yet: `{command}`")
    return json.loads(path.read_text("utf-8"))


def result(name: str) -> Result:
    """The one run in a file; with the rows of reference that were trained in another, over the same items."""
    of, more = Result.from_dict(read(name)), f"{name}_references"
    if not (FOLDER / f"{more}.json").exists():
        return of
    recalls = dict(of.recalls) | read(more)["recalls"]
    asked = [[client["items"] for client in clients] for clients in recalls.values()]
    assert all(items == asked[0] for items in asked), f"{more}: other items than {name}"
    return replace(of, recalls=recalls)


def lines(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    """A table in Markdown, the first column to the left and the others to the right, or all to the left if `words`."""
    table = [head, ("---", *("---" if words else "---:" for _ in head[1:])), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def points(mean: float, low: float, high: float, digits: int = 1) -> str:
    """A difference of shares, in points, with the ends of its interval.

    >>> points(0.53, 0.44, 0.63)
    '+53.0 [+44.0, +63.0]'
    """
    return f"{100 * mean:+.{digits}f} [{100 * low:+.{digits}f}, {100 * high:+.{digits}f}]".replace("-", "−")
