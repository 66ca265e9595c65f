"""The cache that a model needs: a stream's where something reads in streams, transformers' own elsewhere."""

import pytest
import torch
import transformers
from small import tiny_llama, tiny_mamba
from tolerance import assert_close
from torch import nn

import nestling
from nestling.config.schema import LatentConfig, LoraConfig, MemoryConfig
from nestling.core.errors import ConfigError
from nestling.inference.cache import new_cache
from nestling.models.streams import StreamCache
from nestling.models.window import use_window
from nestling.tasks.text import continuing, token_losses

IDS = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))


def sizes(model: nn.Module) -> tuple[int, set[tuple[int, int]]]:
    cache = new_cache(model)
    assert isinstance(cache, StreamCache)
    return len(cache.layers), {(layer.window, layer.sinks) for layer in cache.layers}


def test_it_is_as_long_as_the_model_and_as_wide_as_its_window() -> None:
    model = tiny_llama(num_hidden_layers=2)
    reader = use_window(model, window=6, sinks=1)
    assert sizes(model) == (2, {(6, 1)})
    assert sizes(model.model) == (2, {(6, 1)})  # the body alone
    reader.remove()
    for config, expected in ((MemoryConfig(layers="1", window=5, sinks=3), (5, 3)), (MemoryConfig(window=0), (0, 0))):
        adapter = nestling.attach(model, config)
        assert sizes(model) == (2, {expected})
        adapter.detach()
    assert isinstance(new_cache(model), transformers.DynamicCache)


def test_lora_has_a_stream_only_with_a_window() -> None:
    pytest.importorskip("peft")
    model = tiny_llama()
    adapter = nestling.attach(model, LoraConfig(window=6, sinks=1))
    assert sizes(model) == (3, {(6, 1)})
    adapter.detach()
    nestling.attach(model, LoraConfig())
    assert isinstance(new_cache(model), transformers.DynamicCache)


def test_a_recurrent_model_has_none_and_no_stream_of_ours() -> None:
    model, ids = tiny_mamba(), IDS % 64
    assert new_cache(model) is None
    with pytest.raises(ConfigError, match="MambaForCausalLM: has a recurrent state"):
        nestling.Session(model)
    with pytest.raises(ConfigError, match="cannot be fed in pieces"):
        token_losses(model, ids, piece=20, new_cache=new_cache)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    losses = token_losses(model, ids, piece=29, new_cache=new_cache)
    assert_close(losses.flatten(), torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none"))


@pytest.mark.parametrize("config", [None, LatentConfig(dim=2), MemoryConfig(window=4, layers="1")], ids=str)
@torch.no_grad()
def test_each_is_new_and_the_model_reads_with_it(config: object) -> None:
    model = tiny_llama()
    if config is not None:
        nestling.attach(model, config)
    first, second = new_cache(model), new_cache(model)
    expected = model(IDS, use_cache=False).logits
    pieces = [model(piece, **continuing(model, first)).logits for piece in IDS.split(11, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)
    assert first.get_seq_length() == 30
    assert second.get_seq_length() == 0
    assert torch.equal(model(IDS, **continuing(model, second)).logits, expected)
