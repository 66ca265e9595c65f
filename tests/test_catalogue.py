"""The page of failures and tests is true as far as a program can tell: numbers, names of tests, and counts."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "CATALOGUE.md").read_text("utf-8")
CASES = {int(n): text for n, text in re.findall(r"^- \*\*(\d+)\*\* (.*)$", PAGE, re.MULTILINE)}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def written_in(path: str) -> set[str]:
    """The tests of a file, read and not imported."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def status(text: str) -> str:
    return next((words.lower() for words in ("Not yet", "Does not apply") if f". {words}: " in text), "shown")


def test_every_case_is_there_once() -> None:
    assert [int(n) for n in re.findall(r"^- \*\*(\d+)\*\*", PAGE, re.MULTILINE)] == list(range(1, 104))
    assert len([line for line in PAGE.splitlines() if line.startswith("- ")]) == len(CASES) == 103


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) == PAGE.count("::test_")  # none is written so that it would be passed over
    assert [(path, name) for path, name in named if name not in written_in(path)] == []


def test_a_case_that_is_shown_names_its_test_and_the_counts_are_right() -> None:
    assert [number for number, text in CASES.items() if status(text) == "shown" and not TEST.search(text)] == []
    counts = Counter(map(status, CASES.values()))
    stated = re.search(r"\*\*(\d+) cases: (\d+) shown, (\d+) does not apply, (\d+) not yet", PAGE)
    assert stated
    assert [int(n) for n in stated.groups()] == [103, counts["shown"], counts["does not apply"], counts["not yet"]]
