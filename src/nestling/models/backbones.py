"""The identity of a frozen model: a hash that does not depend on how its file was written or sharded.

    base_hash = SHA-256 over the tensors, sorted by name, of (name, dtype, shape, bytes), then over `SETTINGS`

Two clients that disagree on one weight, or on how the weights are used, get different hashes, and refuse each other's
messages.
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
from nestling.models.untrusted import CONVERT, is_pickle

MAX_FILE = 64 << 30
MAX_HEADER = 1 << 20
"""Ten thousand tensors; the library takes a second and 100 MB for the header of 100,000 empty ones."""
HASH_KEY = "nestling_base_hash"
PROVENANCE_KEY = "nestling_provenance"
SETTINGS = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "rope_parameters", "partial_rotary_factor", "sliding_window", "layer_types", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier", "embedding_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip
"""What of a language model's configuration changes what equal weights give. Named one by one, since other entries come
and go with the version of transformers."""


def base_hash(model: nn.Module) -> str:
    """64 hex digits that identify a model's parameters and persistent buffers.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> base_hash(a) == base_hash(a), base_hash(a) == base_hash(b)
    (True, False)
    """
    return hash_of_state(model.state_dict(), settings_of(model))


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Those of `SETTINGS` that a language model has; empty for any other model.

    >>> settings_of(nn.Linear(2, 2))
    {}
    """
    config, plain = getattr(model, "config", None), (bool, int, float, str, list, dict)
    return {name: value for name in SETTINGS if isinstance(value := getattr(config, name, None), plain)}


def hash_of_state(state: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str:
    """`base_hash` of a model with this `state_dict()` and `settings_of` it. Extra state that is not a tensor counts by
    its JSON.

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
    if settings:
        digest.update(b"settings\0" + json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()


def base_bytes(model: nn.Module, provenance: str = "") -> bytes:
    """The model's tensors as the content of a safetensors file; in its metadata their hash and, if there is one, a text
    that says where they come from. The same model and text give the same bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {HASH_KEY: hash_of_state(tensors)}
    if not provenance:
        return save(tensors, metadata=metadata)
    return _metadata_in_order(save(tensors, metadata=metadata | {PROVENANCE_KEY: provenance}))


def _metadata_in_order(file: bytes) -> bytes:
    """The library writes several entries of metadata in an order that differs from one process to the next."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + file[8 + length :]


def provenance_of(path: Path) -> str:
    """What a base's file says of where its weights come from; empty if it says nothing. The file is one that
    `load_base` has read."""
    return _metadata(path).get(PROVENANCE_KEY, "")


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
    """The tensors of a safetensors file of at most `max_bytes`; its header is bounded before it is parsed.

    Raises `ContextError` if there is no such file, or a pickle, which is never read, `WireError` if it is damaged,
    names a tensor twice (a reader would choose one of them), or has a header of more than `MAX_HEADER` bytes.
    """
    if not isfile(path):
        raise ContextError("there is no such file", where=str(path), remedy="Give the path of a .safetensors file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        header = file.read(min(length, MAX_HEADER))
    if is_pickle(start + header[:1]):
        raise ContextError("is a pickle, which can run code", where=str(path), remedy=CONVERT)
    if size < 8 or size > max_bytes or length > min(size - 8, MAX_HEADER):
        raise WireError("damaged", f"is no safetensors file of at most {max_bytes:,} bytes", where=str(path))
    try:
        json.loads(header, object_pairs_hook=_each_once)
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise WireError("damaged", f"cannot be read as safetensors ({error})", where=str(path)) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(entries := dict(pairs)) != len(pairs):
        raise ValueError("a name stands there twice")
    return entries
