"""Recall of facts in a haystack as a federated task: one template a client, exact match and four-choice score.

    exact   every answer token is the likeliest, given the prompt and the answer's tokens before it (greedy decoding)
    chosen  argmax over the four candidates c of Σ_t ln p(c_t | prompt, c_<t) is the answer; chance is 1 in 4

The prompt is read once; its cache, repeated four times, continues with the candidates. Held-out items never depend on a
run's seed, so that methods are compared item by item (`paired_difference`).

Source: FedNL (arXiv 2605.16350) scores four choices on 15 to 25 items a client; free-form exact match, the interval and
the number of items are ours.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor, nn

from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.tasks.needle import Item, make_item
from nestling.tasks.text import continuing

TEST_SEED = 0
"""The held-out items never depend on a run's seed: every method and seed is judged on the same ones."""
NO_LABEL = -100
"""A position whose prediction is not part of the loss."""
TOKENS_AT_ONCE, ITEMS_AT_ONCE = 8192, 16
"""Prompt tokens, and items, of one evaluation batch: they bound the cache and the candidates' logits."""
RESAMPLES = 2000


ReadOn = Callable[..., Tensor]
"""Reads tokens after those in a cache: (model, ids, cache, keep, *, key) to the logits of the last `keep` positions (0:
all). `key` names the tokens and all before them."""


def nothing() -> None:
    """What is done before a batch of items where nothing is asked for."""


@dataclass(frozen=True)
class Batch:
    """Items of one length: tokens, and the same tokens where they are an answer, else `NO_LABEL`."""

    ids: Int64[Tensor, "b t"]
    labels: Int64[Tensor, "b t"]


@dataclass(frozen=True)
class Recall:
    """How well one client's held-out facts are recalled, or its questions answered.

    Args:
        client, template: whose items, and of what kind: a template, or a subject area.
        items: how many.
        exact: how many greedy continuations equal the answer.
        chosen: how many answers are the likeliest of their four candidates, or letters.
        loss: mean cross-entropy of an answer token, in nats.
        by_depth: (exact, items) for each depth of the asked event; empty for questions.
        hits, choices: exact and chosen, item by item, in the same order for every model.
    """

    client: int
    template: str
    items: int
    exact: int
    chosen: int
    loss: float
    by_depth: dict[float, tuple[int, int]]
    hits: list[bool]
    choices: list[bool]


