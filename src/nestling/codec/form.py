"""What every codec is made of: its form, the receiver's limits, packed codes, and the stream both sides draw alike.

A codec is four plain things, a name, a number on the wire and three functions, so that a family is one module which
imports this one, and `codecs.py` is the only place that knows them all. `key_stream` turns what a message's header says
into random numbers: nothing about them is sent.

    stream = Stream(u64le(SHA-256("nestling-codec/v1" ‖ 0x00 ‖ key)[0:8]), purpose, hex(key))        core/seeds.py

Several codes of 4, 2 or 1 bits share a byte, the first in its lowest bits.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nestling.core.errors import ConfigError, WireError
from nestling.core.seeds import Stream
from nestling.core.vectors import Layout, Vector

FLT_MIN = float(np.finfo(np.float32).tiny)  # smallest normal float32; a smaller step would lose bits as it decodes
FLT_MAX = float(np.finfo(np.float32).max)

Body = bytes | memoryview
Memory = dict[str, np.ndarray]
"""What an encoder keeps from one round to the next on its own side: float32 arrays by name."""


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts, whatever the sender writes.

    The defaults belong together: 1e4 is a float16, so rounding cannot lift a number above it, and 1e4 · √10,000 = 1e6,
    so a layout of up to 10,000 numbers that are each within `max_abs` cannot exceed `max_norm` either. Longer vectors
    need room for rounding: see "Limits" in SPEC.md.

    Args:
        max_examples: the largest number of examples a client may claim, 1 … 2^32 − 1.
        max_abs: the largest absolute value of a number. At least 1, which is the step of an all-zero tensor.
        max_norm: the largest L2 norm of the whole vector.

    Raises `ConfigError` if a limit is outside its range or NaN.

    >>> Limits(max_norm=50.0).max_abs
    10000.0
    """

    max_examples: int = 1_000_000
    max_abs: float = 1e4
    max_norm: float = 1e6

    def __post_init__(self) -> None:
        if not 1 <= self.max_examples < 2**32:
            raise ConfigError(f"is {self.max_examples}", where="max_examples", remedy="Give 1 … 2^32 − 1.")
        if not 1.0 <= self.max_abs <= FLT_MAX:
            raise ConfigError(f"is {self.max_abs}", where="max_abs", remedy="Give 1 … 3.4e38, the range of a float32.")
        if not self.max_norm > 0.0:
            raise ConfigError(f"is {self.max_norm}", where="max_norm", remedy="Give a positive number.")


@dataclass(frozen=True)
class Codec:
    """One way to write a vector: its name, its family's number on the wire and three functions.

    Args:
        name: as `named_codec` reads it, with a parameter after "@" if it has one: ``topk@0.01``.
        id: the family's number on the wire, 0 … 255.
        size: bytes of every body, from the layout alone.
        encode: (layout, vector, key, memory) → body, given finite float32 numbers of shape (layout.size,). May read
            and replace entries of `memory`, which is None for an encoder that is to keep nothing.
        decode: (layout, body, limits, key) → a fresh float32 vector, given a body of the right length. Checks
            everything but the values themselves (`non_finite`, `abs`, `norm`), and raises nothing but `WireError`.

    `key` seeds what both sides must draw alike, through `key_stream`.
    """

    name: str
    id: int
    size: Callable[[Layout], int]
    encode: Callable[[Layout, Vector, bytes, Memory | None], bytes]
    decode: Callable[[Layout, Body, Limits, bytes], Vector]


def key_stream(key: bytes, purpose: str) -> Stream:
    """The random stream that everyone who holds `key` draws alike; one purpose for each thing drawn.

    >>> key_stream(bytes(28), "signs").signs(4).tolist() == key_stream(bytes(28), "signs").signs(4).tolist()
    True
    """
    seed = int.from_bytes(hashlib.sha256(b"nestling-codec/v1\0" + key).digest()[:8], "little")
    return Stream(seed, purpose, key.hex())


def read_scale(body: Body, offset: int, limits: Limits, place: str) -> np.float32:
    """The f32 at `offset`, a scale of `place`. Raises `WireError` (`scale`) unless 2^−126 ≤ scale ≤ max_abs.

    >>> float(read_scale(bytes.fromhex("0000803f"), 0, Limits(), "the message"))
    1.0
    """
    scale = np.frombuffer(body, "<f4", 1, offset)[0]
    if not FLT_MIN <= scale <= limits.max_abs:  # False for NaN
        raise WireError(
            "scale",
            f"the scale of {place} is {scale:.6g}, not a normal number up to {limits.max_abs:.6g}",
            remedy="The sender does not follow the format; drop it.",
        )
    return np.float32(scale)


def pad_error() -> WireError:
    """The error for unused bits of a last byte that are not 0 (`nibble_pad`, whatever their number)."""
    return WireError(
        "nibble_pad",
        "the unused bits of a last byte are not 0",
        remedy="The sender does not follow the format; drop it.",
    )


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes of 8, 4, 2 or 1 bits.

    >>> packed_size(5, 4), packed_size(5, 1)
    (3, 1)
    """
    return (count * bits + 7) // 8


def pack(codes: np.ndarray, bits: int) -> bytes:
    """uint8 codes below 2^bits as bytes, the first code in the lowest bits; the unused bits of a last byte are 0.

    >>> pack(np.array([1, 2, 3], np.uint8), 4).hex()
    '2103'
    """
    per_byte = 8 // bits
    packed = codes[0::per_byte].copy()
    for place in range(1, per_byte):
        part = codes[place::per_byte]
        packed[: part.size] |= part << np.uint8(place * bits)
    return packed.tobytes()


def unpack(body: Body, bits: int) -> np.ndarray:
    """uint8[8 / bits · len(body)]: every code of a body, those in the unused bits of a last byte included.

    >>> unpack(bytes.fromhex("2103"), 4).tolist()
    [1, 2, 3, 0]
    """
    raw = np.frombuffer(body, np.uint8)
    if bits == 8:
        return raw
    per_byte = 8 // bits
    codes = np.empty((raw.size, per_byte), np.uint8)
    for place in range(per_byte):
        codes[:, place] = raw >> np.uint8(place * bits) & np.uint8(2**bits - 1)
    return codes.reshape(-1)
