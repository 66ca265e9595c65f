"""What reads bytes that nobody vouches for, as functions that a fuzzer and a test can both call with anything.

    input = one byte that chooses the reader, one byte of switches, then what is read        → the outcome, in a word

A reader may answer with a value or with the error it documents, whose code is the outcome; everything else that comes
out is a finding. What it answers with must be finite, within the limits, and fit to be written again. Checksums are no
protection from a sender who computes them, so a switch makes those of the input right: mutations get behind them.
"""

import hashlib
import math
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors.numpy import save

from nestling.codec.codecs import CODECS
from nestling.codec.form import FLT_MAX, Limits
from nestling.codec.message import HEADER_SIZE, context_id, decode, encode, peek
from nestling.core.errors import WireError
from nestling.core.vectors import Layout
from nestling.runs.checkpoint import newest_checkpoint
from nestling.runs.files import from_json, row_of, to_json
from nestling.runs.ledger import read_charges

EVERY = [*CODECS, "topk@0.3", "randomk@0.3", "powersgd@1"]
LAYOUTS = [  # the first is that of the golden messages, and so are context, round and client
    Layout.of([("a", (2, 3)), ("empty", (0,)), ("b", (5,))]),
    Layout.of([("a", (7,)), ("w", (8, 4, 2)), ("c", (1,))]),
    Layout.of([("latent", (300,))]),
    Layout.of([]),
]
GOLDEN = Path(__file__).parent / "codec" / "vectors"
CONTEXT = context_id({"base": "0123abcd", "run": "golden", "seed": "00000000000004d2"})
WHO = {"context": CONTEXT, "round": 5, "client": 2**63 + 1}
LIMITS = [Limits(), Limits(max_abs=FLT_MAX, max_norm=math.inf), Limits(max_abs=1.0, max_norm=1.0)]
REPAIRED = 0x80
SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files in memory, where there are such
T = TypeVar("T")


def repaired(message: bytes) -> bytes:
    """The message with the length and the digest that its content asks for."""
    if len(message) < HEADER_SIZE:
        return message
    head, body = message[:8] + struct.pack("<I", len(message)) + message[12:48], message[HEADER_SIZE:]
    return head + hashlib.sha256(head + body).digest()[:16] + body


def answer(read: Callable[[], T]) -> tuple[T | None, str]:
    """What it returned, and "ok" or the code of the error that was documented."""
    try:
        return read(), "ok"
    except WireError as error:
        return None, error.code


def read_message(switches: int, data: bytes) -> str:
    layout, limits = LAYOUTS[switches & 3], LIMITS[(switches >> 2 & 3) % len(LIMITS)]
    message = repaired(data) if switches & REPAIRED else data
    direction = "downlink" if message[:4] == b"NSD1" else "uplink"
    seen, fault = answer(lambda: peek(message))
    agreed = {"direction": direction, "layout": layout, "limits": limits, **WHO}
    read, code = answer(lambda: decode(message, codecs=EVERY, **agreed))
    if read is None:
        # A message too long for this layout is refused before it is read: what peek finds may be another fault.
        assert seen is not None or code in (fault, "length")
        return code
    header, vector = read
    assert seen is not None
    assert (seen.digest, seen.codec) == (header.digest, header.codec.partition("@")[0])
    assert (vector.dtype, vector.shape) == (np.float32, (layout.size,))
    assert np.isfinite(vector).all()
    assert np.abs(vector).max(initial=0.0) <= limits.max_abs
    assert np.linalg.norm(vector.astype(np.float64)) <= limits.max_norm * (1 + 1e-12)
    form = {"direction": direction, "is_difference": header.is_difference, "num_examples": header.num_examples}
    again = encode(layout, vector, codec="float32", **form, **WHO)
    assert decode(again, codecs=["float32"], **agreed)[1].tobytes() == vector.tobytes()
    _, code = answer(lambda: encode(layout, vector, codec=header.codec, **form, **WHO))
    # What a float16 cannot hold, or the span of two numbers not even a float32.
    assert code == "ok" or (code == "overflow" and np.abs(vector).max() > 6e4)
    return "ok"


def read_checkpoint(switches: int, data: bytes) -> str:
    """A file whose name is always right: it is the hash of what is in it."""
    with tempfile.TemporaryDirectory(dir=SHARED) as here:
        folder = Path(here, "checkpoints")
        folder.mkdir()
        digest = hashlib.sha256(data).hexdigest()[:16]
        (folder / f"round-000003--{digest}.safetensors").write_bytes(data)
        found, code = answer(lambda: newest_checkpoint(Path(here)))
    if found is None:
        assert code != "ok"
        return code
    assert np.isfinite(found.state).all()
    assert (found.round, found.state.dtype) == (3, np.float32)
    assert from_json(to_json(dict(found.facts)), "again") == found.facts
    return "ok"


def read_row(switches: int, data: bytes) -> str:
    row, code = answer(lambda: row_of(data, "row"))
    assert row is None or from_json(to_json(row), "again") == row
    return code


def read_ledger(switches: int, data: bytes) -> str:
    with tempfile.TemporaryDirectory(dir=SHARED) as here:
        Path(here, "privacy.jsonl").write_bytes(data)
        charges, code = answer(lambda: read_charges(Path(here)))
    assert all(math.isfinite(number) for charge in charges or () for number in charge.mechanism)
    return code


READERS = (read_message, read_checkpoint, read_row, read_ledger)


def one_input(data: bytes) -> str:
    """The outcome of one input: "ok" or the code of the error that was documented."""
    if len(data) < 2:
        return "short"
    return READERS[data[0] % len(READERS)](data[1], data[2:])


@cache
def corpus() -> tuple[bytes, ...]:
    """Inputs to begin with, all of which are read: messages of every codec and layout, and a file of each kind."""
    inputs = [
        bytes([0, REPAIRED]) + bytes.fromhex(path.read_text()) for path in sorted(GOLDEN.glob("*uplink*[!s].hex"))
    ]
    for index, layout in enumerate(LAYOUTS):
        vector = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
        form = {"is_difference": True, **WHO}
        for codec in EVERY:
            up = encode(layout, vector, codec=codec, direction="uplink", num_examples=9, **form)
            down = encode(layout, vector, codec=codec, direction="downlink", num_examples=0, **form)
            inputs += [bytes([0, REPAIRED | 4 | index]) + message for message in (up, down)]
    arrays = {"state": np.float32([1.5, -0.0]), "server.step": np.array(7), "client.12.codec.error": np.zeros(2)}
    facts = {"schema": 1, "round": 3, "facts": {"seconds": 1.5, "refusals": {"short": 2}}}
    inputs.append(b"\1\0" + save(arrays, {"nestling": to_json(facts)}))
    inputs.append(b'\2\0{"round": 1, "accuracy": 0.5, "loss": null, "bytes_up": 8, "bytes_down": 0, "bytes_total": 8}')
    charge = b'{"round": 1, "noise_multiplier": 1.0, "clip": 0.5, "cohort": 8, "sampling_rate": 1.0, "delta": 1e-05}\n'
    inputs.append(b"\3\0" + charge + charge)
    return tuple(inputs)
