"""Long natural text: where it comes from, next-token loss over a stream, and language modelling as a task.

    loss_t = −ln p(x_{t+1} | x_1 … x_t)    perplexity = exp(mean loss)    relative_i = loss of bin i / loss of bin 0 − 1

The head is applied to at most `ROWS` positions at a time, so that nothing of size positions × vocabulary is ever held.
`relative_to_first` is the streaming measure of FedNL (arXiv 2605.16350): above 0, a model forgets how to read as its
stream grows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from math import exp
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestling.core.errors import ConfigError, ContextError
from nestling.core.seeds import Stream

ROWS = 1024
"""Positions whose logits exist at the same time."""
SHORTEST = 10_000
"""Characters below which a text is no source of haystacks or streams."""


def load_text(source: str, path: str = "") -> str:
    """A long text, as it is.

    Args:
        source: "python-docs" (the reference topics inside the running Python, about 465,000 characters, another text in
            another Python version) or "file".
        path: for "file": a UTF-8 text file, or a folder whose *.txt files are read in the order of their names.

    Raises `ConfigError` for another source, `ContextError` if the text is missing, not UTF-8, or too short.

    >>> len(load_text("python-docs")) > 100_000
    True
    """
    if source == "python-docs":
        return _long_enough(_python_docs(), "pydoc_data.topics")
    if source == "file":
        return _long_enough(_from_files(Path(path) if path else None), path)
    raise ConfigError(f"{source!r} is no source of text", where="source", remedy="Use python-docs or file.")


def _python_docs() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ContextError(
            "this Python has no documentation inside",
            where="pydoc_data.topics",
            remedy="Use source file with a text of your own, or install a complete Python.",
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _from_files(path: Path | None) -> str:
    if path is None or not path.exists():
        raise ContextError(
            "there is no such text file or folder",
            where=str(path or "path"),
            remedy="Give the path of a UTF-8 text file, or of a folder with *.txt files.",
        )
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ContextError("the folder holds no *.txt file", where=str(path), remedy="Put text files into it.")
    parts: list[str] = []
    for file in files:
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ContextError(
                f"cannot be read ({error})", where=str(file), remedy="Give a readable file in UTF-8."
            ) from error
    return "\n\n".join(parts)


def _long_enough(text: str, where: str) -> str:
    if len(text) < SHORTEST:
        raise ContextError(
            f"the text has {len(text)} characters", where=where, remedy=f"Give a text of at least {SHORTEST}."
        )
    return text


def split_text(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training part and held-out part of a token stream: the last fifth is held out.

    >>> [part.tolist() for part in split_text(np.arange(6))]
    [[0, 1, 2, 3, 4], [5]]
    """
    cut = len(ids) - len(ids) // 5
    return ids[:cut], ids[cut:]


