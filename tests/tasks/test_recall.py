"""The recall task: its items, its loss, and that scoring through a cache equals scoring each candidate by itself."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import tiny_mamba
from torch import nn

from nestling.core.errors import ConfigError
from nestling.federation.local import Batches
from nestling.tasks import recall
from nestling.tasks.needle import TEMPLATES
from nestling.tasks.recall import NO_LABEL, NeedleTask, paired_difference

transformers = pytest.importorskip("transformers")

TRAIN, HELD_OUT = np.arange(128, 192).repeat(40), np.arange(192, 256).repeat(40)
"""Tokens that no sentence holds: training and held-out text cannot be mistaken for each other."""


def tokenize(text: str) -> list[int]:
    """Bytes as tokens."""
    return list(text.encode())


def task(templates: list[str] | None = None, **changes) -> NeedleTask:
    given = {"length": 420, "train_items": 5, "test_items": 6} | changes
    return NeedleTask(tokenize, TRAIN, HELD_OUT, templates=templates or list(TEMPLATES), **given)


def tiny(seed: int = 0) -> nn.Module:
    """A language model with random weights over bytes."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def new_cache(model: nn.Module) -> object:
    return transformers.DynamicCache(config=model.config)


class Rows:
    """The cache of a `Reader`: what each row has read."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def batch_repeat_interleave(self, times: int) -> None:
        self.rows = [list(row) for row in self.rows for _ in range(times)]


class Reader(nn.Module):
    """Knows what follows each prompt; `slip` tokens into the answer it is sure of something else."""

    def __init__(self, follows: dict[tuple[int, ...], list[int]], slip: int | None = None) -> None:
        super().__init__()
        self.follows, self.slip = follows, slip

    def forward(self, ids, past_key_values, use_cache, logits_to_keep=0):
        past = past_key_values.rows or [[] for _ in ids]
        past_key_values.rows = [old + new for old, new in zip(past, ids.tolist(), strict=True)]
        logits = torch.zeros(*ids.shape, 256)
        logits[..., 1] = 1.0  # what follows an answer is not the padding
        for row, tokens in enumerate(past_key_values.rows):
            for prompt, answer in self.follows.items():
                if tuple(tokens[: len(prompt)]) == prompt:
                    for i in range(ids.shape[1]):
                        at = len(tokens) - ids.shape[1] + i + 1 - len(prompt)
                        if 0 <= at < len(answer):
                            logits[row, i, 255 if at == self.slip else answer[at]] = 30.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


def reader(made: NeedleTask, *, wrong: bool = False, slip: int | None = None) -> Reader:
    items = [item for client in made.clients() for item in made.held_out(client)]
    follows = {tuple(i.prompt): i.candidates[(i.right + 1) % 4] if wrong else i.answer for i in items}
    return Reader(follows, slip)


def test_a_model_that_gives_nan_is_right_about_nothing() -> None:
    made = task(["mk"])

    class Broken(Reader):
        def forward(self, *args, **kwargs):
            return SimpleNamespace(logits=super().forward(*args, **kwargs).logits * float("nan"))

    [row] = made.evaluate(Broken(reader(made).follows), new_cache=lambda model: Rows())
    assert (row.exact, row.chosen) == (0, 0)


def test_it_is_what_training_needs() -> None:
    assert isinstance(task(), Batches)


def test_batches_hold_each_item_once_in_the_order_of_seed_client_and_epoch() -> None:
    made = task(["mk", "date"])
    assert (made.clients(), made.examples(0), made.examples(None)) == ([0, 1], 5, 10)

    def rows(client: int | None, *, seed: int = 0, epoch: int = 0) -> list[list[int]]:
        batches = list(made.batches(client, size=3, seed=seed, epoch=epoch))
        assert [len(b.ids) for b in batches] == ([3, 3, 3, 1] if client is None else [3, 2])
        assert all(b.ids.shape[1] == made.length and b.ids.dtype == torch.int64 for b in batches)
        return torch.cat([b.ids for b in batches]).tolist()

    assert rows(0) == rows(0)
    assert rows(0) != rows(0, epoch=1)
    assert sorted(rows(0)) == sorted(rows(0, epoch=1))
    assert not {tuple(r) for r in rows(0)} & {tuple(r) for r in rows(0, seed=1)}
    assert sorted(rows(None)) == sorted(rows(0) + rows(1))
    assert len({tuple(r) for r in rows(None)}) == 10


@given(length=st.integers(400, 700), seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_labels_are_the_answer_at_the_end(length, seed) -> None:
    made = task(["uuid", "mv"], length=length, train_items=3, test_items=1)
    for client in made.clients():
        answers = {tuple(made.item(client, i, seed=seed).answer) for i in range(3)}
        [batch] = made.batches(client, size=3, seed=seed, epoch=0)
        for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
            own = [token for token in labels if token != NO_LABEL]
            assert tuple(own) in answers
            assert labels[-len(own) :] == ids[-len(own) :] == own
            assert set(labels[: -len(own)]) == {NO_LABEL}


def test_held_out_items_share_nothing_with_training() -> None:
    made = task(test_items=8)
    for client in made.clients():
        train = torch.cat([b.ids for b in made.batches(client, size=9, seed=0, epoch=0)])
        assert 128 <= int(train.max()) < 192
        for item in made.held_out(client):
            assert not any(128 <= token < 192 for token in item.prompt)
            assert any(token >= 192 for token in item.prompt)
            assert len(item.prompt) + len(item.answer) == made.length
            assert (item.client, item.template) == (client, made.templates[client])
        assert made.held_out(client) is made.held_out(client)
        longer = made.held_out(client, 500)
        assert [len(i.prompt) + len(i.answer) for i in longer] == [500] * 8
        assert [i.answer for i in longer] == [i.answer for i in made.held_out(client)]
    assert task(["mv", "passkey"]).held_out(1)[0].prompt == task().held_out(0)[0].prompt  # whoever holds the template


def test_the_loss_is_that_of_a_full_pass() -> None:
    model, made = tiny(), task(["mv"])
    [batch] = made.batches(0, size=5, seed=0, epoch=0)
    assert len(set((batch.labels != NO_LABEL).sum(1).tolist())) > 1  # answers of different lengths
    p = model(batch.ids).logits[:, :-1].double().log_softmax(2)
    wanted = [-p[r, t - 1, batch.ids[r, t]] for r, t in (batch.labels != NO_LABEL).nonzero().tolist()]
    loss = made.loss(model, batch)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(sum(wanted).detach()) / len(wanted), rel=1e-5)
    heads = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: heads.append(out.shape[1]))
    made.loss(model, batch)
    assert heads == [int((batch.labels != NO_LABEL).sum(1).max()) + 1]


def naive(model: nn.Module, item) -> tuple[bool, bool, float]:
    """Each candidate by itself, no cache: exact, chosen, summed loss."""
    scores, exact = [], False
    for candidate in item.candidates:
        with torch.no_grad():
            logits = model(torch.tensor([item.prompt + candidate])).logits[0, len(item.prompt) - 1 : -1].double()
        target = torch.tensor(candidate)
        scores.append(float(logits.log_softmax(1)[torch.arange(len(candidate)), target].sum()))
        if candidate == item.answer:
            exact = bool((logits.argmax(1) == target).all())
    return exact, scores.index(max(scores)) == item.right, -scores[item.right]


@pytest.mark.parametrize("at_once", [(8192, 16), (900, 16), (8192, 1)])
@pytest.mark.parametrize("length", [None, 470])
@pytest.mark.parametrize("recurrent", [False, True])
def test_scoring_of_a_batch_equals_each_candidate_by_itself(recurrent, at_once, length, monkeypatch) -> None:
    monkeypatch.setattr(recall, "TOKENS_AT_ONCE", at_once[0])
    monkeypatch.setattr(recall, "ITEMS_AT_ONCE", at_once[1])
    model, made = (tiny_mamba(256, initializer_range=0.3) if recurrent else tiny()).train(), task(["mv", "uuid"])
    cache = (lambda model: None) if recurrent else new_cache
    for row in made.evaluate(model, new_cache=cache, clients=[1, 0], length=length):
        items = made.held_out(row.client, length)
        wanted = [naive(model, item) for item in items]
        assert row.hits == [w[0] for w in wanted]
        assert row.choices == [w[1] for w in wanted]
        assert row.loss == pytest.approx(sum(w[2] for w in wanted) / sum(len(i.answer) for i in items), rel=1e-4)
    assert not model.training


def test_a_perfect_reader_scores_one_and_a_wrong_one_nothing() -> None:
    made = task()
    rows = made.evaluate(reader(made), new_cache=lambda model: Rows())
    assert [(r.client, r.template) for r in rows] == list(enumerate(TEMPLATES))
    assert [(r.exact, r.chosen, r.items) for r in rows] == [(6, 6, 6)] * 7
    assert made.accuracy(rows) == 1
    assert max(r.loss for r in rows) < 1e-6
    rows = made.evaluate(reader(made, wrong=True), new_cache=lambda model: Rows())
    assert [(r.exact, r.chosen) for r in rows] == [(0, 0)] * 7
    assert made.accuracy(rows) == 0


@pytest.mark.parametrize("slip", [0, 1, 2])
def test_one_wrong_token_is_no_exact_match(slip) -> None:
    made = task(["counter"])  # answers of three tokens; the last one is their full stop
    [row] = made.evaluate(reader(made, slip=slip), new_cache=lambda model: Rows())
    assert row.exact == 0
    assert (row.chosen == row.items) == (slip != 1)  # it is the middle token that tells the candidates apart
    assert row.loss == pytest.approx(10, abs=1)


def test_results_stay_with_their_items() -> None:
    made = task(["mv"], test_items=24)  # prompts of several lengths
    items = made.held_out(0)
    assert len({len(i.prompt) for i in items}) > 2
    known = [n % 3 == 0 for n in range(24)]
    follows = {tuple(i.prompt): i.answer for i, knows in zip(items, known, strict=True) if knows}
    [row] = made.evaluate(Reader(follows), new_cache=lambda model: Rows())
    assert row.hits == known
    assert (row.exact, sum(row.choices)) == (8, row.chosen)
    assert list(row.by_depth) == [0.1, 0.3, 0.5, 0.7]
    for depth, (right, count) in row.by_depth.items():
        own = [knows for i, knows in zip(items, known, strict=True) if i.depth == depth]
        assert (right, count) == (sum(own), len(own))


def test_what_cannot_be_made_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="templates: 'niah' is no template"):
        task(["niah"])
    with pytest.raises(ConfigError, match="length: 100 tokens leave"):
        task(["mk"], length=100)
    with pytest.raises(ConfigError, match=r"needs \d+ tokens of text; there are 2560"):
        task(["mk"], length=4000)
    for changes in ({"test_items": 0}, {"train_items": -1}):
        with pytest.raises(ConfigError, match="task: 1 templates"):
            task(["mk"], **changes)
    with pytest.raises(ConfigError, match="task: 0 templates"):
        NeedleTask(tokenize, TRAIN, HELD_OUT, templates=[], length=400, train_items=1, test_items=1)


def test_the_interval_of_a_difference() -> None:
    assert paired_difference([True] * 50, [True] * 50) == (0, 0, 0)
    assert paired_difference([True] * 50, [False] * 50) == (1, 1, 1)
    a, b = [n % 2 == 0 for n in range(400)], [n % 5 == 0 for n in range(400)]
    mean, low, high = paired_difference(a, b)
    differences = np.array(a, float) - np.array(b, float)
    assert mean == pytest.approx(0.3)
    half = 1.96 * differences.std() / 400**0.5  # the normal approximation
    assert (mean - low, high - mean) == (pytest.approx(half, rel=0.1), pytest.approx(half, rel=0.1))
    assert paired_difference(a, b) == (mean, low, high)
    assert paired_difference(b, a) == pytest.approx((-mean, -high, -low))
    for one, other in (([], []), ([True], [])):
        with pytest.raises(ConfigError, match="are no pairs"):
            paired_difference(one, other)
