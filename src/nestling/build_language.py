"""The parts of a language run: the frozen model with its tokenizer, its facts or questions, and what to count of it."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from nestling.adapters.layers import layer_numbers
from nestling.adapters.lora import lora_layout
from nestling.adapters.targets import select
from nestling.config.schema import (
    ChoicesConfig,
    FullConfig,
    LanguageConfig,
    LoraConfig,
    MemoryConfig,
    NeedleConfig,
    RunConfig,
)
from nestling.core.errors import ConfigError, ContextError
from nestling.core.vectors import Layout
from nestling.models import assets
from nestling.models.language import empty_language_model, language_shape, load_language_model
from nestling.tasks.choices import ChoicesTask
from nestling.tasks.questions import load_questions
from nestling.tasks.recall import NeedleTask
from nestling.tasks.text import load_text, split_text

Task = NeedleTask | ChoicesTask
WORDNET_FOLDER = Path("/usr/share/wordnet")
"""Of Debian's package wordnet-base."""


def load_language(config: RunConfig, *, note: Callable[[str], object]) -> tuple[nn.Module, Task, Task, Any, str]:
    """The frozen model, the task with all held-out items and with those that are judged after each round, the `Prefix`
    that remembers the layers below the adapter, or None, and the digest of the tokenizer.

    Raises `ContextError` if the model, the text or the questions are missing, `ConfigError` if no item can be made of
    them.
    """
    base, settings = config.base, config.task
    assert isinstance(base, LanguageConfig)
    note(f"loading {base.model}")
    model, tokenizer = load_language_model(base.model, dtype=base.dtype, device=config.machine.device)

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    prefix = _prefix(config, model)
    read, device = prefix.logits if prefix is not None else None, config.machine.device
    if isinstance(settings, ChoicesConfig):
        note("reading the questions")
        questions = load_questions(settings.data, questions_path(settings))
        begin = tokenizer("", verbose=False)["input_ids"][:1]
        begin = begin if begin == [tokenizer.bos_token_id] else []  # where the tokenizer begins a text with it

        def choices(test_items: int) -> ChoicesTask:
            return ChoicesTask(
                tokenize, questions, train_items=settings.train_items, test_items=test_items, begin=begin,
                device=device, read=read,
            )  # fmt: skip

        return model, choices(settings.test_items), choices(settings.round_items), prefix, tokenizer_digest(tokenizer)
    assert isinstance(settings, NeedleConfig)
    needle = settings
    note("reading the text and making the items")
    filler, held_out = split_text(np.array(tokenize(_text(needle))))

    def task(test_items: int) -> NeedleTask:
        try:
            return NeedleTask(
                tokenize,
                filler,
                held_out,
                templates=list(needle.templates),
                length=needle.length,
                train_items=needle.train_items,
                test_items=test_items,
                events=needle.events,
                device=device,
                read=read,
            )
        except ConfigError as error:
            raise ConfigError(error.cause, where=f"task.{error.where}", remedy=error.remedy) from error

    return model, task(needle.test_items), task(needle.round_items), prefix, tokenizer_digest(tokenizer)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256, in hex, of what decides which ids a text becomes: equal weights that are given other ids are of no use.

    What is set anew for each call (padding, truncation), or only makes text of ids, does not count. Of a tokenizer that
    is not one of the library tokenizers, the class, the vocabulary and the ids of some English count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ids = tokenizer.encode(load_text("python-docs")[:20_000], add_special_tokens=False)
        parts = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "ids": ids}
    else:
        whole = json.loads(backend.to_str())
        parts = {name: whole.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _prefix(config: RunConfig, model: Any) -> Any:
    """What lies below the first adapted layer is the same for every state and method of this run. Without a window a
    needle run is not given it: the cache of a long text is not a stream of ours there. Nor is a model whose body is not
    layers and a norm by these names, such as Mamba's."""
    adapter, body = config.adapter, model.base_model
    if not isinstance(adapter, MemoryConfig | LoraConfig) or not (hasattr(body, "layers") and hasattr(body, "norm")):
        return None
    if not adapter.window and isinstance(config.task, NeedleConfig):
        return None
    from nestling.adapters.rules import first_layer  # needs transformers
    from nestling.models.prefix import Prefix

    if isinstance(adapter, MemoryConfig):
        return Prefix(first=first_layer(adapter, model.config))
    return Prefix(first=layer_numbers(adapter.layers, model.config.num_hidden_layers)[0])


def _text(needle: NeedleConfig) -> str:
    if needle.text != "shakespeare":
        return load_text(needle.text, needle.path)
    return load_text("file", str(assets.locate("shakespeare")))


def questions_path(settings: ChoicesConfig) -> str:
    """Where the questions lie: where the settings say, in the cache, or where Debian puts them; empty: on the hub."""
    if settings.path or settings.data == "mmlu":
        return settings.path
    if path := assets.find(settings.data):
        return str(path)
    if settings.data == "wordnet":
        return str(WORDNET_FOLDER)
    raise ContextError("are not on this machine", where=settings.data, remedy=f"nestling fetch {settings.data}")


@dataclass(frozen=True)
class LanguageCount:
    """What can be counted of a language run without weights: the shared layout, the numbers that stay with a client,
    the weights that are adapted and those of the model, and the bytes that one stream needs while it is read."""

    layout: Layout
    local: int
    adapted: int
    weights: int
    stream: dict[str, int]


def count_language(config: RunConfig) -> LanguageCount:
    """Count it. Raises `ContextError` if the model's settings are missing, `ConfigError` if the adapter misfits."""
    assert isinstance(config.base, LanguageConfig)
    shape, adapter = language_shape(config.base.model), config.adapter
    model = empty_language_model(shape)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    weights = sum(sizes.values())
    if isinstance(adapter, MemoryConfig | LoraConfig) and (adapter.window or isinstance(adapter, MemoryConfig)):
        from nestling.models.window import attention_layers, check_window  # needs transformers

        attention_layers(model)
        check_window(shape, window=adapter.window, sinks=adapter.sinks)
    if isinstance(adapter, MemoryConfig):
        return _count_memory(adapter, shape, weights, bytes_per_number=2 if config.base.dtype == "bfloat16" else 4)
    if isinstance(adapter, LoraConfig):
        layout = lora_layout(adapter, model)
        return LanguageCount(layout, 0, _projections(layout, sizes), weights, {})
    assert isinstance(adapter, FullConfig)
    names = select(sizes, adapter.targets, adapter.exclude, what="parameter")
    layout = Layout.of([(n, model.get_parameter(n).shape) for n in names])
    return LanguageCount(layout, 0, layout.size, weights, {})


def _count_memory(adapter: MemoryConfig, shape: Any, weights: int, *, bytes_per_number: int) -> LanguageCount:
    from nestling.adapters.rules import memory_layout, state_bytes  # needs transformers

    layout, local = memory_layout(adapter, shape)
    shared_rules, local_rules = memory_layout(replace(adapter, dim=0), shape)
    return LanguageCount(
        layout,
        local.size,
        shared_rules.size + local_rules.size,
        weights,
        state_bytes(adapter, shape, bytes_per_number=bytes_per_number),
    )


def _projections(layout: Layout, sizes: dict[str, int]) -> int:
    """Weights of the projections that hold a low-rank change: those whose module's name begins an entry's."""
    changed = [name for name in sizes if name.endswith(".weight")]
    return sum(
        sizes[name] for name in changed if any(entry.startswith(name.removesuffix("weight")) for entry in layout.names)
    )
