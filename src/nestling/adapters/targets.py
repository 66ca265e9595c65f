"""Which weights of a model an adapter changes: patterns over module names, each of which must match something."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.conv import _ConvNd

from nestling.core.errors import ConfigError

KINDS = (_ConvNd, nn.Linear, nn.Embedding, nn.MultiheadAttention)


@dataclass(frozen=True)
class Place:
    """Where a parameter is registered: `module.attribute`."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Target:
    """One adapted parameter, and every place that holds it (several where weights are tied)."""

    name: str
    places: tuple[Place, ...]

    @property
    def base(self) -> nn.Parameter:
        """The frozen parameter that the model holds now: loading with `assign=True` puts in another object."""
        parameter = self.places[0].module._parameters[self.places[0].attribute]
        assert parameter is not None
        return parameter


def select(names: Iterable[str], targets: tuple[str, ...], exclude: tuple[str, ...], *, what: str) -> list[str]:
    """The names that match a pattern of `targets` and none of `exclude`, in their own order.

    Raises `ConfigError` if a pattern matches nothing, naming the nearest name.

    >>> select(["conv1", "conv2", "head"], ("conv*",), ("conv2",), what="module")
    ['conv1']
    """
    known = list(names)
    for where, patterns in (("adapter.targets", targets), ("adapter.exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                near = difflib.get_close_matches(pattern.strip("*"), known, n=1, cutoff=0.0)
                raise ConfigError(
                    f"pattern {pattern!r} matches no {what}",
                    where=where,
                    remedy=f"Nearest: {near[0]!r}." if near else f"This model has no such {what} at all.",
                )
    chosen = [n for n in known if _any(n, targets) and not _any(n, exclude)]
    if not chosen:
        raise ConfigError(
            f"leaves no {what} to adapt", where="adapter.targets", remedy="Widen targets or shorten exclude."
        )
    return chosen


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def find_weights(model: nn.Module, targets: tuple[str, ...], exclude: tuple[str, ...]) -> list[Target]:
    """The weights of Conv, Linear and Embedding modules whose module name matches, once each.

    Of `nn.MultiheadAttention` it is the joint weight of queries, keys and values. Weights of other kinds of module are
    not found, among them those of recurrent layers.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [t.name for t in find_weights(model, ("*",), ())]
    ['0.weight', '2.weight']
    """
    # remove_duplicate=False: a module reached under two names can be matched by either.
    modules = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, KINDS)}
    modules = {n: m for n, m in modules.items() if getattr(m, "_qkv_same_embed_dim", True)}  # else: three weights
    chosen = select(modules, targets, exclude, what="Conv, Linear or Embedding module")
    places = _places(model)
    found: dict[int, Target] = {}
    for name in chosen:
        joint = isinstance(modules[name], nn.MultiheadAttention)
        attribute = "in_proj_weight" if joint else "weight"
        weight = modules[name]._parameters.get(attribute)
        if weight is None:
            raise ConfigError(
                "has no plain weight (is it parametrised?)",
                where=name or "model",
                remedy="Remove the parametrisation first, or exclude this module.",
            )
        if not weight.is_floating_point():
            raise ConfigError(
                f"is stored as {weight.dtype}, which cannot be adapted",
                where=name or "model",
                remedy="Load floating-point weights.",
            )
        found.setdefault(id(weight), Target(f"{name}.{attribute}".lstrip("."), places[id(weight)]))
    return list(found.values())


def find_norms(model: nn.Module, mapped: list[Target]) -> list[Target]:
    """The scales and shifts of the normalisation layers: all parameters of modules named …Norm, save those in `mapped`.

    >>> [t.name for t in find_norms(nn.Sequential(nn.GroupNorm(2, 4)), [])]
    ['0.weight', '0.bias']
    """
    places, known = _places(model), {id(target.base) for target in mapped}
    found: dict[int, Target] = {}
    for name, module in model.named_modules():
        if "Norm" not in type(module).__name__:
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in known:
                found.setdefault(id(parameter), Target(f"{name}.{attribute}".lstrip("."), places[id(parameter)]))
    return list(found.values())


def _places(model: nn.Module) -> dict[int, tuple[Place, ...]]:
    """All modules, of whatever kind, that hold a parameter, by the parameter's id: tied weights have several."""
    places: dict[int, tuple[Place, ...]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)] = (*places.get(id(parameter), ()), Place(module, attribute))
    return places
