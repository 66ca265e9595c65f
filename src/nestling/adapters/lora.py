"""LoRA: beside chosen layers of a frozen model, a low-rank change of each, in two factors that are trained.

    W' = W + (alpha / rank) · B A,  A [rank, in], B [out, rank];  the vector: A, then B, of each target in model order

Hu et al., "LoRA" (arXiv 2106.09685); the layers are PEFT's. The W of a Conv2d is a matrix with in · height · width of
the kernel in the place of in: A is a convolution to `rank` channels, B one of 1×1. Unlike theirs, our A begins as the
same bits on every machine: uniform in ±1/√in, their bounds, from a stream of the seed. B begins as zeros. Both are
float32 whatever the model's dtype is. Averaging A and B is not averaging B A, so a federation of these averages
something else than models. With `ffa`, A stays as the seed made it and B alone is trained and sent (FFA-LoRA, arXiv
2403.12313): W' is affine in B, and averages are exact. With `dim`, each trained factor F rides the latent channel as a
memory's rules do, F = F_start + s · U z_F, with `dim` latents z_F and s = 1/√columns.

While attached, the chosen modules are PEFT's, and `state_dict()` names their weights differently; `detach()` puts the
original modules back.
"""

import re
from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.frozen import AdapterHook, Frozen, refuse_second_adapter
from nestling.adapters.lora_targets import Layer, lora_targets
from nestling.adapters.store import check_vector, save_adapter
from nestling.config.schema import LoraConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.core.seeds import SCHEME, Stream
from nestling.core.vectors import Layout, Vector
from nestling.kernels.signs.dispatch import SignMap, digest, make_map, sign_map_one
from nestling.models.backbones import base_hash as hash_of

_OURS = "default"
"""PEFT's name for the one adapter that it puts in here."""


