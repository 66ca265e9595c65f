"""What server and clients agreed on before the first round; a 16-byte digest of it is in every message."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestling.codec.form import Limits
from nestling.codec.message import context_id
from nestling.config.schema import CodecConfig
from nestling.core.vectors import Layout

EVERYONE = 2**64 - 1
"""Client number of a broadcast."""


@dataclass(frozen=True)
class Agreement:
    """Layout, codecs and limits, and a `spec` of all else: base hash, adapter, run.

    A codec's name holds its parameter, so two sides that disagree on a share or a rank have different contexts.
    """

    layout: Layout
    codec: CodecConfig
    limits: Limits
    spec: Mapping[str, Any]

    def context(self, state: str = "") -> bytes:
        """The context of a broadcast; with the digest of a round's start state, that of a reply in that round.

        So a client that was sent another state than the others cannot be averaged with them unnoticed.
        """
        layout = [[name, list(shape)] for name, shape in self.layout]
        policy = {"up": self.codec.up, "down": self.codec.down, "send": self.codec.send}
        return context_id({**self.spec, "layout": layout, "codec": policy, "state": state})
