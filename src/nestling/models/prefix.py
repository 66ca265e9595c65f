"""The layers below everything trained, run once for each item: they are frozen, so their outputs are always the same.

    logits(ids) = upper(lower(ids))     lower: embedding and layers 0 … first − 1, remembered; upper: the rest

With fixed items and an adapter in the upper layers this saves most of a training step on a CPU. Each item goes through
the lower layers alone, so that what is remembered does not depend on which items it shared a batch with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from nestling.models.streams import StreamCache, cache_argument
from nestling.models.window import reader_of


@dataclass
class Prefix:
    """Remembers what the layers below `first` make of each item, up to `limit` bytes; shared by all workers of a run.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> model, ids = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.arange(12).view(2, 6)
    >>> prefix = Prefix(first=1)
    >>> torch.allclose(prefix.logits(model, ids, keep=6), model(ids).logits, atol=1e-5), len(prefix.made)
    (True, 2)
    """

    first: int
    limit: int = 2 << 30
    made: dict[bytes, Tensor] = field(default_factory=dict, repr=False)
    begun: set[bytes] = field(default_factory=set, repr=False)
    """Beginnings of streams that nothing has continued yet."""
    held: int = 0

    def logits(
        self,
        model: nn.Module,
        ids: Int64[Tensor, "b t"],
        keep: int | Int64[Tensor, " keep"],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """The model's logits of the last `keep` positions, or of the positions named, [B, keep, vocabulary]; gradients
        reach the upper layers. With `lengths`, rows are filled up behind their ends, and what is remembered of a row
        does not depend on how far."""
        if self.first == 0:
            return model(ids, use_cache=False, logits_to_keep=keep).logits
        rows = ids if lengths is None else [row[:length] for row, length in zip(ids, lengths, strict=True)]
        hidden = nn.utils.rnn.pad_sequence([self._below(model, row) for row in rows], batch_first=True)
        return self._upper(model, ids, hidden, keep, use_cache=False)

    def logits_after(
        self, model: nn.Module, ids: Int64[Tensor, "b t"], cache: StreamCache, keep: int, *, key: bytes
    ) -> Tensor:
        """The same for tokens that continue the streams in `cache`.

        `key` names these tokens and all before them, in a batch that is always put together in the same way. The lower
        layers of a cache stay empty where what comes next is remembered, so a stream is either remembered from its
        beginning to its end, or not at all. A beginning that another worker has made, and not yet what follows it,
        counts as not remembered.
        """
        name = cache_argument(model.forward)
        # Of the layers above, which alone have read every token of a remembered stream.
        start = cache.layers[self.first].get_seq_length()
        places = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        reading: dict[str, Any] = {name: cache, "use_cache": True, "position_ids": places}
        if self.first == 0:
            return model(ids, logits_to_keep=keep, **reading).logits
        begins, below = start == 0, cache.layers[0].get_seq_length()
        hidden = self.made.get(key) if not below and not (begins and key in self.begun) else None
        if hidden is None:
            assert begins or below, "its beginning was remembered, this was not"
            with torch.no_grad(), _layers(model, 0, self.first):
                hidden = _before_norm(model, ids, **reading)
            if begins and not self._full():
                cache.remembered = key
                self.begun.add(key)
            if cache.remembered is not None:
                self._remember(key, hidden)
                if not begins:
                    self.begun.discard(cache.remembered)
        return self._upper(model, ids, hidden, keep, **reading)

    def _upper(self, model: nn.Module, ids: Tensor, hidden: Tensor, keep: int | Tensor, **reading: Any) -> Tensor:
        reader = reader_of(model)
        if reader is not None:
            reader.embedded = ids
        try:
            with _layers(model, self.first, None):
                logits: Tensor = model(inputs_embeds=hidden, logits_to_keep=keep, **reading).logits
            return logits
        finally:
            if reader is not None:
                reader.embedded = None

    def _full(self) -> bool:
        return self.held >= self.limit

    def _remember(self, key: bytes, hidden: Tensor) -> None:
        self.held += hidden.nbytes if key not in self.made else 0
        self.made[key] = hidden

    def _below(self, model: nn.Module, row: Tensor) -> Tensor:
        key = b"row" + row.cpu().numpy().tobytes()
        if key not in self.made:
            with torch.no_grad(), _layers(model, 0, self.first):
                hidden = _before_norm(model, row[None], use_cache=False)[0]
            if self._full():
                return hidden
            self._remember(key, hidden)
        return self.made[key]


def _before_norm(model: nn.Module, ids: Tensor, **reading: Any) -> Tensor:
    """What the last layer gives: the norm after it belongs to the whole model."""
    kept: list[Tensor] = []
    handle = model.base_model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    try:
        model.base_model(ids, **reading)
    finally:
        handle.remove()
    return kept[0].clone()


@contextmanager
def _layers(model: nn.Module, start: int, stop: int | None) -> Iterator[None]:
    """For a while, the model's body has only these of its layers."""
    body = model.base_model
    every = body.layers
    body.layers = every[start:stop]
    try:
        yield
    finally:
        body.layers = every
