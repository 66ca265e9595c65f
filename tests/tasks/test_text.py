"""Text: where it comes from, that pieces through a cache change nothing, and the language-modelling task."""

from math import exp, log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_close
from torch import nn

from nestling.core.errors import ConfigError, ContextError
from nestling.tasks import text
from nestling.tasks.text import (
    TextTask,
    by_bins,
    load_text,
    perplexity,
    relative_to_first,
    split_text,
    token_losses,
)

transformers = pytest.importorskip("transformers")


def tiny(seed: int = 0) -> nn.Module:
    """A language model with random weights over 50 tokens."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def new_cache(model: nn.Module) -> object:
    return transformers.DynamicCache(config=model.config)


def stream(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, count)


def slow_losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One full pass, all logits, the definition."""
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].double()
    return -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


class Head(nn.Module):
    """Notes how many rows it was applied to."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.rows = head, []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden.numel() // hidden.shape[-1])
        return self.head(hidden)


def test_the_documentation_is_read_in_the_order_of_its_topics() -> None:
    from pydoc_data.topics import topics

    read = load_text("python-docs")
    assert read == load_text("python-docs")
    assert read.startswith(topics[min(topics)])
    assert read.endswith(topics[max(topics)])
    assert len(read) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)


def test_a_file_and_a_folder_in_the_order_of_names(tmp_path) -> None:
    (tmp_path / "b.txt").write_text("zwölf" * 2000, encoding="utf-8")
    (tmp_path / "a.txt").write_text("one " * 3000, encoding="utf-8")
    (tmp_path / "notes.md").write_text("not this", encoding="utf-8")
    assert load_text("file", str(tmp_path / "b.txt")) == "zwölf" * 2000
    assert load_text("file", str(tmp_path)) == "one " * 3000 + "\n\n" + "zwölf" * 2000


def test_what_cannot_be_read_names_the_place(tmp_path) -> None:
    (tmp_path / "latin.txt").write_bytes("zwölf".encode("latin-1") * 5000)
    (tmp_path / "short.txt").write_text("x" * 9999)
    (tmp_path / "empty").mkdir()
    for path, problem in {
        "nowhere": "there is no such text file or folder",
        "empty": "the folder holds no",
        "latin.txt": "cannot be read",
        "short.txt": "the text has 9999 characters",
    }.items():
        with pytest.raises(ContextError, match=f"{path}: {problem}"):
            load_text("file", str(tmp_path / path))
    with pytest.raises(ContextError, match="path: there is no such"):
        load_text("file")
    with pytest.raises(ConfigError, match="source: 'shakespeare' is no source"):
        load_text("shakespeare")


@given(st.integers(0, 200))
def test_the_last_fifth_is_held_out(count) -> None:
    train, held_out = split_text(np.arange(count))
    assert np.concatenate([train, held_out]).tolist() == list(range(count))
    assert len(held_out) == count // 5


@pytest.mark.parametrize("piece", [1, 7, 16, 39, 40, 1000])
@pytest.mark.parametrize("rows", [5, 1024])
def test_pieces_through_a_cache_equal_one_full_pass(piece, rows, monkeypatch) -> None:
    monkeypatch.setattr(text, "ROWS", rows)
    model = tiny().train()
    ids = torch.from_numpy(stream(80)).view(2, 40)
    got = token_losses(model, ids, piece=piece, new_cache=new_cache)
    assert (got.dtype, got.shape) == (torch.float32, (2, 39))
    assert not got.requires_grad
    assert not model.training
    assert_close(got, slow_losses(model, ids))


def test_logits_exist_for_few_positions_only(monkeypatch) -> None:
    monkeypatch.setattr(text, "ROWS", 8)
    model = tiny()
    head = Head(model.get_output_embeddings())
    model.set_output_embeddings(head)
    ids = torch.from_numpy(stream(80)).view(2, 40)
    token_losses(model, ids, piece=16, new_cache=new_cache)
    assert max(head.rows) == 8
    assert sum(head.rows) == 78
    head.rows.clear()
    task = TextTask([stream(200)], length=20)
    [batch] = task.batches(0, size=99, seed=0, epoch=0)
    task.loss(model, batch).backward()
    assert max(head.rows) == 8
    assert sum(head.rows) == 2 * batch[:, 1:].numel()  # made a second time for the gradient
    head.rows.clear()
    task.evaluate(model)
    assert max(head.rows) == 8


def test_streams_that_have_no_next_token_are_refused() -> None:
    for count, piece in ((1, 4), (9, 0)):
        with pytest.raises(ConfigError, match=f"piece: {count} tokens in pieces of {piece}"):
            token_losses(tiny(), torch.ones(1, count, dtype=torch.int64), piece=piece, new_cache=new_cache)


@given(count=st.integers(1, 50), size=st.integers(1, 60))
def test_bins_hold_every_position_once(count, size) -> None:
    losses = torch.from_numpy(np.random.default_rng(count).random((3, count)))
    bins = by_bins(losses, size)
    assert len(bins) == -(-count // size)
    weights = [min(size, count - size * i) for i in range(len(bins))]
    assert np.average(bins, weights=weights) == pytest.approx(float(losses.mean()))
    relative = relative_to_first(bins)
    assert relative[0] == 0
    assert [(1 + r) * bins[0] for r in relative] == pytest.approx(bins)


def test_perplexity_of_a_uniform_guess_is_the_number_of_tokens() -> None:
    assert perplexity(torch.full((2, 9), log(50))) == pytest.approx(50, rel=1e-6)


def test_windows_predict_every_token_of_the_training_part_once() -> None:
    own = np.arange(106)
    task = TextTask([own, np.arange(4), np.arange(200, 300)], length=10)
    assert (task.clients(), [task.examples(c) for c in (0, 1, 2, None)]) == ([0, 1, 2], [8, 0, 7, 15])
    batches = list(task.batches(0, size=3, seed=0, epoch=0))
    assert [tuple(b.shape) for b in batches] == [(3, 11), (3, 11), (2, 11)]
    assert sorted(torch.cat(batches)[:, 1:].flatten().tolist()) == list(range(1, 81))
    assert all((row.diff() == 1).all() for row in torch.cat(batches))
    pooled = torch.cat(list(task.batches(None, size=4, seed=0, epoch=0)))
    assert sorted(pooled[:, 0].tolist()) == [*range(0, 80, 10), *range(200, 270, 10)]
    assert list(task.batches(1, size=4, seed=0, epoch=0)) == []


def test_the_order_depends_on_seed_client_and_epoch() -> None:
    def order(*, client: int = 0, seed: int = 0, epoch: int = 0) -> list[int]:
        task = TextTask([stream(500)] * 2, length=10)
        return torch.cat(list(task.batches(client, size=4, seed=seed, epoch=epoch))).tolist()

    assert order() == order()
    assert all(order() != other for other in (order(client=1), order(seed=1), order(epoch=1)))


def test_the_loss_and_its_gradient_are_those_of_all_logits(monkeypatch) -> None:
    monkeypatch.setattr(text, "ROWS", 7)
    model = tiny()
    task = TextTask([stream(200)], length=20)
    [batch] = task.batches(0, size=99, seed=0, epoch=0)
    loss = task.loss(model, batch)
    got = torch.autograd.grad(loss, list(model.parameters()))
    logits = model(batch[:, :-1]).logits
    wanted_loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    wanted = torch.autograd.grad(wanted_loss, list(model.parameters()))
    assert float(loss.detach()) == pytest.approx(float(wanted_loss.detach()), rel=1e-6)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_score_is_over_held_out_windows_only() -> None:
    model = tiny()
    streams = [stream(205, seed=1), stream(110, seed=2)]
    score = TextTask(streams, length=10).evaluate(model)
    windows = [s[-(len(s) // 5) :][i : i + 11] for s in streams for i in range(0, len(s) // 5 - 10, 10)]
    ids = torch.from_numpy(np.stack(windows))
    assert score.items == ids[:, 1:].numel() == 60
    assert score.loss == pytest.approx(float(slow_losses(model, ids).mean()), rel=1e-5)
    assert score.perplexity == pytest.approx(exp(score.loss))
    assert score.right == int((model(ids).logits[:, :-1].argmax(2) == ids[:, 1:]).sum())
    assert score.accuracy == score.right / 60


def test_text_too_short_to_hold_out_a_window_is_refused() -> None:
    TextTask([stream(55)], length=10)
    with pytest.raises(ConfigError, match="length: no text is long enough to hold out 11 tokens"):
        TextTask([stream(54)], length=10)
