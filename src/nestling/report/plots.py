"""The figure that matters: accuracy against the bytes that one client has moved so far, on a logarithmic axis.

Every line carries its own name; labels are put where they cover neither each other nor, if there is room, a line. The
same input gives the same SVG, byte for byte, and the numbers lie beside the picture as CSV.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from nestling.core.files import write_atomic
from nestling.report.tables import by_method, csv_text, rows_of
from nestling.runs.result import Result

Metrics = Sequence[Mapping[str, Any]]

_GREY = "#666666"
_BACKING = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}


@dataclass(frozen=True)
class Curve:
    """One method: per evaluated round the bytes per client so far, and the accuracy of each seed."""

    label: str
    rounds: tuple[int, ...]
    traffic: tuple[float, ...]
    accuracies: tuple[tuple[float, ...], ...]

    @property
    def mean(self) -> list[float]:
        """Mean accuracy over seeds, per evaluated round."""
        return [fmean(values) for values in self.accuracies]


def curves_of(results: Sequence[Result], metrics: Sequence[Metrics]) -> list[Curve]:
    """One curve per method over its seeds; `metrics[i]` are the rows of `results[i]`, in order of rounds.

    Rounds without an accuracy, before any byte, or not reached by every seed are left out.
    """
    assert len(results) == len(metrics)
    rows_by_run = {id(result): rows for result, rows in zip(results, metrics, strict=True)}
    curves = []
    for label, group in by_method(results).items():
        runs = [_points(result, rows_by_run[id(result)]) for result in group]
        rounds = tuple(sorted(set.intersection(*(set(run) for run in runs))))
        curves.append(
            Curve(
                label,
                rounds,
                traffic=tuple(fmean(run[number][0] for run in runs) for number in rounds),
                accuracies=tuple(tuple(run[number][1] for run in runs) for number in rounds),
            )
        )
    return curves


def _what_is_judged(results: Sequence[Result]) -> str:
    """A language run's rounds are judged on a few items only, so its curve need not end at the table's figure."""
    if all(result.recalls for result in results):
        kinds = {bool(result.classes) for result in results}
        return f"{'accuracy' if True in kinds else 'exact answers'}, on the few items judged each round"
    return "validation accuracy" if {r.evaluated_on for r in results} == {"validation"} else "test accuracy"


def _points(result: Result, rows: Metrics) -> dict[int, tuple[float, float]]:
    points, total = {}, 0
    for row in rows:
        total += row.get("bytes_up", 0) + row.get("bytes_down", 0)
        accuracy = row.get("accuracy")
        if accuracy is not None and total:
            points[row["round"]] = (total / max(result.clients, 1), float(accuracy))
    return points


def accuracy_against_bytes(results: Sequence[Result], metrics: Sequence[Metrics], path: Path) -> list[Path]:
    """Write the figure as `path` ending in .png, .svg and .csv; returns the three paths. Raises `StorageError`."""
    files = {path.with_name(f"{path.stem}.{end}"): data for end, data in figure_files(results, metrics).items()}
    for file, data in files.items():
        write_atomic(file, data)
    return list(files)


def figure_files(results: Sequence[Result], metrics: Sequence[Metrics]) -> dict[Literal["png", "svg", "csv"], bytes]:
    """The figure in memory, by ending; `metrics[i]` are the rows of `results[i]`."""
    curves = curves_of(results, metrics)
    # Not pyplot: it keeps figures, and a user's own settings would change ours.
    style = mpl.rc_params_from_file(Path(__file__).with_name("style.mplstyle"), use_default_template=True)
    with mpl.rc_context(dict(style)):
        figure = _draw(curves, results)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return {"png": png.getvalue(), "svg": svg.getvalue(), "csv": _csv(curves).encode()}


def _csv(curves: Sequence[Curve]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "round", "bytes_per_client", "accuracy", "lowest", "highest", "seeds"])
    for curve in curves:
        for number, traffic, values in zip(curve.rounds, curve.traffic, curve.accuracies, strict=True):
            span = (fmean(values), min(values), max(values), len(values))
            writer.writerow([csv_text(curve.label), number, traffic, *span])
    return out.getvalue()


def _draw(curves: Sequence[Curve], results: Sequence[Result]) -> Figure:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xscale("log")
    colours = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
    styles = ("-", "--", "-.", ":")  # after a turn of the colours, the next style
    drawn = [curve for curve in curves if curve.rounds]
    for number, curve in enumerate(drawn):
        colour, dashes = colours[number % len(colours)], styles[number // len(colours) % len(styles)]
        axes.plot(curve.traffic, curve.mean, color=colour, linestyle=dashes)
        axes.plot(curve.traffic[-1:], curve.mean[-1:], "o", color=colour)
        if len(curve.accuracies[0]) > 1:
            lowest, highest = ([edge(values) for values in curve.accuracies] for edge in (min, max))
            axes.fill_between(curve.traffic, lowest, highest, color=colour, alpha=0.15, linewidth=0)
    references = [row for row in rows_of(results) if row.is_reference and row.accuracy is not None]
    for row in references:
        axes.axhline(row.accuracy or 0.0, color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("bytes on the wire per client, up and down together, so far")
    axes.set_ylabel(_what_is_judged(results))
    _set_limits(axes, drawn)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: _tick(count)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    figure.draw_without_rendering()  # settles the layout, so that pixels can be asked for
    _make_room(axes, drawn)
    placer = _Placer(axes, drawn, [row.accuracy or 0.0 for row in references])
    # From right to left: the outermost end has the free space beside it, and others make way for its line.
    for number, curve in sorted(enumerate(drawn), key=lambda item: -item[1].traffic[-1]):
        end = (curve.traffic[-1], curve.mean[-1])
        placer.put_at_end(_shortened(curve.label), end, colours[number % len(colours)])
    for row in references:
        placer.put_on_line(_shortened(row.label), row.accuracy or 0.0)
    return figure


def _tick(count: float) -> str:
    power = min(max(int(math.log10(count) + 1e-9) // 3, 0), 5)
    return f"{count / 1000**power:g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def _shortened(label: str) -> str:
    return label if len(label) <= 48 else f"{label[:47]}…"


def _set_limits(axes: Axes, curves: Sequence[Curve]) -> None:
    """A margin around the lines; ticks at powers of ten, with steps in between if there are few."""
    low = min((curve.traffic[0] for curve in curves), default=1e3)
    high = max((curve.traffic[-1] for curve in curves), default=1e6)
    span = max(math.log10(high / low), 0.5)
    left, right = low / 10 ** (0.06 * span), high * 10 ** (0.06 * span)
    axes.set_xlim(left, right)
    factors = (1,) if span > 2.2 else (1, 3) if span > 1.2 else (1, 2, 5)
    exponents = range(math.floor(math.log10(left)), math.ceil(math.log10(right) + 1.5 * span) + 1)
    axes.xaxis.set_major_locator(FixedLocator([factor * 10.0**n for n in exponents for factor in factors]))
    bottom, top = axes.get_ylim()
    bottom, top = max(bottom, -0.02), min(top, 1.02)
    axes.set_ylim(bottom - 0.03 * (top - bottom), top + 0.05 * (top - bottom))


def _make_room(axes: Axes, curves: Sequence[Curve]) -> None:
    """Move the right limit out until each method's name fits between the end of its line and the frame."""
    left, right = (math.log10(limit) for limit in axes.get_xlim())
    frame, points = axes.get_window_extent().width, axes.figure.dpi / 72
    for curve in curves:
        text = axes.text(0.5, 0.5, _shortened(curve.label), transform=axes.transAxes, parse_math=False, weight="bold")
        needed = min(text.get_window_extent().width + 14 * points, 0.6 * frame)
        text.remove()
        right = max(right, left + (math.log10(curve.traffic[-1]) - left) * frame / (frame - needed))
    axes.set_xlim(10**left, 10**right)


