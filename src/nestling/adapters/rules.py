"""Which rules a memory has: their names, shapes and bytes, how they begin, and how latents change them.

Everything but `first_rule` and `rule_map` is known from the model's configuration alone, without weights.
"""

from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.adapters.address import FIRST_TAPS, TAPS, AddressHead, address_heads
from nestling.adapters.layers import layer_numbers
from nestling.config.schema import MemoryConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.core.vectors import Layout
from nestling.kernels.signs.dispatch import SignMap, make_map


def rule_layouts(config: MemoryConfig, shape: Any) -> tuple[Layout, Layout]:
    """Names and shapes of the rules that are shared, and of those that stay with a client.

    Args:
        config: of the adapter.
        shape: the model's configuration in transformers; no weights are needed.

    Raises `ConfigError` for layers that the model has not, or a rank above its hidden size.

    >>> from transformers import LlamaConfig
    >>> shape = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> rules, local = rule_layouts(MemoryConfig(layers="all", low_rank="frozen"), shape)
    >>> rules.names[:3], rules.size, local.size
    (('layers.0.write.weight', 'layers.0.write.bias', 'layers.0.gate'), 140, 0)
    """
    hidden, heads, groups, size = head_sizes(shape)
    if config.rank > hidden:
        raise ConfigError(
            f"{config.rank} is more than the model's {hidden} hidden numbers, which already allow any change",
            where="adapter.rank",
            remedy=f"Give {hidden} or less.",
        )
    shared: list[tuple[str, tuple[int, ...]]] = []
    made_of = len(heads_of(config, shape))
    if made_of:
        shared += [("address.centre", (made_of, size)), ("address.taps", (made_of, TAPS))]
    low: list[tuple[str, tuple[int, ...]]] = []
    for number in layer_numbers(config.layers, shape.num_hidden_layers):
        at = f"layers.{number}"
        if config.low_rank == "trained":
            own = () if made_of else (("q", heads), ("k", groups))
            for name, count in (*own, ("v", groups)):
                entries = [(f"{at}.{name}.A", (config.rank, hidden)), (f"{at}.{name}.B", (count * size, config.rank))]
                (shared if config.share == "rules" else low).extend(entries)
        shared += [(f"{at}.write.weight", (groups, hidden)), (f"{at}.write.bias", (groups,))]
        if config.gate != "none":
            shared.append((f"{at}.gate", (heads,) if config.gate == "head" else (heads * size,)))
        if config.forget:
            shared.append((f"{at}.forget", (groups,)))
    return Layout.of(shared), Layout.of(low)


def memory_layout(config: MemoryConfig, shape: Any) -> tuple[Layout, Layout]:
    """Layouts of what is sent, and of what stays with a client; with `dim` the former is the latents'."""
    rules, local = rule_layouts(config, shape)
    if config.dim:
        rules = Layout.of([(name, (min(config.dim, _count(size)),)) for name, size in rules])
    return rules, local


def state_bytes(config: MemoryConfig, shape: Any, *, bytes_per_number: int = 2) -> dict[str, int]:
    """Bytes that one stream holds: of the window and first tokens (0 without a window), and of the float32 memory."""
    _, _, groups, size = head_sizes(shape)
    tokens = config.window + config.sinks if config.window else 0
    layers = shape.num_hidden_layers
    numbers = len(layer_numbers(config.layers, layers)) * groups * size * size
    if made_of := len(heads_of(config, shape)):
        numbers += TAPS * size * (made_of + config.bind)
    return {"window": layers * tokens * 2 * groups * size * bytes_per_number, "memory": numbers * 4}


def heads_of(config: MemoryConfig, shape: Any) -> tuple[AddressHead, ...]:
    """The key heads that make addresses, none if each layer has its own; `ConfigError` for one that cannot."""
    layers = shape.num_hidden_layers
    first = layer_numbers(config.layers, layers)[0]
    return address_heads(config.address, first_memory=first, layers=layers, groups=head_sizes(shape)[2])


def first_layer(config: MemoryConfig, shape: Any) -> int:
    """The lowest layer that the adapter changes or listens to: what lies below is the same for every state."""
    heads = heads_of(config, shape)
    return heads[0].layer if heads else layer_numbers(config.layers, shape.num_hidden_layers)[0]


def head_sizes(shape: Any) -> tuple[int, int, int, int]:
    """Hidden size, query heads, key/value heads, and size of a head."""
    heads = shape.num_attention_heads
    groups = getattr(shape, "num_key_value_heads", None) or heads
    return shape.hidden_size, heads, groups, getattr(shape, "head_dim", None) or shape.hidden_size // heads


def _count(size: tuple[int, ...]) -> int:
    return int(np.prod(size))


def first_rule(name: str, size: tuple[int, ...], config: MemoryConfig) -> Tensor:
    """Rules before training: A random signs of size 1/√h, B zero, gates closed, weak writes, and hardly any decay;
    addresses of two tokens."""
    if name.endswith(".A"):
        signs = Stream(config.seed or 0, "memory", name).signs(_count(size)).reshape(size)
        return torch.from_numpy(signs / np.float32(sqrt(size[1])))
    if name == "address.taps":
        return torch.tensor(FIRST_TAPS).repeat(size[0], 1)
    fill = {"bias": config.write_bias, "forget": 6.0}.get(name.rpartition(".")[2], 0.0)
    return torch.full(size, fill)


def rule_map(name: str, size: tuple[int, ...], config: MemoryConfig) -> SignMap:
    """How latents become the change of one rule. Most rules start at 0, so the scale is by what training moves them."""
    scale = 1 / sqrt(size[-1]) if name.endswith((".A", ".B", ".weight")) else 1.0
    dim = min(config.dim, _count(size))
    return make_map(config.seed or 0, f"memory/{name}", rows=_count(size), dim=dim, rank=dim, scale=scale)
