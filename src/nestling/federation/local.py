"""A client's share of the work: some epochs on its own items, from the state it was given.

A fresh optimiser each time (nothing of a client survives a round), and a client that has nothing to train on or whose
loss stops being finite declines instead of sending a number that means nothing.
"""

from math import isfinite
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nestling.adapters.base import Adapter
from nestling.config.schema import LocalConfig


class Declined(Exception):
    """A client sends nothing this round. `code` is stable: `no_data` or `loss_not_finite`."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


@runtime_checkable
class Batches(Protocol):
    """What training needs of a task."""

    def examples(self, client: int | None) -> int: ...
    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...


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
) -> float:
    """Train the adapter's state in place on one client's items; returns the mean loss of the last epoch.

    Args:
        client: whose items; None for all of them pooled.
        seed: of the run.
        epochs: which of the run's epochs these are, counted from 0: they shuffle differently, and with
            `config.decay = "linear"` epoch e has the learning rate lr · (1 − e/of). The first `config.warmup` steps
            have 1/(warmup + 1), 2/(warmup + 1), … of it.
        of: how many epochs the run has in all.

    Raises `Declined` with `no_data` if there are no items, with `loss_not_finite` if a loss is NaN or infinite.
    """
    if task.examples(client) == 0:
        raise Declined("no_data", "has no training items")
    optimizer = make_optimizer(adapter, config)
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
            if config.clip:
                nn.utils.clip_grad_norm_(adapter.trainable(), config.clip)
            step += 1
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share * min(1.0, step / (config.warmup + 1))
            optimizer.step()
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
