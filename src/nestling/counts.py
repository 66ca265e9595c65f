"""What a run will train, send, hold and take, counted from its settings before any data or weights are read."""

import math
from dataclasses import dataclass, field

import torch

from nestling.adapters.latent import latent_layout
from nestling.adapters.lora import lora_layout
from nestling.adapters.lora_targets import lora_targets
from nestling.adapters.mapping import mapping_layout
from nestling.adapters.targets import find_norms, find_weights, select
from nestling.build import own_settings, payloads, shape_of
from nestling.codec.message import HEADER_SIZE
from nestling.config.schema import (
    BaseConfig,
    FullConfig,
    LanguageConfig,
    LatentConfig,
    LoraConfig,
    MappingConfig,
    RunConfig,
    TaskConfig,
)
from nestling.core.vectors import Layout
from nestling.models.pretrain import make_network
from nestling.models.resnet import orthonormal_rows
from nestling.tasks.sets import TRAINED_ON

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Plan:
    """What a run will train and send, known before any data is read. Bytes are per client and round unless total."""

    method: str
    codec_up: str
    codec_down: str
    trainable_parameters: int
    adapted_parameters: int
    model_parameters: int
    payload_bytes_up: int
    payload_bytes_down: int
    wire_bytes_up: int
    wire_bytes_down: int
    full_payload_bytes: int
    payload_factor: int | float
    total_wire_bytes: int
    rounds: int
    clients_per_round: int
    layout: list[tuple[str, list[int]]]
    local_parameters: int = 0
    """Trained, but never sent."""
    stream_bytes: dict[str, int] = field(default_factory=dict)
    """With a memory: what one stream needs while it is read, its window (and first tokens) and its memory."""
    steps: int | None = None
    """Of all clients in the whole run, reference rows not counted; up to one for each client, round and epoch more
    where shares of images do not fill their last batch; of text and questions as many as train_items allows. None where
    it depends on what is read."""
    weights_bytes: int = 0
    """The model's weights as a client holds them."""
    training_bytes: int = 0
    """What is trained, its gradient and the optimiser's state, as float32; activations come on top of both."""


def plan(config: RunConfig) -> Plan:
    """Count what would be trained and sent, without data, weights or training.

    `full_payload_bytes` is what sending the adapted tensors themselves as float32 would take, `payload_factor` how many
    times more that is than the payload.

    >>> import nestling
    >>> nestling.plan(nestling.load_config("flite-cifar100-resnet18")).payload_bytes_up
    5120
    """
    local, stream = 0, dict[str, int]()
    if isinstance(config.base, LanguageConfig):
        from nestling.build_language import count_language

        counted = count_language(config)
        layout, adapted, weights = counted.layout, counted.adapted, counted.weights
        local, stream = counted.local, counted.stream
    else:
        layout, adapted, weights = _count_items(config)
    up, down = payloads(config, layout)
    asked = config.server.clients_per_round or config.task.clients
    factor = 4 * adapted / up
    return Plan(
        method=config.method,
        codec_up=config.codec.up,
        codec_down=config.codec.down,
        trainable_parameters=layout.size,
        adapted_parameters=adapted,
        model_parameters=weights,
        payload_bytes_up=up,
        payload_bytes_down=down,
        wire_bytes_up=up + HEADER_SIZE,
        wire_bytes_down=down + HEADER_SIZE,
        full_payload_bytes=4 * adapted,
        payload_factor=round(factor) if factor >= 10 else round(factor, 2),
        total_wire_bytes=config.rounds * asked * (up + down + 2 * HEADER_SIZE),
        rounds=config.rounds,
        clients_per_round=asked,
        layout=[(name, list(shape)) for name, shape in layout],
        local_parameters=local,
        stream_bytes=stream,
        steps=count_steps(config),
        weights_bytes=weights * _BYTES[getattr(config.base, "dtype", "float32")],
        training_bytes=4 * (layout.size + local) * (4 if config.local.optimizer == "adamw" else 3),
    )


def count_steps(config: RunConfig) -> int | None:
    """How many optimiser steps all clients take in the whole run, every share filling its batches; None if unknown."""
    task, asked = config.task, config.server.clients_per_round or config.task.clients
    passes = config.rounds * config.local.epochs
    if isinstance(task, TaskConfig):
        items = TRAINED_ON[task.data] * asked // task.clients
        return passes * math.ceil(items / config.local.batch_size)
    if not task.train_items:
        return None
    return passes * asked * math.ceil(task.train_items / config.local.batch_size)


def _count_items(config: RunConfig) -> tuple[Layout, int, int]:
    """What is sent, how many weights it adapts, and how many the model has."""
    of_task, base = own_settings(config)
    channels, classes = shape_of(of_task)
    with torch.device("meta"):
        model = make_network(base, channels=channels, classes=classes)
    if isinstance(base, BaseConfig):
        orthonormal_rows(0, classes, model.head.in_features)  # raises for a classifier that could not be made
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    adapter = config.adapter
    if isinstance(adapter, LatentConfig):
        mapped = find_weights(model, adapter.targets, adapter.exclude)
        norms = find_norms(model, mapped) if adapter.train_norms else []
        layout = latent_layout(mapped, norms, adapter)
        return layout, sum(t.base.numel() for t in mapped + norms), sum(sizes.values())
    if isinstance(adapter, LoraConfig):
        changed = lora_targets(adapter, model).values()
        return lora_layout(adapter, model), sum(m.weight.numel() for m in changed), sum(sizes.values())
    if isinstance(adapter, MappingConfig):
        mapped = find_weights(model, adapter.targets, adapter.exclude)
        return mapping_layout(mapped, adapter), sum(t.base.numel() for t in mapped), sum(sizes.values())
    assert isinstance(adapter, FullConfig)
    names = select(sizes, adapter.targets, adapter.exclude, what="parameter")
    layout = Layout.of([(n, model.get_parameter(n).shape) for n in names])
    return layout, layout.size, sum(sizes.values())
