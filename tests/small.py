"""Federations small enough for tests: one of plain numbers without torch, one of drawn images that trains in a second.

The images are ten blurred patterns with noise, in the four files of Fashion-MNIST, so that a command line can use them.
"""

import atexit
import gzip
import hashlib
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from nestling.codec.message import decode, encode, peek, state_digest
from nestling.codec.quantise import Limits
from nestling.config.load import parse_config
from nestling.config.schema import CodecConfig, RunConfig
from nestling.core.types import Failure, Progress
from nestling.core.vectors import Layout, Vector
from nestling.federation.agreement import EVERYONE, Agreement

# Plain numbers: a client moves half way from the state it is sent towards a vector of its own.

LAYOUT = Layout.of([("a", (2, 3)), ("b", (5,))])
START = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)


def agree(*, limits: Limits | None = None, run: str = "r", **codec: object) -> Agreement:
    """An agreement over `LAYOUT`."""
    return Agreement(LAYOUT, CodecConfig(**codec), limits or Limits(max_examples=100), {"base": "b", "run": run})


def received(agreed: Agreement, message: bytes) -> Vector:
    """What a client decodes from a broadcast."""
    limits, codecs, number = agreed.limits, [agreed.codec.down], peek(message).round
    return decode(
        message, direction="downlink", layout=agreed.layout, context=agreed.context(), round=number, client=EVERYONE,
        codecs=codecs, limits=limits,
    )[1]  # fmt: skip


def answer(
    agreed: Agreement, message: bytes, client: int, difference: Vector, *, examples: int = 10, **changes: object
) -> bytes:
    """The reply of a client whose training changes the state by `difference`; `changes` go to `encode`."""
    start, is_difference = received(agreed, message), agreed.codec.send == "delta"
    fields = {
        "direction": "uplink",
        "codec": agreed.codec.up,
        "is_difference": is_difference,
        "round": peek(message).round,
        "context": agreed.context(state_digest(start)),
        "client": client,
        "num_examples": examples,
    }
    return encode(agreed.layout, difference if is_difference else start + difference, **{**fields, **changes})


def target(client: int) -> Vector:
    """Where a client wants the state to be."""
    return np.random.default_rng(client).normal(size=LAYOUT.size).astype(np.float32)


def honest(agreed: Agreement, examples: Callable[[int], int] = lambda client: 10 + client) -> Callable:
    """Answers of all well-behaved clients."""

    def handle(client: int, message: bytes) -> bytes:
        half = (target(client) - received(agreed, message)) * np.float32(0.5)
        return answer(agreed, message, client, half, examples=examples(client))

    return handle


class Answers:
    """An engine made of a function; counts its exchanges and remembers whom it was given."""

    def __init__(self, answers: Callable[[Mapping[int, bytes]], dict[int, bytes | Failure]]) -> None:
        self.answers, self.asked = answers, []

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        self.asked.append(list(messages))
        return self.answers(messages)


FIELDS = {"version": (4, "B"), "codec": (5, "B"), "flags": (6, "<H"), "total_len": (8, "<I"), "round": (12, "<I")}
FIELDS |= {"context": (16, "16s"), "client": (32, "<Q"), "num_examples": (44, "<I"), "magic": (0, "4s")}


def forge(message: bytes, *, body: bytes | None = None, **fields: object) -> bytes:
    """A message with other fields or another body, and the digest that belongs to them: damage that is no accident."""
    head, body = bytearray(message[:48]), message[64:] if body is None else body
    for name, value in fields.items():
        struct.pack_into(FIELDS[name][1], head, FIELDS[name][0], value)
    return bytes(head) + hashlib.sha256(bytes(head) + body).digest()[:16] + body


# Drawn images: a real run, from data to report.


@cache
def images() -> Path:
    """A folder like that of Fashion-MNIST with 240 training and 60 test images."""
    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    patterns = np.kron(rng.integers(0, 2, (10, 7, 7)), np.ones((4, 4))) * 160
    for part, count in (("train", 240), ("t10k", 60)):
        labels = np.arange(count) % 10
        pixels = np.clip(patterns[labels] + rng.normal(40, 40, (count, 28, 28)), 0, 255).astype(np.uint8)
        for kind, data, head in (("images-idx3", pixels, 16), ("labels-idx1", labels.astype(np.uint8), 8)):
            content = gzip.compress(bytes(head) + data.tobytes(), mtime=0)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    return folder


def toml(out: Path | str, *, name: str = "small", data: Path | None = None) -> str:
    """Settings of a run over three clients that takes about a second."""
    return f"""\
name = "{name}"
rounds = 2

[task]
data = "fashion"
path = "{data or images()}"
clients = 3
alpha = 1.0

[base]
width = 8
pretrain_on = "fashion"
epochs = 16
lr = 2e-2
augment = false

[adapter]
dim = 4
targets = ["*conv*"]

[local]
lr = 3e-2

[machine]
workers = 1
out = "{out}"
"""


def config(out: Path | str, *, references: bool = False, **changes: object) -> RunConfig:
    """The same settings, with `changes` to the top level."""
    made = parse_config(toml(out))
    machine = replace(made.machine, references=references)
    return replace(made, **{"machine": machine, **changes})


@cache
def finished(seed: int = 0) -> tuple:
    """One run with its reference rows, shared by all tests that only look: (settings, result, progress)."""
    from nestling.api import run

    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    steps: list[Progress] = []
    settings = config(folder / "runs", references=True, seed=seed)
    result = run(settings, progress=steps.append, command=["nestling", "run", "small.toml"])
    return settings, result, steps
