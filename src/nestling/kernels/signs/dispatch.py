"""The latent channel's map, differentiable in the latent: one flat z in, every adapted tensor out, U never stored.

    θ_l = base_l + s_l/√r · U_l y_l,   y_l = V_lᵀ z_l   (V_l ∈ {±1/√d}^{d×r}; none where r = d: y_l = z_l)
    ∂/∂z_l = s_l/√r · V_l U_lᵀ ∂/∂θ_l

The map is affine in z, so the mean of latents gives the mean of weights. Source: FLITE (arXiv 2607.18343); the signs,
their seeded streams and the direct form (no V where r = d) are ours. Where each tensor is made: `backend`.
"""

import hashlib
import importlib
import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.core.errors import ConfigError
from nestling.core.seeds import SCHEME, Key, Stream, words
from nestling.core.seeds import key as stream_key
from nestling.kernels.signs import portable
from nestling.kernels.signs.reference import words_per_row

DIGEST_WORDS = 4096


@dataclass(frozen=True, eq=False)
class SignMap:
    """How the latent slice of one tensor becomes its change: built by `make_map`, the same on client and server.

    `v` holds ±1/√dim, or is None where rank = dim.
    """

    key: Key
    rows: int
    rank: int
    dim: int
    scale: float
    v: Float32[np.ndarray, "dim rank"] | None

    @property
    def factor(self) -> float:
        """scale/√rank, folded into y so that no pass over the rows multiplies by it."""
        return self.scale / math.sqrt(self.rank)


def make_map(seed: int, name: str, *, rows: int, dim: int, rank: int, scale: float) -> SignMap:
    """The map of the tensor `name` with `rows` elements, `dim` latents and rank `rank`.

    U is the stream (seed, "signs-u", name); V is sign i·rank + j of (seed, "signs-v", name) at row i, column j.
    Raises `ConfigError` for rows, dim or rank below 1, rank above dim, or a scale no float32 can hold.

    >>> make_map(0, "conv.weight", rows=576, dim=8, rank=4, scale=0.02).v.shape
    (8, 4)
    """
    if min(rows, dim, rank) < 1:
        raise ConfigError(f"rows {rows}, dim {dim} and rank {rank} must each be 1 or more", where=name)
    if rank > dim:
        raise ConfigError(
            f"rank {rank} is above the {dim} latents, which is redundancy: the change still spans {dim} dimensions",
            where=name,
            remedy=f"Give rank {dim} (the direct form) or less.",
        )
    if not abs(scale) <= float(np.finfo(np.float32).max):
        raise ConfigError(f"scale {scale} is not a float32", where=name, remedy="Does the base hold NaN or infinity?")
    v = None
    if rank < dim:
        signs = Stream(seed, "signs-v", name).signs(dim * rank).reshape(dim, rank)
        v = signs * np.float32(1 / math.sqrt(dim))
    return SignMap(stream_key(seed, "signs-u", name), rows, rank, dim, float(np.float32(scale)), v)


def digest(maps: Sequence[SignMap]) -> bytes:
    """SHA-256 over the scheme and all maps: what client and server compare before any training.

    Each map gives the first 4,096 words of U (little-endian; all of them if fewer), the signs of V packed lowest bit
    first, rank, dim and rows as u64, and the float32 bits of the scale.

    >>> digest([make_map(0, "a", rows=9, dim=2, rank=2, scale=1.0)]).hex()[:8]
    'd1a3bfac'
    """
    hashed = hashlib.sha256(SCHEME.encode())
    for each in maps:
        count = min(DIGEST_WORDS, each.rows * words_per_row(each.rank))
        hashed.update(words(each.key, 0, count).astype("<u4").tobytes())
        if each.v is not None:
            hashed.update(np.packbits(each.v > 0, bitorder="little").tobytes())
        hashed.update(struct.pack("<QQQf", each.rank, each.dim, each.rows, each.scale))
    return hashed.digest()


def backend(device: torch.device | str) -> str:
    """Which code makes tensors on `device`: "numba" (a CPU with a working Numba) or "portable" (PyTorch).

    >>> backend("cuda")
    'portable'
    """
    return "portable" if _kernels_for(torch.device(device)) is None else "numba"


def _kernels_for(device: torch.device) -> ModuleType | None:
    return _numba_kernels() if device.type == "cpu" else None


