"""One table from many runs: methods between their reference rows, each accuracy with its interval, each cost in bytes.

Intervals are those of `intervals.py`. The last round is shown, never the best one on test.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from nestling.report.intervals import has_spread, interval
from nestling.runs.files import printable
from nestling.runs.result import Result

_REFERENCES: tuple[tuple[str, Callable[[Result], float | None]], ...] = (
    ("frozen base", lambda result: result.accuracy_base),
    ("local only", lambda result: result.accuracy_local_only),
    ("centralised", lambda result: result.accuracy_centralised),
)


@dataclass(frozen=True)
class Row:
    """One line of the table: `accuracies` over seeds, empty if unknown; costs are None for a reference row.

    `payload_up` and `payload_down` are of one client's message in one round; `factor` is how many times less the
    former is than all weights of the model as float32; `wire_bytes` and `seconds` are of a whole run (mean over seeds).
    """

    label: str
    accuracies: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    payload_up: int | None = None
    payload_down: int | None = None
    wire_bytes: int | None = None
    seconds: float | None = None
    factor: float | None = None

    @property
    def accuracy(self) -> float | None:
        """Mean over seeds; None if unknown."""
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def is_reference(self) -> bool:
        """Whether nothing travelled for this row."""
        return self.wire_bytes is None


def by_method(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results of the same method and settings over seeds, under a label that names no more than is needed.

    If one group has a seed twice (a run done again) the later one counts. Groups that differ only in what has no word
    here are told apart by their runs' names or, where these do not differ, by the first signs of `Result.settings`.
    """
    groups: dict[tuple[str, ...], dict[int, Result]] = {}
    for result in results:
        groups.setdefault(settings_of(result), {})[result.seed] = result
    # Method and codec always; then whatever two groups differ in.
    differing = [column for column in range(2, 7) if len({key[column] for key in groups}) > 1]
    # An adapter goes without saying if each method has its own.
    if 2 in differing and len({key[0] for key in groups}) == len({(key[0], key[2]) for key in groups}):
        differing.remove(2)
    labels = {key: ", ".join([*key[:2], *(key[column] for column in differing)]) for key in groups}
    for label in dict.fromkeys(labels.values()):
        keys = [key for key in groups if labels[key] == label]
        if len(keys) > 1:
            ends = _told_apart([(key[-1], [result.name for result in groups[key].values()]) for key in keys])
            labels |= {key: f"{label}, {end}" if end else label for key, end in zip(keys, ends, strict=True)}
    return {labels[key]: list(seeds.values()) for key, seeds in groups.items()}


