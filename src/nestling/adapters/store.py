"""Adapters on disk: the vector as named tensors (safetensors), its settings and the base's hash (JSON), a model card.

Loading is strict: exact tensors, shapes and dtypes, finite values, the base they were trained on, the same regenerated
maps. Each mismatch is an error, never a warning.
"""

import dataclasses
import hashlib
import json
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from nestling.config.load import parse_table
from nestling.config.schema import AdapterConfig, LatentConfig, LoraConfig, MappingConfig, MemoryConfig
from nestling.core.errors import ContextError, NestlingError, SeedError, WireError
from nestling.core.files import make_folder, write_atomic
from nestling.core.vectors import Layout, Vector
from nestling.models.backbones import base_hash as hash_of
from nestling.models.backbones import read_tensors

if TYPE_CHECKING:
    from nestling.adapters.base import Adapter

FORMAT = "nestling-adapter/v1"


def check_vector(vector: np.ndarray | Tensor, layout: Layout) -> Vector:
    """`vector` as float32[layout.size]; `ContextError` if it is longer or shorter, `WireError` if not finite."""
    array = vector.detach().cpu().float().numpy() if isinstance(vector, Tensor) else np.asarray(vector)
    if array.shape != (layout.size,):
        raise ContextError(
            f"has shape {array.shape}, this adapter holds {layout.size} numbers",
            where="vector",
            remedy="Was it made with the same settings, for the same model?",
        )
    with np.errstate(over="ignore"):
        array = np.require(array, np.float32, ["C", "W"])  # writable: torch warns about tensors over read-only memory
    if not np.isfinite(array).all():
        raise WireError("non_finite", "holds NaN or infinity", where="vector", remedy="Keep the last finite state.")
    return array


def save_adapter(adapter: "Adapter", folder: str | Path) -> None:
    """Write `adapter.safetensors`, `adapter.json` and `README.md` into `folder`, which is made if need be.

    Raises `ConfigError` if the folder cannot be made or written, `StorageError` if the disk is full, `ContextError` if
    the base is no longer the one that the adapter was attached to, because it would give other outputs on that one.
    """
    if adapter.frozen.hash_now() != adapter.base_hash:
        raise ContextError(
            "the frozen base has changed since the adapter was attached, and no adapter holds that change",
            where="save_pretrained",
            remedy="Load weights before attaching; keep modules that write buffers in eval() while training.",
        )
    path = make_folder(Path(folder))
    vector = adapter.vector()
    arrays = adapter.layout.unpack(vector)
    about = {
        "format": FORMAT,
        "config": dataclasses.asdict(adapter.config),
        "spec": adapter.spec,
        "base_hash": adapter.base_hash,
        "layout": [[name, list(shape)] for name, shape in adapter.layout],
        "vector": _vector_digest(vector),
    }
    write_atomic(path / "README.md", _card(about, adapter.layout.size).encode())
    write_atomic(path / "adapter.json", (json.dumps(about, indent=2, allow_nan=False) + "\n").encode())
    write_atomic(path / "adapter.safetensors", save({n: torch.from_numpy(a.copy()) for n, a in arrays.items()}))


def from_pretrained(model: nn.Module, folder: str | Path) -> "Adapter":
    """Attach the adapter saved in `folder` to `model`, which must be the base it was trained on.

    Args:
        model: the base, its weights in the number format of the training (a language run's `base.dtype`).
        folder: of `save_pretrained`, or of a run, whose adapter lies in it.

    Raises:
        ContextError: the folder is not an adapter's, or the model is another base (exit 3).
        SeedError: the maps regenerated here are not those it was trained with (exit 4).
        WireError: a file is damaged, or does not hold exactly the expected tensors (exit 5).

    >>> import nestling, tempfile
    >>> model = nn.Sequential(nn.Linear(4, 4))
    >>> adapter = nestling.attach(model, nestling.LatentConfig(seed=7, dim=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adapter.save_pretrained(folder)
    ...     adapter.detach()
    ...     again = nestling.from_pretrained(model, folder)
    >>> again.layout == adapter.layout
    True
    """
    from nestling.adapters.base import attach

    path = Path(folder)
    if isfile(path / "config.toml") and isfile(path / "adapter" / "adapter.json"):
        path = path / "adapter"
    about = _read_about(path / "adapter.json")
    own_hash = hash_of(model)
    if own_hash != about["base_hash"]:
        raise ContextError(
            f"was trained on base {str(about['base_hash'])[:12]}, this model is {own_hash[:12]}",
            where=str(path),
            remedy="Load the exact weights that the adapter was trained on, in the same number format (base.dtype).",
        )
    try:
        config = parse_table(about["config"])
        _check_size(config, model, path)
        adapter = attach(model, config, base_hash=own_hash)
    except WireError:
        raise
    except (NestlingError, TypeError, OverflowError) as error:  # the latter two: values no setting can have
        raise ContextError(f"does not fit this model ({error})", where=str(path)) from error
    try:
        _check_spec(about, adapter, path)
        vector = _read_vector(path / "adapter.safetensors", adapter.layout)
        if _vector_digest(vector) != about["vector"]:
            raise WireError("damaged", "its numbers are not those that were saved", where=str(path))
        adapter.load_vector(vector)
    except BaseException:
        adapter.detach()  # a refused file must not leave the model half adapted
        raise
    return adapter


