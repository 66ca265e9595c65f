"""The table of a needle run: each row of `result.json`'s recalls with its exact answers, choices among four and loss.

    exact % and four-choice % with Wilson's 95 % interval over all clients' items; loss is the mean over items

Chance is 25 % for four choices. Per client (one kind of fact each) the exact answers follow in the order of clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
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

    def cells(self, clients: Sequence[str] = ()) -> tuple[str, ...]:
        """One text for each of `HEADINGS`, then the exact share of each of these clients."""
        return (
            self.label,
            _share(self.exact, self.items),
            _share(self.chosen, self.items),
            "–" if self.loss is None else f"{self.loss:.3f}",
            *(f"{100 * self.by_client[name]:.0f}" if name in self.by_client else "–" for name in clients),
        )


def recall_rows(result: Result) -> list[RecallRow]:
    """The rows of a needle run, references among them; none for another run."""
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
    )


def _share(share: float, items: int) -> str:
    low, high = wilson(share, items)
    return f"{100 * share:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def client_headings(rows: Sequence[RecallRow]) -> list[str]:
    """The clients, each by its number and kind of fact."""
    return list(dict.fromkeys(name for row in rows for name in row.by_client))


def recall_caption(result: Result) -> str:
    """What the numbers mean, what the memory adds, and what a client sends for it."""
    items = sum(client["items"] for client in result.recalls.get("trained", []))
    gains = [
        f"{'exact' if kind == 'exact' else 'of four'} {100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
        for kind, (mean, low, high) in result.gains.items()
    ]
    parts = [
        f"{items:,} held-out items of {result.clients:,} clients after the last round, of {result.task}",
        "of four: the answer is the likeliest of four values from the same text; chance is 25 %",
        "loss: of an answer's token, in nats",
        "brackets are 95 % intervals (Wilson)",
        f"memory on − memory off, paired over items: {', '.join(gains)}" if gains else "",
        f"each round a client sends {human_bytes(result.payload_bytes_up)} and receives"
        f" {human_bytes(result.payload_bytes_down)}",
    ]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def recalls_to_rich(result: Result) -> Table:
    """The table for a terminal, without the columns of single clients."""
    table = Table(
        caption=Text(printable(recall_caption(result))),
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if column else "left", overflow="fold")
    for row in recall_rows(result):
        table.add_row(*(Text(printable(cell)) for cell in row.cells()), style="dim" if row.is_reference else "")
    return table


def recalls_to_markdown(result: Result) -> str:
    """The table as Markdown with a column of exact % for each client, the caption below it."""
    rows = recall_rows(result)
    clients = client_headings(rows)
    lines = [(*HEADINGS, *clients), *(row.cells(clients) for row in rows)]
    first, *rest = [f"| {' | '.join(map(escaped, line))} |" for line in lines]
    text = "\n".join([first, f"| --- |{' ---: |' * (len(lines[0]) - 1)}", *rest])
    return f"{text}\n\n{escaped(recall_caption(result))}\n"
