"""What a stream leaves in a model that reads in constant space: per layer a window, the first tokens, and a memory.

It is a cache of transformers in form, so that `model.generate()` works, but nothing in it grows (with a window), and it
is private: it holds what a user said. It refuses to be copied, pickled or saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nestling.core.errors import ContextError, PrivateStateError


def cache_argument(forward: Callable[..., object]) -> str:
    """What a forward pass calls its cache: newer versions of transformers have another name for it.

    >>> cache_argument(lambda ids, past_key_values=None: None)
    'past_key_values'
    """
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


@dataclass
class Held:
    """The static path's share: the last tokens and the first ones. `count`: the real tokens that each row has read."""

    keys: Float[Tensor, "b w h d"]
    values: Float[Tensor, "b w h d"]
    first_keys: Float[Tensor, "b s h d"]
    first_values: Float[Tensor, "b s h d"]
    count: Int64[Tensor, " b"]
    new_values: Tensor


class Private:
    """Refuses every way out of the process."""

    def _refuse(self, *args: object) -> NoReturn:
        raise PrivateStateError(
            "is private to its stream, and is neither copied nor stored",
            where=type(self).__name__,
            remedy="Read the stream again where you need it.",
        )

    __reduce_ex__ = __reduce__ = __getstate__ = __copy__ = __deepcopy__ = _refuse


class StreamLayer(Private, CacheLayerMixin):
    """One layer's state. `held` and `keep` are for attention; the rest is what transformers asks of a cache."""

    is_sliding = False
    is_compileable = False

    def __init__(self, *, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks = window, sinks
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None
        self.memory: Tensor | None = None
        self.before: Tensor | None = None
        """Of the last few tokens, what the next ones' addresses are made of."""
        self.count: Tensor | None = None
        self.columns = 0
        """Tokens read, padding included, as transformers counts them."""

    def __repr__(self) -> str:
        return f"StreamLayer(window={self.window}, sinks={self.sinks}, tokens={self.columns})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is set up ahead."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """With a window: the new keys and values as they are (`held` has the others). Without: all of them."""
        self.columns += key_states.shape[2]
        if self.window:
            return key_states, value_states
        if self.keys is None or self.values is None:
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        return self.keys, self.values

    def held(self, k: Tensor, v: Tensor) -> Held:
        """What attention needs of the tokens before k and v [B, T, H, d]; zeros and a count of 0 at the beginning."""
        if self.keys is None or self.values is None or self.first is None or self.count is None:
            batch, _, heads, size = k.shape
            window, first = k.new_zeros(batch, self.window, heads, size), k.new_zeros(batch, self.sinks, heads, size)
            return Held(window, window, first, first, torch.zeros(batch, dtype=torch.int64, device=k.device), v)
        return Held(self.keys, self.values, *self.first, self.count, v)

    def keep(self, k: Tensor, v: Tensor, first: Any, lengths: Tensor | None) -> None:
        """Hold the last tokens of each row, after k and v have been read."""
        held = self.held(k, v)
        tokens = k.shape[1]
        if lengths is None:
            self.keys = torch.cat([held.keys, k], 1)[:, tokens:].clone()
            self.values = torch.cat([held.values, v], 1)[:, tokens:].clone()
            self.count = held.count + tokens
        else:
            at = lengths[:, None] + torch.arange(self.window, device=k.device)
            at = at[..., None, None].expand(-1, -1, *k.shape[2:])
            self.keys = torch.cat([held.keys, k], 1).gather(1, at)
            self.values = torch.cat([held.values, v], 1).gather(1, at)
            self.count = held.count + lengths
        self.first = first.keys, first.values

    def tensors(self) -> dict[str, Tensor]:
        """What the layer holds, by name."""
        first = self.first or (None, None)
        named = {"keys": self.keys, "values": self.values, "first_keys": first[0], "first_values": first[1]}
        named |= {"memory": self.memory, "before": self.before, "count": self.count}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the mask that the model's own attention needs: (keys, offset)."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens read, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """There is none."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget the stream; what was held is overwritten with zeros first."""
        with torch.inference_mode():  # whether they were read with gradients, without, or in this mode
            for tensor in self.tensors().values():
                tensor.zero_()
        self.keys = self.values = self.first = self.memory = self.before = self.count = None
        self.columns = 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        pick = lambda x: None if x is None else x.index_select(0, rows.to(x.device))  # noqa: E731
        self.keys, self.values, self.count = map(pick, (self.keys, self.values, self.count))
        self.memory, self.before = pick(self.memory), pick(self.before)
        if self.first is not None:
            self.first = pick(self.first[0]), pick(self.first[1])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        tensors = self.tensors()
        if tensors:
            rows = next(iter(tensors.values())).shape[0]
            device = next(iter(tensors.values())).device
            self.select(torch.arange(rows, device=device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """A stream cannot be unread."""
        raise PrivateStateError("cannot be unread", where="StreamLayer", remedy="Reset it and read the part again.")


class StreamCache(Private, Cache):
    """All layers' state of one batch of streams. With a window its size does not depend on their length.

    Raises `PrivateStateError` where it is copied or pickled.

    >>> cache = StreamCache(2, window=4, sinks=1)
    >>> cache.get_seq_length(), cache.nbytes
    (0, 0)
    """

    def __init__(self, layers: int, *, window: int, sinks: int) -> None:
        super().__init__(layers=[StreamLayer(window=window, sinks=sinks) for _ in range(layers)])
        self.padded = False
        """Whether padding was among what it read."""
        self.remembered: bytes | None = None
        """The key of the stream's beginning, if the layers below an adapter are remembered (`models/prefix.py`)."""
        self.reading = False
        """From the beginning of a forward pass to its good end."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `StreamLayer.update`. Raises `ContextError` for a model that does not read in this way."""
        if not self.reading:
            raise ContextError(
                "belongs to a model with a window or a memory on it", where="StreamCache", remedy="Use its own cache."
            )
        return super().update(key_states, value_states, layer_idx, **kwargs)

    def reset(self) -> None:
        """Forget the streams; what was held is overwritten with zeros first."""
        super().reset()
        self.padded = self.reading = False
        self.remembered = None

    def __repr__(self) -> str:
        return f"StreamCache({len(self.layers)} layers, {self.get_seq_length()} tokens, {self.nbytes:,} bytes)"

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens read, padding included, by a layer or by the one that has read most."""
        if layer_idx is not None:
            return self.layers[layer_idx].get_seq_length()
        return max(layer.get_seq_length() for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors().values())
