"""Where a memory writes and reads: the address of a token is made of the tokens before it, the same for all memories.

    k̂_t = (key head h of layer l, before the rotation) / its length          f_t = Σ_j τ_j (k̂_{t−j} − c)
    several heads: f_t = f_t¹ ⊙ f_t² ⊙ …, each of length 1; bound to the token: f_t ⊙ s(x_t), signs s(x) ∈ {−1, 1}^d
    written under k_t = f_{t−1} / ‖f_{t−1}‖                                  read with q_t = f_t / ‖f_t‖

What once stood behind some tokens is found again behind the same ones, as an induction head finds it (Olsson et al.,
arXiv 2209.11895), across any distance. Centres c and taps τ are rules like others; key heads are the frozen model's
own: a few of them tell what a fact is about, whatever follows it (`benchmarks/address.py` finds them).

A delta rule that is given near keys overwrites old values, so addresses must not only be right, but far apart. Three
things see to that. A centre begins at the mean key over random tokens, for keys of a head have most in common.
A product of two heads is near only where both are. And as no such head sees *which* token it stands on, so that all
digits of a number met at one address, signs of the token's number make what follows a 7 and what follows a 3 nearly
orthogonal; they come of the seed, so nothing of it is trained or sent. Binding by products: Gayler, 1998 (MAP).

Source: ours. FedNL (arXiv 2605.16350) takes q and k of each layer and token, which a model with a window gives no
reason to agree: the key of a value and the query for it come of different tokens. Short convolutions over keys, as
DeltaNet has (arXiv 2406.06484), are the nearest relative.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.models.streams import StreamLayer
from nestling.models.window import Seen, attention_layers

TAPS = 4
"""Tokens that an address is made of, at most."""
FIRST_TAPS = (1.0, 1.0, 0.0, 0.0)
"""Before training: the token itself and the one before it, for a value often follows a space or a colon."""


CENTRED_ON = 64
"""Random tokens that the first centre is the mean of, the first few of them left out."""
_AS_SINKS = 4
_STEPS = 2.0**12
"""Centres begin at multiples of 1/_STEPS: a machine that adds in another order hardly ever begins elsewhere."""


@dataclass(frozen=True)
class AddressHead:
    """A key head of a layer, of which addresses are made.

    >>> AddressHead.of("18.2", first_memory=20, layers=30, groups=3)
    AddressHead(layer=18, head=2)
    """

    layer: int
    head: int

    @classmethod
    def of(cls, text: str, *, first_memory: int, layers: int, groups: int) -> "AddressHead":
        """From a setting. `ConfigError` if the model has no such head, or memories lie below it."""
        layer, head = map(int, text.split("."))
        if layer >= layers or head >= groups:
            raise ConfigError(
                f"{text!r} names no key head: there are layers 0 to {layers - 1}, each with heads 0 to {groups - 1}",
                where="adapter.address",
                remedy="Give LAYER.HEAD (several with commas between), or own.",
            )
        if layer > first_memory:
            raise ConfigError(
                f"{text!r} is made above layer {first_memory}, which has a memory already",
                where="adapter.address",
                remedy="Let adapter.layers begin at the address's layer or above it.",
            )
        return cls(layer, head)

    def make(
        self,
        seen: Seen,
        centre: Tensor,
        taps: Tensor,
        stream: StreamLayer | None,
        mask: Tensor | None,
        signs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Addresses to read with and to write under, each float32[B, T, d]; the stream keeps the last tokens' keys.

        Args:
            seen: of this head's layer, the real tokens of each row first.
            centre, taps: rules, [d] and [TAPS].
            stream: this layer's, if the tokens continue one.
            mask: bool [B, T], which tokens are real.
            signs: int8[vocabulary, d] to bind addresses to their tokens, or None. `ConfigError` if `seen` has no ids.
        """
        key = seen.k[:, :, self.head]
        key = F.normalize(key.to(torch.promote_types(key.dtype, torch.float32)), dim=-1) - centre
        batch, tokens, _ = key.shape
        kept = key[:, :, None]
        if signs is not None:
            kept = torch.stack([key, _signs_of(seen.ids, signs).to(key.dtype)], 2)
        before = None if stream is None else stream.before
        line = torch.cat([kept.new_zeros(batch, TAPS, *kept.shape[2:]) if before is None else before, kept], 1)
        if stream is not None:
            stream.before = _last(line, mask)
        # made[:, i] is f of the token before token i
        keys = (line[:, TAPS - 1 - j : TAPS + tokens - j, 0] for j in range(TAPS))
        made = sum((tap * key for tap, key in zip(taps, keys, strict=True)), torch.zeros_like(centre))
        made = F.normalize(made, dim=-1)
        if signs is not None:  # which are of size 1, so that lengths stay
            made = made * line[:, TAPS - 1 :, 1]
        return made[:, 1:], made[:, :-1]


