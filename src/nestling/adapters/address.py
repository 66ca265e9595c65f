"""Where a memory writes and reads: the address of a token is made of the tokens before it, the same for all memories.

    k̂_t = (key head h of layer l, before the rotation) / its length          f_t = Σ_j τ_j (k̂_{t−j} − c)
    written under k_t = f_{t−1} / ‖f_{t−1}‖                                  read with q_t = f_t / ‖f_t‖

What once stood behind some tokens is found again behind the same ones, as an induction head finds it (Olsson et al.,
arXiv 2209.11895), across any distance. The centre c and the taps τ are rules like others; the key head is the frozen
model's own: a few of them tell what a fact is about, whatever follows it (`benchmarks/address.py` finds them).

Source: ours. FedNL (arXiv 2605.16350) takes q and k of each layer and token, which a model with a window gives no
reason to agree: the key of a value and the query for it come of different tokens. Short convolutions over keys, as
DeltaNet has (arXiv 2406.06484), are the nearest relative.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.core.errors import ConfigError
from nestling.models.streams import StreamLayer
from nestling.models.window import Seen

TAPS = 4
"""Tokens that an address is made of, at most."""
FIRST_TAPS = (1.0, 1.0, 0.0, 0.0)
"""Before training: the token itself and the one before it, for a value often follows a space or a colon."""


@dataclass(frozen=True)
class AddressHead:
    """Which key head of which layer makes the addresses.

    >>> AddressHead.of("18.2", first_memory=20, layers=30, groups=3)
    AddressHead(layer=18, head=2)
    """

    layer: int
    head: int

    @classmethod
    def of(cls, text: str, *, first_memory: int, layers: int, groups: int) -> "AddressHead | None":
        """From a setting; None for "own". `ConfigError` if the model has no such head, or memories lie below it."""
        if text == "own":
            return None
        layer, head = map(int, text.split("."))
        if layer >= layers or head >= groups:
            raise ConfigError(
                f"{text!r} names no key head: there are layers 0 to {layers - 1}, each with heads 0 to {groups - 1}",
                where="adapter.address",
                remedy="Give LAYER.HEAD, or own.",
            )
        if layer > first_memory:
            raise ConfigError(
                f"{text!r} is made above layer {first_memory}, which has a memory already",
                where="adapter.address",
                remedy="Let adapter.layers begin at the address's layer or above it.",
            )
        return cls(layer, head)

    def make(
        self, seen: Seen, centre: Tensor, taps: Tensor, stream: StreamLayer | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Addresses to read with and to write under, each float32[B, T, d]; the stream keeps the last tokens' keys.

        Args:
            seen: of this head's layer, the real tokens of each row first.
            centre, taps: rules, [d] and [TAPS].
            stream: this layer's, if the tokens continue one.
            mask: bool [B, T], which tokens are real.
        """
        key = seen.k[:, :, self.head]
        key = F.normalize(key.to(torch.promote_types(key.dtype, torch.float32)), dim=-1) - centre
        batch, tokens, size = key.shape
        before = None if stream is None else stream.before
        line = torch.cat([key.new_zeros(batch, TAPS, size) if before is None else before, key], 1)
        if stream is not None:
            stream.before = _last(line, mask)
        # made[:, i] is f of the token before token i
        made = sum((taps[j] * line[:, TAPS - 1 - j : TAPS + tokens - j] for j in range(TAPS)), torch.zeros_like(centre))
        made = F.normalize(made, dim=-1)
        return made[:, 1:], made[:, :-1]


def _last(line: Tensor, mask: Tensor | None) -> Tensor:
    """The last TAPS of each row, [B, TAPS, d], where the real tokens come first."""
    if mask is None:
        return line[:, -TAPS:].detach().clone()
    at = mask.sum(1)[:, None] + torch.arange(TAPS, device=line.device)
    return line.gather(1, at[..., None].expand(-1, -1, line.shape[2])).detach()
