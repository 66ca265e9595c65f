"""What a report says of clients that look as if they did not train: a fact with its count, and no verdict.

How they are found, and what else it can mean, is in `federation/riders.py`.
"""

from collections.abc import Mapping

from nestling.runs.files import printable
from nestling.runs.result import Result

_SAID = {
    "zero": "no change",
    "small": "next to no change (under a thousandth of the usual)",
    "echo": "the federation's own last step back",
}
_SHOWN = 10


def rider_lines(result: Result) -> list[str]:
    """One line for each client of `Result.riders`, and one for how many more; empty where nobody is named."""
    lines = [_line(client, counts) for client, counts in result.riders.items()]
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"and {more:,} more clients like these: see result.json"] if more > 0 else lines


def _line(client: str, counts: Mapping[str, int]) -> str:
    """What is said of one.

    >>> _line("3", {"rounds": 10, "zero": 9, "small": 0, "echo": 0})
    'client 3 sent no change in 9 of 10 rounds: it may not train (free rider); it was not punished'
    """
    return f"client {printable(client)} sent {_what(counts)}: it may not train (free rider); it was not punished"


def _what(counts: Mapping[str, int]) -> str:
    kinds = [f"{said} in {counts[kind]:,}" for kind, said in _SAID.items() if counts[kind]]
    return f"{' and '.join(kinds)} of {counts['rounds']:,} rounds"
