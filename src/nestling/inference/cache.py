"""The cache that a model's streams need: constant in size where the model reads through a window."""

from typing import Any

from torch import nn

from nestling.models.streams import StreamCache
from nestling.models.window import reader_of


def new_cache(model: nn.Module) -> Any:
    """An empty cache for one batch of streams through `model`, for `model(ids, past_key_values=…)` and `generate()`; or
    None for a recurrent model such as Mamba, which in transformers reads on from its state by single tokens only: of
    more at once, the state would be silently left out.

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
    return cache if all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers) else None
