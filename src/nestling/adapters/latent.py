"""FLITE: a frozen model, and a few latents per tensor from which everyone regenerates the weight change.

    θ_l = θ_pre,l + s_l · U_l V_lᵀ z_l

z is all that is trained and sent; U and V are signs regenerated from a seed, s_l is the root mean square of θ_pre,l.
The map is affine in z, so averaging latents is averaging weights: Σ p_k θ(z_k) = θ(Σ p_k z_k). FLITE, arXiv 2607.18343.
The paper leaves the distribution of U and V open; ours are signs of an integer stream, which are the same bits on
every machine, and are never stored: `kernels/signs` makes them where they are used. By default V is the identity.

The model itself is not rewritten. For the time of a forward pass of a module, adapted weights stand in place of its own
and of those of all modules inside it (some blocks read their children's weights directly, as `nn.MultiheadAttention`
does); before and after, the model is its base, so `state_dict()`, `.to()` and copies behave as ever.
"""

from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.adapters.frozen import AdapterHook, Frozen, refuse_second_adapter
from nestling.adapters.store import check_vector, save_adapter
from nestling.adapters.targets import Place, Target, find_norms, find_weights
from nestling.config.schema import LatentConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import SCHEME
from nestling.core.vectors import Layout, Vector
from nestling.kernels.signs.dispatch import SignMap, digest, make_map, sign_map, sign_map_one
from nestling.models.backbones import base_hash as hash_of


