"""The table of a needle run: rows in one order, shares over all clients' items, and chance beside the choices."""

import dataclasses
import io

import pytest
from rich.console import Console

from conftest import BASE
from nestling.cli.main import main
from nestling.report.html import write_report
from nestling.report.recalls import (
    HEADINGS,
    client_table,
    recall_caption,
    recall_rows,
    recalls_to_markdown,
    recalls_to_rich,
)
from nestling.report.tables import caption_of


def client(number, template, hits, choices, loss=1.0):
    counts = {"items": len(hits), "exact": hits.count("1"), "chosen": choices.count("1"), "loss": loss}
    return {
        "client": number,
        "template": template,
        "by_depth": {"0.1": [1, 4]},
        "hits": hits,
        "choices": choices,
    } | counts


RECALLED = dataclasses.replace(
    BASE,
    method="fednl",
    adapter="memory",
    alpha=None,
    classes=0,
    task="facts in 256 tokens",
    test_items=8,
    recalls={
        "centralised": [client(0, "mk", "1111", "1111"), client(1, "<b>|x", "1100", "1111", None)],
        "trained": [client(0, "mk", "1100", "1110", 0.5), client(1, "<b>|x", "1000", "1110", 1.5)],
        "memory off": [client(0, "mk", "0000", "1000"), client(1, "<b>|x", "0000", "1000")],
        "later": [client(0, "mk", "0000", "0000")],
        "full attention": [client(0, "mk", "1111", "1111"), client(1, "<b>|x", "1111", "1111")],
    },
    gains={"exact": [0.375, 0.125, 0.625], "choice": [0.5, 0.25, 0.75]},
)


def test_rows_come_in_one_order_and_unknown_ones_last():
    assert [row.label for row in recall_rows(RECALLED)] == [
        "frozen base, full attention", "fednl", "fednl, memory off", "centralised", "later"
    ]  # fmt: skip
    assert [row.is_reference for row in recall_rows(RECALLED)] == [True, False, False, True, False]
    assert recall_rows(BASE) == []


def test_a_rows_shares_are_over_the_items_of_all_clients():
    row = recall_rows(RECALLED)[1]
    assert (row.items, row.exact, row.chosen, row.loss) == (8, 3 / 8, 6 / 8, 1.0)
    assert row.by_client == {"0 mk": 0.5, "1 <b>|x": 0.25}
    assert row.cells(["0 mk", "1 <b>|x"]) == ("fednl", "37.5 [13.7, 69.4]", "75.0 [40.9, 92.9]", "1.000", "50", "25")


def test_a_loss_that_is_no_number_is_left_open():
    assert recall_rows(RECALLED)[3].cells()[3] == "–"


def test_a_row_that_lacks_a_client_keeps_its_columns_in_place():
    line = next(line for line in recalls_to_markdown(RECALLED).splitlines() if line.startswith("| later"))
    assert line.endswith("| 0 | – |")


def test_the_caption_names_chance_gain_and_bytes():
    caption = recall_caption(RECALLED)
    for text in ("8 held-out items of 2 clients", "chance is 25 %", "exact +37.5 points [+12.5, +62.5]",
                 "of four +50.0 points", "sends 648 B and receives 5,120 B"):  # fmt: skip
        assert text in caption
    assert "memory" not in recall_caption(dataclasses.replace(RECALLED, gains={}))


def test_the_usual_caption_speaks_of_exact_answers():
    caption = caption_of([RECALLED])
    assert caption.startswith("Exact answers on 8 test items of facts in 256 tokens")
    assert "chance is about 0" in caption
    assert caption_of([RECALLED, BASE]).startswith("Accuracy on")


def test_the_terminal_and_markdown_show_all_rows():
    console = Console(width=90, file=io.StringIO())
    console.print(recalls_to_rich(RECALLED))
    shown, markdown = console.file.getvalue(), recalls_to_markdown(RECALLED)
    for text in (*HEADINGS, "37.5 [13.7, 69.4]", "centralised"):
        assert text in shown
    assert "&lt;b&gt;\\|x" in markdown
    assert {line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")} == {7}


def test_the_page_has_the_table_escaped(run_of, tmp_path):
    write_report([run_of(RECALLED)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Facts recalled" in page
    assert "1 &lt;b&gt;|x" in page
    assert "a kind of fact each" in page
    write_report([run_of(BASE)], tmp_path / "other.html")
    assert "Facts recalled" not in (tmp_path / "other.html").read_text()


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "latex"])
def test_every_form_of_the_report_can_be_printed(form, run_of, tmp_path, capsys):
    assert main(["report", str(run_of(RECALLED)), "--format", form, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert ("memory off" in shown) == (form in ("table", "markdown"))


# Questions: right letters, and client by client what averaging costs.

ANSWERED = dataclasses.replace(
    RECALLED,
    classes=4,
    task="WordNet 3.1 by letter",
    recalls={
        "full attention": [client(0, "life", "0000", "1000"), client(1, "<b>|x", "0000", "1000")],
        "local only": [client(0, "life", "1111", "1110")],
        "trained": [client(0, "life", "1111", "1100"), client(1, "<b>|x", "1111", "1111")],
    },
    gains={},
    drops={"0 life": [0.25, 0.0, 0.75], "all": [0.25, 0.0, 0.75]},
)


def test_a_run_of_questions_shows_right_letters_and_not_exact_answers():
    row = recall_rows(ANSWERED)[-1]
    assert row.cells() == ("fednl", "75.0 [40.9, 92.9]", "1.000")
    caption = recall_caption(ANSWERED)
    for text in ("8 held-out questions of 2 clients", "the right letter is the likeliest", "aggregation drop"):
        assert text in caption
    assert "same text" not in caption
    assert caption_of([ANSWERED]).startswith("Accuracy on 8 test items of WordNet 3.1 by letter")
    assert "chance is 25 %" in caption_of([ANSWERED])


def test_by_client_stand_the_rows_and_the_drop_and_what_is_not_known_is_left_open():
    assert client_table(ANSWERED) == [
        ("client", "items", "frozen base", "local only", "fednl", "drop ↓"),
        ("0 life", "4", "25.0 [4.6, 69.9]", "75.0 [30.1, 95.4]", "50.0 [15.0, 85.0]", "+25.0 [+0.0, +75.0]"),
        ("1 <b>|x", "4", "25.0 [4.6, 69.9]", "–", "100.0 [51.0, 100.0]", "–"),
        ("all", "8", "25.0 [7.1, 59.1]", "75.0 [30.1, 95.4]", "75.0 [40.9, 92.9]", "+25.0 [+0.0, +75.0]"),
    ]
    assert client_table(ANSWERED, digits=0)[1][2:] == ("25 [5, 70]", "75 [30, 95]", "50 [15, 85]", "+25.0 [+0, +75]")
    assert client_table(RECALLED) == client_table(BASE) == []
    alone = dataclasses.replace(ANSWERED, drops={})
    assert {len(line) for line in client_table(alone)} == {5}


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_both_tables_are_printed_and_on_the_page_escaped(form, run_of, tmp_path, capsys):
    assert main(["report", str(run_of(ANSWERED)), "--format", form, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in ("answered by", "drop ↓", "0 life"):
        assert text in shown
    page = (tmp_path / "report.html").read_text()
    assert "Questions answered" in page
    assert "1 &lt;b&gt;|x" in page
    assert "columns are exact" not in page
