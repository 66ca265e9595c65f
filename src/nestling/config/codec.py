"""How the trained vector becomes bytes, up and down: a family, its bits, and what is done about what it loses."""

from dataclasses import dataclass
from typing import Literal

from nestling.config.checks import at_least, is_count, is_one_of
from nestling.core.errors import ConfigError


@dataclass(frozen=True)
class CodecConfig:
    """How the trained vector becomes bytes."""

    kind: Literal["plain", "rotated", "topk", "randomk", "powersgd"] = "plain"
    """What a client sends. plain: every number; rotated: every number, turned by a map both sides know; topk, randomk:
    some of them; powersgd: factors of low rank."""
    bits: Literal[32, 16, 8, 4, 2, 1] = 32
    """Bits of a number sent by a client: 32 to 2 if plain, 4 to 1 if rotated; the other kinds have their own."""
    scale: Literal["message", "tensor"] = "message"
    """For 8, 4 and 2 bits: one scale and zero for the whole message (as in the paper), or one scale per tensor."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Of a client's plain numbers of 8, 4 or 2 bits. stochastic: up or down at random, right on average."""
    share: float = 0.01
    """Of topk and randomk: which part of the numbers is sent."""
    rank: int = 2
    """Of powersgd."""
    feedback: bool = False
    """A client adds what its last message lost to its next one (needs send = "delta")."""
    down_kind: Literal["plain", "rotated"] = "plain"
    """What the server sends."""
    down_bits: Literal[32, 16, 8, 4, 2, 1] = 32
    """Bits of a number sent by the server, always rounded to the nearest."""
    send: Literal["state", "delta"] = "delta"
    """A client sends what it trained (state), or its difference from what it received (delta)."""

    def __post_init__(self) -> None:
        is_one_of("codec.kind", self.kind, ("plain", "rotated", *PARTIAL))
        is_one_of("codec.down_kind", self.down_kind, ("plain", "rotated"))
        is_one_of("codec.bits", self.bits, (32, 16, 8, 4, 2, 1))
        is_one_of("codec.down_bits", self.down_bits, (32, 16, 8, 4, 2, 1))
        _fits_kind("codec.bits", self.bits, self.kind)
        _fits_kind("codec.down_bits", self.down_bits, self.down_kind)
        is_one_of("codec.scale", self.scale, ("message", "tensor"))
        is_one_of("codec.rounding", self.rounding, ("nearest", "stochastic"))
        is_one_of("codec.send", self.send, ("state", "delta"))
        at_least("codec.share", self.share, 0, strict=True)
        is_count("codec.rank", self.rank, 1, 1024)
        if self.share > 1 or float(f"{self.share:g}") != self.share:  # its name is what both sides agree on
            raise ConfigError(
                f"{self.share!r} is not allowed", where="codec.share", remedy="Give at most 1, in six digits or fewer."
            )
        if self.rounding == "stochastic" and (self.kind != "plain" or self.bits > 8):
            raise ConfigError(
                f"stochastic does not go with {self.up}",
                where="codec.rounding",
                remedy='It is for kind = "plain" and 8, 4 or 2 bits.',
            )
        if self.send == "state" and self.kind in PARTIAL:
            raise ConfigError(
                f"state does not go with {self.kind}",
                where="codec.send",
                remedy='Give "delta": what is left out of a state would count as 0.',
            )
        if self.send == "state" and self.feedback:
            raise ConfigError(
                'is for differences, but send = "state"', where="codec.feedback", remedy='Give send = "delta".'
            )

    @property
    def up(self) -> str:
        """Name of the codec of a client's message."""
        if self.kind in ("topk", "randomk"):
            return f"{self.kind}@{self.share:g}"
        return f"powersgd@{self.rank}" if self.kind == "powersgd" else codec_name(self.kind, self.bits, self.scale)

    @property
    def down(self) -> str:
        """Name of the codec of the server's message."""
        return codec_name(self.down_kind, self.down_bits, self.scale)


PARTIAL = ("topk", "randomk", "powersgd")
"""Kinds of codec that leave out most of a vector, so that only a difference can be sent."""


def _fits_kind(where: str, bits: int, kind: str) -> None:
    """Refuse a number of bits that this kind of codec does not have."""
    allowed = {"plain": (32, 16, 8, 4, 2), "rotated": (4, 2, 1)}.get(kind, (32,))
    if bits not in allowed or isinstance(bits, bool):
        choice = ", ".join(map(str, allowed)) if kind not in PARTIAL else "32: what it sends has a form of its own"
        raise ConfigError(f"{bits} does not go with {kind}", where=where, remedy=f"Give {choice}.")


def codec_name(kind: str, bits: int, scale: str) -> str:
    """The codec that `codec/codecs.py` knows under these three settings.

    >>> codec_name("plain", 4, "message"), codec_name("plain", 16, "message"), codec_name("rotated", 2, "message")
    ('int4-message', 'float16', 'rotated2')
    """
    if kind == "rotated":
        return f"rotated{bits}"
    return f"float{bits}" if bits >= 16 else f"int{bits}-{scale}"
