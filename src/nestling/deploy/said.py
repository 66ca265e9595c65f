"""How the server's app marks its lines in a run's log, so that `nestling submit` knows them from Flower's."""

import re

from nestling.runs.files import printable

LINE, RESULT, ERROR, FOLDER = "nestling: ", "nestling-result: ", "nestling-error: ", "nestling-folder: "
"""What lines of ours begin with. After the second and third, one of which ends a log, JSON follows; after the last, the
name of the run's folder, once it has one."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def uncoloured(text: str) -> str:
    """A line without the escapes that colour it on a terminal."""
    return _COLOURS.sub("", text).strip()


def plain(text: str) -> str:
    r"""What Flower says, in one line: without colours, and without the frame that it puts around errors.

    >>> plain("\x1b[31m╭─ Error ─╮\n│ no such run │\x1b[0m")
    'Error no such run'
    """
    return " ".join(printable(word) for line in text.splitlines() if (word := uncoloured(line).strip("│╭╮╰╯─ ")))