class _Place(NamedTuple):
    """Where a label may stand: its `side` is `shift` points from `point`; `cost` is how far that is from ideal."""

    point: tuple[float, float]
    shift: tuple[float, float]
    side: Literal["left", "center", "right"]
    cost: float


class _Placer:
    """Puts each label at the cheapest of a few places: covering a label costs most, then a line, then distance."""

    def __init__(self, axes: Axes, curves: Sequence[Curve], heights: Sequence[float]) -> None:
        self.axes = axes
        self.scale = axes.figure.dpi / 72
        self.boxes: list[Bbox] = []
        self.curves = [self._pixels(curve.traffic, curve.mean) for curve in curves]
        self.levels = [self._pixels([1.0], [height])[0, 1] for height in heights]

    def _pixels(self, x: Sequence[float], y: Sequence[float]) -> np.ndarray:
        corners = np.asarray(self.axes.transData.transform(np.column_stack([x, y])))
        if len(corners) < 2:
            return corners
        at = np.linspace(0, len(corners) - 1, max(400, len(corners)))
        return np.column_stack([np.interp(at, np.arange(len(corners)), corners[:, axis]) for axis in (0, 1)])

    def put_at_end(self, text: str, end: tuple[float, float], colour: str) -> None:
        """A method's name beside the end of its line, joined to it by a hair if it had to move away."""
        steps = [0.0] + [sign * step for step in range(6, 120, 6) for sign in (1.0, -1.0)]
        places = [_Place(end, (9.0, step), "left", abs(step)) for step in steps]
        places += [_Place(end, (-4.0, step), "right", abs(step) + 30) for step in steps if abs(step) > 10]
        self._put(text, places, color=colour, weight="bold")

    def put_on_line(self, text: str, height: float) -> None:
        """A reference's name just above its line (below, it could seem to name another), wherever there is room."""
        left, right = self.axes.get_xlim()
        places = []
        sides: tuple[tuple[float, Literal["left", "center", "right"]], ...]
        sides = ((0.01, "left"), (0.99, "right"), (0.3, "center"), (0.5, "center"), (0.7, "center"))
        for along, side in sides:
            x = left * (right / left) ** along
            places.append(_Place((x, height), (0.0, 6.5), side, 20 * along))
        self._put(text, places, color=_GREY, fontsize=8.5)

    def _put(self, text: str, places: list[_Place], **looks: Any) -> None:
        style: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "parse_math": False}
        style |= {"va": "center", "bbox": _BACKING, **looks}
        trial = self.axes.annotate(text, places[0].point, places[0].shift, **style)
        size = trial.get_window_extent()
        trial.remove()
        best = min(places, key=lambda place: place.cost + self._cost(self._box(place, size)))
        if best.side == "left" and abs(best.shift[1]) > 12:
            # From the name's near edge to the end of its line.
            hair = {"shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
            style["arrowprops"] = {"arrowstyle": "-", "color": looks["color"], "linewidth": 0.8, **hair}
        self.axes.annotate(text, best.point, best.shift, ha=best.side, **style)
        self.boxes.append(self._box(best, size))

    def _box(self, place: _Place, size: Bbox) -> Bbox:
        x, y = self.axes.transData.transform(place.point) + np.asarray(place.shift) * self.scale
        left = x - size.width * {"left": 0.0, "center": 0.5, "right": 1.0}[place.side]
        return Bbox.from_bounds(left, y - size.height / 2, size.width, size.height)

    def _cost(self, box: Bbox) -> float:
        frame = self.axes.get_window_extent()
        outside = max(0.0, box.x1 - frame.x1, frame.x0 - box.x0, box.y1 - frame.y1 - 8, frame.y0 - box.y0)
        low, high = (box.x0 - 2, box.y0 - 2), (box.x1 + 2, box.y1 + 2)
        on_labels = sum(box.padded(2).overlaps(other) for other in self.boxes)
        on_curves = sum(bool(((pixels > low) & (pixels < high)).all(axis=1).any()) for pixels in self.curves)
        on_levels = sum(box.y0 < level < box.y1 for level in self.levels)
        return float(1000 * on_labels + 20 * outside + 60 * on_curves + 25 * on_levels)


def inline_svg(svg: bytes) -> str:
    """An SVG of this module without prologue, metadata and addresses, fit to stand inside an HTML page."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    head, rest = text.split(">", 1)  # the page decides the size; the view box keeps the shape
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="Accuracy against bytes per client; the table gives the end points">{rest}'