class NeedleTask:
    """Facts in haystacks over clients; client i has the template `templates[i]`.

    Args:
        tokenize: text to tokens, without tokens for beginning and end.
        filler, held_out_filler: tokens of the text around the facts, for training and for held-out items.
        templates: a name of `needle.TEMPLATES` for each client.
        length: tokens of an item, prompt and answer together.
        train_items, test_items: items of each client.
        events: facts in a haystack.
        device: where batches go.
        read: the logits [B, keep, vocabulary] of the last `keep` positions, (model, ids, keep), for training; None: a
            plain forward pass.

    `client=None` stands for all clients' items pooled. Raises `ConfigError` if an item cannot be made: an unknown
    template, a length too small for the events, a text too short for the length.
    """

    classes = 0

    def __init__(
        self,
        tokenize: Callable[[str], list[int]],
        filler: np.ndarray,
        held_out_filler: np.ndarray,
        *,
        templates: list[str],
        length: int,
        train_items: int,
        test_items: int,
        events: int = 4,
        device: str = "cpu",
        read: Callable[[nn.Module, Tensor, int], Tensor] | None = None,
    ) -> None:
        if not templates or train_items < 0 or test_items < 1:
            raise ConfigError(
                f"{len(templates)} templates, {train_items} training and {test_items} held-out items",
                where="task",
                remedy="Give one or more templates and held-out items.",
            )
        self.templates, self.length, self.events = templates, length, events
        self.device = torch.device(device)
        self.read = read or _read_all
        self._tokenize, self._train_items, self._test_items = tokenize, train_items, test_items
        # Lists, not arrays: the items then share their integers, which at 16K tokens an item is most of the memory.
        self._filler, self._held_out_filler = filler.tolist(), held_out_filler.tolist()
        self._held_out: dict[tuple[int, int], list[Item]] = {}
        for client in self.clients():  # what cannot be made is found out now, not after an hour
            self.held_out(client)
            self.item(client, 0, seed=TEST_SEED)

    def clients(self) -> list[int]:
        """Numbers of the clients."""
        return list(range(len(self.templates)))

    @property
    def title(self) -> str:
        """What people call it."""
        return f"facts in {self.length:,} tokens"

    @property
    def held_out_items(self) -> int:
        """Number of held-out items of all clients."""
        return self._test_items * len(self.templates)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the text around the facts and of all held-out items, in tokens."""
        items = [(i.prompt, i.answer) for client in self.clients() for i in self.held_out(client)]
        written = json.dumps([self._filler, self._held_out_filler, items], allow_nan=False)
        return hashlib.sha256(written.encode()).hexdigest()[:32]

    def examples(self, client: int | None) -> int:
        """How many training items a client holds."""
        return self._train_items * (len(self.templates) if client is None else 1)

    def item(self, client: int, index: int, *, seed: int) -> Item:
        """One training item, decided by (seed, client, index)."""
        return make_item(
            self.templates[client],
            self._filler,
            self._tokenize,
            length=self.length,
            events=self.events,
            stream=Stream(seed, "needle", f"{client}/{index}"),
            client=client,
        )

    def held_out(self, client: int, length: int | None = None) -> list[Item]:
        """The held-out items of a client at a length; the same facts at every length."""
        key = client, length or self.length
        if key not in self._held_out:
            template = self.templates[client]
            self._held_out[key] = [
                make_item(
                    template,
                    self._held_out_filler,
                    self._tokenize,
                    length=key[1],
                    events=self.events,
                    stream=Stream(TEST_SEED, "needle-held-out", f"{template}/{index}"),
                    client=client,
                )
                for index in range(self._test_items)
            ]
        return self._held_out[key]

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Batches of at most `size` items, each item once. A run's items are the same in every epoch; their order
        depends only on (seed, client, epoch)."""
        order = Stream(seed, "batches", f"{client}/{epoch}").permutation(self.examples(client)).tolist()
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            if client is None:
                items = [self.item(*divmod(i, self._train_items), seed=seed) for i in chosen]
            else:
                items = [self.item(client, i, seed=seed) for i in chosen]
            yield self._collate(items)

    def _collate(self, items: list[Item]) -> Batch:
        ids = torch.tensor([item.prompt + item.answer for item in items])
        labels = torch.full_like(ids, NO_LABEL)
        for row, item in enumerate(items):
            labels[row, -len(item.answer) :] = ids[row, -len(item.answer) :]
        return Batch(ids.to(self.device), labels.to(self.device))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the answers' tokens, in float32; the head runs on the last few positions only."""
        longest = int((batch.labels != NO_LABEL).sum(1).max())
        logits = self.read(model, batch.ids, longest + 1)[:, :-1]
        return F.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels[:, -longest:].flatten(), ignore_index=NO_LABEL
        )

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        *,
        new_cache: Callable[[nn.Module], Any],
        clients: list[int] | None = None,
        length: int | None = None,
        read: ReadOn | None = None,
        before_batch: Callable[[], object] = nothing,
    ) -> list[Recall]:
        """How well each client's held-out facts are recalled.

        Args:
            model: a causal language model of transformers; set to evaluation.
            new_cache: makes the empty cache of one batch of prompts, or None for a model that can do without only.
            clients: whose items; None for all clients.
            length: of the items; None for the task's own.
            read: how tokens are read after those in a cache; None: by a plain forward pass.
            before_batch: called before each batch of items; what it raises is passed on.
        """
        model.eval()
        clients = self.clients() if clients is None else clients
        return [self._recall(model, new_cache, read or _read_on, c, length, before_batch) for c in clients]

    @staticmethod
    def accuracy(recalls: list[Recall]) -> float:
        """Share of exact answers among all clients' items, 0 to 1."""
        return sum(r.exact for r in recalls) / sum(r.items for r in recalls)

    def _recall(
        self,
        model: nn.Module,
        new_cache: Callable[[nn.Module], Any],
        read_on: ReadOn,
        client: int,
        length: int | None,
        before_batch: Callable[[], object],
    ) -> Recall:
        items = self.held_out(client, length)
        read = np.empty((len(items), 3))  # exact, chosen, summed loss
        by_length: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            by_length.setdefault(len(item.prompt), []).append(index)
        for prompt_length, indices in by_length.items():  # prompts of one length need no padding
            times = 4 if new_cache(model) is None else 1  # how often each prompt is read
            size = max(1, min(ITEMS_AT_ONCE, TOKENS_AT_ONCE // (times * prompt_length)))
            for start in range(0, len(indices), size):
                before_batch()
                some = indices[start : start + size]
                read[some] = self._read(model, new_cache(model), read_on, [items[i] for i in some]).cpu().numpy()
        hits, choices = [bool(x) for x in read[:, 0]], [bool(x) for x in read[:, 1]]
        by_depth: dict[float, tuple[int, int]] = {}
        for item, hit in sorted(zip(items, hits, strict=True), key=lambda pair: pair[0].depth):
            right, count = by_depth.get(item.depth, (0, 0))
            by_depth[item.depth] = right + hit, count + 1
        loss = float(read[:, 2].sum()) / sum(len(item.answer) for item in items)
        return Recall(
            client, self.templates[client], len(items), sum(hits), sum(choices), loss, by_depth, hits, choices
        )

    def _read(self, model: nn.Module, cache: Any, read_on: ReadOn, items: list[Item]) -> Tensor:
        """float64[items, 3]: exact, chosen, and summed loss of the answer, of items with prompts of one length."""
        prompts = torch.tensor([item.prompt for item in items], device=self.device)
        key = prompts.cpu().numpy().tobytes()
        texts = [candidate for item in items for candidate in item.candidates]
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        longest = int(lengths.max())  # what comes after a text's end is masked below, and seen by nothing
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=self.device)
        if cache is not None:
            logits = read_on(model, prompts, cache, 1, key=key).repeat_interleave(4, 0)
            if longest > 1:
                cache.batch_repeat_interleave(4)
                key += ids.cpu().numpy().tobytes()
                logits = torch.cat([logits, read_on(model, ids[:, :-1], cache, 0, key=key)], 1)
        else:  # each text is read from its beginning
            logits = _read_all(model, torch.cat([prompts.repeat_interleave(4, 0), ids[:, :-1]], 1), longest)
        logits = logits.float()
        inside = torch.arange(longest, device=self.device) < lengths[:, None]
        token_losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
        losses = token_losses.double().masked_fill(~inside, 0).sum(1).view(-1, 4)
        greedy = ((logits.argmax(2) == ids) | ~inside).all(1).view(-1, 4)
        right = torch.tensor([item.right for item in items], device=self.device)
        chosen = (losses.argmin(1) == right) & ~losses.isnan().any(1)  # to argmin, the first NaN is the least
        own = torch.arange(len(items), device=self.device), right
        return torch.stack([greedy[own].double(), chosen.double(), losses[own]], 1)


def _read_all(model: nn.Module, ids: Tensor, keep: int) -> Tensor:
    return model(ids, use_cache=False, logits_to_keep=keep).logits


def _read_on(model: nn.Module, ids: Tensor, cache: Any, keep: int, *, key: bytes) -> Tensor:
    return model(ids, logits_to_keep=keep, **continuing(model, cache)).logits


def paired_difference(a: list[bool], b: list[bool]) -> tuple[float, float, float]:
    """Mean of a − b over the same items, and the ends of its 95 % interval (bootstrap over items, fixed seed).

    Raises `ConfigError` unless both have the same number of items, one or more.

    >>> paired_difference([True, True, False], [False, False, True])[0]
    0.3333333333333333
    """
    if len(a) != len(b) or not a:
        raise ConfigError(f"{len(a)} and {len(b)} items are no pairs", where="items", remedy="Judge the same items.")
    differences = np.array(a, np.float64) - np.array(b, np.float64)
    drawn = Stream(TEST_SEED, "bootstrap", str(len(a))).integers(RESAMPLES * len(a), len(a))
    means = differences[drawn.reshape(RESAMPLES, len(a))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)