def _told_apart(groups: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A short text for each of the groups, given as (digest of settings, names of the runs)."""
    names = [{printable(name) for name in names} for _, names in groups]
    if all(len(own) == 1 for own in names) and len(set.union(*names)) == len(names):
        return [own.pop() for own in names]
    digests = [digest for digest, _ in groups]
    most = max(map(len, digests))
    length = next((n for n in range(4, most) if len({digest[:n] for digest in digests}) == len(digests)), most)
    return [digest[:length] for digest in digests]


def settings_of(result: Result) -> tuple[str, ...]:
    """What two runs must share to be seeds of one row: method, codec, adapter, task, rounds, clients, alpha, and the
    digest of all settings together."""
    alpha = "iid" if result.alpha is None else f"α = {result.alpha:g}"
    rounds, clients = f"{result.rounds:,} rounds", f"{result.clients:,} clients"
    names = (result.method, result.codec, result.adapter, result.task)
    return (*(printable(name) for name in names), rounds, clients, alpha, printable(result.settings))


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The table's rows: frozen base, local only, one per method over its seeds, centralised.

    A reference that differs between kinds of adapter gets a row for each, which says whose it is.
    """
    references = {name: _reference_rows(name, value, results) for name, value in _REFERENCES}
    methods = [_method_row(label, group, results) for label, group in by_method(results).items()]
    return [*references["frozen base"], *references["local only"], *methods, *references["centralised"]]


def _reference_rows(name: str, value: Callable[[Result], float | None], results: Sequence[Result]) -> list[Row]:
    known = [result for result in results if value(result) is not None]
    if not known:
        return [Row(name)]
    labels = {settings_of(group[0]): label for label, group in by_method(results).items()}
    everyone = {result.adapter for result in known} == {result.adapter for result in results}
    owners: list[Callable[[Result], str]] = [
        lambda result: "",
        lambda result: f" ({printable(result.adapter)})",
        lambda result: f" ({labels[settings_of(result)]})",
    ]
    # The shortest name under which every seed has one value.
    for owner in owners if everyone else owners[1:]:
        groups: dict[str, dict[int, set[float | None]]] = {}
        for result in known:
            groups.setdefault(owner(result), {}).setdefault(result.seed, set()).add(value(result))
        if all(len(values) == 1 for seeds in groups.values() for values in seeds.values()):
            break
    items = min(result.test_items for result in known)
    rows = []
    for label, seeds in groups.items():
        accuracies = tuple(next(v for v in values if v is not None) for values in seeds.values())
        rows.append(Row(name + label, accuracies, interval(accuracies, items)))
    return rows


def _method_row(label: str, group: Sequence[Result], results: Sequence[Result]) -> Row:
    accuracies = tuple(result.accuracy for result in group)
    up, down = (max(getattr(result, f"payload_bytes_{way}") for result in group) for way in ("up", "down"))
    weights = _all_weights(group[0], results)
    return Row(
        label,
        accuracies,
        interval(accuracies, min(result.test_items for result in group)),
        payload_up=up,
        payload_down=down,
        wire_bytes=round(fmean(result.bytes_up + result.bytes_down for result in group)),
        seconds=fmean(result.seconds for result in group),
        factor=4 * weights / up if weights and up else None,
    )


def _all_weights(result: Result, results: Sequence[Result]) -> int | None:
    if result.model_parameters is not None:
        return result.model_parameters
    full = [other for other in results if other.adapter == "full" and other.task == result.task]
    return full[0].trainable_parameters if full else None


def caption_of(results: Sequence[Result]) -> str:
    """What the numbers mean: data, chance, seeds, test items, intervals, which round, which bytes."""
    rows = rows_of(results)
    seeds = sorted({len(group) for group in by_method(results).values()})
    items = sorted({result.test_items for result in results})
    tasks = ", ".join(sorted({printable(result.task) for result in results}))
    needles = all(result.recalls and not result.classes for result in results)
    chance = (
        "about 0"
        if needles
        else ", ".join(f"{100 * share:.3g} %" for share in sorted({_chance(r) for r in results if r.classes}))
    )
    items_of = {"test": "test", "validation": "validation"}
    kinds = sorted({items_of.get(result.evaluated_on, "other") for result in results})
    spread = any(has_spread(row.accuracies) for row in rows)
    single = any(row.accuracies and not has_spread(row.accuracies) for row in rows)
    intervals = [
        "± is the 95 % t-interval over seeds" if spread else "",
        "brackets are the Wilson 95 % interval over the items of a single run (or of equal runs)" if single else "",
    ]
    parts = [
        f"{'exact answers' if needles else 'accuracy'} on {_span(items)} {' and '.join(kinds)} items of {tasks}"
        f" after the last round, never the best round on test",
        f"{_span(seeds)} {'seed' if seeds == [1] else 'seeds'}; chance is {chance or 'unknown'}",
        "; ".join(part for part in intervals if part),
        "Up and down: the payload of one client's message in one round; total: every byte on the wire in the whole run,"
        " headers included",
        "less: how many times smaller the payload up is than all weights of the model as float32"
        if any(row.factor for row in rows)
        else "",
        _perplexities(results),
        *(privacy_of(result) for result in results if result.epsilon is not None),
    ]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def _chance(result: Result) -> float:
    return 1 / result.classes if result.chance is None else result.chance


def _perplexities(results: Sequence[Result]) -> str:
    """Perplexity by method, mean over seeds, and of the frozen base; empty where no run has one."""
    known = [result for result in results if result.perplexity is not None]
    entries = [("frozen base", [r.perplexity_base for r in known if r.perplexity_base is not None])]
    entries += [(label, [r.perplexity for r in group if r.perplexity]) for label, group in by_method(known).items()]
    means = [f"{label} {fmean(values):.3f}" for label, values in entries if values]
    lost = sum(result.chance is not None and result.perplexity is None for result in results)
    means += [f"without {lost} of {len(results)} runs, whose loss is no number"] if lost else []
    return f"perplexity of a byte: {'; '.join(means)}" if means else ""


def privacy_of(result: Result) -> str:
    """What a private run's ε holds for and what it does not cover; without a final full stop."""
    assert result.epsilon is not None
    taking_part = "every client is counted as if it took part in every round"
    if result.sampling_rate is not None:
        taking_part = (
            f"every client took part in a round with probability {result.sampling_rate:.3g}, drawn in secret, and who "
            "knows which did, or how many, is promised less"
        )
    return (
        f"Privacy of {printable(result.name)}: epsilon {result.epsilon:.3g} at delta {result.delta:.1e} for adding or "
        f"removing one client, if the server is trusted; {taking_part}. Not "
        "covered: how many replied and when, log.txt, checkpoints, and the rows local only and centralised"
    )


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no"
    return f"{numbers[0]:,}" if numbers[0] == numbers[-1] else f"{numbers[0]:,} to {numbers[-1]:,}"


def human_bytes(count: int | float) -> str:
    """Exact below 100,000 bytes, else three digits in decimal units.

    >>> human_bytes(648), human_bytes(5120), human_bytes(46_827_520)
    ('648 B', '5,120 B', '46.8 MB')
    """
    if count < 100_000:
        return f"{count:,.0f} B"
    for power, unit in enumerate(("kB", "MB", "GB", "TB", "PB"), 1):
        scaled = count / 1000**power
        if scaled < 999.5 or unit == "PB":
            break
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f} {unit}"


