"""The figure: the right points, the same bytes each time, and labels that do not lie on each other."""

import csv
import itertools
import re
from xml.etree import ElementTree

import pytest

from nestling.report import plots
from nestling.report.plots import accuracy_against_bytes, curves_of, figure_files, inline_svg


def test_points_are_bytes_per_client_so_far(result):
    rows = [
        {"round": 1, "accuracy": None, "bytes_up": 10, "bytes_down": 30},
        {"round": 2, "accuracy": 0.5, "bytes_up": 10, "bytes_down": 30},
        {"round": 3, "bytes_up": 10, "bytes_down": 30},
        {"round": 4, "accuracy": 0.6, "bytes_up": 10, "bytes_down": 30},
    ]
    (curve,) = curves_of([result(clients=2)], [rows])
    assert (curve.rounds, curve.traffic, curve.mean) == ((2, 4), (40.0, 80.0), [0.5, 0.6])


def test_seeds_are_averaged_over_the_rounds_all_have(result, metrics):
    short = metrics(result(seed=1))[:2]
    (curve,) = curves_of([result(), result(seed=1)], [metrics(result(accuracy=0.8)), short])
    assert curve.rounds == (1, 2)
    assert curve.mean == pytest.approx([0.65, 0.75])


def test_three_files_and_the_csv_holds_the_curve(result, metrics, tmp_path):
    results = [result(), result("fedavg")]
    files = accuracy_against_bytes(results, [metrics(r) for r in results], tmp_path / "figure")
    assert [file.suffix for file in files] == [".png", ".svg", ".csv"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(files[2].read_text().splitlines()))
    assert len(rows) == 6
    assert float(rows[2]["bytes_per_client"]) == (4272 + 31104) / 2
    assert float(rows[2]["accuracy"]) == 0.9


def test_the_same_input_gives_the_same_bytes(result, metrics):
    results = [result(), result("fedavg")]
    first, second = (figure_files(results, [metrics(r) for r in results]) for _ in range(2))
    assert first == second
    assert b"<dc:date>" not in first["svg"]


def test_the_axis_says_what_is_judged(result, metrics):
    kinds = {"test accuracy": {}, "validation accuracy": {"evaluated_on": "validation"}}
    kinds["exact answers, on the few items judged each round"] = {"recalls": {"trained": [{}]}, "classes": 0}
    kinds["accuracy, on the few items judged each round"] = {"recalls": {"trained": [{}]}, "classes": 4}
    for wanted, changes in kinds.items():
        assert wanted in figure_files([result(**changes)], [metrics(result())])["svg"].decode()


@pytest.mark.parametrize("ends", [(0.9, 0.9, 0.9, 0.9), (0.9, 0.9005, 0.901, 0.2), (0.95, 0.949, 0.3, 0.3)])
def test_labels_do_not_lie_on_each_other(result, metrics, monkeypatch, ends):
    placers = []
    build = plots._Placer.__init__

    def remember(self, *arguments):
        build(self, *arguments)
        placers.append(self)

    monkeypatch.setattr(plots._Placer, "__init__", remember)
    codecs = ("int4-message", "int8-message", "float16", "float32")
    results = [result(accuracy=end, codec=codec) for end, codec in zip(ends, codecs, strict=True)]
    figure_files(results, [metrics(r) for r in results])
    boxes, frame = placers[0].boxes, placers[0].axes.figure.bbox
    assert len(boxes) == 7
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1 for box in boxes)


@pytest.mark.parametrize("rows", [[], [{"round": 1, "accuracy": 0.5, "bytes_up": 5, "bytes_down": 5}]])
def test_no_round_and_one_round_can_be_drawn(result, rows):
    assert figure_files([result()], [rows])["svg"]


@pytest.mark.parametrize(
    "name", [r"$\frac{1}{", "$x$", "<script>alert(1)</script>", "-->", "\x1b[31m\u202e", "x" * 300]
)
def test_hostile_names_are_drawn_as_they_are(result, metrics, name):
    svg = figure_files([result(name)], [metrics(result())])["svg"]
    ElementTree.fromstring(svg)
    assert b"<script" not in svg


def test_inline_svg_has_no_address_and_is_well_formed(result, metrics):
    text = inline_svg(figure_files([result("--><script>")], [metrics(result())])["svg"])
    assert text.startswith("<svg")
    assert "http" not in text
    assert "<!" not in text
    assert "<script" not in text
    ElementTree.fromstring(text.replace("xlink:href", "href"))
    assert not re.search(r'href="(?!#)', text)
