"""Whatever arrives, the decoder answers with numbers or a `WireError`, in less than a megabyte."""

import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestling.codec.codecs import CODECS, body_size, named_codec
from nestling.codec.message import Limits, decode, encode, peek
from nestling.core.errors import WireError
from nestling.core.vectors import Layout

EVERY = [*CODECS, "topk@0.1", "randomk@0.1", "powersgd@2"]
LAYOUT = Layout.of([("a", (7,)), ("empty", (0,)), ("b", (8, 4, 2)), ("c", (1,))])
CONTEXT = bytes(range(16))
AGREED = {
    "direction": "uplink",
    "layout": LAYOUT,
    "context": CONTEXT,
    "round": 5,
    "client": 7,
    "codecs": EVERY,
    "limits": Limits(),
}
SPECIAL = [0.0, -0.0, -1.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 1e4, 10001.0, 3.4e38, np.inf, -np.inf, np.nan]
FIELDS = [(0, 4), (4, 1), (5, 1), (6, 2), (8, 4), (12, 4), (16, 16), (32, 8), (40, 4), (44, 4), (48, 16)]


def seeds():
    vector = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    header = {"direction": "uplink", "is_difference": True, "round": 5, "context": CONTEXT, "client": 7}
    return [encode(LAYOUT, vector, codec=codec, num_examples=9, **header) for codec in EVERY]


def outcome(data):
    """The error's code, or "ok"; any other exception is the failure looked for."""
    try:
        _, vector = decode(data, **AGREED)
    except WireError as error:
        return error.code
    limits = AGREED["limits"]
    assert vector.shape == (LAYOUT.size,)
    assert np.isfinite(vector).all()
    assert np.abs(vector).max() <= limits.max_abs
    assert np.linalg.norm(vector.astype(np.float64)) <= limits.max_norm
    return "ok"


def mutant(message, random):
    """A damaged copy. Half of them get a correct digest, so that the checks behind it are reached."""
    data = bytearray(message)
    for _ in range(random.integers(1, 4)):
        kind = random.integers(8)
        if not data or kind == 0:
            data += random.bytes(random.integers(1, 65))
        elif kind == 1:
            del data[random.integers(len(data)) :]
        elif kind == 2:
            data[random.integers(len(data))] = random.integers(256)
        elif kind == 3:
            offset, width = FIELDS[random.integers(len(FIELDS))]
            data[offset : offset + width] = random.bytes(width)
        elif kind == 4:
            offset, width = FIELDS[random.integers(len(FIELDS))]
            data[offset : offset + width] = [b"\0", b"\xff"][random.integers(2)] * width
        elif kind == 5 and len(data) >= 72:  # where scales and zeros lie, or anywhere in the body
            offset = [64, 68, 64 + random.integers(len(data) - 68)][random.integers(3)]
            data[offset : offset + 4] = struct.pack("<f", SPECIAL[random.integers(len(SPECIAL))])
        elif kind == 6 and len(data) > 64:
            data[64:] = random.bytes(len(data) - 64)
        elif kind == 7 and len(data) > 64:  # another codec with a body of the right length
            codec = named_codec(EVERY[random.integers(len(EVERY))])
            size = body_size(codec.name, LAYOUT)
            data[5], data[64:] = codec.id, (bytes(data[64:]) + random.bytes(size))[:size]
            data[8:12] = struct.pack("<I", len(data))
    if len(data) >= 64 and random.integers(2):
        data[48:64] = hashlib.sha256(data[:48] + data[64:]).digest()[:16]
    return bytes(data)


def test_cat_002_mutants_meet_only_wire_errors():
    random, messages = np.random.default_rng(2), seeds()
    codes = {outcome(mutant(messages[index % len(messages)], random)) for index in range(20_000)}
    reached = "short length magic version flags codec digest context stale_round future_round client num_examples"
    reached += " scale zero nibble_pad code_range positions non_finite abs ok"
    assert set(reached.split()) <= codes


@given(st.binary(max_size=400))
@example(b"")
@example(b"NSU1" + bytes(60))
@settings(max_examples=500, deadline=None)
def test_cat_002_any_bytes_meet_only_wire_errors(data):
    assert outcome(data) != "ok"
    with pytest.raises(WireError):
        peek(data)


@given(codec=st.sampled_from([named_codec(name) for name in EVERY]), data=st.data())
@settings(max_examples=500, deadline=None)
def test_cat_002_any_body_behind_a_valid_header(codec, data):
    size = body_size(codec.name, LAYOUT)
    body = data.draw(st.binary(min_size=size, max_size=size))
    head = struct.pack("<4sBBHII16sQII", b"NSU1", 1, codec.id, 1, 64 + size, 5, CONTEXT, 7, 0, 9)
    code = outcome(head + hashlib.sha256(head + body).digest()[:16] + body)
    assert code in {"ok", "scale", "zero", "nibble_pad", "code_range", "positions", "non_finite", "abs", "norm"}


def test_cat_002_memory_stays_below_a_megabyte():
    random, messages = np.random.default_rng(3), seeds()
    mutants = [mutant(messages[index % len(messages)], random) for index in range(1_000)]
    mutants += [message[:8] + b"\xff" * 4 + message[12:] for message in messages]
    mutants += [bytes(1 << 22), b"NSU1" + bytes(1 << 22)]
    for data in mutants[:10]:
        outcome(data)  # imports and caches, once
    tracemalloc.start()
    try:
        for data in mutants:
            outcome(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