class LatentAdapter:
    """See the module's docstring; made by `nestling.attach(model, LatentConfig(...))`.

    One forward pass at a time: threads need a copy of the model each (`copy.deepcopy((model, adapter))`).
    Raises `ConfigError` if a pattern matches nothing, a weight is all zeros (its scale would be 0) or the model carries
    an adapter already.
    """

    def __init__(self, model: nn.Module, config: LatentConfig, *, base_hash: str | None = None) -> None:
        self.config = replace(config, seed=config.seed or 0)
        mapped = find_weights(model, config.targets, config.exclude)
        norms = find_norms(model, mapped) if config.train_norms else []
        self._targets = mapped + norms
        refuse_second_adapter(model)
        self.layout = latent_layout(mapped, norms, config)
        self._maps = [_map_of(t, size, self.config) for t, size in zip(mapped, self.layout.sizes, strict=False)]
        self._put_on(model, base_hash)
        self.averages_exactly = self._is_never_rounded

    def _put_on(self, model: nn.Module, base_hash: str | None) -> None:
        """Freeze the model, and let it read weights made of latents that begin at 0; targets and layout are known."""
        self.base_hash = base_hash or hash_of(model)
        self.z = nn.Parameter(torch.zeros(self.layout.size, device=self._targets[0].base.device))
        self._made: dict[int, _Made] = {}
        self._depth, self._shown_version, self._shown_with_graph = 0, 0, False
        self.frozen = Frozen(model)
        self._handles = [handle for module in model.modules() for handle in self._hook(module)]

    @property
    def _is_never_rounded(self) -> bool:
        """False in half precision: adapted weights are rounded after the map, and a mean of such is another number."""
        return all(target.base.dtype in (torch.float32, torch.float64) for target in self._targets)

    @property
    def spec(self) -> dict[str, Any]:
        """What both sides must agree on: the kind, the sizes, the seed and a digest of the regenerated maps."""
        c = self.config
        assert c.seed is not None
        return {
            "kind": c.kind,
            "seed": f"{c.seed:016x}",
            "scheme": SCHEME,
            "dim": c.dim,
            "budget": c.budget,
            "rank": c.rank,
            "targets": list(c.targets),
            "exclude": list(c.exclude),
            "train_norms": c.train_norms,
            "maps": digest(self._maps).hex(),
        }

    def vector(self) -> Vector:
        """The latents z (then, with `train_norms`, the changes of the norms), a copy: float32[layout.size]."""
        return self.z.detach().cpu().numpy().copy()

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set the latents. Raises `ContextError` if the length differs, `WireError` if a number is not finite."""
        array = check_vector(vector, self.layout)
        with torch.no_grad():
            self.z.copy_(torch.from_numpy(array))

    def trainable(self) -> list[nn.Parameter]:
        """The one parameter z, for an optimiser."""
        return [self.z]

    def gates(self) -> list[nn.Parameter]:
        """None."""
        return []

    def weights(self) -> dict[str, Tensor]:
        """The adapted tensors by parameter name, shape and dtype as in the base; gradients flow to z."""
        n = len(self._maps)
        latents = self.z[: sum(m.dim for m in self._maps)]
        mapped = sign_map(latents, self._maps, [t.base.detach() for t in self._targets[:n]])
        tensors = [_padding_kept(w, t) for w, t in zip(mapped, self._targets, strict=False)]
        tensors += [self._weight(i) for i in range(n, len(self._targets))]
        return {target.name: tensor for target, tensor in zip(self._targets, tensors, strict=True)}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the latents, their settings, the base's hash and a model card into `folder`."""
        save_adapter(self, folder)

    def detach(self, *, merge: bool = False) -> None:
        """Take the adapter off. The model is the base again, bit for bit; with `merge` it keeps the adapted weights.

        Taking it off twice does nothing more.
        """
        if not self._handles:
            return
        if merge:
            with torch.no_grad():
                adapted = self.weights()
                for target in self._targets:
                    target.base.copy_(adapted[target.name])
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hide()
        self.frozen.release()
        self._made.clear()

    def _weight(self, index: int) -> Tensor:
        """Base plus change of one target, as a function of z."""
        target = self._targets[index]
        base, z = target.base.detach(), self._latent(index)
        if index < len(self._maps):
            return _padding_kept(sign_map_one(z, self._maps[index], base), target)
        wide = base.to(torch.promote_types(base.dtype, torch.float32))
        return (wide + z.view(base.shape).to(base.device)).to(base.dtype)

    def _latent(self, index: int) -> Tensor:
        return self.z[self.layout.slice(self.layout.names[index])]

    def _weight_for_forward(self, index: int) -> Tensor:
        """`_weight`; without gradients it is kept until z or the base changes."""
        if torch.is_grad_enabled():
            self._made.pop(index, None)  # training follows: its memory matters more than a later evaluation's time
            return self._weight(index)
        base, z = self._targets[index].base, self._latent(index)
        made = self._made.get(index)
        if made is None or not made.is_of(z, base):
            # `detach` is an alias: it holds on to the storage, so that no new one can take its address.
            made = self._made[index] = _Made(self._weight(index), z.detach().clone(), base.detach(), _version(base))
        return made.weight

    def _hook(self, module: nn.Module) -> list[Any]:
        within = {id(m) for m in module.modules()}
        inside = [(i, p) for i, target in enumerate(self._targets) for p in target.places if id(p.module) in within]
        if not inside:
            return []
        before = module.register_forward_pre_hook(_Show(self, inside, is_root=module is self.frozen.model))
        return [before, module.register_forward_hook(_Hide(self), always_call=True)]

    def _hide(self) -> None:
        """The modules read their own parameters again."""
        self._depth = 0
        for target in self._targets:
            for place in target.places:
                place.module.__dict__.pop(place.attribute, None)


def _padding_kept(weight: Tensor, target: Target) -> Tensor:
    """The row of an embedding's padding index is never trained, so it stays as in the base."""
    for place in target.places:
        padding = getattr(place.module, "padding_idx", None)
        if isinstance(place.module, nn.Embedding) and padding is not None:
            rows = torch.tensor([padding], device=weight.device)
            return weight.index_copy(0, rows, target.base.detach()[rows])
    return weight


