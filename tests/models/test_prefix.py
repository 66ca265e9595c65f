"""Remembering the frozen lower layers changes nothing: not logits, not gradients, not what a cache continues."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from small import tiny_llama

from nestling.adapters.memory import MemoryAdapter
from nestling.adapters.rules import first_layer
from nestling.config.schema import MemoryConfig
from nestling.inference.cache import new_cache
from nestling.models.prefix import Prefix

ATOL = 1e-5


def memory_on_top(
    *, first: int = 1, window: int = 5, address: str = "own", bind: bool = False
) -> tuple[Any, MemoryAdapter]:
    model = tiny_llama()
    config = MemoryConfig(layers=f"{first}-2", window=window, sinks=2, rank=3, address=address, bind=bind)
    adapter = MemoryAdapter(model, config)
    drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1))
    adapter.load_vector(torch.from_numpy(adapter.vector()) + 0.1 * drawn)
    return model, adapter


def some_ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_logits_are_those_of_a_plain_pass(first: int) -> None:
    model, _ = memory_on_top(first=first)
    ids, prefix = some_ids(3, 20), Prefix(first)
    plain = model(ids, use_cache=False, logits_to_keep=4).logits
    for _ in range(2):  # made, then remembered
        torch.testing.assert_close(prefix.logits(model, ids, 4), plain, atol=ATOL, rtol=0)
    assert len(prefix.made) == (3 if first else 0)
    assert len(model.base_model.layers) == 3  # all are back


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("address", ["0.1", "1.0", "1.0,2.1"])
def test_the_layer_of_the_addresses_is_never_remembered(address: str, bind: bool) -> None:
    model, adapter = memory_on_top(first=2, address=address, bind=bind)
    ids, more = some_ids(3, 20), some_ids(3, 6, seed=1)
    first = first_layer(adapter.config, model.config)
    assert first == int(address[0])
    prefix = Prefix(first)
    with torch.no_grad():
        plain = model(torch.cat([ids, more], 1), use_cache=False).logits
        for _ in range(2):
            torch.testing.assert_close(prefix.logits(model, ids, 20), plain[:, :20], atol=ATOL, rtol=0)
            cache = new_cache(model)
            prefix.logits_after(model, ids, cache, 1, key=b"a")
            got = prefix.logits_after(model, more, cache, 0, key=b"ab")
            torch.testing.assert_close(got, plain[:, 20:], atol=ATOL, rtol=0)
        with pytest.raises(KeyError):  # and never are a layer's own queries taken in its place
            Prefix(2).logits(model, ids, 1)


def test_gradients_are_those_of_a_plain_pass() -> None:
    model, adapter = memory_on_top(first=2)
    ids, prefix = some_ids(2, 16), Prefix(2)

    def gradients(logits: Tensor) -> list[Tensor]:
        adapter.frozen.model.zero_grad()
        for parameter in adapter.trainable():
            parameter.grad = None
        logits.float().square().sum().backward()
        return [p.grad.clone() for p in adapter.trainable() if p.grad is not None]

    plain = gradients(model(ids, use_cache=False, logits_to_keep=3).logits)
    own = gradients(prefix.logits(model, ids, 3))
    assert len(own) == len(plain) > 0
    for a, b in zip(own, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_what_is_remembered_is_the_frozen_part_alone() -> None:
    """Other rules give other logits from the same memory of the lower layers."""
    model, adapter = memory_on_top()
    ids, prefix = some_ids(1, 16), Prefix(1)
    before = prefix.logits(model, ids, 2)
    adapter.load_vector(adapter.vector() * 2)
    after = prefix.logits(model, ids, 2)
    torch.testing.assert_close(after, model(ids, use_cache=False, logits_to_keep=2).logits, atol=ATOL, rtol=0)
    assert not torch.allclose(before, after, atol=1e-4)


def test_an_item_does_not_depend_on_its_batch() -> None:
    model, _ = memory_on_top()
    ids = some_ids(4, 12)
    one_by_one, together = Prefix(1), Prefix(1)
    for row in ids:
        one_by_one.logits(model, row[None], 1)
    together.logits(model, ids, 1)
    assert one_by_one.made.keys() == together.made.keys()
    assert all(torch.equal(one_by_one.made[key], together.made[key]) for key in together.made)


@torch.no_grad()
def read_twice(model: nn.Module, prefix: Prefix, prompts: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    cache = new_cache(model)
    first = prefix.logits_after(model, prompts, cache, 1, key=b"prompts")
    cache.batch_repeat_interleave(2)
    return first, prefix.logits_after(model, texts, cache, 0, key=b"prompts and texts")


@pytest.mark.parametrize("limit", [1 << 30, 1])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_cache_is_continued_as_in_a_plain_pass(first: int, limit: int) -> None:
    model, _ = memory_on_top(first=first)
    prompts, texts, prefix = some_ids(2, 17), some_ids(4, 5, seed=1), Prefix(first, limit=limit)
    with torch.no_grad():
        whole = model(torch.cat([prompts.repeat_interleave(2, 0), texts], 1), use_cache=False).logits
    for _ in range(3):
        after_prompts, after_texts = read_twice(model, prefix, prompts, texts)
        torch.testing.assert_close(after_prompts[:, 0], whole[::2, 16], atol=ATOL, rtol=0)
        torch.testing.assert_close(after_texts, whole[:, 17:], atol=ATOL, rtol=0)


def test_a_full_prefix_remembers_no_more_and_stays_right() -> None:
    model, _ = memory_on_top()
    prefix = Prefix(1, limit=1)
    for seed in range(3):
        ids = some_ids(2, 8, seed)
        plain = model(ids, use_cache=False, logits_to_keep=1).logits
        torch.testing.assert_close(prefix.logits(model, ids, 1), plain, atol=ATOL, rtol=0)
    assert len(prefix.made) == 1


@torch.no_grad()
def test_a_beginning_that_another_worker_is_still_reading_is_not_taken() -> None:
    model, _ = memory_on_top()
    ids, more = some_ids(2, 9), some_ids(2, 4, seed=1)
    whole = model(torch.cat([ids, more], 1)).logits[:, 9:]
    prefix, one, two = Prefix(1), new_cache(model), new_cache(model)
    prefix.logits_after(model, ids, one, 1, key=b"a")
    prefix.logits_after(model, ids, two, 1, key=b"a")
    for cache in (two, one):
        torch.testing.assert_close(prefix.logits_after(model, more, cache, 0, key=b"ab"), whole, atol=ATOL, rtol=0)
    three = new_cache(model)
    prefix.logits_after(model, ids, three, 1, key=b"a")
    after = prefix.logits_after(model, more, three, 0, key=b"ab")
    torch.testing.assert_close(after, whole, atol=ATOL, rtol=0)
    assert three.layers[0].get_seq_length() == 0  # now both were remembered
    assert prefix.held == sum(hidden.nbytes for hidden in prefix.made.values())


@torch.no_grad()
def test_a_cache_that_is_used_again_keeps_to_the_limit() -> None:
    model, _ = memory_on_top()
    prefix, cache = Prefix(1, limit=1), new_cache(model)
    for seed in range(3):
        prefix.logits_after(model, some_ids(2, 8, seed), cache, 1, key=bytes([seed]))
        cache.reset()
    assert len(prefix.made) == 1


def test_rows_filled_up_behind_their_ends_are_remembered_without_the_filling() -> None:
    model = tiny_llama()
    prefix, short = Prefix(first=2), torch.tensor([3, 1, 4, 1, 5])
    ends = torch.tensor([4, 6])
    for width in (7, 9):
        ids = torch.zeros(2, width, dtype=torch.int64)
        ids[0, :5], ids[1, :7] = short, torch.arange(10, 17)
        found = prefix.logits(model, ids, ends, [5, 7])
        wanted = [model(ids[:1, :5]).logits[0, -1], model(ids[1:, :7]).logits[0, -1]]
        torch.testing.assert_close(found[[0, 1], [0, 1]], torch.stack(wanted), atol=1e-4, rtol=1e-4)
    assert len(prefix.made) == 2
