"""WikiText-2 and other texts over clients: blocks of bytes, in each of which every next byte is predicted.

    loss = − mean over t of ln p(x_{t+1} | x_1 … x_t)    perplexity = exp(loss)    chance = share of the commonest byte

A token is a byte: a vocabulary of 256 that no file has to bring, that a base trained on one text shares with clients
who hold another, and that leaves no word unknown. Perplexity is therefore of bytes, not of words as in most tables. A
text is a list of articles (of Wikipedia, or works of Shakespeare); one after the other they are cut into blocks of
length + 1 bytes, each of which begins with the last byte of the one before, and belongs to the article it begins in.
"""

import re
from dataclasses import dataclass
from os.path import isdir, isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from nestling.config.schema import TextConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.tasks.hub import from_hub
from nestling.tasks.items import ItemsTask, Score
from nestling.tasks.parquet import find_parquet, read_texts
from nestling.tasks.partition import group_shares, iid_shares
from nestling.tasks.text import load_text, windows

HUB, SUBSET, COLUMN = "Salesforce/wikitext", "wikitext-2-raw-v1", "text"
VOCABULARY = 256
TITLES = {"wikitext2": "WikiText-2, next byte", "shakespeare": "Shakespeare, next byte"}
PLAIN = (("wiki.train", "wiki.valid", "wiki.test"), (".raw", ".tokens"), ("wikitext-2-raw", "wikitext-2"))
"""Names, ends and folders of the published archives; those that end in .tokens have rare words replaced."""
_WORK = re.compile(r"^(?=[^\n]+\n\n?by William Shakespeare$)", re.MULTILINE)


def title_of(config: TextConfig) -> str:
    """What tables call the task.

    >>> title_of(TextConfig(partition="articles"))
    'Shakespeare, next byte, whole works'
    """
    whole = {"wikitext2": ", whole articles", "shakespeare": ", whole works"}[config.data]
    return TITLES[config.data] + whole * (config.partition == "articles")


@dataclass(frozen=True)
class Articles:
    """A text by split, each a list of articles."""

    train: list[str]
    validation: list[str]
    test: list[str]


def load_articles(name: str, path: str = "") -> Articles:
    """A text by its name.

    Args:
        name: wikitext2 (in its published splits); shakespeare or python-docs (of each work, the last tenth is for
            testing, the tenth before for validation).
        path: wikitext2: the folder with the hub's parquet files or with the published wiki.*.raw or wiki.*.tokens;
            empty: the hub. shakespeare: the file.

    Raises `ContextError` (exit 3) if the text is not there, `WireError` (exit 5) if a file is damaged, `ConfigError`
    for another name.

    >>> sum(map(len, load_articles("python-docs").train)) > 100_000
    True
    """
    if name == "python-docs":
        return _in_tenths([load_text("python-docs")])
    if name == "shakespeare":
        return _in_tenths([work for work in _WORK.split(load_text("file", path)) if work.strip()])
    if name != "wikitext2":
        raise ConfigError(
            f"{name!r} is no text", where="task.data", remedy="Give wikitext2, shakespeare or python-docs."
        )
    if path:
        rows = _from_folder(Path(path))
    else:
        rows = from_hub(HUB, SUBSET, read=lambda parts: [_column(parts[s]) for s in ("train", "validation", "test")])
    return Articles(*(by_headings(part) for part in rows))


def by_headings(rows: list[str]) -> list[str]:
    """Rows of WikiText, put together to articles. One begins with a heading of the first order, ` = Title = `, between
    empty rows; what comes before the first is an article, too.

    >>> by_headings(["", " = A = \\n", "", " = = B = = \\n", " x = 1 \\n", "", " = C = \\n", "", " y \\n"])
    [' = A = \\n = = B = = \\n x = 1 \\n', ' = C = \\n y \\n']
    """
    articles: list[list[str]] = [[]]
    for number, row in enumerate(rows):
        words = row.split()
        heading = len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "=" != words[-2]
        between = not any(other.strip() for other in rows[max(0, number - 1) : number] + rows[number + 1 : number + 2])
        if heading and between and any(other.strip() for other in articles[-1]):
            articles.append([])
        articles[-1].append(row)
    return ["".join(article) for article in articles if article]


