"""Multiple choice as a federated task: a subject area a client, four options, and the letter of the right one.

    prompt   question ⏎ A. … ⏎ B. … ⏎ C. … ⏎ D. … ⏎ Answer:
    loss     −ln p(letter | prompt), of all tokens         right   argmax over " A" … " D" of p(letter | prompt)

Chance is 1 in 4. Questions of a batch differ in length and are filled up behind their end, where a causal model's
answer cannot see; logits are made at the questions' ends only. Held-out questions never depend on a run's seed, so
that methods are compared question by question, and none of them is among a run's training questions.

Source: the prompt and the score of MMLU (arXiv 2009.03300), the five clients of FedNL (arXiv 2605.16350), which trains
on five sixths of MMLU's test split and holds out one. There is one instruction fewer here: no line names the subject.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.tasks.questions import LETTERS, Question, Questions
from nestling.tasks.recall import TEST_SEED, Recall, nothing

TOKENS_AT_ONCE, ITEMS_AT_ONCE = 8192, 16
"""Tokens, filling included, and questions of one evaluation batch."""
HELD_OUT_OF = 6
"""One question of six is held out at most, as in the paper."""

Read = Callable[..., Tensor]
"""The logits [b, positions, vocabulary] at some positions of rows that are filled up behind their ends: (model, ids,
positions, lengths)."""


@dataclass(frozen=True)
class ChoiceBatch:
    """Prompts, filled up with zeros behind their ends, their lengths in tokens, and the token of the right letter."""

    ids: Int64[Tensor, "b t"]
    lengths: list[int]
    letters: Int64[Tensor, " b"]


class ChoicesTask:
    """Questions with four options over clients; client i has the i-th subject area.

    Args:
        tokenize: text to tokens, without tokens for beginning and end.
        questions: of all subject areas.
        train_items, test_items: questions of each client, at most. Of the questions of an area one in six is held out
            at most; where a set is too small to train on, all that training leaves.
        begin: tokens in front of every prompt, such as a model's token for the beginning of a text.
        device: where batches go.
        read: how training reads; None: by a plain forward pass.

    `client=None` stands for all clients' questions pooled. Raises `ConfigError` if a letter is not one token, or if a
    client would have nothing to train on or to be tested on.
    """

    classes = 4

    def __init__(
        self,
        tokenize: Callable[[str], list[int]],
        questions: Questions,
        *,
        train_items: int,
        test_items: int,
        begin: Sequence[int] = (),
        device: str = "cpu",
        read: Read | None = None,
    ) -> None:
        self.domains = list(questions.domains)
        self.title = f"{questions.title} by letter"
        self.device, self.read = torch.device(device), read or _read_plainly
        self._tokenize, self._begin = tokenize, list(begin)
        letters = [tokenize(f" {letter}") for letter in LETTERS]
        if any(len(tokens) != 1 for tokens in letters) or len({tokens[0] for tokens in letters}) != 4:
            raise ConfigError(
                f"its tokenizer makes {[len(tokens) for tokens in letters]} tokens of the answers A to D, not one each",
                where="base.model",
                remedy="Give a model whose tokenizer has a space and a letter as one token.",
            )
        self.letters = torch.tensor([tokens[0] for tokens in letters], device=self.device)
        self._pools: list[list[Question]] = []
        self._held_out: list[list[Question]] = []
        for domain, own in questions.domains.items():
            order = Stream(TEST_SEED, "choices-held-out", domain).permutation(len(own)).tolist()
            count = min(test_items, len(own) - train_items if questions.scarce else max(1, len(own) // HELD_OUT_OF))
            if not 0 < count < len(own):
                raise ConfigError(
                    f"{questions.title} has {len(own)} questions of {domain}, too few to train on {train_items:,} and "
                    "be tested on others",
                    where="task.train_items",
                    remedy=f"Give fewer than {len(own)}, or another task.data.",
                )
            self._held_out.append([own[i] for i in order[:count]])
            self._pools.append([own[i] for i in order[count:]])
        self._train_items = [min(train_items, len(pool)) for pool in self._pools]
        self._prompts: dict[Question, list[int]] = {}
        self._drawn: dict[tuple[int, int], list[Question]] = {}

    def clients(self) -> list[int]:
        """Numbers of the clients."""
        return list(range(len(self.domains)))

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of all questions, and of which are held out."""
        parts = [[vars(question) for question in own] for own in (*self._pools, *self._held_out)]
        return hashlib.sha256(json.dumps(parts, allow_nan=False).encode()).hexdigest()[:32]

    @property
    def held_out_items(self) -> int:
        """Number of held-out questions of all clients."""
        return sum(map(len, self._held_out))

    def examples(self, client: int | None) -> int:
        """How many training questions a client holds."""
        return sum(self._train_items) if client is None else self._train_items[client]

    def training(self, client: int, *, seed: int) -> list[Question]:
        """The training questions of a client, drawn from its pool by the run's seed, the same in every epoch."""
        if (client, seed) not in self._drawn:
            pool = self._pools[client]
            order = Stream(seed, "choices", self.domains[client]).permutation(len(pool)).tolist()
            self._drawn[client, seed] = [pool[i] for i in order[: self._train_items[client]]]
        return self._drawn[client, seed]

    def held_out(self, client: int) -> list[Question]:
        """The held-out questions of a client; a smaller `test_items` has the first of them."""
        return self._held_out[client]

    def prompt(self, question: Question) -> list[int]:
        """The tokens of a question, up to the colon behind "Answer"."""
        if question not in self._prompts:
            self._prompts[question] = self._begin + self._tokenize(prompt_text(question))
        return self._prompts[question]

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[ChoiceBatch]:
        """Batches of at most `size` questions, each once; their order depends only on (seed, client, epoch)."""
        some = self.clients() if client is None else [client]
        own = [question for c in some for question in self.training(c, seed=seed)]
        order = Stream(seed, "batches", f"{client}/{epoch}").permutation(len(own)).tolist()
        for start in range(0, len(own), size):
            yield self._collate([own[i] for i in order[start : start + size]])

    def _collate(self, questions: list[Question]) -> ChoiceBatch:
        prompts = [self.prompt(question) for question in questions]
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts], device=self.device)
        right = torch.tensor([question.answer for question in questions], device=self.device)
        return ChoiceBatch(ids, lengths, self.letters[right])

    def loss(self, model: nn.Module, batch: ChoiceBatch) -> Tensor:
        """Mean cross-entropy of the right letter among all tokens, in float32."""
        return F.cross_entropy(answers(model, batch, self.read), batch.letters)

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        *,
        clients: list[int] | None = None,
        read: Read | None = None,
        before_batch: Callable[[], object] = nothing,
    ) -> list[Recall]:
        """How each client's held-out questions are answered: `chosen` counts the right letters among four, `exact`
        those that are the likeliest of all tokens, and `loss` is of the right letter among all tokens.

        Args:
            model: a causal language model of transformers; set to evaluation.
            clients: whose questions; None for all clients.
            read: None: by a plain forward pass.
            before_batch: called before each batch of questions; what it raises is passed on.
        """
        model.eval()
        clients = self.clients() if clients is None else clients
        return [self._answered(model, client, read or _read_plainly, before_batch) for client in clients]

    @staticmethod
    def accuracy(recalls: list[Recall]) -> float:
        """Share of right letters among all clients' questions, 0 to 1."""
        return sum(r.chosen for r in recalls) / sum(r.items for r in recalls)

    def _answered(self, model: nn.Module, client: int, read: Read, before_batch: Callable[[], object]) -> Recall:
        questions = self._held_out[client]
        found = np.empty((len(questions), 3))  # exact, chosen, loss
        by_length = sorted(range(len(questions)), key=lambda i: len(self.prompt(questions[i])))
        start = 0
        while start < len(by_length):
            before_batch()
            some = by_length[start : start + ITEMS_AT_ONCE]
            while len(some) > 1 and len(some) * len(self.prompt(questions[some[-1]])) > TOKENS_AT_ONCE:
                some.pop()
            batch = self._collate([questions[i] for i in some])
            logits = answers(model, batch, read)
            known = ~logits.isnan().any(1)  # to argmax, the first NaN is the most
            exact = (logits.argmax(1) == batch.letters) & known
            chosen = (self.letters[logits[:, self.letters].argmax(1)] == batch.letters) & known
            loss = F.cross_entropy(logits, batch.letters, reduction="none")
            found[some] = torch.stack([exact.double(), chosen.double(), loss.double()], 1).cpu().numpy()
            start += len(some)
        hits, choices = [bool(x) for x in found[:, 0]], [bool(x) for x in found[:, 1]]
        loss_of_all = float(found[:, 2].mean())
        return Recall(client, self.domains[client], len(hits), sum(hits), sum(choices), loss_of_all, {}, hits, choices)


def prompt_text(question: Question) -> str:
    r"""The text in front of the letter.

    >>> prompt_text(Question("2 + 2?", ("3", "4", "5", "6"), 1, "elementary_mathematics"))
    '2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:'
    """
    options = [f"{letter}. {option}" for letter, option in zip(LETTERS, question.options, strict=True)]
    return "\n".join([question.text, *options, "Answer:"])


def answers(model: nn.Module, batch: ChoiceBatch, read: Read) -> Float32[Tensor, "b v"]:
    """The logits of the token that follows each prompt. The head runs at these positions only."""
    ends = sorted({length - 1 for length in batch.lengths})
    logits = read(model, batch.ids, torch.tensor(ends, device=batch.ids.device), batch.lengths)
    rows = torch.arange(len(batch.lengths), device=logits.device)
    return logits[rows, torch.tensor([ends.index(n - 1) for n in batch.lengths], device=logits.device)].float()


def _read_plainly(model: nn.Module, ids: Tensor, positions: Tensor, lengths: list[int]) -> Tensor:
    logits: Any = model(ids, use_cache=False, logits_to_keep=positions).logits
    return logits