def address_heads(text: str, *, first_memory: int, layers: int, groups: int) -> tuple[AddressHead, ...]:
    """From a setting, the lowest layer first; none for "own". `ConfigError` as of `AddressHead.of`, or for two heads of
    one layer.

    >>> address_heads("18.2,17.1", first_memory=20, layers=30, groups=3)
    (AddressHead(layer=17, head=1), AddressHead(layer=18, head=2))
    """
    if text == "own":
        return ()
    parts = [AddressHead.of(part, first_memory=first_memory, layers=layers, groups=groups) for part in text.split(",")]
    if len({part.layer for part in parts}) < len(parts):
        raise ConfigError(
            f"{text!r} has two heads of one layer", where="adapter.address", remedy="Give heads of different layers."
        )
    return tuple(sorted(parts, key=lambda part: part.layer))


@torch.no_grad()
def first_centres(model: nn.Module, heads: tuple[AddressHead, ...], seed: int) -> Tensor:
    """float32[heads, d]: of each, the mean of its keys, each of length 1, over random tokens. Takes a short pass of the
    model's lower layers; zeros for a model on the meta device."""
    body, attentions = attention_layers(model)
    shape = body.config
    groups = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    device, kept = next(model.parameters()).device, dict[int, Tensor]()
    if device.type == "meta":
        return torch.zeros(len(heads), attentions[0].k_proj.out_features // groups)  # type: ignore[operator, union-attr]

    def keep(layer: int) -> RemovableHandle:
        source = getattr(attentions[layer], "k_norm", None) or attentions[layer].k_proj
        return source.register_forward_hook(lambda module, args, output: kept.__setitem__(layer, output))  # type: ignore[union-attr, operator]

    drawn = Stream(seed, "memory", "address.centre").integers(CENTRED_ON, shape.vocab_size)
    hooks, every = [keep(head.layer) for head in heads], body.layers
    training = [module for module in body.modules() if module.training]  # without dropout, whatever the model is at
    body.eval()
    body.layers = every[: heads[-1].layer + 1]  # type: ignore[index]
    try:
        body(torch.from_numpy(drawn)[None].to(device), use_cache=False)
    finally:
        body.layers = every
        for module in training:
            module.training = True
        for hook in hooks:
            hook.remove()
    keys = torch.stack([kept[head.layer].reshape(CENTRED_ON, groups, -1)[_AS_SINKS:, head.head] for head in heads])
    centre = F.normalize(keys.double(), dim=-1).mean(1)
    return ((centre * _STEPS).round() / _STEPS).float()


@lru_cache(maxsize=4)
def token_signs(seed: int, vocabulary: int, size: int) -> Tensor:
    """int8[vocabulary, size]: the signs of every token; those of a token do not depend on how many there are.

    >>> token_signs(0, 3, 8)[:2].equal(token_signs(0, 2, 8))
    True
    """
    drawn = Stream(seed, "memory", "address.signs").signs(vocabulary * size)
    return torch.from_numpy(drawn.astype(np.int8).reshape(vocabulary, size))


def _signs_of(ids: Tensor | None, signs: Tensor) -> Tensor:
    """int8[B, T, d], of the tokens that are read."""
    if ids is None:
        raise ConfigError(
            "binds addresses to tokens, and was given embeddings alone",
            where="adapter.bind",
            remedy="Give the model input_ids, or set adapter.bind = false.",
        )
    return signs.to(ids.device)[ids]


def _last(line: Tensor, mask: Tensor | None) -> Tensor:
    """The last TAPS of each row, [B, TAPS, 1 or 2, d], where the real tokens come first."""
    if mask is None:
        return line[:, -TAPS:].detach().clone()
    at = mask.sum(1)[:, None] + torch.arange(TAPS, device=line.device)
    return line.gather(1, at[..., None, None].expand(-1, -1, *line.shape[2:])).detach()