def human_seconds(seconds: int | float) -> str:
    """A duration in at most two units.

    >>> human_seconds(4.21), human_seconds(75), human_seconds(3700)
    ('4.2 s', '1 min 15 s', '1 h 01 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02} min"


def human_factor(factor: int | float) -> str:
    """How many times less, with two digits below ten.

    >>> human_factor(1.0), human_factor(3.25), human_factor(71234.5)
    ('1×', '3.2×', '71,234×')
    """
    return f"{factor:.1f}×".replace(".0×", "×") if factor < 9.95 else f"{factor:,.0f}×"


HEADINGS = ("method", "accuracy % ↑", "up ↓", "down ↓", "total ↓", "less ↑", "time")
_DASH = "–"


def cells(row: Row) -> tuple[str, ...]:
    """The row as people read it, one text for each of `HEADINGS`."""
    return (
        row.label,
        accuracy_text(row),
        *(_DASH if n is None else human_bytes(n) for n in (row.payload_up, row.payload_down, row.wire_bytes)),
        _DASH if row.factor is None else human_factor(row.factor),
        _DASH if row.seconds is None else human_seconds(row.seconds),
    )


def accuracy_text(row: Row) -> str:
    """Mean and interval in per cent.

    >>> accuracy_text(Row("a", (0.9,), (0.85, 0.94))), accuracy_text(Row("a", (0.9, 0.92), (0.89, 0.93)))
    ('90.0 [85.0, 94.0]', '91.0 ± 2.0')
    """
    if row.accuracy is None:
        return _DASH
    mean = f"{100 * row.accuracy:.1f}"
    if row.interval is None:
        return mean
    low, high = (100 * bound for bound in row.interval)
    return f"{mean} ± {(high - low) / 2:.1f}" if has_spread(row.accuracies) else f"{mean} [{low:.1f}, {high:.1f}]"


def to_rich(rows: Sequence[Row], caption: str = "") -> Table:
    """The table for a terminal. Labels are plain text there: no markup, no control characters."""
    table = Table(
        caption=Text(printable(caption)) if caption else None,
        caption_justify="left",
        box=SIMPLE_HEAD,  # narrow enough for a terminal of 80 columns
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if column else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells(row)), style="dim" if row.is_reference else "")
    return table


def to_markdown(rows: Sequence[Row], caption: str = "") -> str:
    """The table as Markdown, the caption below it."""
    lines = [
        HEADINGS,
        ("---", *("---:" for _ in HEADINGS[1:])),
        *((escaped(r.label), *cells(r)[1:]) for r in rows),
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    return f"{text}\n{escaped(caption)}\n" if caption else text


def escaped(text: str) -> str:
    """`text` with nothing left in it that Markdown would take for markup."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*_\[\]|!]", lambda found: f"\\{found[0]}", text)


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "×": r"$\times$", "α": r"$\alpha$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "–": "--",
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in printable(text))


def to_latex(rows: Sequence[Row], caption: str = "") -> str:
    """The table for a paper (needs booktabs), special characters escaped."""
    body = [" & ".join(_latex(cell) for cell in cells(row)) + r" \\" for row in rows]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'r' * (len(HEADINGS) - 1)}}}",
        r"\toprule",
        " & ".join(_latex(heading) for heading in HEADINGS) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *([rf"\caption{{{_latex(caption)}}}"] if caption else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """The table with plain numbers; unknown ones are empty. A label never begins a spreadsheet formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["method", "seeds", "accuracy", "low", "high", "payload_up", "payload_down", "wire_bytes", "less", "seconds"]
    )
    for row in rows:
        low, high = row.interval or (None, None)
        costs = (row.payload_up, row.payload_down, row.wire_bytes, row.factor, row.seconds)
        writer.writerow([csv_text(row.label), len(row.accuracies), row.accuracy, low, high, *costs])
    return out.getvalue()


def csv_text(text: str) -> str:
    """`text` that no spreadsheet takes for a formula.

    >>> csv_text("=cmd|x"), csv_text("flite")
    ("'=cmd|x", 'flite')
    """
    text = printable(text)
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@") else text
