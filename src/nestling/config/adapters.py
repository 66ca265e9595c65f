"""The settings of each adapter: what of a model is trained, and so what travels."""

import re
from dataclasses import dataclass
from typing import Literal

from nestling.config.checks import are_patterns, at_least, is_count, is_one_of, is_seed
from nestling.core.errors import ConfigError


@dataclass(frozen=True)
class LatentConfig:
    """FLITE: per adapted tensor `dim` latents, from which everyone regenerates the weight change."""

    kind: Literal["latent"] = "latent"
    seed: int | None = None
    """Seed of the frozen maps U and V; none: the run's seed (0 outside a run)."""
    dim: int = 64
    """Latents of each adapted tensor: the numbers that are trained and sent."""
    budget: int = 0
    """If not 0: this many latents in all instead of `dim` each, shared out by the square root of the tensors' sizes."""
    rank: int = 0
    """Columns of U. 0 means `dim`, with V the identity; a smaller rank mixes the latents through V first."""
    targets: tuple[str, ...] = ("*",)
    """Patterns (as of a shell) of the Conv, Linear and Embedding modules whose weights are adapted."""
    exclude: tuple[str, ...] = ()
    """Patterns of modules to leave frozen although a target matches."""
    train_norms: bool = False
    """Also train and send the scales and shifts of normalisation layers (counted like everything else)."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            is_seed("adapter.seed", self.seed)
        is_count("adapter.dim", self.dim, 1)
        is_count("adapter.rank", self.rank, 0)
        is_count("adapter.budget", self.budget, 0)
        are_patterns("adapter.targets", self.targets)
        are_patterns("adapter.exclude", self.exclude)
        if self.budget and self.rank:
            raise ConfigError(
                "cannot be given together with a rank", where="adapter.budget", remedy="Give one of them as 0."
            )
        if self.rank > self.dim:
            raise ConfigError(
                f"rank {self.rank} is larger than dim {self.dim}: the extra columns of U could never be reached",
                where="adapter.rank",
                remedy="Give rank 0 (the same as dim) or less than dim.",
            )


@dataclass(frozen=True)
class FullConfig:
    """Every matching parameter itself is trained and sent: FedAvg as it is usually run."""

    kind: Literal["full"] = "full"
    targets: tuple[str, ...] = ("*",)
    """Patterns (as of a shell) of the parameters that are trained."""
    exclude: tuple[str, ...] = ()
    """Patterns of parameters to leave frozen although a target matches."""

    def __post_init__(self) -> None:
        are_patterns("adapter.targets", self.targets)
        are_patterns("adapter.exclude", self.exclude)


@dataclass(frozen=True)
class MemoryConfig:
    """FedNL: beside a frozen language model's attention, a matrix per head that writes itself while the model reads;
    the rules by which it does are what is trained and sent."""

    kind: Literal["memory"] = "memory"
    seed: int | None = None
    """Seed of the rules before training and of their frozen maps; none: the run's seed (0 outside a run)."""
    rank: int = 16
    """Of the low-rank changes by which the memory reads the frozen projections."""
    layers: str = "upper:0.4"
    """Which layers carry a memory: all, upper:F (the last F of them), 17-23 (both included), or 3,7,11; from 0."""
    gate: Literal["head", "channel", "none"] = "head"
    """How finely attention and memory are mixed: a gate per head, per channel, or none."""
    mix: Literal["blend", "add"] = "blend"
    """blend: (1 − α) of attention and α of the memory, α = tanh of the gate; add: all of attention, and the gate times
    the memory, so that nothing is taken away where the memory has nothing to say."""
    address: str = "own"
    """own: each layer's own queries and keys. Or LAYER.HEAD, such as 18.2: a key head that makes the addresses of all
    memories, out of the tokens before; or several, such as 17.1,18.2, whose product does."""
    bind: bool = False
    """Each address is also bound to the token it is made at, by signs of the seed: what followed a 7 is found behind a
    7. Needs an `address`."""
    update: Literal["delta", "additive"] = "delta"
    """delta: a new value replaces what its key held; additive: it is added to it."""
    forget: bool = False
    """The whole memory fades at a trained rate before each write."""
    window: int = 64
    """Tokens that attention sees; 0: all of them."""
    sinks: int = 4
    """First tokens that stay in sight when there is a window."""
    window_dropout: float = 0.0
    """Share of training items that the layers with a memory read with it alone, as if their window were off."""
    low_rank: Literal["trained", "frozen"] = "trained"
    """frozen: there are none, and gates and write strengths alone are trained."""
    share: Literal["rules", "gates"] = "rules"
    """rules: all that is trained travels; gates: gates and write strengths, the low-rank parts stay with the client."""
    write_bias: float = -3.0
    """Where the write strengths begin, before the sigmoid: −3 writes 5 % of a value."""
    dim: int = 0
    """0: the rules themselves are trained; otherwise so many latents for each tensor of the rules, as in FLITE."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            is_seed("adapter.seed", self.seed)
        is_count("adapter.rank", self.rank, 1)
        are_layers("adapter.layers", self.layers)
        is_one_of("adapter.gate", self.gate, ("head", "channel", "none"))
        is_one_of("adapter.mix", self.mix, ("blend", "add"))
        head = r"\d{1,9}\.\d{1,9}"
        if self.address != "own" and not re.fullmatch(f"{head}(,{head}){{0,7}}", self.address, re.ASCII):
            raise ConfigError(
                f"{self.address[:60]!r} is not allowed",
                where="adapter.address",
                remedy="Give own, LAYER.HEAD, or several heads with commas between.",
            )
        if self.bind and self.address == "own":
            raise ConfigError(
                "has no addresses to bind",
                where="adapter.bind",
                remedy="Set adapter.address, or adapter.bind = false (--adapter.no-bind).",
            )
        is_one_of("adapter.update", self.update, ("delta", "additive"))
        is_count("adapter.window", self.window, 0)
        is_count("adapter.sinks", self.sinks, 0)
        at_least("adapter.window_dropout", self.window_dropout, 0)
        if self.window_dropout > 1:
            raise ConfigError(
                f"{self.window_dropout} is above 1", where="adapter.window_dropout", remedy="Give 0 to 1."
            )
        is_one_of("adapter.low_rank", self.low_rank, ("trained", "frozen"))
        is_one_of("adapter.share", self.share, ("rules", "gates"))
        at_least("adapter.write_bias", self.write_bias, -100)
        is_count("adapter.dim", self.dim, 0)


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: a low-rank change of some Linear and Conv2d modules of a frozen model."""

    kind: Literal["lora"] = "lora"
    seed: int | None = None
    """Seed of the first factors (and of the maps of `dim`); none: the run's seed (0 outside a run)."""
    rank: int = 8
    alpha: float = 16.0
    """The change is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Patterns (as of a shell) of module names or of their ends: q_proj, or *conv* in an image network."""
    layers: str = "all"
    """Which layers: all, upper:F (the last F of them), 17-23 (both included), or 3,7,11; from 0."""
    ffa: bool = False
    """FFA-LoRA: the first factor A stays as the seed made it; B alone is trained and sent, and averages exactly."""
    dim: int = 0
    """0: the factors themselves are trained; otherwise so many latents for each trained factor, as in FLITE."""
    window: int = 0
    """Tokens that a language model's attention sees; 0: all of them."""
    sinks: int = 4
    """First tokens that stay in sight when there is a window."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            is_seed("adapter.seed", self.seed)
        is_count("adapter.rank", self.rank, 1)
        at_least("adapter.alpha", self.alpha, 0, strict=True)
        are_patterns("adapter.targets", self.targets)
        are_layers("adapter.layers", self.layers)
        is_count("adapter.dim", self.dim, 0)
        is_count("adapter.window", self.window, 0)
        is_count("adapter.sinks", self.sinks, 0)


@dataclass(frozen=True)
class MappingConfig:
    """Mapping Networks: one latent for the whole model; each of its numbers moves every adapted weight."""

    kind: Literal["mapping"] = "mapping"
    seed: int | None = None
    """Seed of the frozen map; none: the run's seed (0 outside a run)."""
    dim: int = 256
    """Latents in all: the numbers that are trained and sent."""
    modulation: float = 0.0
    """How strongly the latent scales the map's own columns, by 1 + modulation · z; above 0 averages are not exact."""
    squash: bool = False
    """The change of each weight goes through tanh, so it stays below the tensor's scale; averages are not exact."""
    targets: tuple[str, ...] = ("*",)
    """Patterns (as of a shell) of the Conv, Linear and Embedding modules whose weights are adapted."""
    exclude: tuple[str, ...] = ()
    """Patterns of modules to leave frozen although a target matches."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            is_seed("adapter.seed", self.seed)
        is_count("adapter.dim", self.dim, 1)
        at_least("adapter.modulation", self.modulation, 0)
        are_patterns("adapter.targets", self.targets)
        are_patterns("adapter.exclude", self.exclude)


AdapterConfig = LatentConfig | FullConfig | MemoryConfig | LoraConfig | MappingConfig


def are_layers(where: str, layers: str) -> None:
    """Refuse what can name no layers in any model; `adapters/layers.py` says which ones it names in one."""
    if not re.fullmatch(r"all|upper:\d{0,9}\.?\d{1,9}|\d{1,9}(-\d{1,9})?(, ?\d{1,9}(-\d{1,9})?)*", layers, re.ASCII):
        raise ConfigError(
            f"{layers[:60]!r} is not allowed", where=where, remedy="Write all, upper:0.4, 17-23 or 3,7,11."
        )
