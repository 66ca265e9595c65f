import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.codec.form import Limits, key_stream, pack, packed_size, unpack
from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream


@given(st.sampled_from([8, 4, 2, 1]), st.data())
def test_packed_codes_come_back_and_the_rest_is_zero(bits, data):
    codes = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40)), np.uint8)
    packed = pack(codes, bits)
    assert len(packed) == packed_size(codes.size, bits)
    again = unpack(packed, bits)
    assert again[: codes.size].tolist() == codes.tolist()
    assert not again[codes.size :].any()


@given(st.sampled_from([8, 4, 2, 1]), st.binary(max_size=30))
def test_every_byte_is_codes_lowest_bits_first(bits, data):
    number = int.from_bytes(data, "little")  # the definition: one long number, cut from its low end
    expected = [number >> bits * place & (2**bits - 1) for place in range(len(data) * 8 // bits)]
    assert unpack(data, bits).tolist() == expected
    assert pack(unpack(data, bits), bits) == data


def test_the_stream_of_a_key_is_the_documented_one():
    seed = int.from_bytes(hashlib.sha256(b"nestling-codec/v1\0" + b"\x01\xff").digest()[:8], "little")
    assert key_stream(b"\x01\xff", "signs") == Stream(seed, "signs", "01ff")
    assert key_stream(b"", "signs").words(4).tolist() != key_stream(b"\0", "signs").words(4).tolist()
    assert key_stream(b"", "signs").words(4).tolist() != key_stream(b"", "rounding").words(4).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_examples": 0},
        {"max_examples": 2**32},
        {"max_abs": 0.5},
        {"max_abs": float("inf")},
        {"max_abs": float("nan")},
        {"max_norm": 0.0},
        {"max_norm": float("nan")},
    ],
)
def test_limits_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
