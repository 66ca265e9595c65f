"""The tables of the pages are those of the committed results, and each claim's verdict follows from numbers."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("documents")


def test_pages_say_what_the_results_say(documents: ModuleType) -> None:
    for page in documents.PAGES:
        text = page.read_text("utf-8")
        assert documents.filled(text) == text, f"{page.name}: run 'python benchmarks/documents.py'"


def test_every_table_stands_in_a_page_and_every_mark_is_closed(documents: ModuleType) -> None:
    text = "\n".join(page.read_text("utf-8") for page in documents.PAGES)
    marks = re.findall(r"<!-- table: (\S+) -->", text)
    assert set(marks) == set(documents.TABLES)
    assert len(marks) == text.count("<!-- end -->")


def test_a_changed_number_is_put_right_and_text_around_it_is_left(documents: ModuleType) -> None:
    page = "Before 82.2.\n<!-- table: digits-seeds -->\n| 3 | 99.9 |\n<!-- end -->\nAfter.\n"
    filled = documents.filled(page)
    assert filled.startswith("Before 82.2.\n<!-- table: digits-seeds -->\n| seed |")
    assert filled.endswith("<!-- end -->\nAfter.\n")
    assert "99.9" not in filled
    assert documents.filled(filled) == filled


def test_a_table_that_nobody_makes_is_an_error(documents: ModuleType) -> None:
    with pytest.raises(KeyError, match="nothing-of-the-kind"):
        documents.filled("<!-- table: nothing-of-the-kind -->\n<!-- end -->")


def test_results_that_were_not_made_are_named_with_their_command(
    documents: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = sys.modules["saved"]
    saved.read.cache_clear()
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    try:
        filled = documents.filled("<!-- table: pareto -->\n<!-- end -->")
    finally:
        saved.read.cache_clear()
    assert "Not measured yet: `python benchmarks/pareto.py --json`" in filled


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.1, 0.2, "reproduced"), (-0.2, -0.1, "contradicted"), (-0.1, 0.2, "not told apart")]
)
def test_a_verdict_follows_from_the_interval(documents: ModuleType, low: float, high: float, said: str) -> None:
    assert sys.modules["claims"].verdict(low, high, above=0.0) == said
