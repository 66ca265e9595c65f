"""How a client trains between two messages: its optimiser, its rule, and what the rules need."""

from dataclasses import dataclass
from typing import Literal

from nestling.config.checks import at_least, is_count, is_one_of
from nestling.core.errors import ConfigError


@dataclass(frozen=True)
class LocalConfig:
    """How a client trains between two messages."""

    epochs: int = 1
    batch_size: int = 32
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float = 1e-2
    decay: Literal["linear", "none"] = "linear"
    """linear: the learning rate falls from epoch to epoch of the run, to a last one just above 0."""
    momentum: float = 0.9
    """Of sgd; adamw has its own."""
    weight_decay: float = 0.0
    gate_lr: float = 0.0
    """Learning rate of a memory's gates and write strengths, which have no weight decay; 0: the same as lr."""
    clip: float = 0.0
    """Largest norm of the gradient, which is scaled down to it; 0: none."""
    warmup: int = 0
    """Steps at the start of each local training over which the learning rate rises from 0."""
    keep_optimizer: bool = False
    """The optimiser's state stays with the client from round to round, as in DiLoCo; false: a fresh one each round."""
    rule: Literal["plain", "prox", "ssi", "ala"] = "plain"
    """plain: FedAvg. prox, ssi: held to where the round began. ala: begins between the client's own last state and the
    server's, and is judged there."""
    mu: float = 0.01
    """Of prox: strength of the pull; 0: plain."""
    ssi_strength: float = 0.1
    """Of ssi: strength of the pull on numbers that earlier rounds found important; 0: plain."""
    ssi_lambda: float = 0.5
    """Of ssi: 1 finds what is important by training freely, less by staying closer to the server's state."""
    ala_layers: int = 1
    """Of ala: so many of the last trained tensors are blended, the others are the server's; 0: all are blended."""
    ala_share: float = 0.8
    """Of ala: share of a client's batches that the blend is learnt on."""
    ala_rate: float = 1.0
    """Of ala: learning rate of the blend; 0: plain."""

    def __post_init__(self) -> None:
        is_count("local.epochs", self.epochs, 1)
        is_count("local.batch_size", self.batch_size, 1)
        is_one_of("local.optimizer", self.optimizer, ("sgd", "adamw"))
        at_least("local.lr", self.lr, 0, strict=True)
        is_one_of("local.decay", self.decay, ("linear", "none"))
        at_least("local.momentum", self.momentum, 0)
        at_least("local.weight_decay", self.weight_decay, 0)
        at_least("local.gate_lr", self.gate_lr, 0)
        at_least("local.clip", self.clip, 0)
        is_count("local.warmup", self.warmup, 0)
        is_one_of("local.rule", self.rule, ("plain", "prox", "ssi", "ala"))
        at_least("local.mu", self.mu, 0)
        at_least("local.ssi_strength", self.ssi_strength, 0)
        at_least("local.ssi_lambda", self.ssi_lambda, 0, strict=True)
        is_count("local.ala_layers", self.ala_layers, 0)
        at_least("local.ala_share", self.ala_share, 0, strict=True)
        at_least("local.ala_rate", self.ala_rate, 0)
        if self.momentum >= 1:
            raise ConfigError(f"{self.momentum} is not allowed", where="local.momentum", remedy="Give less than 1.")
        for name in ("ssi_lambda", "ala_share"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{getattr(self, name)} is not allowed", where=f"local.{name}", remedy="Give at most 1."
                )
