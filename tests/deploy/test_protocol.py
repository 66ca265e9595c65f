"""What server and site say before the first round is read as it was written, and nothing else is read at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.errors import WireError
from nestling.deploy.protocol import PIECE, Hello, Ready, count_pieces, from_piece, read, to_piece, write

HELLO = Hello(config='name = "x"', base="0" * 64, pieces=2, run="f" * 32)


NUMBERS = st.integers(0, 2**63 - 1)


@given(st.builds(Ready, NUMBERS, st.booleans(), NUMBERS, st.integers(0, 9), NUMBERS))
def test_what_is_written_is_read(ready: Ready) -> None:
    assert read(Ready, write(ready)) == ready
    assert read(Hello, write(HELLO)) == HELLO


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": True}, {"pieces": -1}, {"pieces": 2**63}, {"pieces": 1.0}, {"config": None}, {"more": 1},
        {"run": 1}, {"base": ["x"]},
    ],
)  # fmt: skip
def test_entries_of_another_kind_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError, match="not what was expected"):
        read(Hello, json.dumps(json.loads(write(HELLO)) | change).encode())


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_as_such(body: bytes) -> None:
    with pytest.raises(WireError):
        read(Hello, body)
    with pytest.raises(WireError):
        read(Ready, write(HELLO))


def test_what_is_too_long_is_not_parsed() -> None:
    with pytest.raises(WireError, match="not what was expected"):
        read(Hello, write(Hello("x" * (1 << 20), "", 0, "")))


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_pieces_make_up_the_base(size: int) -> None:
    base = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pieces = [from_piece(to_piece(base, n)) for n in range(count_pieces(base))]
    assert [number for number, _ in pieces] == list(range(len(pieces)))
    assert b"".join(piece for _, piece in pieces) == base


@pytest.mark.parametrize("size", [0, 7, 8, 9 + PIECE])
def test_a_piece_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(WireError, match="bytes"):
        from_piece(bytes(size))
