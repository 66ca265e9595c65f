"""The tables of a language run, from `result.json`'s recalls: each row with its answers and loss, and client by client.

    facts       exact % and four-choice %, loss; then the exact % of each client, in columns
    questions   accuracy %, loss; then a table by client: accuracy % of the rows that tell what averaging costs, and

        aggregation drop = own training − federated state, in points, paired over the client's items

Brackets are Wilson's 95 % intervals, those of a drop over paired items. Chance is 25 % among four.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nestling.report.intervals import wilson
from nestling.report.tables import escaped, human_bytes
from nestling.runs.files import printable
from nestling.runs.result import Result

_LABELS: Mapping[str, str] = {
    "full attention": "frozen base, full attention",
    "window": "frozen base, window",
    "local only": "local only",
    "trained": "{method}",
    "memory off": "{method}, memory off",
    "window off": "{method}, window off",
    "centralised": "centralised",
}
"""The rows in the order in which they are shown."""
HEADINGS = ("read by", "exact % ↑", "of four % ↑", "loss ↓")
_OF_QUESTIONS = ("answered by", "accuracy % ↑", "loss ↓")
_BY_CLIENT = ("full attention", "local only", "trained")
"""The rows that stand in the table by client, in this order."""


@dataclass(frozen=True)
class RecallRow:
    """One row: shares in 0 … 1 over the items of all its clients, and the exact share of each client."""

    label: str
    items: int
    exact: float
    chosen: float
    loss: float | None
    by_client: dict[str, float]
    is_reference: bool
    of_questions: bool = False

    def cells(self, clients: Sequence[str] = ()) -> tuple[str, ...]:
        """One text for each of the `headings` of its run, then the exact share of each of these clients."""
        return (
            self.label,
            *(() if self.of_questions else (_share(self.exact, self.items),)),
            _share(self.chosen, self.items),
            "–" if self.loss is None else f"{self.loss:.3f}",
            *(f"{100 * self.by_client[name]:.0f}" if name in self.by_client else "–" for name in clients),
        )


def of_questions(result: Result) -> bool:
    """Whether a language run is one of multiple choice, and not of facts in long text."""
    return bool(result.classes)


def headings(result: Result) -> tuple[str, ...]:
    """The columns of its table, those of single clients left out."""
    return _OF_QUESTIONS if of_questions(result) else HEADINGS


def recall_rows(result: Result) -> list[RecallRow]:
    """The rows of a language run, references among them; none for another run."""
    names = [name for name in _LABELS if name in result.recalls]
    names += sorted(set(result.recalls) - set(names))
    return [_row(result, name) for name in names]


def _row(result: Result, name: str) -> RecallRow:
    clients = result.recalls[name]
    items = sum(client["items"] for client in clients)
    losses = [client["loss"] for client in clients]
    known = all(loss is not None for loss in losses)
    return RecallRow(
        _LABELS.get(name, name).format(method=result.method),
        items,
        sum(client["exact"] for client in clients) / items,
        sum(client["chosen"] for client in clients) / items,
        sum(c["loss"] * c["items"] for c in clients) / items if known else None,
        {f"{c['client']} {c['template']}": c["exact"] / c["items"] for c in clients},
        name in ("full attention", "window", "local only", "centralised"),
        of_questions(result),
    )


def _share(share: float, items: int, digits: int = 1) -> str:
    low, high = wilson(share, items)
    return f"{100 * share:.{digits}f} [{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


def client_headings(rows: Sequence[RecallRow]) -> list[str]:
    """The clients, each by its number and kind of fact; none where they have a table of their own."""
    return list(dict.fromkeys(name for row in rows for name in row.by_client if not row.of_questions))


def client_table(result: Result, *, digits: int = 1) -> list[tuple[str, ...]]:
    """By client, the headings first: the accuracy of some rows, and the aggregation drop; empty for a run of facts.
    With `digits` 0 it fits a terminal."""
    if not of_questions(result) or not result.recalls:
        return []
    shown = [name for name in _BY_CLIENT if name in result.recalls]
    titles = ["frozen base" if name == "full attention" else name.replace("trained", result.method) for name in shown]
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name in shown:
        for client in result.recalls[name]:
            own = found.setdefault(f"{client['client']} {client['template']}", {})
            own[name] = client["chosen"], client["items"]
    whole = {name: _sum(own[name] for own in found.values() if name in own) for name in shown}
    lines = [("client", "items", *titles, *(("drop ↓",) if result.drops else ()))]
    for label, own in [*found.items(), ("all", whole)]:
        cells = [_share(own[name][0] / own[name][1], own[name][1], digits) if name in own else "–" for name in shown]
        cells += [_points(result.drops[label], digits) if label in result.drops else "–"] if result.drops else []
        lines.append((label, f"{max(items for _, items in own.values()):,}", *cells))
    return lines


def _sum(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    right, items = zip(*counts, strict=True)
    return sum(right), sum(items)


def _points(difference: Sequence[float], digits: int) -> str:
    mean, low, high = (100 * x for x in difference)
    return f"{mean:+.1f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def recall_caption(result: Result) -> str:
    """What the numbers mean, what the memory adds, and what a client sends for it."""
    items = sum(client["items"] for client in result.recalls.get("trained", []))
    questions = of_questions(result)
    gains = [
        f"{'exact' if kind == 'exact' else 'of four'} {100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
        for kind, (mean, low, high) in result.gains.items()
        if kind != "exact" or not questions
    ]
    parts = [
        f"{items:,} held-out {'questions' if questions else 'items'} of {result.clients:,} clients after the last"
        f" round, of {result.task}",
        "accuracy: the right letter is the likeliest of A to D; chance is 25 %"
        if questions
        else "of four: the answer is the likeliest of four values from the same text; chance is 25 %",
        "loss: of the right letter among all tokens, in nats" if questions else "loss: of an answer's token, in nats",
        "brackets are 95 % intervals (Wilson)",
        "drop, for aggregation drop: what a client's own training answers more than the federated state, in points,"
        " paired over its questions"
        if questions and result.drops
        else "",
        f"memory on − memory off, paired over items: {', '.join(gains)}" if gains else "",
        f"each round a client sends {human_bytes(result.payload_bytes_up)} and receives"
        f" {human_bytes(result.payload_bytes_down)}",
    ]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def recalls_to_rich(result: Result) -> Group:
    """The tables for a terminal, without the columns of single clients of a run of facts."""
    rows = recall_rows(result)
    tables = [_rich([headings(result), *(row.cells() for row in rows)], dim=[row.is_reference for row in rows])]
    if by_client := client_table(result, digits=0):
        tables.append(_rich(by_client))
    tables[-1].caption = Text(printable(recall_caption(result)))
    return Group(*tables)


def _rich(lines: Sequence[tuple[str, ...]], *, dim: Sequence[bool] = ()) -> Table:
    table = Table(caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column, heading in enumerate(lines[0]):
        table.add_column(Text(printable(heading)), justify="right" if column else "left", overflow="fold")
    for number, line in enumerate(lines[1:]):
        table.add_row(*(Text(printable(cell)) for cell in line), style="dim" if any(dim[number : number + 1]) else "")
    return table


def recalls_to_markdown(result: Result) -> str:
    """The tables as Markdown, with a column of exact % for each client of a run of facts, the caption below."""
    rows = recall_rows(result)
    clients = client_headings(rows)
    tables = [[(*headings(result), *clients), *(row.cells(clients) for row in rows)], client_table(result)]
    return "\n".join([_markdown(lines) for lines in tables if lines] + [f"{escaped(recall_caption(result))}\n"])


def _markdown(lines: Sequence[tuple[str, ...]]) -> str:
    first, *rest = [f"| {' | '.join(map(escaped, line))} |" for line in lines]
    return "\n".join([first, f"| --- |{' ---: |' * (len(lines[0]) - 1)}", *rest]) + "\n"
