from math import log2

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestling.codec.positions import decode_positions, encode_positions, size_of
from nestling.core.errors import WireError


def reference(positions, n):
    """The definition as a string of bits: a zero for each step of the high part, a one for each position; low parts."""
    k = len(positions)
    low = 0
    while k and k * 2 ** (low + 1) <= n:
        low += 1
    bits, high = "", 0
    for position in positions:
        bits += "0" * (position // 2**low - high) + "1"
        high = position // 2**low
    if k:
        bits += "0" * ((n - 1) // 2**low - high)
    for position in positions:
        bits += "".join(str(position >> place & 1) for place in range(low))
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


@st.composite
def sets(draw, largest=300):
    n = draw(st.integers(0, largest))
    return n, sorted(draw(st.sets(st.integers(0, n - 1), max_size=n))) if n else []


def refused(body, n, k):
    with pytest.raises(WireError) as caught:
        decode_positions(body, n, k)
    return caught.value.code


@given(sets())
@example((1, [0]))
@example((300, list(range(300))))
@settings(deadline=None, max_examples=40)
def test_bytes_follow_the_definition_and_come_back(case):
    n, positions = case
    body = encode_positions(np.array(positions, np.int64), n)
    assert body == reference(positions, n)
    assert len(body) == size_of(n, len(positions))
    assert decode_positions(body, n, len(positions)).tolist() == positions
    assert decode_positions(memoryview(body), n, len(positions)).tolist() == positions


@settings(max_examples=40)
@given(n=st.integers(1, 10**9), share=st.floats(1e-6, 1))
def test_size_is_within_the_bound(n, share):
    k = max(1, round(share * n))
    assert 8 * size_of(n, k) <= k * (2 + log2(n / k)) + 8


def test_positions_beyond_32_bits():
    n, positions = 2**40, np.array([0, 2**33 + 5, 2**40 - 1], np.int64)
    assert decode_positions(encode_positions(positions, n), n, 3).tolist() == positions.tolist()


def test_by_hand():
    """n = 12, k = 3, l = 2: high parts 0 0 2 give 11001, low parts 2 3 1 give 01 11 10 (lowest bit first)."""
    assert encode_positions(np.array([2, 3, 9]), 12) == bytes([0b11010011, 0b011])
    assert size_of(0, 0) == size_of(5, 0) == 0


def test_every_body_is_refused_or_is_the_one_of_its_positions():
    """Of all 2^8 bodies of two positions below 6, exactly the 15 sets are accepted, each once."""
    seen, codes = [], set()
    for number in range(2**8):
        try:
            positions = decode_positions(bytes([number]), 6, 2)
        except WireError as error:
            codes.add(error.code)
            continue
        assert encode_positions(positions, 6) == bytes([number])
        seen.append(tuple(positions.tolist()))
    assert len(set(seen)) == len(seen) == 15
    assert codes == {"positions", "nibble_pad"}


def test_what_is_refused_and_why():
    assert refused(bytes([0b11010001, 0b011]), 12, 3) == "positions"  # two marks
    assert refused(bytes([0b11010111, 0b011]), 12, 3) == "positions"  # four
    assert refused(bytes([0b11110011, 0b011]), 12, 3) == "positions"  # 3, 3, 9
    assert refused(bytes([0b01110011, 0b010]), 12, 3) == "positions"  # 3, 0, 9
    assert refused(bytes([0b11010011, 0b1011]), 12, 3) == "nibble_pad"
    body = encode_positions(np.array([2, 3, 13]), 16)
    assert len(body) == size_of(13, 3)
    assert refused(body, 13, 3) == "positions"