def continuing(model: nn.Module, cache: object) -> dict[str, object]:
    """The arguments by which a forward pass continues the stream in `cache`: newer transformers name it otherwise."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


@torch.no_grad()
def token_losses(
    model: nn.Module, ids: Int64[Tensor, "b t"], *, piece: int, new_cache: Callable[[nn.Module], object]
) -> Float32[Tensor, "b t_less_one"]:
    """Next-token loss, in nats, of long streams fed in pieces through a cache.

    Args:
        model: a causal language model of transformers; set to evaluation.
        ids: token streams, on the model's device.
        piece: tokens of each forward pass; the losses do not depend on it.
        new_cache: makes the empty cache of one pass over the streams; None for a model that has none to give.

    Returns:
        The loss of tokens 2 … t, float32[b, t − 1].

    Raises `ConfigError` for fewer than two tokens, a piece below 1, or a model that cannot be fed in pieces.
    """
    if ids.shape[1] < 2 or piece < 1:
        raise ConfigError(
            f"{ids.shape[1]} tokens in pieces of {piece}",
            where="piece",
            remedy="Give 2 tokens and pieces of 1 or more.",
        )
    model.eval()
    if (cache := new_cache(model)) is None and piece < ids.shape[1] - 1:
        raise ConfigError("cannot be fed in pieces", where="model", remedy="Give a model with attention alone.")
    losses: list[Tensor] = []
    for part, targets in zip(ids[:, :-1].split(piece, 1), ids[:, 1:].split(piece, 1), strict=True):
        hidden = model.base_model(part, **continuing(model.base_model, cache)).last_hidden_state
        pairs = zip(hidden.flatten(0, 1).split(ROWS), targets.flatten().split(ROWS), strict=True)
        losses.append(torch.cat([_losses(model, h, y) for h, y in pairs]).view_as(targets))
    return torch.cat(losses, 1)


def _losses(model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """float32[rows]: loss of each row, from the last hidden state."""
    return F.cross_entropy(model.get_output_embeddings()(hidden).float(), targets, reduction="none")


def by_bins(losses: Tensor, size: int = 1024) -> list[float]:
    """Mean loss of each `size` positions, over all streams; the last bin may hold fewer.

    >>> by_bins(torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]), size=2)
    [2.5, 4.0]
    """
    return [float(part.double().mean()) for part in losses.split(size, -1)]


def relative_to_first(bins: list[float]) -> list[float]:
    """By which share each bin's loss differs from the first bin's.

    >>> relative_to_first([2.0, 2.5, 1.0])
    [0.0, 0.25, -0.5]
    """
    return [loss / bins[0] - 1 for loss in bins]


def perplexity(losses: Tensor) -> float:
    """exp of the mean loss.

    >>> round(perplexity(torch.full((2, 3), 3.0).log()), 4)
    3.0
    """
    return exp(float(losses.double().mean()))


@dataclass(frozen=True)
class TextScore:
    """Mean loss in nats over `items` held-out tokens, `right` of which were the likeliest."""

    loss: float
    right: int
    items: int

    @property
    def accuracy(self) -> float:
        """Share of next tokens guessed, 0 to 1."""
        return self.right / self.items

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return exp(self.loss)


class TextTask:
    """Language modelling over clients, each with a token stream, cut into windows that do not overlap.

    Args:
        streams: tokens of each client; the last fifth of each is held out.
        length: tokens predicted in a window, which has one more.
        device: where batches go.

    `client=None` stands for all clients' windows. A client may be too short for a window: it then has no examples.
    Raises `ConfigError` if no held-out part has a window.
    """

    def __init__(self, streams: list[np.ndarray], *, length: int, device: str = "cpu") -> None:
        self.length, self.device = length, torch.device(device)
        parts = [split_text(stream) for stream in streams]
        self._train = [windows(train, length) for train, _ in parts]
        self._held_out = np.concatenate([windows(held_out, length) for _, held_out in parts])
        if not len(self._held_out):
            raise ConfigError(
                f"no text is long enough to hold out {length + 1} tokens",
                where="length",
                remedy="Give longer texts or a shorter length.",
            )

    def clients(self) -> list[int]:
        """Numbers of the clients, those without windows included."""
        return list(range(len(self._train)))

    def examples(self, client: int | None) -> int:
        """How many training windows a client holds."""
        return sum(map(len, self._train)) if client is None else len(self._train[client])

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[Int64[Tensor, "b t"]]:
        """Batches of at most `size` windows, each window once, in an order that depends only on (seed, client,
        epoch)."""
        own = np.concatenate(self._train) if client is None else self._train[client]
        order = Stream(seed, "batches", f"{client}/{epoch}").permutation(len(own))
        for start in range(0, len(order), size):
            yield torch.from_numpy(own[order[start : start + size]]).to(self.device)

    def loss(self, model: nn.Module, batch: Int64[Tensor, "b t"]) -> Tensor:
        """Mean next-token loss; the logits of `ROWS` positions at a time, made again for the gradient."""
        hidden = model.base_model(batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        targets = batch[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for h, y in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
            total = total + checkpoint(_losses, model, h, y, use_reentrant=False).sum()
        return total / len(targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> TextScore:
        """Loss and guessed tokens over every held-out window."""
        model.eval()
        total, right = 0.0, 0
        for window in torch.from_numpy(self._held_out).to(self.device):
            hidden = model.base_model(window[None, :-1], use_cache=False).last_hidden_state[0]
            for h, y in zip(hidden.split(ROWS), window[1:].split(ROWS), strict=True):
                logits = model.get_output_embeddings()(h).float()
                total += float(F.cross_entropy(logits, y, reduction="sum"))
                right += int((logits.argmax(1) == y).sum())
        items = self._held_out.shape[0] * self.length
        return TextScore(total / items, right, items)


def windows(ids: np.ndarray, length: int) -> Int64[np.ndarray, "n t"]:
    """Every window of length + 1 tokens whose first token is the last of the window before it.

    >>> windows(np.arange(6), 2).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    count = max(0, (len(ids) - 1) // length)
    return ids[np.arange(count)[:, None] * length + np.arange(length + 1)].astype(np.int64)
