"""The table: intervals against numbers worked out by hand, who shares a row, and hostile names in four formats."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nestling.report.tables import (
    HEADINGS,
    Row,
    by_method,
    caption_of,
    cells,
    csv_text,
    human_bytes,
    rows_of,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
)

GOLDEN = """\
| method | accuracy % ↑ | up ↓ | down ↓ | total ↓ | less ↑ | time |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| frozen base | 30.0 [27.2, 32.9] | – | – | – | – | – |
| local only | – | – | – | – | – | – |
| flite, int4-message | 91.0 ± 12.7 | 648 B | 5,120 B | 35,376 B | 482× | 12 s |
| fedavg, float32 | 94.0 [92.4, 95.3] | 312 kB | 312 kB | 3.75 MB | 1× | 12 s |
| centralised (latent) | 95.0 [93.5, 96.2] | – | – | – | – | – |
| centralised (full) | 97.0 [95.7, 97.9] | – | – | – | – | – |
"""


def mixed(result):
    return [
        result(accuracy=0.90, accuracy_local_only=None),
        result(accuracy=0.92, accuracy_local_only=None, seed=1),
        result("fedavg", accuracy_local_only=None, accuracy_centralised=0.97),
    ]


def test_a_small_table_in_markdown(result):
    assert to_markdown(rows_of(mixed(result))) == GOLDEN


def test_reference_rows_are_always_there(result):
    rows = rows_of([result(accuracy_base=None, accuracy_local_only=None, accuracy_centralised=None)])
    assert [row.label for row in rows] == ["frozen base", "local only", "flite, int4-message", "centralised"]
    assert [cells(row)[1] for row in rows if row.is_reference] == ["–"] * 3
    assert [row.label for row in rows_of([])] == ["frozen base", "local only", "centralised"]


def test_a_reference_known_for_one_adapter_only_says_whose_it_is(result):
    rows = rows_of([result(), result("fedavg", accuracy_local_only=None)])
    assert [row.label for row in rows if row.label.startswith("local")] == ["local only (latent)"]


def test_references_that_differ_within_an_adapter_name_their_method(result):
    rows = rows_of([result(), result(codec="float32", accuracy_local_only=0.5)])
    local = {row.label: row.accuracy for row in rows if row.label.startswith("local")}
    assert local == {"local only (flite, int4-message)": 0.6, "local only (flite, float32)": 0.5}


def test_other_settings_are_not_taken_for_seeds(result):
    groups = by_method([result(), result(seed=1), result(seed=1, rounds=9), result(alpha=None)])
    assert {label: len(group) for label, group in groups.items()} == {
        "flite, int4-message, 3 rounds, α = 0.1": 2,
        "flite, int4-message, 9 rounds, α = 0.1": 1,
        "flite, int4-message, 3 rounds, iid": 1,
    }


def test_runs_that_differ_in_any_setting_are_rows_of_their_own(result):
    """Also in one that the label has no word for; it then names the run, or the settings by four signs."""
    named = [
        result(name="far", settings="ab12cd34", accuracy=0.1),
        result(name="near", settings="ef567890"),
        result(name="far", settings="ab12cd34", seed=1),
    ]
    assert {label: [r.seed for r in group] for label, group in by_method(named).items()} == {
        "flite, int4-message, far": [0, 1],
        "flite, int4-message, near": [0],
    }
    unnamed = [result(settings="ab12cd34"), result(settings="ef567890"), result("fedavg", settings="ab12cd34")]
    assert list(by_method(unnamed)) == ["flite, int4-message, ab12", "flite, int4-message, ef56", "fedavg, float32"]
    alike = [result(settings="ab12cd34"), result(settings="ab12cf34"), result()]
    assert list(by_method(alike)) == [
        "flite, int4-message, ab12cd",
        "flite, int4-message, ab12cf",
        "flite, int4-message",
    ]


def test_references_of_runs_with_other_settings_say_whose_they_are(result):
    runs = [result(settings="ab12cd34"), result(settings="ef567890", accuracy_local_only=0.5)]
    local = {row.label: row.accuracy for row in rows_of(runs) if row.label.startswith("local")}
    assert local == {"local only (flite, int4-message, ab12)": 0.6, "local only (flite, int4-message, ef56)": 0.5}


def test_one_method_over_two_adapters_names_them(result):
    assert list(by_method([result(), result(adapter="lora")])) == [
        "flite, int4-message, latent",
        "flite, int4-message, lora",
    ]


def test_a_seed_that_was_run_again_counts_once(result):
    (row,) = [row for row in rows_of([result(accuracy=0.1), result(accuracy=0.9)]) if not row.is_reference]
    assert row.accuracies == (0.9,)


def test_less_is_measured_against_all_weights_if_they_are_known(result):
    alone = rows_of([result(model_parameters=None)])[2]
    beside = rows_of([result(model_parameters=None), result("fedavg", model_parameters=None)])[2]
    assert alone.factor is None
    assert beside.factor == pytest.approx(4 * 78042 / 648)


def test_the_caption_says_what_epsilon_counts_on(result):
    fixed = caption_of([result(epsilon=2.0, delta=1e-5)])
    assert "every client is counted as if it took part in every round" in fixed
    drawn = caption_of([result(epsilon=1.0, delta=1e-5, sampling_rate=0.25)])
    assert "with probability 0.25, drawn in secret" in drawn
    assert "as if it took part in every round" not in drawn
    assert "Not covered: how many replied" in drawn


def test_the_caption_of_text_names_the_commonest_byte_and_perplexities(result):
    runs = [
        result(seed=seed, classes=256, chance=0.154, perplexity=7.0 + seed, perplexity_base=20.0) for seed in (0, 1)
    ]
    text = caption_of(runs)
    assert "chance is 15.4 %" in text
    assert "Perplexity of a byte: frozen base 20.000; flite, float32 7.500" in text.replace(runs[0].codec, "float32")
    assert "erplexity" not in caption_of([result()])
    lost = result(seed=2, classes=256, chance=0.154, perplexity_base=20.0)  # whose loss was no number
    assert "7.500; without 1 of 3 runs, whose loss is no number" in caption_of([*runs, lost])


def test_the_caption_says_what_the_numbers_are(result):
    text = caption_of(mixed(result))
    for part in (
        "1,000 test items of digits",
        "never the best round",
        "1 to 2 seeds",
        "chance is 10 %",
        "t-interval",
        "Wilson",
        "how many times smaller the payload up is than all weights",
    ):
        assert part in text
    alone = caption_of([result(evaluated_on="validation")])
    assert "t-interval" not in alone
    assert "1 seed;" in alone
    assert "validation items" in alone


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (648, "648 B"), (99_999, "99,999 B"), (100_000, "100 kB"), (999_600, "1.00 MB"), (1e9, "1.00 GB")],
)
def test_bytes_for_people(count, text):
    assert human_bytes(count) == text


HOSTILE = [
    "=cmd|' /C calc'!A0",
    "+1",
    "@x",
    "\t=1",
    "<script>alert(1)</script>",
    r"\input{/etc/passwd}",
    "a|b",
    "[red]x[/]",
]


@pytest.mark.parametrize("name", [*HOSTILE, "\x1b[31m", "\u202eevil", "a\nb", "{{7*7}}", "$x$ 5% #1 ~ ^ & _"])
def test_hostile_names_are_inert_in_every_format(result, name):
    rows = rows_of([result(name)])
    label = rows[2].label

    parsed = list(csv.reader(io.StringIO(to_csv(rows))))
    assert len(parsed) == 5
    assert parsed[3][0].lstrip()[:1] not in ("=", "+", "-", "@")

    markdown = to_markdown(rows, name)
    assert len(markdown.splitlines()) == 8
    assert "<" not in markdown
    assert all(line.replace(r"\|", "").count("|") == len(HEADINGS) + 1 for line in markdown.splitlines()[:6])

    body = to_latex(rows, name)
    assert r"\input{" not in body
    assert [line.replace(r"\&", "").count("&") for line in body.splitlines() if line.endswith(r"\\")] == [6] * 5
    assert body.replace(r"\{", "").count("{") == body.replace(r"\}", "").count("}")

    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(to_rich(rows, name))
    shown = console.file.getvalue()
    assert label in shown
    assert not any(character in shown for character in ("\x1b", "\u202e"))


@given(st.text())
def test_no_label_begins_a_formula(text):
    assert csv_text(text).lstrip()[:1] not in ("=", "+", "-", "@")


def test_csv_holds_plain_numbers(result):
    row = next(csv.DictReader(io.StringIO(to_csv([Row("a", (0.5, 0.7), (0.4, 0.8), 1, 2, 3, 4.0, 5.0)]))))
    assert float(row["accuracy"]) == pytest.approx(0.6)
    assert (row["seeds"], row["payload_up"], row["wire_bytes"], row["less"]) == ("2", "1", "3", "5.0")