def _check_size(config: AdapterConfig, model: nn.Module, path: Path) -> None:
    """Settings must not make us allocate more numbers than the file can hold, nor a window the model has no use for.

    A memory's rules are more than its latents (`dim`), but not than the model's own projections: their rank is bounded.
    """
    file = path / "adapter.safetensors"
    room = file.stat().st_size // 4 if isfile(file) else 0
    asked = config.budget or config.dim if isinstance(config, LatentConfig) else 0
    if isinstance(config, MappingConfig):
        asked = config.dim
    if isinstance(config, LoraConfig):
        from nestling.adapters.lora import lora_layout

        asked = lora_layout(config, model).size
    if isinstance(config, MemoryConfig):
        from nestling.adapters.rules import memory_layout

        shared, local = memory_layout(config, _shape(model))
        asked = shared.size + local.size  # the latter is never in a file
    if asked > room:
        raise WireError("spec", f"asks for {asked:,} numbers, {room:,} fit into the file", where=str(path))
    if isinstance(config, MemoryConfig | LoraConfig) and config.window:
        seen, most = config.window + config.sinks, _shape(model).max_position_embeddings
        if seen > most:
            raise WireError("spec", f"keeps {seen:,} tokens in sight, the model knows {most:,}", where=str(path))


def _shape(model: nn.Module) -> Any:
    """The settings of a language model, in transformers' form."""
    from nestling.models.window import attention_layers  # needs transformers

    return attention_layers(model)[0].config


def _read_about(path: Path) -> dict[str, Any]:
    if not isfile(path):
        raise ContextError(
            "is missing: this is not an adapter's folder",
            where=str(path),
            remedy="Give the folder of save_pretrained; a run whose clients keep parts (share = gates) has none.",
        )
    try:
        about = json.loads(path.read_text("utf-8")) if path.stat().st_size < (16 << 20) else None
    except (ValueError, OSError, RecursionError) as error:
        raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error
    keys = {"format", "config", "spec", "base_hash", "layout", "vector"}
    if not isinstance(about, dict) or set(about) != keys or about["format"] != FORMAT:
        raise WireError(
            "format", f"is not in the format {FORMAT}", where=str(path), remedy="Was it made by another version?"
        )
    return about


def _check_spec(about: dict[str, Any], adapter: "Adapter", path: Path) -> None:
    own = adapter.spec
    if isinstance(about["spec"], dict) and about["spec"].get("maps") != own.get("maps"):
        raise SeedError(
            "its maps U and V do not come out the same here",
            where=str(path),
            remedy="Run `nestling doctor`; an edited seed, rank or base has the same effect.",
        )
    if about["spec"] != own or about["layout"] != [[name, list(shape)] for name, shape in adapter.layout]:
        raise WireError("spec", "its settings and its tensors contradict each other", where=str(path / "adapter.json"))


def _read_vector(path: Path, layout: Layout) -> Vector:
    # The names take a little room besides the numbers; anything larger is not this adapter.
    tensors = read_tensors(path, max_bytes=4 * layout.size + 1024 * (len(layout.names) + 1))
    if set(tensors) != set(layout.names):
        raise WireError("tensors", "does not hold exactly the adapter's tensors", where=str(path))
    for name, shape in layout:
        if tensors[name].dtype != torch.float32 or tuple(tensors[name].shape) != shape:
            raise WireError("tensors", f"{name} is not float32{list(shape)}", where=str(path))
    return layout.pack({name: tensor.numpy() for name, tensor in tensors.items()})


def _vector_digest(vector: Vector) -> str:
    return hashlib.sha256(vector.astype("<f4").tobytes()).hexdigest()


def _card(about: dict[str, Any], size: int) -> str:
    config = "\n".join(f"- {key}: `{value}`" for key, value in about["config"].items())
    return f"""---
library_name: nestling
---
# An adapter of {size:,} numbers ({4 * size:,} bytes)

It changes a frozen base whose hash is `{about["base_hash"]}`, and fits no other weights.

{config}

```python
import nestling

adapter = nestling.from_pretrained(model, "this folder")  # model: the base, loaded
```
"""