@dataclass(frozen=True, eq=False)
class _Place:
    """A chosen layer, and PEFT's module that stands in its place while the adapter is on."""

    name: str
    layer: Layer
    wrapper: Any

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B; asked for each time, since loading with `assign=True` puts in other objects."""
        return tuple(holder._parameters["weight"] for holder in self.holders)

    @property
    def holders(self) -> tuple[nn.Module, nn.Module]:
        """The modules that hold them."""
        return self.wrapper.lora_A[_OURS], self.wrapper.lora_B[_OURS]

    @property
    def names(self) -> tuple[str, str]:
        """Of A and B in the layout."""
        return _factor_names(self.name)


class LoraAdapter:
    """See the module's docstring; made by `nestling.attach(model, LoraConfig(...))`.

    Raises `ConfigError` if a target matches no Linear or Conv2d or cannot be adapted, or if the model carries an
    adapter already; `ContextError` if PEFT is not installed.

    >>> model = nn.Sequential()
    >>> model.q_proj = nn.Linear(6, 4)
    >>> adapter = LoraAdapter(model, LoraConfig(rank=2, targets=("q_proj",)))
    >>> adapter.vector().shape, list(adapter.weights())
    ((20,), ['q_proj.weight'])
    """

    def __init__(self, model: nn.Module, config: LoraConfig, *, base_hash: str | None = None) -> None:
        self.config = config = replace(config, seed=config.seed or 0)
        self.averages_exactly = config.ffa  # with one A for all, W' is affine in B; adapted weights are never rounded
        refuse_second_adapter(model)
        targets = lora_targets(config, model)
        self.layout = _layout(targets, config)
        self._maps = _maps(targets, config)
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
        """The factors as the seed says; they, or the latents that move them, are the only parameters that train."""
        assert self.config.seed is not None
        for place in self._places:
            device, (first, second) = place.layer.weight.device, _factor_shapes(place.layer, self.config.rank)
            drawn = first_factor(self.config.seed, place.name, first[0], prod(first[1:])).reshape(first)
            a, b = place.holders
            a.weight = nn.Parameter(torch.from_numpy(drawn).to(device))
            b.weight = nn.Parameter(torch.zeros(second, dtype=torch.float32, device=device))
            place.wrapper.train(place.layer.training)
            place.wrapper.register_forward_pre_hook(_Show(self, place))
            if self._maps:
                place.wrapper.register_forward_hook(_Hide(place), always_call=True)
        self.z = nn.Parameter(torch.zeros(self.layout.size, device=device)) if self._maps else None
        own = {id(p) for p in self.trainable()}
        for parameter in self.frozen.model.parameters():
            parameter.requires_grad_(id(parameter) in own)

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """The trained factors by name; with latents, where those begin."""
        both = [pair for place in self._places for pair in zip(place.names, place.factors, strict=True)]
        return {name: factor for name, factor in both if name in self.layout.names}

    def _made(self, place: _Place) -> tuple[Tensor, Tensor]:
        """A and B as the model uses them; gradients flow to what is trained."""
        a, b = (self._factor(name, factor) for name, factor in zip(place.names, place.factors, strict=True))
        return a, b

    def _factor(self, name: str, factor: nn.Parameter) -> Tensor:
        if self.z is None or name not in self._maps:
            return factor
        return sign_map_one(self.z[self.layout.slice(name)], self._maps[name], factor.detach())

    @property
    def spec(self) -> dict[str, Any]:
        """What both sides must agree on."""
        c = self.config
        assert c.seed is not None
        spec = {
            "kind": c.kind,
            "seed": f"{c.seed:016x}",
            "scheme": SCHEME,
            "rank": c.rank,
            "alpha": c.alpha,
            "targets": list(c.targets),
            "layers": c.layers,
            "ffa": c.ffa,
            "dim": c.dim,
            "window": c.window,
            "sinks": c.sinks,
        }
        return spec | ({"maps": digest(list(self._maps.values())).hex()} if self._maps else {})

    def vector(self) -> Vector:
        """A, then B, of each target in model order (or B alone, or their latents), a copy: float32[layout.size]."""
        if self.z is not None:
            return self.z.detach().cpu().numpy().copy()
        return self.layout.pack({n: p.detach().float().cpu().numpy() for n, p in self._trained.items()})

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set them. Raises `ContextError` if the length differs, `WireError` if a number is not finite."""
        array = check_vector(vector, self.layout)
        with torch.no_grad():
            if self.z is not None:
                self.z.copy_(torch.from_numpy(array))
                return
            arrays = self.layout.unpack(array)
            for name, factor in self._trained.items():
                factor.copy_(torch.from_numpy(arrays[name]))

    def trainable(self) -> list[nn.Parameter]:
        """A and B of each target (or B alone, or the one parameter of their latents), for an optimiser."""
        return [self.z] if self.z is not None else list(self._trained.values())

    def gates(self) -> list[nn.Parameter]:
        """None."""
        return []

    def weights(self) -> dict[str, Tensor]:
        """W' of each target by the name of W in the base; gradients flow to `trainable()`.

        At least float32 also where W is shorter: in a forward pass x W and x (B A) are added, and W' is never rounded.
        """
        return {f"{place.name}.weight": self._weight(place) for place in self._places}

    def _weight(self, place: _Place) -> Tensor:
        first, second = self._made(place)
        base = place.layer.weight.detach()
        wide = base.to(torch.promote_types(base.dtype, torch.float32))
        return wide + (self.config.alpha / self.config.rank) * (second.flatten(1) @ first.flatten(1)).view(base.shape)

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
                    place.layer.weight.copy_(self._weight(place))
        _put_back(self.frozen.model, {place.name: place.layer for place in self._places})
        self.frozen.release()


class _Show(AdapterHook):
    """Before a pass of PEFT's module: with latents, its factors are those that the latents make.

    By it a module is known to carry an adapter, too; a copy of that module has one as well.
    """

    def __init__(self, adapter: LoraAdapter, place: _Place) -> None:
        self.adapter, self.place = adapter, place

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object) -> None:
        if self.adapter.z is None:
            return
        for holder, factor in zip(self.place.holders, self.adapter._made(self.place), strict=True):
            holder.__dict__["weight"] = factor  # an instance attribute hides the registered parameter


class _Hide:
    """After it: they are dropped, since with their graph they could not be copied."""

    def __init__(self, place: _Place) -> None:
        self.place = place

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        for holder in self.place.holders:
            holder.__dict__.pop("weight", None)


