"""Making a base: an ordinary supervised run on public data, kept in a cache and checked before anybody uses it.

A base that learned nothing makes everything after it look broken, so one whose held-out accuracy stays near chance is
refused. Trained on one thread: on one machine a recipe always gives the same bytes.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from math import ceil, cos, log, pi
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor, nn

from nestling.config.schema import GptConfig, OwnBase
from nestling.core.errors import ConfigError, ContextError, NestlingError
from nestling.core.files import cache_folder, make_folder, write_atomic
from nestling.core.seeds import Stream
from nestling.models.backbones import base_bytes, load_base, provenance_of
from nestling.models.resnet import make_resnet
from nestling.models.tinygpt import make_tinygpt

RECIPE = 3
"""Raise it when a change below changes what comes out, so that no cached base of an older recipe is used."""

BATCH, BLOCKS, WARM_UP = 64, 16, 50
"""Images, or blocks of text, in a step: a block of 128 bytes is 128 answers, and 64 blocks left too few steps to learn
much in."""

Data = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Loads uint8 images [n, c, h, w] and their labels [n], or tokens [n, t] and those that follow [n, t]; only called if
nothing is cached."""

Note = Callable[[str], object]


def _silence(text: str) -> None:
    pass


def make_base(
    config: OwnBase, *, channels: int, classes: int, data: Data, source: str = "", note: Note = _silence
) -> nn.Module:
    """The frozen network of a run: from `config.weights`, from the cache, or trained now on `data`.

    `channels` is of images; a GPT has none, and the classes are its vocabulary. `source` names where the data comes
    from, if not from its usual place: another source is another base. `note` is told now and then how far the training
    is.

    Raises `ContextError` if the weights are missing, belong to another model, or training did not take.
    """
    if config.weights or not trains(config):
        model = make_network(config, channels=channels, classes=classes)
        if config.weights:
            load_base(model, Path(config.weights))
        return model
    return trained_base(config, channels=channels, classes=classes, data=data, source=source, note=note)[0]


def trains(config: OwnBase) -> bool:
    """Whether a base without given weights is trained at all, rather than random."""
    return config.pretrain_on != "none" and config.epochs > 0


def trained_base(
    config: OwnBase, *, channels: int, classes: int, data: Data, source: str = "", device: str = "cpu",
    note: Note = _silence,
) -> tuple[nn.Module, str]:  # fmt: skip
    """The base that `config` asks for, on the CPU, and as JSON where it comes from: settings, data and held-out
    accuracy; that text says less if an earlier version made the base, and never where files lie.

    `device` is where it is trained; on a GPU the bytes are not the same twice. Other arguments and errors as
    `make_base`.
    """
    model = make_network(config, channels=channels, classes=classes)
    # Where its data lies is `source`; a recipe from before there was `base.path` keeps its name.
    settings = {name: value for name, value in asdict(config).items() if name != "path"}
    recipe = [RECIPE, settings, source, channels, classes, torch.__version__, *([device] if device != "cpu" else [])]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_folder() / "bases" / f"{digest}.safetensors"
    said: dict[str, object] = {
        "recipe": RECIPE, "channels": channels, "classes": classes, "torch": torch.__version__, "device": device,
        "base": {name: value for name, value in settings.items() if name != "weights"},
    }  # fmt: skip
    if isfile(path):
        try:
            load_base(model, path)
            return model, provenance_of(path) or json.dumps(said, sort_keys=True)
        except NestlingError:
            path.unlink(missing_ok=True)  # damaged: made again below
    x, y = data()
    if len(y) < 10:
        raise ConfigError(
            f"has {len(y)} items to train a base on",
            where="base.pretrain_on",
            remedy="Give at least ten: more data under base.path, or, of a text, a shorter base.context.",
        )
    own_classes = int(y.max()) + 1
    # Another label space: train the features under a classifier of that size; the task's own one stays as drawn.
    other = make_network(config, channels=channels, classes=own_classes) if own_classes > classes else model
    accuracy = pretrain(other.to(device), x, y, config, note=note)
    other.cpu()
    if other is not model:
        head = model.get_parameter("head.weight").detach().clone()
        model.load_state_dict({**other.state_dict(), "head.weight": head})
    said |= {"items": len(y), "data_sha256": _digest(x, y), "trained_classes": own_classes}
    provenance = json.dumps(said | {"held_out_accuracy": round(accuracy, 4)}, sort_keys=True)
    try:
        write_atomic(make_folder(path.parent) / path.name, base_bytes(model, provenance))
    except NestlingError as error:  # the cache is a convenience: the run goes on with what it has
        warnings.warn(f"the base is not kept for the next run: {error}", stacklevel=2)
    return model, provenance


