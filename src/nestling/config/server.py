"""The server's settings: who takes part, how replies are brought together and made a step of, and how privately."""

from dataclasses import dataclass
from typing import Literal

from nestling.config.checks import at_least, is_count, is_one_of
from nestling.core.errors import ConfigError

LONGEST_DEADLINE = 1e7
"""Seconds, four months: beyond some such number no clock can wait."""


@dataclass(frozen=True)
class ServerConfig:
    """Who takes part in a round, how replies are weighed, and how their mean becomes the next state."""

    clients_per_round: int = 0
    """How many clients a round asks, drawn by the seed; 0: all of them."""
    deadline: float = 0.0
    """Seconds for the replies of a round; those that are not there by then are left out. 0: as long as it takes."""
    stragglers: int = 0
    """A round does not wait for its slowest clients, so many, once all others have replied: ask a few more than needed
    and leave as many behind. Like a deadline, this lets time decide, so two such runs of one seed may differ."""
    weighting: Literal["examples", "uniform"] = "examples"
    min_replies: int = 1
    """A round with fewer usable replies is abandoned: the state stays as it was."""
    patience: int = 3
    """After this many abandoned rounds in a row the run stops (exit code 7)."""
    max_abs: float = 1e4
    """A reply with a larger number than this is rejected."""
    outlier: float = 10.0
    """A change longer than so many times the round's median, or a number of examples, is cut down to it; 0: none is."""
    aggregate: Literal["mean", "median", "trimmed", "krum", "rfa", "clipping"] = "mean"
    """How replies are brought together. The others withstand hostile clients: median or trimmed mean of each number,
    multi-Krum, the geometric median (RFA), centred clipping with buckets."""
    hostile_share: float = 0.2
    """Of aggregates other than mean: the share of clients that may be hostile."""
    rule: Literal["mean", "nesterov", "adam", "yogi"] = "mean"
    """The next state. mean: the mean of the replies. The others are an optimiser's step towards it: nesterov (DiLoCo),
    adam and yogi (FedOpt)."""
    lr: float = 0.0
    """Of nesterov, adam and yogi; 0: the rule's own, 0.7 for nesterov, 0.01 for adam and yogi. mean has none."""
    momentum: float = 0.9
    """Of nesterov."""
    beta1: float = 0.9
    """Of adam and yogi: how much of the mean change is kept from round to round."""
    beta2: float = 0.99
    """Of adam and yogi: how much of the mean squared change is kept."""
    tau: float = 1e-3
    """Of adam and yogi: changes well below it are not scaled up."""

    def __post_init__(self) -> None:
        is_count("server.clients_per_round", self.clients_per_round, 0)
        at_least("server.deadline", self.deadline, 0)
        if self.deadline > LONGEST_DEADLINE:
            raise ConfigError(
                f"{self.deadline:g} s is not allowed",
                where="server.deadline",
                remedy=f"Give at most {LONGEST_DEADLINE:,.0f} s, or 0 for none.",
            )
        is_count("server.stragglers", self.stragglers, 0)
        is_one_of("server.weighting", self.weighting, ("examples", "uniform"))
        is_count("server.min_replies", self.min_replies, 1)
        is_count("server.patience", self.patience, 1)
        at_least("server.max_abs", self.max_abs, 1)
        is_one_of("server.rule", self.rule, ("mean", "nesterov", "adam", "yogi"))
        at_least("server.outlier", self.outlier, 0)
        if 0 < self.outlier < 1:
            raise ConfigError("would cut most replies", where="server.outlier", remedy="Give 1 or more, or 0 for none.")
        is_one_of("server.aggregate", self.aggregate, ("mean", "median", "trimmed", "krum", "rfa", "clipping"))
        at_least("server.hostile_share", self.hostile_share, 0)
        if self.hostile_share >= 0.5:
            raise ConfigError(
                f"{self.hostile_share} is not allowed",
                where="server.hostile_share",
                remedy="Give less than 0.5: no rule withstands a half.",
            )
        if self.aggregate not in ("mean", "rfa") and self.weighting == "examples":
            raise ConfigError(
                f"{self.aggregate} counts every client alike, whatever number of examples it claims",
                where="server.aggregate",
                remedy='Set server.weighting = "uniform".',
            )
        at_least("server.lr", self.lr, 0)
        at_least("server.tau", self.tau, 0, strict=True)
        for name in ("momentum", "beta1", "beta2"):
            at_least(f"server.{name}", getattr(self, name), 0)
            if getattr(self, name) >= 1:
                raise ConfigError(
                    f"{getattr(self, name)} is not allowed", where=f"server.{name}", remedy="Give less than 1."
                )

    @property
    def rate(self) -> float:
        """`lr`, or what the rule takes where that is 0.

        >>> ServerConfig(rule="adam").rate, ServerConfig(rule="adam", lr=0.1).rate
        (0.01, 0.1)
        """
        return self.lr or (0.7 if self.rule == "nesterov" else 0.01)


SMALLEST_NOISE = 1e-5
"""Below it the noise has too few steps of the grid that it is drawn on."""


@dataclass(frozen=True)
class PrivacyConfig:
    """Client-level differential privacy, by a server that is trusted; off unless there is noise."""

    noise: float = 0.0
    """Standard deviation of the noise on the sum of a round's changes, in clips; 0: no privacy."""
    clip: float = 1.0
    """A longer change of a client is cut down to this length, in the place of `server.outlier`."""
    quantile: float = 0.0
    """Above 0: clip is of the first round alone, and then follows this quantile of the changes' lengths."""
    delta: float = 1e-5
    """What ε is reported at; well below one over the number of all clients."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """fixed: so many clients as server.clients_per_round says, drawn by the seed, which everybody knows. poisson: that
    many on average, each drawn in secret and on its own, and ε is smaller for it as long as the draw stays secret."""

    def __post_init__(self) -> None:
        at_least("privacy.noise", self.noise, 0)
        is_one_of("privacy.sampling", self.sampling, ("fixed", "poisson"))
        for name, smallest, largest in (("noise", SMALLEST_NOISE, 2.0**20), ("clip", 2.0**-60, 2.0**60)):
            if getattr(self, name) and not smallest <= getattr(self, name) <= largest:
                raise ConfigError(
                    f"{getattr(self, name):g} is not allowed",
                    where=f"privacy.{name}",
                    remedy=f"Give {smallest:.3g} to {largest:.3g}.",
                )
        at_least("privacy.clip", self.clip, 0, strict=True)
        at_least("privacy.quantile", self.quantile, 0)
        at_least("privacy.delta", self.delta, 0, strict=True)
        for name in ("quantile", "delta"):
            if getattr(self, name) >= 1:
                raise ConfigError(
                    f"{getattr(self, name)} is not allowed", where=f"privacy.{name}", remedy="Give less than 1."
                )