def _in_tenths(works: list[str]) -> Articles:
    """Of each work eight tenths to train on, one for validation, the last for testing."""
    cuts = [(8 * len(work) // 10, 9 * len(work) // 10) for work in works]
    return Articles(
        [work[:a] for work, (a, _) in zip(works, cuts, strict=True)],
        [work[a:b] for work, (a, b) in zip(works, cuts, strict=True)],
        [work[b:] for work, (_, b) in zip(works, cuts, strict=True)],
    )


def _column(split: Any) -> list[str]:
    texts = list(split[COLUMN])
    if not all(isinstance(text, str) for text in texts):
        raise WireError("damaged", f"has a row without a text in {COLUMN!r}", where=HUB)
    return texts


def _from_folder(folder: Path) -> list[list[str]]:
    """The rows of the three splits, from what lies in the folder or in one inside it, by its published name."""
    place = folder / SUBSET if isdir(folder / SUBSET) else folder
    names, ends, folders = PLAIN
    for end in ends:
        for plain in (folder, *(folder / inside for inside in folders)):
            if isfile(plain / f"{names[0]}{end}"):
                return [_lines(plain / f"{name}{end}") for name in names]
    if parquet := find_parquet(place):
        return [read_texts(HUB, parquet, split, COLUMN) for split in ("train", "validation", "test")]
    raise ContextError(
        f"holds neither the hub's parquet files (train-*.parquet and so on) nor {names[0]}{ends[0]} or {ends[1]}",
        where=str(folder),
        remedy="Set the path to a folder that does, or leave it empty for the hub.",
    )


def _lines(path: Path) -> list[str]:
    if not isfile(path):
        raise ContextError("there is no such file", where=str(path), remedy="Unpack the archive once more.")
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return [line if line.strip() else "" for line in file]  # as the hub's rows are
    except (OSError, UnicodeDecodeError) as error:
        raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error


@dataclass(frozen=True)
class Blocks:
    """Blocks of bytes, and the number of the article that each begins in."""

    tokens: UInt8[np.ndarray, "n length_and_one"]
    article: Int64[np.ndarray, " n"]

    @property
    def x(self) -> UInt8[np.ndarray, "n t"]:
        """What is read."""
        return self.tokens[:, :-1]

    @property
    def y(self) -> UInt8[np.ndarray, "n t"]:
        """The byte that follows each."""
        return self.tokens[:, 1:]

    def take(self, items: np.ndarray) -> "Blocks":
        """Some of the blocks, in the order given."""
        return Blocks(self.tokens[items], self.article[items])

    def __len__(self) -> int:
        return len(self.tokens)


def cut_blocks(articles: list[str], length: int) -> Blocks:
    """The articles one after the other, in blocks of `length` bytes to predict; what is too short at the end is left.

    >>> blocks = cut_blocks(["abc", "de"], 2)
    >>> [bytes(block).decode() for block in blocks.tokens], blocks.article.tolist()
    (['abc', 'cde'], [0, 0])
    """
    parts = [np.frombuffer(article.encode("utf-8", "replace"), np.uint8) for article in articles]
    blocks = windows(np.concatenate([*parts, np.zeros(0, np.uint8)]), length).astype(np.uint8)
    ends = np.cumsum([len(part) for part in parts])
    return Blocks(blocks, np.searchsorted(ends, np.arange(len(blocks)) * length, side="right"))


def spaced(items: np.ndarray, most: int) -> np.ndarray:
    """At most so many of the items, evenly spaced; 0: all.

    >>> spaced(np.arange(10), 4).tolist()
    [0, 2, 5, 7]
    """
    return items if most == 0 or len(items) <= most else items[np.arange(most) * len(items) // most]


class BlocksTask(ItemsTask):
    """Clients' training blocks and held-out ones. An item is a block; accuracy is of its bytes."""

    def __init__(
        self, train: Blocks, held_out: Blocks, shares: list[np.ndarray], *, most: int = 0, device: str = "cpu"
    ) -> None:
        """`most`: training blocks of a client, also where one holds all there are (`whole`); 0: any number."""
        super().__init__(train, held_out, shares, classes=VOCABULARY, device=device)
        self._most = most
        commonest = np.bincount(train.y.ravel(), minlength=VOCABULARY).argmax()
        self.chance = float((held_out.y == commonest).mean())

    def whole(self, client: int) -> ItemsTask:
        """The same text, all of it `client`'s, but for what is more than a client trains on."""
        task = super().whole(client)
        task._shares = [spaced(share, self._most) for share in task._shares]
        return task

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Score:
        """Accuracy and mean loss over the bytes of the held-out blocks."""
        right, loss = 0, 0.0
        for logits, y in self._answers(model):
            right += int((logits.argmax(-1) == y).sum())
            loss += float(F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="sum"))
        return Score(right, self.held_out_items, loss / self.held_out_items)

    def _to_device(self, part: Blocks) -> tuple[Tensor, Tensor]:
        whole = torch.from_numpy(part.tokens).to(self.device).long()
        return whole[:, :-1], whole[:, 1:]


def make_blocks_task(config: TextConfig, *, path: str, seed: int, device: str = "cpu") -> BlocksTask:
    """The task of a run: blocks, those held out, and the seed's partition. `path` is where the text lies.

    Raises `ContextError` if the text is missing, `ConfigError` if it cannot be divided as asked.
    """
    articles = load_articles(config.data, path)
    train = cut_blocks(articles.train, config.length)
    held_out = cut_blocks(articles.test if config.evaluate_on == "test" else articles.validation, config.length)
    if not (len(held_out) and len(train)):
        raise ConfigError(
            f"no text is long enough for blocks of {config.length + 1} bytes",
            where="task.length",
            remedy="Give a shorter length.",
        )
    if config.clients > len(train):
        raise ConfigError(
            f"{config.clients} clients for {len(train)} blocks", where="task.clients", remedy="Give fewer clients."
        )
    if config.partition == "iid":
        shares = iid_shares(len(train), clients=config.clients, seed=seed)
    else:
        shares = group_shares(train.article, clients=config.clients, seed=seed)
    shares = [spaced(share, config.train_items) for share in shares]
    kept = np.sort(np.concatenate(shares))
    train, shares = train.take(kept), [np.searchsorted(kept, share) for share in shares]
    held_out = held_out.take(spaced(np.arange(len(held_out)), config.test_items))
    return BlocksTask(train, held_out, shares, most=config.train_items, device=device)