def _digest(x: np.ndarray, y: np.ndarray) -> str:
    """Of images and labels, whatever files they were in."""
    found = hashlib.sha256(f"{x.dtype}{x.shape}{y.dtype}".encode())
    for part in (x, y):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def make_network(config: OwnBase, *, channels: int, classes: int) -> nn.Module:
    """The network of a base before it is trained."""
    if isinstance(config, GptConfig):
        return make_tinygpt(
            vocabulary=classes, width=config.width, layers=config.layers, context=config.context, seed=config.seed
        )
    return make_resnet(
        config.model, width=config.width, channels=channels, classes=classes, seed=config.seed, head=config.head
    )


def pretrain(model: nn.Module, x: np.ndarray, y: np.ndarray, config: OwnBase, *, note: Note = _silence) -> float:
    """Train `model` in place, where it lies, with AdamW and a cosine schedule; returns accuracy on a held-out tenth.

    Args:
        x: uint8 images [n, c, h, w], or tokens [n, t].
        y: labels [n], or the tokens that follow each [n, t].

    Raises `ContextError` if the result is not clearly better than chance.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretrain(model, x, y, config, note=note)
    finally:
        torch.set_num_threads(threads)


def _pretrain(model: nn.Module, x: np.ndarray, y: np.ndarray, config: OwnBase, note: Note) -> float:
    order = Stream(config.seed, "pretrain", "held-out").permutation(len(y))
    held_out, own = order[: len(y) // 10], order[len(y) // 10 :]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=1e-4)
    size = BLOCKS if isinstance(config, GptConfig) else BATCH
    steps = config.epochs * ceil(len(own) / size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 + cos(pi * step / steps)) / 2
    )
    generator, device = torch.Generator().manual_seed(config.seed), parameters[0].device
    every = 10 if len(own) < 10_000 else 1  # large sets take minutes or hours an epoch
    model.train()
    for epoch in range(config.epochs):
        if epoch % every == 0:
            note(f"training the base, epoch {epoch + 1} of {config.epochs}")
        shuffled = own[Stream(config.seed, "pretrain", f"epoch/{epoch}").permutation(len(own))]
        for start in range(0, len(own), size):
            items = shuffled[start : start + size]
            answers = torch.from_numpy(y[items]).to(device).long().flatten()
            loss = F.cross_entropy(model(_inputs(x[items], config, generator).to(device)).flatten(0, -2), answers)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        parts = (_inputs(x[held_out[i : i + 256]], config).to(device) for i in range(0, len(held_out), 256))
        guesses = torch.cat([model(part).argmax(-1).cpu() for part in parts])
    accuracy = float((guesses == torch.from_numpy(y[held_out])).double().mean())
    # Tokens are not equally frequent, as classes of images are: always the commonest is right more often than 1 in all.
    tokens = y.ndim > 1
    chance = float(np.bincount(y.ravel()).max() / y.size) if tokens else 1 / (int(y.max()) + 1)
    if accuracy < min((1.5 if tokens else 2) * chance, (1 + chance) / 2):
        raise ContextError(
            f"pre-training ended at {accuracy:.1%} on held-out items, where chance is {chance:.1%}",
            where="base",
            remedy="Lower base.lr or raise base.epochs.",
        )
    return accuracy


def _inputs(x: np.ndarray, config: OwnBase, generator: torch.Generator | None = None) -> Tensor:
    """What the network is given: tokens as they are; pixels from 0 to 1, augmented where there is a generator."""
    if isinstance(config, GptConfig):
        return torch.from_numpy(x).long()
    images = _scaled(x)
    return augmented(images, generator) if generator is not None and config.augment else images


def _scaled(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).float().div_(255)


def augmented(images: Float32[Tensor, "b c h w"], generator: torch.Generator) -> Float32[Tensor, "b c h w"]:
    """Each image turned by up to 15°, scaled by 0.55 to 1.1, shifted by up to a tenth, and hardened in contrast.

    This is what makes features that carry over: without it the latents' way to other data is too long. What a shift
    uncovers is background, 0.
    """
    n = len(images)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=generator)

    turn, size = uniform(-pi / 12, pi / 12), torch.exp(uniform(log(0.55), log(1.1)))
    matrix = torch.stack([turn.cos() / size, -turn.sin() / size, turn.sin() / size, turn.cos() / size], 1).view(n, 2, 2)
    shift = torch.stack([uniform(-0.2, 0.2), uniform(-0.2, 0.2)], 1).unsqueeze(2)  # the image's half width is 1
    grid = F.affine_grid(torch.cat([matrix, shift], 2), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    contrast = 1 + 4 * torch.rand(n, 1, 1, 1, generator=generator)
    return ((moved - 0.5) * contrast + 0.5).clamp(0, 1)