@lru_cache(maxsize=1)
def _numba_kernels() -> ModuleType | None:
    """The CPU kernels, imported when first needed; None, with one warning, where Numba is missing or broken."""
    try:
        return importlib.import_module("nestling.kernels.signs.cpu")
    except Exception as error:  # a broken compiler fails in many ways, and every one has the same remedy
        warnings.warn(
            f"Numba cannot be used ({error}); the sign map runs in PyTorch, correctly but some fifty times slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def sign_map(z: Float[Tensor, " latents"], maps: Sequence[SignMap], bases: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Every tensor for the flat float32 latent `z`, whose slices follow the order of `maps`.

    Each result has the shape, dtype and device of its base; half-precision bases are added to in float32, then cast.
    Gradients flow to `z` alone, once. z = 0 gives the bases exactly. Raises `ConfigError` on sizes that do not fit.

    >>> maps = [make_map(0, name, rows=6, dim=4, rank=4, scale=1.0) for name in ("a", "b")]
    >>> z = torch.zeros(8, requires_grad=True)
    >>> a, b = sign_map(z, maps, [torch.ones(2, 3), torch.ones(6)])
    >>> torch.equal(a, torch.ones(2, 3)), b.shape
    (True, torch.Size([6]))
    """
    dims = [each.dim for each in maps]
    if len(maps) != len(bases) or z.numel() != sum(dims):
        raise ConfigError(
            f"{z.numel()} latents and {len(bases)} tensors, the maps need {sum(dims)} and {len(maps)}",
            where="sign map",
            remedy="Was the latent made by another adapter?",
        )
    return tuple(map(sign_map_one, z.split(dims), maps, bases)) if maps else ()


def sign_map_one(z: Float[Tensor, " dim"], map: SignMap, base: Tensor) -> Tensor:
    """One tensor from its slice of the latent; as `sign_map`, for hooks that adapt a layer at a time.

    Raises `ConfigError` unless `z` is float32[dim] and `base` holds `rows` floating-point numbers.

    >>> one = make_map(0, "a", rows=6, dim=4, rank=4, scale=1.0)
    >>> sign_map_one(torch.tensor([1.0, 0, 0, 0]), one, torch.zeros(2, 3))
    tensor([[ 0.5000, -0.5000,  0.5000],
            [-0.5000,  0.5000,  0.5000]])
    """
    if z.dtype != torch.float32 or z.numel() != map.dim:
        raise ConfigError(f"is {z.dtype}[{z.numel()}], the map needs float32[{map.dim}]", where="latent")
    if base.numel() != map.rows or not base.dtype.is_floating_point:
        raise ConfigError(
            f"is {base.dtype}[{base.numel()}], the map needs {map.rows} floating-point numbers",
            where="base tensor",
            remedy="Was the map made for another model?",
        )
    return _SignMap.apply(z.to(base.device), map, base.detach())


class _SignMap(torch.autograd.Function):
    """One node of the graph for each tensor: in the backward pass a large weight's gradient is freed at once."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, map: SignMap, base: Tensor) -> Tensor:
        ctx.map = map
        y = z if map.v is None else (z[:, None] * _v(map, z.device)).sum(0)
        return _expand(map, y * map.factor, base)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        g_y = _reduce(ctx.map, g) * ctx.map.factor
        return g_y if ctx.map.v is None else (g_y * _v(ctx.map, g.device)).sum(1), None, None


def _v(map: SignMap, device: torch.device) -> Tensor:
    return torch.from_numpy(map.v).to(device)


def _expand(map: SignMap, y: Tensor, base: Tensor) -> Tensor:
    flat, kernels = base.reshape(-1).contiguous(), _kernels_for(base.device)
    if kernels is None:
        out = torch.empty_like(flat)
        portable.expand(map.key, y, base=flat, out=out)
        return out.reshape(base.shape)
    if not y.any():  # the start of every run; also keeps the sign of a zero in the base
        return base.clone(memory_format=torch.contiguous_format)
    wide = base.dtype == torch.float64  # its own digits must survive, so the change is made alone and added
    start = torch.zeros_like(flat, dtype=torch.float32) if wide else flat.float()
    out = torch.empty_like(start) if start is flat else start
    kernels.expand(map.key, y.numpy(), base=start.numpy(), out=out.numpy(), threads=torch.get_num_threads())
    return (flat + out if wide else out.to(base.dtype)).reshape(base.shape)


def _reduce(map: SignMap, g: Tensor) -> Tensor:
    flat, kernels = g.reshape(-1).to(torch.float32).contiguous(), _kernels_for(g.device)
    if kernels is None:
        return portable.reduce(map.key, flat, map.rank)
    sums = kernels.reduce(map.key, flat.numpy(), map.rank, threads=torch.get_num_threads())
    return torch.from_numpy(sums.astype(np.float32))
