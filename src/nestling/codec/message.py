"""One message: a header of 64 bytes, and a body whose length both sides knew beforehand.

What both sides agreed on (base, layout, seed, run, round-start state) is one 128-bit `context_id`, so a message made
for anything else is refused before its body is looked at. Nothing a sender writes decides how much memory is used,
which code runs, or what an object is: there is no compression, no nesting and no name in the format.

    header = magic version codec flags total_len round context_id client attempt num_examples digest
    digest = SHA-256(header[0:48] + body)[0:16]         finds corruption; it does not prove who sent it

The definition is SPEC.md, beside this file.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from nestling.codec.codecs import FAMILIES, body_size, decode_body, encode_body, named_codec
from nestling.codec.form import Limits, Memory
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.vectors import Layout, Vector

__all__ = ["HEADER_SIZE", "VERSION", "Direction", "Header", "Limits", "context_id", "decode", "encode"]
__all__ += ["message_key", "peek", "state_digest"]

HEADER_SIZE = 64
VERSION = 1
IS_DIFFERENCE = 1  # flags, bit 0; the other fifteen are reserved
LARGEST = 2**32 - 1  # what total_len can say

Direction = Literal["uplink", "downlink"]
MAGIC: dict[Direction, bytes] = {"uplink": b"NSU1", "downlink": b"NSD1"}
_DIRECTIONS = {magic: direction for direction, magic in MAGIC.items()}
_BUFFERS = (bytes, bytearray, memoryview)

_FIELDS = struct.Struct("<4sBBHII16sQII16s")
_KEY = struct.Struct("<16sIQ")
_DIGEST_AT = 48
assert _FIELDS.size == HEADER_SIZE


@dataclass(frozen=True)
class Header:
    """The header of a message, taken apart.

    `direction` is uplink (client to server) or downlink. With `is_difference` the body is the change since the round's
    start state, otherwise a whole state. `client` is the sender of an uplink and the addressee of a downlink.
    `attempt` is for reading only. `digest` is as received.
    """

    direction: Direction
    version: int
    codec: str
    is_difference: bool
    total_len: int
    round: int
    context: bytes
    client: int
    attempt: int
    num_examples: int
    digest: bytes


def context_id(spec: Mapping[str, object]) -> bytes:
    """16 bytes that stand for everything both sides agreed on; equal exactly when the canonical JSON is equal.

    Keys are strings; values are what JSON can hold. Prefer strings and integers: a 64-bit seed is a hex string.
    Raises `ContextError` if `spec` has no canonical JSON (NaN, infinity, an object).

    >>> context_id({"seed": "00000000000004d2", "run": "a"}) == context_id({"run": "a", "seed": "00000000000004d2"})
    True
    """
    try:
        text = json.dumps(dict(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ContextError(
            f"cannot be written as canonical JSON ({error})", where="context", remedy="Use strings and integers."
        ) from error
    return hashlib.sha256(b"nestling-context/v1\0" + text.encode("ascii")).digest()[:16]


def state_digest(vector: Vector) -> str:
    """SHA-256, in hex, of a float32[n] state's little-endian bytes.

    >>> import numpy as np
    >>> state_digest(np.zeros(2, np.float32))[:16]
    'af5570f5a1810b7a'
    """
    return hashlib.sha256(vector.astype("<f4").tobytes()).hexdigest()


def message_key(context: bytes, round: int, client: int) -> bytes:
    """28 bytes that a codec's random numbers are seeded with: what the header says of the context, round and client.

    >>> message_key(bytes(16), 1, 7).hex(" ", -16)
    '00000000000000000000000000000000 010000000700000000000000'
    """
    return _KEY.pack(context, round, client)


def encode(
    layout: Layout,
    vector: Vector,
    *,
    direction: Direction,
    codec: str,
    is_difference: bool,
    round: int,
    context: bytes,
    client: int,
    num_examples: int,
    attempt: int = 0,
    memory: Memory | None = None,
    stochastic: bool = False,
) -> bytes:
    """The message that carries `vector`, float32 of shape (layout.size,). A downlink has 0 examples.

    `memory` and `stochastic` are those of `encode_body`; its key is `message_key` of this header.

    Raises `WireError` with code `field` (a number does not fit its field), `context` (not 16 bytes), `num_examples`,
    `length` (over 4 GiB), `non_finite` or `overflow`; `ContextError` if the vector is not one of this layout;
    `ConfigError` on an unknown codec or a rounding it does not know.

    >>> import numpy as np
    >>> layout = Layout.of([("latent", (1280,))])
    >>> message = encode(layout, np.zeros(1280, np.float32), direction="uplink", codec="int4-message",
    ...                  is_difference=True, round=1, context=bytes(16), client=7, num_examples=500)
    >>> len(message)
    712
    """
    for name, value, bits in (("round", round, 32), ("client", client, 64), ("attempt", attempt, 32)):
        if not 0 <= value < 2**bits:
            raise WireError("field", f"{name} is {value}", remedy=f"It must fit {bits} bits without a sign.")
    if len(context) != 16:
        raise WireError("context", f"the context has {len(context)} bytes", remedy="Make it with context_id().")
    _check_examples(direction, num_examples, LARGEST)
    total = HEADER_SIZE + body_size(codec, layout)
    if total > LARGEST:
        raise WireError("length", f"the message would have {total} bytes", remedy="Send fewer numbers, or fewer bits.")
    key = message_key(context, round, client)
    body = encode_body(codec, layout, vector, key=key, memory=memory, stochastic=stochastic)
    head = _FIELDS.pack(
        MAGIC[direction],
        VERSION,
        named_codec(codec).id,
        IS_DIFFERENCE if is_difference else 0,
        total,
        round,
        context,
        client,
        attempt,
        num_examples,
        bytes(16),
    )[:_DIGEST_AT]
    return head + _digest(head, body) + body


def decode(
    message: object,
    *,
    direction: Direction,
    layout: Layout,
    context: bytes,
    round: int,
    client: int,
    codecs: Collection[str],
    limits: Limits,
) -> tuple[Header, Vector]:
    """Header and float32[layout.size] of a message, or a `WireError`. Nothing in `message` is believed.

    `message` is bytes, bytearray or memoryview; `client` is the identity the channel has proved; `codecs` are the names
    the run allows, at most one of each family. The error's code is the first of these that fails: `type`, `short`,
    `length`, `magic`, `version`, `flags`, `codec`, `length`, `digest`, `context`, `stale_round` or `future_round`,
    `client`, `num_examples`, then those of `decode_body`. `ConfigError` if `codecs` names one that does not
    exist, or two of a family, which a message cannot tell apart.

    >>> import numpy as np
    >>> layout, who = Layout.of([("latent", (2,))]), dict(context=bytes(16), round=1, client=7)
    >>> message = encode(layout, np.array([1, -2], np.float32), direction="uplink", codec="float32",
    ...                  is_difference=True, num_examples=500, **who)
    >>> header, vector = decode(message, direction="uplink", layout=layout, codecs=["float32"], limits=Limits(), **who)
    >>> header.num_examples, vector
    (500, array([ 1., -2.], dtype=float32))
    """
    allowed = [named_codec(name) for name in codecs]
    sizes = {codec.name: HEADER_SIZE + codec.size(layout) for codec in allowed}
    names = {codec.id: codec.name for codec in allowed}
    if len(names) < len(sizes):
        raise ConfigError(
            f"{', '.join(sizes)}: two have one number on the wire", where="codecs", remedy="Allow one of a family."
        )
    header, data = _parse(message, [direction], names, max(sizes.values(), default=HEADER_SIZE))
    _check_length(header, data, sizes[header.codec])
    _check_digest(header, data)
    if header.context != context:
        raise WireError(
            "context",
            f"is for context {header.context.hex()[:8]}…, this run has {context.hex()[:8]}…",
            remedy="Base, layout, seed, run or start state differ; compare them in the handshake.",
        )
    if header.round != round:
        code = "stale_round" if header.round < round else "future_round"
        raise WireError(code, f"is for round {header.round}, this is round {round}", remedy="Drop it.")
    if header.client != client:
        raise WireError(
            "client",
            f"names client {header.client}, the channel says {client}",
            remedy="Drop it; a client may speak only for itself.",
        )
    _check_examples(direction, header.num_examples, limits.max_examples)
    key = message_key(header.context, header.round, header.client)
    return header, decode_body(header.codec, layout, memoryview(data)[HEADER_SIZE:], limits, key=key)


def peek(message: object) -> Header:
    """The header of an undamaged message of either direction, without knowing its layout or context.

    Its `codec` is the name before "@", for a parameter is nothing a message says.

    Raises `WireError` with the codes of `decode` up to `digest`. The body is not decoded, so it may still be refused.

    >>> import numpy as np
    >>> layout = Layout.of([("latent", (4,))])
    >>> peek(encode(layout, np.ones(4, np.float32), direction="downlink", codec="float16", is_difference=False,
    ...             round=3, context=bytes(16), client=0, num_examples=0)).codec
    'float16'
    """
    header, data = _parse(message, list(MAGIC), FAMILIES, LARGEST)
    _check_length(header, data, len(data))
    _check_digest(header, data)
    return header


def _parse(
    message: object, directions: Collection[Direction], codecs: Mapping[int, str], largest: int
) -> tuple[Header, bytes]:
    """Checks up to `codec`. The bytes returned are ours: the sender's buffer can no longer change under the digest."""
    if not isinstance(message, _BUFFERS):
        raise WireError("type", f"is a {type(message).__name__}", remedy="Give bytes, bytearray or memoryview.")
    size = memoryview(message).nbytes
    if size < HEADER_SIZE:
        raise WireError("short", f"has {size} bytes, the header alone has {HEADER_SIZE}", remedy="It was cut off.")
    if size > largest:
        raise WireError("length", f"has {size} bytes, at most {largest} are possible here", remedy="Drop it unread.")
    data = bytes(message)
    magic, version, number, flags, total, turn, context, client, attempt, examples, digest = _FIELDS.unpack_from(data)
    direction = _DIRECTIONS.get(magic)
    if direction is None or direction not in directions:
        wanted = " or ".join(str(MAGIC[name])[2:-1] for name in directions)
        raise WireError("magic", f"begins with {magic.hex()}, not with {wanted}", remedy="Is it a Nestling message?")
    if version != VERSION:
        raise WireError(
            "version",
            f"has format version {version}, this program reads version {VERSION}",
            remedy="Install the same release on both sides.",
        )
    if flags & ~IS_DIFFERENCE:
        raise WireError("flags", f"has flags 0x{flags:04x}, only bit 0 is defined", remedy="Drop it.")
    codec = codecs.get(number)
    if codec is None:
        known = ", ".join(f"{number} ({name})" for number, name in codecs.items())
        raise WireError(
            "codec",
            f"uses codec {number}, allowed are {known or 'none'}",
            remedy="Use the same codec setting on both sides.",
        )
    difference = bool(flags & IS_DIFFERENCE)
    header = Header(direction, version, codec, difference, total, turn, context, client, attempt, examples, digest)
    return header, data


