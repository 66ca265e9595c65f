"""A client's share of the work: some epochs on its own items, from the state it was given, by the local rule.

    plain   epochs of the task's loss                                       prox   with a pull to where it began
    ssi     with a pull on what earlier rounds found important              ala    from a blend with its own last state

The rules' mathematics is in `strategies/`; here they meet an adapter and a task. What a client keeps for its next round
is given and returned as plain arrays by name, its `ClientState`; the optimiser is a fresh one unless it is kept, too. A
client that has nothing to train on or whose loss stops being finite declines instead of sending a number that means
nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil, isfinite
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.base import Adapter
from nestling.config.schema import LocalConfig
from nestling.core.vectors import Vector
from nestling.strategies import fedala, fedssi
from nestling.strategies.diloco import load_optimizer_arrays, optimizer_arrays
from nestling.strategies.fedprox import add_pull

ClientState = dict[str, np.ndarray]
"""What one client keeps between rounds, and no one else sees: arrays by dotted name. ``adapter`` is the part of an
adapter that never travels, ``rule.…`` the local rule's, ``optimizer.…`` the optimiser's, ``codec.…`` the codec's."""


class Declined(Exception):
    """A client sends nothing this round. `code` is stable: `no_data`, `loss_not_finite` or `local_not_finite`."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


@runtime_checkable
class Batches(Protocol):
    """What training needs of a task."""

    def examples(self, client: int | None) -> int: ...
    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...


def train_by_rule(
    model: nn.Module,
    adapter: Adapter,
    task: Batches,
    config: LocalConfig,
    memory: ClientState,
    *,
    client: int,
    seed: int,
    epochs: range,
    of: int,
) -> ClientState:
    """A client's round by `config.rule`: trains the adapter's state in place, from the state it holds.

    `memory` is what the client kept, and is left alone; returns the ``rule.…`` and ``optimizer.…`` entries to keep in
    place of its own. Other arguments and errors as `train_local`.
    """
    kept: ClientState = {}
    settings: dict[str, Any] = {"client": client, "seed": seed, "epochs": epochs, "of": of}
    optimizer = make_optimizer(adapter, config)
    if config.keep_optimizer:
        load_optimizer_arrays(optimizer, memory)
    pulls: list[float | Tensor] = []
    if config.rule == "prox" and config.mu:
        pulls = [config.mu] * len(adapter.trainable())
    elif config.rule == "ssi":
        pulls = fedssi.pulls(memory, adapter.trainable(), strength=config.ssi_strength)
        kept |= fedssi.next_omega(memory, _importance(model, adapter, task, config, **settings))
    elif config.rule == "ala" and "rule.local" in memory:
        kept["rule.weights"] = _blend_weights(model, adapter, task, config, memory, client, seed, epochs.start)
        adapter.load_vector(fedala.blend(adapter.vector(), memory | kept))
    train_local(model, adapter, task, config, **settings, optimizer=optimizer, pulls=pulls)
    if config.rule == "ala":
        kept["rule.local"] = adapter.vector()
    if config.keep_optimizer:
        kept |= optimizer_arrays(optimizer)
    return kept


def train_local(
    model: nn.Module,
    adapter: Adapter,
    task: Batches,
    config: LocalConfig,
    *,
    client: int | None,
    seed: int,
    epochs: range,
    of: int,
    optimizer: torch.optim.Optimizer | None = None,
    pulls: Sequence[float | Tensor] = (),
    path: fedssi.Path | None = None,
) -> float:
    """Train the adapter's state in place on one client's items; returns the mean loss of the last epoch.

    Args:
        client: whose items; None for all of them pooled.
        seed: of the run.
        epochs: which of the run's epochs these are, counted from 0: they shuffle differently, and with
            `config.decay = "linear"` epoch e has the learning rate lr · (1 − e/of). The first `config.warmup` steps
            have 1/(warmup + 1), 2/(warmup + 1), … of it.
        of: how many epochs the run has in all.
        optimizer: to go on with, from `make_optimizer`; None: a fresh one.
        pulls: how strongly each trained parameter is pulled to where it is now; none: not at all.
        path: told of every step.

    Raises `Declined` with `no_data` if there are no items, with `loss_not_finite` if a loss is NaN or infinite.
    """
    if task.examples(client) == 0:
        raise Declined("no_data", "has no training items")
    optimizer = optimizer or make_optimizer(adapter, config)
    parameters = adapter.trainable()
    starts = [p.detach().clone() for p in parameters] if pulls else []
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    mean, step = 0.0, 0
    for epoch in epochs:
        share = max(0.0, 1 - epoch / of) if config.decay == "linear" else 1.0
        total, batches = 0.0, 0
        for batch in task.batches(client, size=config.batch_size, seed=seed, epoch=epoch):
            loss = task.loss(model, batch)
            value = float(loss.detach())
            if not isfinite(value):
                raise Declined("loss_not_finite", f"loss became {value} in epoch {epoch + 1}; lower local.lr")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if path is not None:
                path.before_step([p.grad for p in parameters])
            if pulls:
                add_pull(parameters, starts, pulls)
            if config.clip:
                nn.utils.clip_grad_norm_(parameters, config.clip)
            step += 1
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share * min(1.0, step / (config.warmup + 1))
            optimizer.step()
            if path is not None:
                path.after_step()
            total, batches = total + value, batches + 1
        if not batches:
            raise Declined("no_data", "has items but no batch to train on")
        mean = total / batches
    return mean


def make_optimizer(adapter: Adapter, config: LocalConfig) -> torch.optim.Optimizer:
    """The optimiser a config names, from torch: one group of parameters, and one of the adapter's gates if it has any,
    which `config.gate_lr` is for and which are never decayed."""
    gates = adapter.gates()
    own = {id(gate) for gate in gates}
    rest = [parameter for parameter in adapter.trainable() if id(parameter) not in own]
    groups: list[dict[str, Any]] = [{"params": rest}] if rest else []
    if gates:
        groups.append({"params": gates, "lr": config.gate_lr or config.lr, "weight_decay": 0.0})
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)


def shared_gradient(adapter: Adapter) -> Vector:
    """The gradient of what is shared, in the order of `adapter.vector()`, float32[layout.size].

    A vector is the trained parameters in the layout's order, so for a moment these hold their gradients and are read.
    """
    parameters = adapter.trainable()
    values = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        try:
            for p in parameters:
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
            return adapter.vector()
        finally:
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)


def _importance(
    model: nn.Module, adapter: Adapter, task: Batches, config: LocalConfig, **settings: Any
) -> list[np.ndarray]:
    """FedSSI's surrogate, trained from where the adapter is, to which it is put back: s / (Δ² + ξ) by parameter."""
    start, parameters = adapter.vector(), adapter.trainable()
    values = [p.detach().clone() for p in parameters]
    path = fedssi.Path(parameters)
    pull = fedssi.surrogate_pull(config.ssi_lambda)
    train_local(model, adapter, task, config, **settings, pulls=[pull] * len(parameters), path=path)
    found = path.importance()
    adapter.load_vector(start)  # also what an adapter counts since then
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)  # also the part that never travels
    return found


def _blend_weights(
    model: nn.Module,
    adapter: Adapter,
    task: Batches,
    config: LocalConfig,
    memory: ClientState,
    client: int,
    seed: int,
    epoch: int,
) -> Vector:
    """FedALA's W, learnt on the first batches of the epoch that comes: shuffled, so a random share of the items."""
    count = ceil(config.ala_share * ceil(task.examples(client) / config.batch_size))

    def batches() -> Iterator[Any]:
        return islice(task.batches(client, size=config.batch_size, seed=seed, epoch=epoch), count)

    def slope(state: Vector, batch: Any) -> tuple[float, Vector]:
        adapter.load_vector(state)
        for p in adapter.trainable():
            p.grad = None
        loss = task.loss(model, batch)
        loss.backward()
        return float(loss.detach()), shared_gradient(adapter)

    model.train()
    start, top = adapter.vector(), fedala.top_part(adapter.layout, config.ala_layers)
    weights = fedala.learn_weights(start, memory, batches, slope, top=top, rate=config.ala_rate)
    adapter.load_vector(start)
    return weights
