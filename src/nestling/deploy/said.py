"""How the server's app marks its lines in a run's log, so that `nestling submit` knows them from Flower's."""

import re

from nestling.core.errors import RemoteError
from nestling.runs.files import printable

LINE, RESULT, ERROR, FOLDER = "nestling: ", "nestling-result: ", "nestling-error: ", "nestling-folder: "
"""What lines of ours begin with. After the second and third, one of which ends a log, JSON follows; after the last, the
name of the run's folder, once it has one."""
_CHATTER = re.compile(r"\W*(Using SuperLink: |Stopping run |INFO )")
_FORBIDDEN = re.compile(r"error '403 Forbidden' for url '\S+/control/")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def uncoloured(text: str) -> str:
    """A line without the escapes that colour it on a terminal."""
    return _COLOURS.sub("", text).strip()


def plain(text: str) -> str:
    r"""What Flower says, in one line: without colours, and without the frame that it puts around errors.

    >>> plain("\x1b[31m╭─ Error ─╮\n│ no such run │\x1b[0m")
    'Error no such run'
    """
    words = (uncoloured(line).strip("│╭╮╰╯─ ") for line in text.splitlines())
    return " ".join(printable(word) for word in words if word and not _CHATTER.match(word))


def is_forbidden(said: str) -> bool:
    """Whether what Flower's command said is that the server takes no orders from this machine's address."""
    return bool(_FORBIDDEN.search(said))


def forbidden() -> RemoteError:
    """What to raise of it."""
    return RemoteError(
        "takes no orders from this machine's address",
        where="the server",
        remedy="Give them on the server's machine, or let 'nestling serve' have --control with this address.",
    )
