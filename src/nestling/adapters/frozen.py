"""What stays still while an adapter is on: the rest of the model, its running statistics included.

An adapter stands for a change of a *frozen* base. Layers that keep running statistics (BatchNorm) would change the base
in every training pass, and no message carries that; so they work as in `eval()` until the adapter comes off.
"""

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from nestling.core.errors import ConfigError
from nestling.models.backbones import hash_of_state, settings_of

_TRAINED: WeakSet[nn.Module] = WeakSet()
"""Modules whose own parameters are trained (`FullConfig`); a copy of one is an ordinary module again."""


class AdapterHook:
    """Base of the hooks by which a module is known to carry an adapter."""


class Frozen:
    """The state of a model from `attach` to `detach`.

    `trained` are the parameters that do change (`FullConfig`), as they were. `wrapped` are the names of modules around
    which others are put after this (LoRA), in which the base's own is then called `base_layer`; they must be in place
    again at `release()`.

    >>> model = nn.Linear(2, 2)
    >>> frozen = Frozen(model)
    >>> model.weight.requires_grad
    False
    >>> frozen.release()
    >>> model.weight.requires_grad
    True
    """

    def __init__(
        self, model: nn.Module, *, trained: Mapping[str, Tensor] | None = None, wrapped: Iterable[str] = ()
    ) -> None:
        self.model = model
        self._wrapped = tuple(wrapped)
        self._trained = dict(trained or {})
        self._was_trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self._buffers = {name: buffer.detach().clone() for name, buffer in _kept_buffers(model)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self._trained)
        self._owners = [model.get_submodule(name.rpartition(".")[0]) for name in self._trained]
        _TRAINED.update(self._owners)
        statistics = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        self._handles = [handle for m in statistics for handle in _keep_in_eval(m)]

    def hash_now(self) -> str:
        """The base's hash, were it computed now: as at `attach` unless something else has written to the model."""
        before = {id(self.model.get_parameter(name)): tensor for name, tensor in self._trained.items()}
        state = self._base_state()  # tied weights stand there once under each of their names
        weights = {name: before.get(id(tensor), tensor) for name, tensor in state.items()}
        return hash_of_state(weights, settings_of(self.model))

    def _base_state(self) -> dict[str, Any]:
        """`state_dict()` as the base alone has it: without what was put around its modules."""
        state: dict[str, Any] = self.model.state_dict(keep_vars=True)
        for module in self._wrapped:
            within = [name for name in state if name.startswith(f"{module}.")]
            for name, value in [(name, state.pop(name)) for name in within]:
                own = name.removeprefix(f"{module}.base_layer.")
                if own != name:
                    state[f"{module}.{own}"] = value
        return state

    def release(self) -> None:
        """Each parameter is as trainable as it was before, each buffer holds what it held."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._was_trainable.get(name, parameter.requires_grad))
        with torch.no_grad():
            for name, buffer in _kept_buffers(self.model):
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])
        for handle in self._handles:
            handle.remove()
        _TRAINED.difference_update(self._owners)


def refuse_second_adapter(model: nn.Module) -> None:
    """Raise `ConfigError` if a part of the model carries an adapter."""
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        if module in _TRAINED or any(isinstance(hook, AdapterHook) for hook in hooks):
            raise ConfigError(
                "carries an adapter already", where=name or "model", remedy="Call detach() on that adapter first."
            )


def _kept_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that belong to the base, which are those in its `state_dict()`."""
    kept = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


class _Eval:
    """Before a forward pass: no statistics are taken; `was` is put back by `_Train`."""

    def __init__(self) -> None:
        self.was = False

    def __call__(self, module: nn.Module, args: object) -> None:
        self.was, module.training = module.training, False


class _Train:
    """After it."""

    def __init__(self, before: _Eval) -> None:
        self.before = before

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        module.training = self.before.was


def _keep_in_eval(module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    before = _Eval()
    after = module.register_forward_hook(_Train(before), always_call=True)
    return [module.register_forward_pre_hook(before), after]
