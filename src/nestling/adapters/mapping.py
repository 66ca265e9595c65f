"""A dense Mapping Network: one latent for the whole model, and a frozen map by which each latent moves every weight.

    θ_l = θ_pre,l + s_l · σ(W_l y),   y_j = z_j (1 + m z_j),   W_l ∈ {±1/√d}^{n_l×d},  σ: identity or tanh

z is all that is trained and sent, z = 0 is the base. Mapping Networks, arXiv 2602.19134, the ancestor of FLITE, which
gives each tensor latents of its own instead. Only without σ and modulation (m = 0) is the map affine in z, so only then
is averaging latents averaging weights.

Where we differ: the paper makes whole networks, θ = σ(W z + b); here b is the frozen base outside σ, and s_l its root
mean square. Their W is orthonormal and stored, for a ResNet-18 and 1,280 latents 57 GB; ours are signs regenerated from
the seed where they are used, whose columns are orthogonal up to 1/√n for n weights. Of their modulation of W by z we
take the simplest form, a factor 1 + m z_j for column j. Time is the limit, not memory: n · d/8 additions forward and as
many backward. For all of that ResNet-18 it is 1.3 and 1.5 seconds of one core, fourteen times that of 64 latents.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nestling.adapters.frozen import refuse_second_adapter
from nestling.adapters.latent import LatentAdapter, _padding_kept, root_mean_square
from nestling.adapters.targets import Target, find_weights
from nestling.config.schema import MappingConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import SCHEME
from nestling.core.vectors import Layout
from nestling.kernels.signs.dispatch import SignMap, digest, make_map, sign_map_one


class MappingAdapter(LatentAdapter):
    """See the module's docstring; made by `nestling.attach(model, MappingConfig(...))`.

    Weights come into the model as those of `LatentAdapter` do: for the time of a forward pass, one at a time.
    Raises `ConfigError` if a pattern matches nothing, a weight is all zeros, there are more latents than weights, or
    the model carries an adapter already.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> adapter = MappingAdapter(model, MappingConfig(dim=6))
    >>> adapter.vector().shape, list(adapter.weights()), adapter.averages_exactly
    ((6,), ['0.weight', '2.weight'], True)
    """

    config: MappingConfig  # type: ignore[assignment]

    def __init__(self, model: nn.Module, config: MappingConfig, *, base_hash: str | None = None) -> None:
        self.config = replace(config, seed=config.seed or 0)
        self._targets = find_weights(model, config.targets, config.exclude)
        refuse_second_adapter(model)
        self.layout = mapping_layout(self._targets, config)
        self._maps = [_map_of(target, self.config) for target in self._targets]
        self._put_on(model, base_hash)
        self.averages_exactly = self._is_never_rounded and not config.squash and config.modulation == 0

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
            "modulation": c.modulation,
            "squash": c.squash,
            "targets": list(c.targets),
            "exclude": list(c.exclude),
            "maps": digest(self._maps).hex(),
        }

    def weights(self) -> dict[str, Tensor]:
        """The adapted tensors by parameter name, shape and dtype as in the base; gradients flow to z."""
        return {target.name: self._weight(index) for index, target in enumerate(self._targets)}

    def _weight(self, index: int) -> Tensor:
        """Base plus change of one target, as a function of z."""
        target, one, z = self._targets[index], self._maps[index], self.z
        base = target.base.detach()
        y = z * (1 + self.config.modulation * z)
        if not self.config.squash:
            return _padding_kept(sign_map_one(y, one, base), target)
        wide = base.to(torch.promote_types(base.dtype, torch.float32))
        inside = sign_map_one(y, one, torch.zeros_like(base, dtype=torch.float32))
        # `inside` is of the base's scale already, as without σ; σ itself is of numbers around 1.
        scale = one.scale
        return _padding_kept((wide + scale * torch.tanh(inside / scale)).to(base.dtype), target)

    def _latent(self, index: int) -> Tensor:
        return self.z


def mapping_layout(mapped: list[Target], config: MappingConfig) -> Layout:
    """The one entry of the trained vector; its name is no tensor's. Raises `ConfigError` for more latents than weights.

    >>> mapping_layout(find_weights(nn.Sequential(nn.Linear(4, 4)), ("*",), ()), MappingConfig(dim=6))
    Layout(names=('latent',), shapes=((6,),))
    """
    weights = sum(target.base.numel() for target in mapped)
    if config.dim > weights:
        raise ConfigError(
            f"{config.dim:,} latents for {weights:,} weights, which fewer already allow any change",
            where="adapter.dim",
            remedy="Give fewer, or adapt more.",
        )
    return Layout.of([("latent", (config.dim,))])


def _map_of(target: Target, config: MappingConfig) -> SignMap:
    """The rows of W that belong to one tensor: signs of a stream of its own, all `dim` of each row."""
    assert config.seed is not None
    name = f"mapping/{target.name}"
    scale = root_mean_square(target.base)
    if scale == 0:
        raise ConfigError(
            "is all zeros, so a change scaled by it could never move it",
            where=target.name,
            remedy="Exclude it in adapter.exclude, or initialise it.",
        )
    return make_map(config.seed, name, rows=target.base.numel(), dim=config.dim, rank=config.dim, scale=scale)