def lora_layout(config: LoraConfig, model: nn.Module) -> Layout:
    """Names and shapes of the vector that an adapter of these settings would have; changes and allocates nothing.

    `model` may lie on the meta device. Raises `ConfigError` as `LoraAdapter` does.

    >>> with torch.device("meta"):
    ...     model = nn.ModuleDict({"q_proj": nn.Linear(6, 4)})
    >>> lora_layout(LoraConfig(rank=2, targets=("q_proj",)), model).shapes
    ((2, 6), (4, 2))
    """
    return _layout(lora_targets(config, model), config)


def _layout(targets: dict[str, Layer], config: LoraConfig) -> Layout:
    """Of the trained factors; with `dim`, of their latents."""
    shapes = _trained_shapes(targets, config)
    if not config.dim:
        return Layout.of(shapes.items())
    widest = max(min(layer.weight.shape[0], prod(layer.weight.shape[1:])) for layer in targets.values())
    if config.rank > widest:  # no message's size would bound it
        raise ConfigError(
            f"{config.rank:,} is more than {widest:,}, which already allows any change",
            where="adapter.rank",
            remedy=f"Give {widest:,} or less.",
        )
    return Layout.of((name, (min(config.dim, prod(shape)),)) for name, shape in shapes.items())


def _trained_shapes(targets: dict[str, Layer], config: LoraConfig) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, layer in targets.items():
        both = zip(_factor_names(name), _factor_shapes(layer, config.rank), strict=True)
        shapes |= dict(list(both)[config.ffa :])
    return shapes


def _factor_names(name: str) -> tuple[str, str]:
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"


def _factor_shapes(layer: Layer, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B as PEFT holds them: of a convolution, A has its kernel and B is 1×1."""
    out, *rest = layer.weight.shape
    return (rank, *rest), (out, rank, *[1] * (len(rest) - 1))


def _maps(targets: dict[str, Layer], config: LoraConfig) -> dict[str, SignMap]:
    """How latents become the change of each trained factor; none without latents."""
    maps = {}
    for name, shape in _trained_shapes(targets, config).items() if config.dim else ():
        dim = min(config.dim, prod(shape))
        scale = 1 / sqrt(prod(shape[1:]))
        maps[name] = make_map(config.seed or 0, f"lora/{name}", rows=prod(shape), dim=dim, rank=dim, scale=scale)
    return maps


def first_factor(seed: int, name: str, rank: int, width: int) -> np.ndarray:
    """A at the beginning: float32[rank, width], uniform in ±1/√width, from the stream (seed, "lora-a", name).

    A word w becomes ((2w + 1) / 2³² − 1) / √width in float64: each of the three steps is exactly rounded everywhere.

    >>> first_factor(7, "q_proj", 1, 4).round(4)
    array([[-0.0212,  0.0484,  0.0556, -0.3167]], dtype=float32)
    """
    words = Stream(seed, "lora-a", name).words(rank * width).astype(np.float64)
    unit = (2 * words + 1) / 2**32 - 1
    return (unit / sqrt(width)).astype(np.float32).reshape(rank, width)


def _peft() -> ModuleType:
    try:
        import peft  # two seconds, and only for those who use LoRA
    except ImportError as error:
        raise ContextError(
            f"LoRA needs the package peft ({error})", where="adapter", remedy='pip install "nestling[llm]"'
        ) from error
    return peft


def _inject(peft: ModuleType, model: nn.Module, targets: dict[str, Layer], config: LoraConfig) -> list[_Place]:
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
    for name, layer in targets.items():
        wrapper = model.get_submodule(name)
        if getattr(wrapper, "base_layer", None) is not layer or _OURS not in getattr(wrapper, "lora_A", ()):
            raise ConfigError("was passed over by PEFT", where=name, remedy="Leave it out of adapter.targets.")
        places.append(_Place(name, layer, wrapper))
    return places


def _put_back(model: nn.Module, targets: dict[str, Layer]) -> None:
    for name, layer in targets.items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._modules[attribute] = layer