def _check_length(header: Header, data: bytes, expected: int) -> None:
    if header.total_len != len(data):
        cause = f"has {len(data)} bytes, but its header says {header.total_len}"
        raise WireError("length", cause, remedy="It was cut off or extended.")
    if len(data) != expected:
        cause = f"has {len(data)} bytes, this layout and codec take {expected}"
        raise WireError("length", cause, remedy="The two sides have different layouts.")


def _check_digest(header: Header, data: bytes) -> None:
    found = _digest(data[:_DIGEST_AT], memoryview(data)[HEADER_SIZE:])
    if not hmac.compare_digest(found, header.digest):
        raise WireError("digest", "was changed on its way", remedy="Ask for it again.")


def _check_examples(direction: Direction, num_examples: int, largest: int) -> None:
    if direction == "downlink" and num_examples != 0:
        raise WireError("num_examples", f"a downlink claims {num_examples} examples", remedy="It must be 0.")
    if direction == "uplink" and not 1 <= num_examples <= largest:
        raise WireError(
            "num_examples",
            f"claims {num_examples} examples, the range is 1 … {largest}",
            remedy="A client without data declines the round.",
        )


def _digest(head: bytes, body: bytes | memoryview) -> bytes:
    state = hashlib.sha256(head)
    state.update(body)
    return state.digest()[:16]
