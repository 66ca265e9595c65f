"""What every adapter offers, and `attach`, which puts one onto a model.

An adapter is what is trained, seen as one flat float32 vector: state in, state out. Nothing else of a model ever enters
a message.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.frozen import Frozen
from nestling.config.schema import AdapterConfig, FullConfig, LatentConfig, LoraConfig, MappingConfig, MemoryConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.core.vectors import Layout, Vector


@runtime_checkable
class Adapter(Protocol):
    """The seam between a model and the federation.

    `averages_exactly` says that averaging vectors is averaging the models they stand for.
    """

    config: AdapterConfig
    layout: Layout
    averages_exactly: bool
    base_hash: str
    frozen: Frozen

    @property
    def spec(self) -> dict[str, Any]:
        """Everything two sides must agree on to understand each other's vectors; JSON values only."""
        ...

    def vector(self) -> Vector:
        """The trained state, a copy: float32[layout.size]."""
        ...

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set the trained state. `ContextError` if the length differs, `WireError` if a number is not finite."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The adapted tensors by parameter name, as the model uses them; gradients flow to `trainable()`."""
        ...

    def trainable(self) -> list[nn.Parameter]:
        """What to hand to an optimiser."""
        ...

    def gates(self) -> list[nn.Parameter]:
        """Those of `trainable()` that are gates or write strengths: they have their own learning rate, and no decay."""
        ...

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the state, the settings, the base's hash and a model card into `folder`."""
        ...

    def detach(self, *, merge: bool = False) -> None:
        """Take the adapter off: the model is the base again, bit for bit; with `merge` it keeps the adapted weights."""
        ...


def attach(model: nn.Module, config: AdapterConfig, *, base_hash: str | None = None) -> "Adapter":
    """Put an adapter onto `model`, in place; train `adapter.trainable()` in any loop of your own.

    Args:
        model: any module; all its other parameters are frozen until `detach()`.
        config: `LatentConfig` (FLITE), `MemoryConfig` (FedNL), `LoraConfig`, `MappingConfig` or `FullConfig`.
        base_hash: of the model, if known already (it is computed otherwise).

    Adapted weights are seen by forward passes (calling the model or any module inside it), not by methods of yours that
    read weights without one. `torch.compile` runs; `torch.export`, `vmap` and tracing do not.

    Raises:
        ConfigError: a pattern matches nothing, the model carries an adapter already, or a weight cannot be adapted;
            `MemoryConfig` for a model that is not a language model of the Llama family.
        ContextError: a package that the adapter needs is not installed.

    >>> import nestling, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> adapter = nestling.attach(model, nestling.LatentConfig(seed=7, dim=4))
    >>> adapter.vector().shape
    (8,)
    """
    from nestling.adapters.full import FullAdapter
    from nestling.adapters.latent import LatentAdapter
    from nestling.adapters.lora import LoraAdapter
    from nestling.adapters.mapping import MappingAdapter

    if isinstance(config, LatentConfig):
        return LatentAdapter(model, config, base_hash=base_hash)
    if isinstance(config, LoraConfig):
        return LoraAdapter(model, config, base_hash=base_hash)
    if isinstance(config, MappingConfig):
        return MappingAdapter(model, config, base_hash=base_hash)
    if isinstance(config, MemoryConfig):
        return _memory(model, config, base_hash)
    if not isinstance(config, FullConfig):
        raise ConfigError(
            f"{config!r} is not a configuration",
            where="attach",
            remedy="Give LatentConfig(), MemoryConfig(), LoraConfig(), MappingConfig() or FullConfig().",
        )
    return FullAdapter(model, config, base_hash=base_hash)


def _memory(model: nn.Module, config: MemoryConfig, base_hash: str | None) -> "Adapter":
    try:
        from nestling.adapters.memory import MemoryAdapter
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ContextError(
            "a memory needs the package transformers", where="adapter", remedy='pip install "nestling[llm]"'
        ) from error
    return MemoryAdapter(model, config, base_hash=base_hash)


class InexactAverages(UserWarning):
    """Clients' vectors are averaged although that is not averaging the models they stand for."""


_WARNED: set[str] = set()
"""Kinds of adapter that were warned about in this process."""


def warn_if_inexact(adapter: Adapter) -> None:
    """Say once per process and kind of adapter that the mean of its vectors is another model than the mean of models.

    Silent for an adapter that averages exactly. Call it where a federation is built, since one client alone averages
    nothing.
    """
    kind = adapter.config.kind
    if adapter.averages_exactly or kind in _WARNED:
        return
    _WARNED.add(kind)
    warnings.warn(
        f"the mean of clients' {kind} vectors is not the mean of their models: the server's state is a model of its "
        "own, near that mean only while clients stay near each other",
        InexactAverages,
        stacklevel=2,
    )


@torch.no_grad()
def averaging_error(adapter: Adapter, states: Sequence[Vector], weights: Sequence[int]) -> float:
    """max |Σ p_k θ(z_k) − θ(Σ p_k z_k)| / max |θ|, p_k = weight_k / Σ weights: 0 to rounding if averages are exact.

    The adapter's own state is put back afterwards.
    """
    own, total = adapter.vector(), float(sum(weights))
    averaged: dict[str, Tensor] = {}
    for state, weight in zip(states, weights, strict=True):
        adapter.load_vector(state)
        for name, tensor in adapter.weights().items():
            share = tensor.double() * (weight / total)
            averaged[name] = averaged[name].add_(share) if name in averaged else share
    mean = sum(state.astype(np.float64) * (weight / total) for state, weight in zip(states, weights, strict=True))
    adapter.load_vector(np.asarray(mean, np.float32))
    error = largest = 0.0
    for name, tensor in adapter.weights().items():
        error = max(error, float((averaged[name] - tensor.double()).abs().max()))
        largest = max(largest, float(tensor.abs().max()))
    adapter.load_vector(own)
    return error / largest
