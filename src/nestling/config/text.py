"""The settings of next-token prediction in a text: which one, who holds which part, and the small GPT that reads it."""

from dataclasses import dataclass
from typing import Literal

from nestling.config.checks import at_least, is_count, is_one_of, is_seed, is_text
from nestling.core.errors import ConfigError

TEXTS = ("wikitext2", "shakespeare")
PRETRAIN_TEXTS = ("python-docs", "shakespeare", "wikitext2", "none")


@dataclass(frozen=True)
class TextConfig:
    """A text in blocks of bytes, each of which is predicted from those before: which, and how it is divided."""

    kind: Literal["text"] = "text"
    data: Literal["wikitext2", "shakespeare"] = "shakespeare"
    """wikitext2: a folder, or the hub. shakespeare: his works ('nestling fetch shakespeare')."""
    path: str = ""
    """wikitext2: folder with the data; shakespeare: the file; empty: the hub, and where 'nestling fetch' puts it."""
    clients: int = 8
    partition: Literal["iid", "articles"] = "iid"
    """iid: equal random shares of the blocks. articles: whole articles, or works, so that clients differ in topic."""
    length: int = 128
    """Bytes predicted in a block; at most base.context."""
    train_items: int = 0
    """Training blocks of each client, at most, evenly spaced over those it holds; 0: all."""
    test_items: int = 0
    """Held-out blocks that a state is judged on, evenly spaced; 0: all."""
    evaluate_on: Literal["test", "validation"] = "test"
    """Settings are chosen on validation and reported on test."""

    def __post_init__(self) -> None:
        is_one_of("task.data", self.data, TEXTS)
        is_text("task.path", self.path)
        is_count("task.clients", self.clients, 1)
        is_one_of("task.partition", self.partition, ("iid", "articles"))
        is_count("task.length", self.length, 1)
        is_count("task.train_items", self.train_items, 0)
        is_count("task.test_items", self.test_items, 0)
        is_one_of("task.evaluate_on", self.evaluate_on, ("test", "validation"))


@dataclass(frozen=True)
class GptConfig:
    """A frozen small GPT over bytes that everyone holds before the first round."""

    kind: Literal["tinygpt"] = "tinygpt"
    width: int = 64
    """Channels, in attention heads of 32."""
    layers: int = 2
    context: int = 128
    """The longest block that it reads, in bytes; it is pre-trained on blocks of that length."""
    weights: str = ""
    """A safetensors file made by `nestling pretrain`, by an earlier run (its `base.safetensors`) or by you; empty:
    pre-train."""
    pretrain_on: Literal["python-docs", "shakespeare", "wikitext2", "none"] = "python-docs"
    """Where the base is trained when no weights are given. python-docs: the reference inside Python; none: random."""
    path: str = ""
    """Where that text lies; empty: task.path if it is the task's own text, else the usual places, or the hub."""
    epochs: int = 10
    lr: float = 3e-3
    seed: int = 0
    """The base's own seed, so that runs with different seeds share one base."""

    def __post_init__(self) -> None:
        is_count("base.width", self.width, 32, 4096)
        if self.width % 32:
            raise ConfigError(
                f"{self.width} is not a multiple of 32",
                where="base.width",
                remedy="Attention heads are 32 channels wide: give 32, 64, 128 or 256.",
            )
        is_count("base.layers", self.layers, 1, 1000)
        is_count("base.context", self.context, 1, 2**20)
        is_text("base.weights", self.weights)
        is_one_of("base.pretrain_on", self.pretrain_on, PRETRAIN_TEXTS)
        is_text("base.path", self.path)
        is_count("base.epochs", self.epochs, 0)
        at_least("base.lr", self.lr, 0, strict=True)
        is_seed("base.seed", self.seed)
