"""The cache that a model's streams need: constant in size where the model reads through a window."""

from typing import Any

from torch import nn

from nestling.models.streams import StreamCache
from nestling.models.window import reader_of


def new_cache(model: nn.Module) -> Any:
    """An empty cache for one batch of streams through `model`, for `model(ids, past_key_values=…)` and `generate()`; or
    None for a model with a recurrent state. Several of those (Mamba, FalconMamba, Jamba and Bamba in transformers 5.24)
    silently drop it where they are given more than one further token, and none can be repeated for several answers.

    Args:
        model: a causal language model of transformers; with a window or a memory on it the cache is a `StreamCache`,
            otherwise transformers' own, which grows with every token.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    >>> type(new_cache(LlamaForCausalLM(LlamaConfig(**sizes)))).__name__
    'DynamicCache'
    """
    reader = reader_of(model)
    if reader is not None:
        return StreamCache(len(reader.layers), window=reader.window, sinks=reader.sinks)
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    return None if any(hasattr(layer, "recurrent_states") for layer in cache.layers) else cache
