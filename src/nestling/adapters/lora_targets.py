"""Which modules of a model LoRA changes: patterns of their names, in some of the model's layers.

A pattern that matches nothing, or a module whose weight is also read in another way than by calling it, is an error:
a change beside it would go unseen.
"""

import difflib
from fnmatch import fnmatchcase

from torch import nn

from nestling.adapters.layers import layer_numbers
from nestling.config.schema import LoraConfig
from nestling.core.errors import ConfigError

Layer = nn.Linear | nn.Conv2d


def lora_targets(config: LoraConfig, model: nn.Module) -> dict[str, Layer]:
    """The chosen Linear and Conv2d modules by name, in model order, in the chosen layers.

    A target is a pattern of whole names or of their ends: `q_proj`, `mlp.*_proj`, `*conv*`. Layers are the entries of
    the outermost `nn.ModuleList` that a target lies in. Raises `ConfigError` if a target matches no module, if layers
    are chosen where there is no one list of them, or if a module cannot be adapted.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}) for _ in range(3))})
    >>> list(lora_targets(LoraConfig(targets=("q_proj",), layers="upper:0.5"), model))
    ['layers.1.q_proj', 'layers.2.q_proj']
    """
    known = {name: m for name, m in model.named_modules() if isinstance(m, Layer)}
    matched = {t: [n for n in known if fnmatchcase(f".{n}", f"*.{t}")] for t in config.targets}
    for target, found in matched.items():
        if not found or not target:
            ends = sorted({n.rpartition(".")[2] for n in known})
            near = difflib.get_close_matches(target.strip("*"), ends, n=1, cutoff=0.0)
            raise ConfigError(
                f"{target!r} matches the end of no Linear or Conv2d module's name",
                where="adapter.targets",
                remedy=f"Nearest: {near[0]!r}." if near else "This model has no such module at all.",
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
    targets = {name: layer for name, layer in known.items() if name in chosen}
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


def _refuse_what_cannot_be_adapted(targets: dict[str, Layer], model: nn.Module) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, set[str]] = {}
    for name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), set()).add(f"{name}.{attribute}")
    for name, layer in targets.items():
        weight = layer._parameters.get("weight")
        path = name.rpartition(".")[0]
        if weight is None or not weight.is_floating_point():
            cause = f"is stored as {weight.dtype}" if weight is not None else "has no plain weight"
        elif len(names[id(weight)]) > 1:
            cause = f"shares its weight with {min(names[id(weight)] - {f'{name}.weight'}).rpartition('.')[0]}"
        elif _reads_weights(modules[path], name.rpartition(".")[2]):
            cause = f"is read by {type(modules[path]).__name__} without a call, so a change beside it would go unseen"
        elif isinstance(layer, nn.Conv2d) and not _is_plain(layer):
            cause = "has groups, dilation or a padding that is not of zeros, which PEFT's factors do not follow"
        else:
            continue
        raise ConfigError(cause, where=name, remedy="Leave it out of adapter.targets, or use the kind latent or full.")


def _reads_weights(module: nn.Module, child: str) -> bool:
    """Whether a module reads the weight of this child without calling it. Mixers as Mamba's, whatever their model is
    called, call `in_proj` alone wherever they run: the others are read by CUDA kernels in training, and Mamba's
    `dt_proj` everywhere."""
    if all(hasattr(module, name) for name in ("A_log", "conv1d", "in_proj")):
        return child != "in_proj"
    return isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)


def _is_plain(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and set(conv.dilation) == {1} and conv.padding_mode == "zeros"
