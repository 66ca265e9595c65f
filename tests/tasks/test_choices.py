"""Multiple choice: what is asked and scored, held to a slow form by question, and what may not be trained on."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nestling.core.errors import ConfigError
from nestling.federation.local import Batches
from nestling.tasks import choices
from nestling.tasks.choices import ChoicesTask, prompt_text
from nestling.tasks.questions import Question, Questions

transformers = pytest.importorskip("transformers")

LETTER = {" A": [256], " B": [257], " C": [258], " D": [259]}


def tokenize(text: str) -> list[int]:
    """Bytes as tokens, and four more for the answers."""
    return LETTER.get(text) or list(text.encode())


def made_of(counts: dict[str, int], **changes) -> Questions:
    """Questions of several lengths."""
    domains = {
        domain: [Question(f"{domain} {'?' * (i % 7)} {i}", ("a", "bc", "d", f"e{i}"), i % 4, domain) for i in range(n)]
        for domain, n in counts.items()
    }
    return Questions("Drawn", domains, **changes)


def task(counts: dict[str, int] | None = None, **changes) -> ChoicesTask:
    given = {"train_items": 10, "test_items": 5} | changes
    return ChoicesTask(tokenize, made_of(counts or {"x": 30, "y": 42}), **given)


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Sure(nn.Module):
    """Is sure of one letter for each prompt it knows, and of `other` for all else; it sees no filling."""

    def __init__(self, letters: dict[tuple[int, ...], int], other: int = 0, value: float = 30.0) -> None:
        super().__init__()
        self.letters, self.other, self.value = letters, other, value

    def forward(self, ids, use_cache, logits_to_keep):
        logits = torch.zeros(*ids.shape, 260)
        for row, tokens in enumerate(ids.tolist()):
            for end in range(len(tokens)):
                token = self.letters.get(tuple(tokens[: end + 1]), self.other)
                logits[row, end, token] = self.value
        return SimpleNamespace(logits=logits[:, logits_to_keep])


def sure(made: ChoicesTask, turn: int = 0) -> dict[tuple[int, ...], int]:
    held_out = [question for client in made.clients() for question in made.held_out(client)]
    return {tuple(made.prompt(q)): 256 + (q.answer + turn) % 4 for q in held_out}


def test_it_is_what_training_needs() -> None:
    assert isinstance(task(), Batches)


def test_the_prompt_ends_where_the_letter_belongs() -> None:
    made = task(begin=[7])
    question = made.held_out(0)[0]
    assert made.prompt(question) == [7, *prompt_text(question).encode()]
    assert prompt_text(question).endswith(f"\nD. {question.options[3]}\nAnswer:")


def test_what_is_tested_is_never_trained_on_and_depends_on_no_seed() -> None:
    made, fewer = task(), task(test_items=2)
    for client in made.clients():
        held_out = made.held_out(client)
        assert len(held_out) == 5
        assert fewer.held_out(client) == held_out[:2]
        for seed in range(5):
            training = made.training(client, seed=seed)
            assert len(set(training)) == 10
            assert not set(training) & set(held_out)
        assert made.training(client, seed=0) != made.training(client, seed=1)
        assert set(made.training(client, seed=0)) != set(made.training(client, seed=1))
    assert (made.examples(0), made.examples(None), made.held_out_items) == (10, 20, 10)
    assert made.digest == task().digest != fewer.digest


def test_one_in_six_is_held_out_and_a_small_area_trains_on_what_it_has() -> None:
    made = task({"x": 13, "y": 1200}, train_items=2000, test_items=100)
    assert [len(made.held_out(c)) for c in made.clients()] == [2, 100]
    assert [made.examples(c) for c in made.clients()] == [11, 1100]


def test_a_set_that_is_too_small_to_train_on_is_tested_on_all_that_training_leaves() -> None:
    def scarce(train: int, test: int = 200) -> ChoicesTask:
        found = made_of({"x": 40, "y": 50}, scarce=True)
        return ChoicesTask(tokenize, found, train_items=train, test_items=test)

    assert [len(scarce(4).held_out(c)) for c in (0, 1)] == [36, 46]
    assert [len(scarce(4, 9).held_out(c)) for c in (0, 1)] == [9, 9]
    with pytest.raises(ConfigError, match=r"40 questions of x, too few to train on 2,000 .* fewer than 40"):
        scarce(2000)


def test_an_area_with_one_question_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 questions of y, too few"):
        task({"x": 30, "y": 1})


def test_a_letter_must_be_one_token() -> None:
    for letters in (lambda text: list(text.encode()), lambda text: [5]):
        with pytest.raises(ConfigError, match="not one each") as caught:
            ChoicesTask(letters, made_of({"x": 30}), train_items=2, test_items=2)
        assert caught.value.where == "base.model"


def test_batches_hold_each_question_once_in_the_order_of_seed_client_and_epoch() -> None:
    made = task()

    def rows(client: int | None, *, seed: int = 0, epoch: int = 0) -> list[tuple]:
        batches = list(made.batches(client, size=4, seed=seed, epoch=epoch))
        assert [len(b.lengths) for b in batches] == ([4] * 5 if client is None else [4, 4, 2])
        found = []
        for b in batches:
            assert b.ids.shape[1] == max(b.lengths)
            for ids, length, letter in zip(b.ids.tolist(), b.lengths, b.letters.tolist(), strict=True):
                assert set(ids[length:]) <= {0}
                found.append((tuple(ids[:length]), letter))
        return found

    assert rows(0) == rows(0)
    assert rows(0) != rows(0, epoch=1)
    assert sorted(rows(0)) == sorted(rows(0, epoch=1))
    assert sorted(rows(None)) == sorted(rows(0) + rows(1))
    wanted = {(tuple(made.prompt(q)), 256 + q.answer) for q in made.training(0, seed=0)}
    assert set(rows(0)) == wanted


def test_the_loss_is_that_of_each_question_by_itself() -> None:
    model, made = tiny(), task()
    [batch] = made.batches(0, size=10, seed=0, epoch=0)
    assert len(set(batch.lengths)) > 3
    wanted = 0.0
    for ids, length, letter in zip(batch.ids, batch.lengths, batch.letters, strict=True):
        wanted -= float(model(ids[None, :length]).logits[0, -1].detach().double().log_softmax(0)[letter]) / 10
    loss = made.loss(model, batch)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5)
    heads = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: heads.append(out.shape[1]))
    made.loss(model, batch)
    assert heads == [len(set(batch.lengths))]  # the head runs where a question ends, and nowhere else


@pytest.mark.parametrize("at_once", [(8192, 16), (150, 16), (8192, 1)])
def test_scores_are_those_of_each_question_by_itself(at_once: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "TOKENS_AT_ONCE", at_once[0])
    monkeypatch.setattr(choices, "ITEMS_AT_ONCE", at_once[1])
    model, made = tiny().train(), task()
    rows = made.evaluate(model, clients=[1, 0])
    assert [(row.client, row.template, row.items, row.by_depth) for row in rows] == [(1, "y", 5, {}), (0, "x", 5, {})]
    for row in rows:
        losses = []
        for question, hit, choice in zip(made.held_out(row.client), row.hits, row.choices, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([made.prompt(question)])).logits[0, -1].double()
            losses.append(-float(logits.log_softmax(0)[256 + question.answer]))
            assert choice == (int(logits[256:].argmax()) == question.answer)
            assert hit == (int(logits.argmax()) == 256 + question.answer)
        assert row.loss == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert not model.training


def test_a_model_that_knows_is_right_and_one_that_is_sure_of_another_letter_is_wrong() -> None:
    made = task()
    for turn, right in ((0, 5), (1, 0)):
        rows = made.evaluate(Sure(sure(made, turn)))
        assert [(r.exact, r.chosen, r.items) for r in rows] == [(right, right, 5)] * 2
        assert made.accuracy(rows) == right / 5
    rows = made.evaluate(Sure({}, other=65))  # a letter without its space: all four are alike to it, and A comes first
    assert [r.exact for r in rows] == [0, 0]
    assert [r.choices for r in rows] == [[q.answer == 0 for q in made.held_out(c)] for c in made.clients()]


def test_a_model_that_gives_nan_is_right_about_nothing() -> None:
    made = task()
    for row in made.evaluate(Sure(sure(made), value=float("nan"))):
        assert (row.exact, row.chosen) == (0, 0)
