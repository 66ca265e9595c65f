"""Text over clients: the published files and damaged ones, articles, blocks, who holds which, and the score."""

import shutil
import sys
from importlib.machinery import ModuleSpec
from itertools import chain
from math import exp, log
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import articles
from torch import Tensor, nn

from nestling.config.schema import TextConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.tasks import wikitext
from nestling.tasks.wikitext import Blocks, BlocksTask, by_headings, cut_blocks, load_articles, make_blocks_task, spaced

ROWS = ["", " = Rain = \n", "", " Rain is water @-@ like . \n", "", " = = Use = = \n", "", " a = b \n", ""]
ROWS += [" = Sun = \n", "", " Not a title : \n", " = 1 = \n", " ( since the rows around it are not empty ) \n", ""]
TWO = ["".join(ROWS[:9]), "".join(ROWS[9:])]
SPLITS = ("train", "validation", "test")


def write(path: Path, rows: list) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    path.parent.mkdir(exist_ok=True)
    library.write_table(pyarrow.table({"text": rows}), path)


def as_lines(rows: list[str]) -> str:
    """As in the published archive, where an empty row is a line with a space."""
    return "".join(row or " \n" for row in rows)


@pytest.mark.parametrize("inside", ["", "wikitext-2-raw-v1"])
def test_the_hubs_files(inside, tmp_path) -> None:
    folder = tmp_path / inside
    write(folder / "train-00000-of-00002.parquet", ROWS[:7])
    write(folder / "train-00001-of-00002.parquet", ROWS[7:])
    for split in SPLITS[1:]:
        write(folder / f"{split}-00000-of-00001.parquet", ["", f" = {split} = \n", ""])
    if inside:  # the repository has four subsets, each in a folder
        write(tmp_path / "wikitext-103-v1" / "train-00000-of-00001.parquet", ["another"])
    found = load_articles("wikitext2", str(tmp_path))
    assert found.train == TWO
    assert (found.validation, found.test) == ([" = validation = \n"], [" = test = \n"])


@pytest.mark.parametrize("end", [".raw", ".tokens"])
@pytest.mark.parametrize("inside", ["", "wikitext-2-raw", "wikitext-2"])
def test_the_archives_files_hold_the_same(inside, end, tmp_path) -> None:
    (tmp_path / inside).mkdir(exist_ok=True)
    rows = [*ROWS, " a\u2028line\x0bthat is one , é \n"]  # of what Python takes for ends of lines, the file has one
    for name in ("train", "valid", "test"):
        (tmp_path / inside / f"wiki.{name}{end}").write_text(as_lines(rows), "utf-8", newline="\n")
    found = load_articles("wikitext2", str(tmp_path))
    assert found.train == found.test == found.validation == [TWO[0], TWO[1] + rows[-1]]


