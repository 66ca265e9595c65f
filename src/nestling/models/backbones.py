"""The identity of a frozen model: a hash that does not depend on how its file was written or sharded.

    base_hash = SHA-256 over the tensors, sorted by name, of (name, dtype, shape, bytes)

Two clients that disagree on one weight get different hashes, and refuse each other's messages.
"""

import hashlib
import json
from collections.abc import Mapping
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from nestling.core.errors import ConfigError, ContextError, WireError

MAX_FILE = 64 << 30
HASH_KEY = "nestling_base_hash"


def base_hash(model: nn.Module) -> str:
    """64 hex digits that identify a model's parameters and persistent buffers.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> base_hash(a) == base_hash(a), base_hash(a) == base_hash(b)
    (True, False)
    """
    return hash_of_state(model.state_dict())


def hash_of_state(state: Mapping[str, Any]) -> str:
    """`base_hash` of a model with this `state_dict()`. Extra state that is not a tensor counts by its JSON.

    Raises `ConfigError` if a tensor has no content (on the meta device), or extra state no JSON.
    """
    digest = hashlib.sha256(b"nestling-base/v1\0")
    for name, tensor in sorted(state.items()):
        if not isinstance(tensor, Tensor):
            try:
                digest.update(json.dumps([name, tensor], sort_keys=True).encode() + b"\0")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"has extra state that cannot be hashed ({error})", where=name) from error
            continue
        if tensor.is_meta:
            raise ConfigError("has no content yet", where=name, remedy="Load the weights before attaching an adapter.")
        head = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        digest.update(head.encode() + b"\0")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def base_bytes(model: nn.Module) -> bytes:
    """The model's tensors as the content of a safetensors file, their hash in its metadata."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    return save(tensors, metadata={HASH_KEY: hash_of_state(tensors)})


def load_base(model: nn.Module, path: Path) -> None:
    """Fill `model` from a safetensors file, which must hold exactly its tensors, all finite, and of the hash it states.

    Raises `ContextError` (exit 3) if the file is missing or made for another model, `WireError` (exit 5) if damaged.
    """
    tensors = read_tensors(path)
    own = model.state_dict()
    if set(tensors) != set(own):
        missing, extra = sorted(set(own) - set(tensors))[:3], sorted(set(tensors) - set(own))[:3]
        raise ContextError(
            f"holds other tensors than the model (missing {missing}, unexpected {extra})",
            where=str(path),
            remedy="Check base.model, base.width and the number of classes.",
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ContextError(
                f"{name} is {tensor.dtype}{list(tensor.shape)}, the model has {own[name].dtype}{list(own[name].shape)}",
                where=str(path),
                remedy="Check base.model, base.width and the number of classes.",
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WireError("non_finite", f"{name} holds NaN or infinity", where=str(path))
    if (stated := _metadata(path).get(HASH_KEY)) and stated != hash_of_state(tensors):
        raise WireError("damaged", "its tensors are not those that were saved", where=str(path))
    model.load_state_dict(tensors)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def read_tensors(path: Path, *, max_bytes: int = MAX_FILE) -> dict[str, Tensor]:
    """The tensors of a safetensors file of at most `max_bytes`; its header is bounded before it is parsed."""
    if not isfile(path):
        raise ContextError("there is no such file", where=str(path), remedy="Give the path of a .safetensors file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or size > max_bytes or header > min(size - 8, 16 << 20):
        raise WireError("damaged", f"is no safetensors file of at most {max_bytes:,} bytes", where=str(path))
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WireError("damaged", f"cannot be read as safetensors ({error})", where=str(path)) from error