@dataclass(frozen=True, eq=False)
class _Made:
    """An adapted tensor and what it was made from.

    z is compared by content, since writes through `.data` leave no other trace; the base is frozen and is not, so such
    a write to it goes unseen.
    """

    weight: Tensor
    z: Tensor
    base: Tensor
    version: int

    def is_of(self, z: Tensor, base: Tensor) -> bool:
        """Whether the same would be made now."""
        same_base = self.base.data_ptr() == base.data_ptr() and self.base.dtype == base.dtype
        return same_base and self.version == _version(base) and torch.equal(self.z, z)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Show(AdapterHook):
    """Before a forward pass: the modules inside read the adapted tensors. Passes within that pass change nothing."""

    def __init__(self, adapter: LatentAdapter, inside: list[tuple[int, Place]], *, is_root: bool) -> None:
        self.adapter, self.inside, self.is_root = adapter, inside, is_root

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object) -> None:
        adapter = self.adapter
        if self.is_root:
            adapter._hide()  # what a pass left behind that was interrupted
        version, grad = _version(adapter.z), torch.is_grad_enabled()
        if adapter._depth == 0 or version != adapter._shown_version or (grad and not adapter._shown_with_graph):
            adapter._shown_version, adapter._shown_with_graph = version, grad
            # `torch.func.functional_call` puts in plain tensors for one call, and those are then meant.
            own = [(i, p) for i, p in self.inside if isinstance(p.module._parameters[p.attribute], nn.Parameter)]
            made = {index: adapter._weight_for_forward(index) for index in dict.fromkeys(i for i, _ in own)}
            for index, place in own:
                # An instance attribute hides the registered parameter of the same name.
                place.module.__dict__[place.attribute] = made[index]
        adapter._depth += 1


class _Hide:
    """After the outermost pass: the modules read their own parameters again."""

    def __init__(self, adapter: LatentAdapter) -> None:
        self.adapter = adapter

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.adapter._depth -= 1
        if self.adapter._depth <= 0:
            self.adapter._hide()


def latent_layout(mapped: list[Target], norms: list[Target], config: LatentConfig) -> Layout:
    """Names and shapes of the trained vector: the latents of each mapped weight, then the norms as they are."""
    dims = latent_counts([t.base.numel() for t in mapped], config)
    entries = [(t.name, (dim,)) for t, dim in zip(mapped, dims, strict=True)]
    return Layout.of(entries + [(t.name, t.base.shape) for t in norms])


def latent_counts(sizes: list[int], config: LatentConfig) -> list[int]:
    """How many latents each tensor gets: `dim` (at most its size), or its share of `budget` by the root of its size.

    Shares are rounded down in integer arithmetic and what is left goes to the largest remainders, so that every client
    counts alike; each tensor gets at least one. The paper gives every layer the same; equal bytes serve large layers
    better when those have more.

    >>> latent_counts([100, 400], LatentConfig(budget=30)), latent_counts([100, 400], LatentConfig(dim=8))
    ([10, 20], [8, 8])
    """
    if not config.budget:
        return [min(config.dim, size) for size in sizes]
    if config.budget < len(sizes):
        raise ConfigError(
            f"{config.budget} latents for {len(sizes)} tensors",
            where="adapter.budget",
            remedy="Give at least one each.",
        )
    roots = [isqrt(size << 20) for size in sizes]
    spare = config.budget - len(sizes)
    counts = [1 + spare * root // sum(roots) for root in roots]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (-(spare * roots[i] % sum(roots)), i))
    for i in by_remainder[: config.budget - sum(counts)]:
        counts[i] += 1
    return counts


def _map_of(target: Target, dim: int, config: LatentConfig) -> SignMap:
    assert config.seed is not None
    scale = root_mean_square(target.base)
    if scale == 0:
        raise ConfigError(
            "is all zeros, so latents scaled by it could never move it",
            where=target.name,
            remedy="Exclude it in adapter.exclude, or initialise it.",
        )
    return make_map(
        config.seed, target.name, rows=target.base.numel(), dim=dim, rank=min(config.rank or dim, dim), scale=scale
    )


def root_mean_square(tensor: Tensor) -> float:
    """√mean(x²) as a float32 number, summed in float64 in a fixed order so that all clients get the same bits.

    >>> root_mean_square(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    total, flat = 0.0, tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), 1 << 20):
        chunk = flat[start : start + (1 << 20)].cpu().to(torch.float64).numpy()
        total += float(np.square(chunk).sum())
    return float(np.float32(np.sqrt(total / max(flat.numel(), 1))))
