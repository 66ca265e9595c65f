"""LoRA: beside chosen projections of a frozen model, a low-rank change of each, in two factors that are trained.

    W' = W + (alpha / rank) · B A,  A [rank, in], B [out, rank];  the vector: A, then B, of each target in model order

Hu et al., "LoRA" (arXiv 2106.09685); the layers are PEFT's. Unlike theirs, our A begins as the same bits on every
machine: uniform in ±1/√in, their bounds, from a stream of the seed. B begins as zeros. Both are float32 whatever the
model's dtype is. Averaging A and B is not averaging B A, so a federation of these averages something else than models.

While attached, the chosen modules are PEFT's, and `state_dict()` names their weights differently; `detach()` puts the
original modules back.
"""

import difflib
import re
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.frozen import AdapterHook, Frozen, refuse_second_adapter
from nestling.adapters.layers import layer_numbers
from nestling.adapters.store import check_vector, save_adapter
from nestling.config.schema import LoraConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.core.seeds import SCHEME, Stream
from nestling.core.vectors import Layout, Vector
from nestling.models.backbones import base_hash as hash_of

_OURS = "default"
"""PEFT's name for the one adapter that it puts in here."""


@dataclass(frozen=True, eq=False)
class _Place:
    """A chosen Linear, and PEFT's module that stands in its place while the adapter is on."""

    name: str
    linear: nn.Linear
    wrapper: Any

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B; asked for each time, since loading with `assign=True` puts in other objects."""
        return self.wrapper.lora_A[_OURS].weight, self.wrapper.lora_B[_OURS].weight


class LoraAdapter:
    """See the module's docstring; made by `nestling.attach(model, LoraConfig(...))`.

    Raises `ConfigError` if a target matches no Linear or cannot be adapted, or if the model carries an adapter already;
    `ContextError` if PEFT is not installed.

    >>> model = nn.Sequential()
    >>> model.q_proj = nn.Linear(6, 4)
    >>> adapter = LoraAdapter(model, LoraConfig(rank=2, targets=("q_proj",)))
    >>> adapter.vector().shape, list(adapter.weights())
    ((20,), ['q_proj.weight'])
    """

    averages_exactly = False

    def __init__(self, model: nn.Module, config: LoraConfig, *, base_hash: str | None = None) -> None:
        self.config = config = replace(config, seed=config.seed or 0)
        refuse_second_adapter(model)
        targets = lora_targets(config, model)
        self.layout = _layout(targets, config)
        peft = _peft()
        self.base_hash = base_hash or hash_of(model)
        self.frozen = Frozen(model, wrapped=targets)
        self._places: list[_Place] = []
        self._window: Any = None
        self._attached = True
        try:
            self._places = _inject(peft, model, targets, config)
            self._begin()
            if config.window:
                from nestling.models.window import use_window  # needs transformers

                self._window = use_window(model, window=config.window, sinks=config.sinks)
        except BaseException:
            _put_back(model, targets)
            self.frozen.release()
            raise

    def _begin(self) -> None:
        """The factors as the seed says, the only parameters that train."""
        assert self.config.seed is not None
        for place in self._places:
            device, width = place.linear.weight.device, place.linear.in_features
            first = first_factor(self.config.seed, place.name, self.config.rank, width)
            second = torch.zeros(place.linear.out_features, self.config.rank, dtype=torch.float32, device=device)
            place.wrapper.lora_A[_OURS].weight = nn.Parameter(torch.from_numpy(first).to(device))
            place.wrapper.lora_B[_OURS].weight = nn.Parameter(second)
            place.wrapper.train(place.linear.training)
            place.wrapper.register_forward_pre_hook(_Mark())
        own = {id(p) for p in self.trainable()}
        for parameter in self.frozen.model.parameters():
            parameter.requires_grad_(id(parameter) in own)

    @property
    def _factors(self) -> dict[str, nn.Parameter]:
        both = [factor for place in self._places for factor in place.factors]
        return dict(zip(self.layout.names, both, strict=True))

    @property
    def spec(self) -> dict[str, Any]:
        """What both sides must agree on."""
        c = self.config
        assert c.seed is not None
        return {
            "kind": c.kind,
            "seed": f"{c.seed:016x}",
            "scheme": SCHEME,
            "rank": c.rank,
            "alpha": c.alpha,
            "targets": list(c.targets),
            "layers": c.layers,
            "window": c.window,
            "sinks": c.sinks,
        }

    def vector(self) -> Vector:
        """A, then B, of each target in model order, a copy: float32[layout.size]."""
        return self.layout.pack({n: p.detach().float().cpu().numpy() for n, p in self._factors.items()})

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set the factors. Raises `ContextError` if the length differs, `WireError` if a number is not finite."""
        arrays = self.layout.unpack(check_vector(vector, self.layout))
        with torch.no_grad():
            for name, factor in self._factors.items():
                factor.copy_(torch.from_numpy(arrays[name]))

    def trainable(self) -> list[nn.Parameter]:
        """A and B of each target, for an optimiser."""
        return [factor for place in self._places for factor in place.factors]

    def gates(self) -> list[nn.Parameter]:
        """None."""
        return []

    def weights(self) -> dict[str, Tensor]:
        """W' of each target by the name of W in the base; gradients flow to A and B.

        At least float32 also where W is shorter: in a forward pass x W and x (B A) are added, and W' is never rounded.
        """
        return {f"{place.name}.weight": self._weight(place) for place in self._places}

    def _weight(self, place: _Place) -> Tensor:
        first, second = place.factors
        base = place.linear.weight.detach()
        wide = base.to(torch.promote_types(base.dtype, torch.float32))
        return wide + (self.config.alpha / self.config.rank) * (second @ first)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the factors, the settings, the base's hash and a model card into `folder`."""
        save_adapter(self, folder)

    def detach(self, *, merge: bool = False) -> None:
        """Take the adapter off. The model is the base again, bit for bit, with its own modules; with `merge` it keeps
        the adapted weights, rounded to its dtype. Twice does nothing more."""
        if not self._attached:
            return
        self._attached = False
        if self._window is not None:
            self._window.remove()
        if merge:
            with torch.no_grad():
                for place in self._places:
                    place.linear.weight.copy_(self._weight(place))
        _put_back(self.frozen.model, {place.name: place.linear for place in self._places})
        self.frozen.release()