def fake_hub(monkeypatch: pytest.MonkeyPatch, rows: list) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []
    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = lambda *names: asked.append(names) or {s: {"text": rows} for s in SPLITS}  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_the_hub_is_asked_by_name(monkeypatch) -> None:
    asked = fake_hub(monkeypatch, ROWS)
    assert load_articles("wikitext2").train == TWO
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1")]
    fake_hub(monkeypatch, ["", None])
    with pytest.raises(WireError):
        load_articles("wikitext2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ContextError, match=r"nestling\[hub\]"):
        load_articles("wikitext2")


def test_what_is_missing_or_damaged_is_said(tmp_path) -> None:
    with pytest.raises(ContextError, match=r"wiki\.train\.raw"):
        load_articles("wikitext2", str(tmp_path))
    with pytest.raises(ContextError):
        load_articles("wikitext2", "n" * 5000)
    for name in ("train", "test"):
        (tmp_path / f"wiki.{name}.raw").write_text(as_lines(ROWS), "utf-8")
    with pytest.raises(ContextError, match=r"wiki\.valid\.raw: there is no such file"):
        load_articles("wikitext2", str(tmp_path))
    (tmp_path / "wiki.valid.raw").write_bytes(b" \n = A = \n \xff\n")
    with pytest.raises(WireError, match=r"wiki\.valid\.raw") as caught:
        load_articles("wikitext2", str(tmp_path))
    assert caught.value.exit_code == 5
    with pytest.raises(ConfigError, match=r"task\.data"):
        load_articles("milton")


@pytest.mark.parametrize("damage", ["cut", "null", "number", "column", "split"])
def test_damaged_parquet_is_refused(damage, tmp_path) -> None:
    for split in SPLITS:
        write(tmp_path / f"{split}.parquet", ROWS)
    path = tmp_path / "train.parquet"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "null":
        write(path, ["a", None])
    elif damage == "number":
        write(path, [1, 2])
    elif damage == "column":
        import pyarrow
        from pyarrow import parquet as library

        library.write_table(pyarrow.table({"page": ["a"]}), path)
    else:
        path.unlink()
    wanted = WireError if damage in ("cut", "null", "number") else ContextError
    with pytest.raises(wanted, match="train"):
        load_articles("wikitext2", str(tmp_path))


def test_shakespeare_is_cut_at_his_name_and_each_work_in_tenths(tmp_path) -> None:
    works = [f"{title}\n\nby William Shakespeare\n\n\n\n\n{'x' * 9000}\n\n\n\n" for title in ("KING JOHN", "HAMLET")]
    works.append(f"THE SONNETS\nby William Shakespeare\n\n{'y' * 6000}\nTHE END\n\n\nI, by William Shakespeare, say\n")
    (tmp_path / "his.txt").write_text("".join(works))
    found = load_articles("shakespeare", str(tmp_path / "his.txt"))
    assert ["".join(parts) for parts in zip(found.train, found.validation, found.test, strict=True)] == works
    assert [8 * len(work) // 10 for work in works] == [len(part) for part in found.train]


@given(st.lists(st.sampled_from([*ROWS, " = B = \n", ""]), max_size=30))
def test_no_row_is_lost_between_articles(rows: list[str]) -> None:
    assert "".join(by_headings(rows)) == "".join(rows)


@given(st.lists(st.text(max_size=9), max_size=6), st.integers(1, 7))
def test_blocks_predict_every_byte_once_and_know_their_article(texts: list[str], length: int) -> None:
    blocks, whole = cut_blocks(texts, length), "".join(texts).encode("utf-8", "replace")
    assert len(blocks) == max(0, len(whole) - 1) // length
    assert blocks.y.tobytes() == whole[1 : len(blocks) * length + 1]
    assert blocks.x.tobytes() == whole[: len(blocks) * length]
    owners = [number for number, text in enumerate(texts) for _ in text.encode("utf-8", "replace")]
    assert blocks.article.tolist() == [owners[n * length] for n in range(len(blocks))]


@given(count=st.integers(0, 40), most=st.integers(0, 40))
def test_spaced_items_are_some_of_them_in_order(count: int, most: int) -> None:
    found = spaced(np.arange(count), most)
    assert len(found) == (min(count, most) if most else count)
    assert (np.diff(found) > 0).all()
    if most and 0 < most <= count:
        assert found[0] == 0
        assert found[-1] >= count - -(-count // most)


def task(**changes: object) -> BlocksTask:
    config = TextConfig(**{"data": "wikitext2", "clients": 3, "length": 16, **changes})
    return make_blocks_task(config, path=str(articles()), seed=int(changes.pop("seed", 0)))


def held(found: BlocksTask, client: int | None) -> list[bytes]:
    """A client's blocks, as bytes."""
    batches = found.batches(client, size=7, seed=0, epoch=0)
    pairs = [(x.tolist(), y.tolist()) for x, y in batches]
    return sorted(bytes([*before, after[-1]]) for x, y in pairs for before, after in zip(x, y, strict=True))


@pytest.mark.parametrize("partition", ["iid", "articles"])
def test_every_block_is_with_one_client_and_the_seed_decides_which(partition, monkeypatch) -> None:
    def shares(seed: int) -> list[list[int]]:
        config = TextConfig(data="wikitext2", clients=3, length=16, partition=partition)
        found = make_blocks_task(config, path=str(articles()), seed=seed)
        return [share.tolist() for share in found._shares]

    first, whole = shares(0), cut_blocks(load_articles("wikitext2", str(articles())).train, 16)
    assert sorted(chain.from_iterable(first)) == list(range(len(whole)))
    assert first == shares(0) != shares(1)
    sizes = [len(share) for share in first]
    if partition == "iid":
        assert max(sizes) - min(sizes) <= 1
    else:
        owned = [set(whole.article[share].tolist()) for share in first]
        assert sum(map(len, owned)) == len(set.union(*owned)) == 12
        assert max(sizes) - min(sizes) <= np.bincount(whole.article).max()


def test_a_limit_of_items_holds_for_each_client_and_for_all_of_them_pooled() -> None:
    few, all_of_them = task(train_items=5, test_items=4), task()
    assert [few.examples(client) for client in few.clients()] == [5, 5, 5]
    assert (few.examples(None), few.held_out_items) == (15, 4 * 16)
    assert held(few, None) == sorted(chain.from_iterable(held(few, client) for client in few.clients()))
    assert all(set(held(few, client)) <= set(held(all_of_them, client)) for client in few.clients())


def test_what_is_held_out_is_the_published_split_whatever_the_partition() -> None:
    found = load_articles("wikitext2", str(articles()))
    for part, wanted in (("test", found.test), ("validation", found.validation)):
        for changes in ({}, {"partition": "articles", "clients": 2}):
            assert task(evaluate_on=part, **changes)._held_out.tokens.tolist() == cut_blocks(wanted, 16).tokens.tolist()


class Knows(nn.Module):
    """Gives the byte after next in the alphabet a share of one half, and all others equal shares of the rest."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.full((*x.shape, 256), log(0.5 / 255))
        return logits.scatter(-1, (x[..., None] + 1) % 256, log(0.5))


def test_the_score_counts_bytes_and_its_loss_is_their_mean() -> None:
    train, held_out = np.frombuffer(b"aaaaab", np.uint8), np.frombuffer(b"abcxabaa", np.uint8)
    blocks = [Blocks(part.reshape(2, -1), np.zeros(2, np.int64)) for part in (train, held_out)]
    found = BlocksTask(*blocks, [np.arange(2)])
    score = found.evaluate(Knows())
    assert (score.right, score.items, found.held_out_items) == (3, 6, 6)
    wanted = -(3 * log(0.5) + 3 * log(0.5 / 255)) / 6
    assert score.loss == pytest.approx(wanted, rel=1e-6)
    assert score.perplexity == pytest.approx(exp(wanted), rel=1e-6)
    assert found.chance == pytest.approx(2 / 6)  # "a" is the commonest to train on, and 2 of the 6 held-out answers
    assert found.right_by_class(Knows()).sum() == 3
    [batch] = found.batches(0, size=4, seed=0, epoch=0)
    assert batch[0].shape == batch[1].shape == (2, 2)
    logits = Knows()(batch[0])
    each = [-float(logits[b, t].log_softmax(0)[batch[1][b, t]]) for b in range(2) for t in range(2)]
    assert float(found.loss(Knows(), batch)) == pytest.approx(sum(each) / 4, rel=1e-6)


def test_a_site_of_its_own_holds_all_blocks_of_its_folder() -> None:
    found = task()
    whole = found.whole(1)
    assert [whole.examples(client) for client in whole.clients()] == [0, found.examples(None), 0]
    assert [found.examples(client) > 0 for client in found.clients()] == [True] * 3
    assert whole.chance == found.chance
    few = task(train_items=5).whole(1)
    assert [few.examples(client) for client in few.clients()] == [0, 5, 0]


def test_a_text_that_cannot_be_divided_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"task\.length"):
        task(length=100_000)
    with pytest.raises(ConfigError, match=r"task\.clients"):
        task(clients=1000)
    shutil.copytree(articles(), tmp_path / "copy")
    (tmp_path / "copy" / "wiki.test.raw").write_text("")
    with pytest.raises(ConfigError, match="blocks of 17 bytes"):
        make_blocks_task(TextConfig(data="wikitext2", length=16), path=str(tmp_path / "copy"), seed=0)
    (tmp_path / "copy" / "wiki.test.raw").write_text((articles() / "wiki.test.raw").read_text())
    (tmp_path / "copy" / "wiki.train.raw").write_text("")
    with pytest.raises(ConfigError, match="blocks of 17 bytes"):
        make_blocks_task(TextConfig(data="wikitext2", length=16, clients=1), path=str(tmp_path / "copy"), seed=0)


def test_another_text_or_partition_has_another_digest() -> None:
    digests = {task(**changes).digest for changes in ({}, {"clients": 2}, {"length": 8}, {"evaluate_on": "validation"})}
    assert len(digests) == 4
    assert task().digest in digests


def test_the_title_says_how_it_is_divided() -> None:
    assert wikitext.title_of(TextConfig(data="wikitext2")) == "WikiText-2, next byte"
    whole = TextConfig(data="wikitext2", partition="articles")
    assert wikitext.title_of(whole) == "WikiText-2, next byte, whole articles"
