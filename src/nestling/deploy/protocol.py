"""What server and site say to each other before the first round, as bytes; a round's messages are those of `codec/`.

    hello   settings, the base's hash, and in how many pieces it can be had    →    ready, or not yet: send the base
    base    one piece, in order                                                →    the same
    round   a broadcast                                                        →    a reply

Both sides read with suspicion: JSON is strict, entries are those named here and no others, and sizes are bounded.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from nestling.core.errors import WireError
from nestling.runs.files import from_json, to_json

HELLO, BASE, ROUND = "hello", "base", "round"
PIECE = 4 << 20
"""Bytes of a base that travel in one message."""
LARGEST_BASE = 16 << 30
_LONGEST = 1 << 20

Said = TypeVar("Said", "Hello", "Ready")


@dataclass(frozen=True)
class Hello:
    """A run is about to begin, or to go on. `pieces` is 0 where the site has to find the base itself, by the name in
    the settings; `run`: 32 hex digits that no other run has, under which a site keeps what its client keeps."""

    config: str
    base: str
    pieces: int
    run: str


@dataclass(frozen=True)
class Ready:
    """Whether a site can take part, as which client and with how many training items; `piece` is the next it needs, and
    after `limit` seconds it ends a call."""

    client: int
    ready: bool
    examples: int
    piece: int
    limit: int


def write(said: Hello | Ready) -> bytes:
    """Its bytes.

    >>> read(Ready, write(Ready(client=3, ready=True, examples=60, piece=0, limit=3600)))
    Ready(client=3, ready=True, examples=60, piece=0, limit=3600)
    """
    return to_json(asdict(said)).encode()


def read(kind: type[Said], body: bytes) -> Said:
    """What was said. Raises `WireError` with the code `hello` unless it is of this kind, with each entry of its type.

    >>> read(Ready, b'{"client": -1, "ready": true, "examples": 60, "piece": 0, "limit": 9}')
    Traceback (most recent call last):
    nestling.core.errors.WireError: Ready: is not what was expected.
    """
    values: Any = from_json(body, kind.__name__) if len(body) <= _LONGEST else None
    kinds = {f.name: f.type for f in fields(kind)}
    if (
        not isinstance(values, dict)
        or values.keys() != kinds.keys()
        or not all(type(values[name]) is wanted for name, wanted in kinds.items())
        or not all(0 <= value < 2**63 for value in values.values() if type(value) is int)
    ):
        raise WireError("hello", "is not what was expected", where=kind.__name__)
    return kind(**values)


def count_pieces(base: bytes) -> int:
    """How many messages a base takes.

    >>> count_pieces(bytes(PIECE)), count_pieces(bytes(PIECE + 1))
    (1, 2)
    """
    return -(-len(base) // PIECE)


def to_piece(base: bytes, number: int) -> bytes:
    """The message with piece `number`, counted from 0."""
    return number.to_bytes(8, "little") + base[number * PIECE : (number + 1) * PIECE]


def from_piece(body: bytes) -> tuple[int, bytes]:
    """A piece's number and content. Raises `WireError` with the code `base` if it is too short or too long.

    >>> from_piece(to_piece(b"abc", 0))
    (0, b'abc')
    """
    if not 8 < len(body) <= 8 + PIECE:
        raise WireError("base", f"has {len(body)} bytes", where="piece")
    return int.from_bytes(body[:8], "little"), body[8:]