class _Mark(AdapterHook):
    """By which a module is known to carry an adapter; a copy of it has one too."""

    def __call__(self, module: nn.Module, args: object) -> None:
        return None


def lora_layout(config: LoraConfig, model: nn.Module) -> Layout:
    """Names and shapes of the vector that an adapter of these settings would have; changes and allocates nothing.

    `model` may lie on the meta device. Raises `ConfigError` as `LoraAdapter` does.

    >>> with torch.device("meta"):
    ...     model = nn.ModuleDict({"q_proj": nn.Linear(6, 4)})
    >>> lora_layout(LoraConfig(rank=2, targets=("q_proj",)), model).shapes
    ((2, 6), (4, 2))
    """
    return _layout(lora_targets(config, model), config)


def _layout(targets: dict[str, nn.Linear], config: LoraConfig) -> Layout:
    entries = []
    for name, linear in targets.items():
        entries += [(f"{name}.lora_A.weight", (config.rank, linear.in_features))]
        entries += [(f"{name}.lora_B.weight", (linear.out_features, config.rank))]
    return Layout.of(entries)


def first_factor(seed: int, name: str, rank: int, width: int) -> np.ndarray:
    """A at the beginning: float32[rank, width], uniform in ±1/√width, from the stream (seed, "lora-a", name).

    A word w becomes ((2w + 1) / 2³² − 1) / √width in float64: each of the three steps is exactly rounded everywhere.

    >>> first_factor(7, "q_proj", 1, 4).round(4)
    array([[-0.0212,  0.0484,  0.0556, -0.3167]], dtype=float32)
    """
    words = Stream(seed, "lora-a", name).words(rank * width).astype(np.float64)
    unit = (2 * words + 1) / 2**32 - 1
    return (unit / sqrt(width)).astype(np.float32).reshape(rank, width)


def lora_targets(config: LoraConfig, model: nn.Module) -> dict[str, nn.Linear]:
    """The chosen Linear modules by name, in model order: those whose name ends in a target, in the chosen layers.

    Layers are the entries of the outermost `nn.ModuleList` that a target lies in. Raises `ConfigError` if a target
    matches no Linear, if layers are chosen where there is no one list of them, or if a Linear cannot be adapted.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}) for _ in range(3))})
    >>> list(lora_targets(LoraConfig(targets=("q_proj",), layers="upper:0.5"), model))
    ['layers.1.q_proj', 'layers.2.q_proj']
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    matched = {t: [n for n in linears if f".{n}".endswith(f".{t}")] for t in config.targets}
    for target, found in matched.items():
        if not found or not target:
            near = difflib.get_close_matches(target, {n.rpartition(".")[2] for n in linears}, n=1, cutoff=0.0)
            raise ConfigError(
                f"{target!r} is the end of no Linear module's name",
                where="adapter.targets",
                remedy=f"Nearest: {near[0]!r}." if near else "This model has no Linear module at all.",
            )
    chosen = _in_layers({n for found in matched.values() for n in found}, config.layers, model)
    for target, found in matched.items():
        if not chosen.intersection(found):
            raise ConfigError(
                f"{target!r} is in none of the layers {config.layers!r}",
                where="adapter.targets",
                remedy="Choose other layers, or leave it out.",
            )
    if not chosen:
        raise ConfigError("names no module to adapt", where="adapter.targets", remedy='Give some, such as "q_proj".')
    targets = {name: linear for name, linear in linears.items() if name in chosen}
    _refuse_what_cannot_be_adapted(targets, model)
    return targets


def _in_layers(names: set[str], layers: str, model: nn.Module) -> set[str]:
    if layers == "all":
        return names
    places = {name: _layer_of(name, model) for name in sorted(names)}
    lists = {place[0]: name for name, place in places.items()}
    if len(lists) > 1:
        raise ConfigError(
            f"{' and '.join(list(lists.values())[:2])} do not lie in one list of layers",
            where="adapter.layers",
            remedy='Give "all", or targets that do.',
        )
    numbers = {n for path in lists for n in layer_numbers(layers, len(model.get_submodule(path)))}  # type: ignore[arg-type]
    return {name for name, (_, number) in places.items() if number in numbers}


def _layer_of(name: str, model: nn.Module) -> tuple[str, int]:
    """The outermost list of modules that a module lies in, and its number there."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if isinstance(model.get_submodule(path), nn.ModuleList):
            return path, int(parts[end])
    raise ConfigError(
        f"{name} lies in no list of layers", where="adapter.layers", remedy='Give "all", or targets that do.'
    )


def _refuse_what_cannot_be_adapted(targets: dict[str, nn.Linear], model: nn.Module) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, set[str]] = {}
    for name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), set()).add(f"{name}.{attribute}")
    for name, linear in targets.items():
        weight = linear._parameters.get("weight")
        path = name.rpartition(".")[0]
        if weight is None or not weight.is_floating_point():
            cause = f"is stored as {weight.dtype}" if weight is not None else "has no plain weight"
        elif len(names[id(weight)]) > 1:
            cause = f"shares its weight with {min(names[id(weight)] - {f'{name}.weight'}).rpartition('.')[0]}"
        elif isinstance(modules[path], nn.MultiheadAttention | nn.TransformerEncoderLayer):
            cause = f"is read by {type(modules[path]).__name__} without a call, so a change beside it would go unseen"
        else:
            continue
        raise ConfigError(cause, where=name, remedy="Leave it out of adapter.targets, or use the kind latent or full.")


def _peft() -> ModuleType:
    try:
        import peft  # two seconds, and only for those who use LoRA
    except ImportError as error:
        raise ContextError(
            f"LoRA needs the package peft ({error})", where="adapter", remedy='pip install "nestling[llm]"'
        ) from error
    return peft


def _inject(peft: ModuleType, model: nn.Module, targets: dict[str, nn.Linear], config: LoraConfig) -> list[_Place]:
    """PEFT's modules in the place of the targets. Their factors have no content yet, so nothing random is drawn."""
    before = model.__dict__.get("peft_config")
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="|".join(map(re.escape, targets)),  # an expression for whole names; a list is one for ends
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,
    )
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=_OURS, low_cpu_mem_usage=True)
    finally:
        model.__dict__.pop("peft_config", None)  # only its own tools read it
        if before is not None:
            model.__dict__["peft_config"] = before
    places = []
    for name, linear in targets.items():
        wrapper = model.get_submodule(name)
        if getattr(wrapper, "base_layer", None) is not linear or _OURS not in getattr(wrapper, "lora_A", ()):
            raise ConfigError("was passed over by PEFT", where=name, remedy="Leave it out of adapter.targets.")
        places.append(_Place(name, linear, wrapper))
    return places


def _put_back(model: nn.Module, targets: dict[str, nn.Linear]) -> None:
    for name, linear in targets.items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._modules[attribute] = linear
