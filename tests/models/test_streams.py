"""Streams: however they are cut, padded, batched or generated they equal one pass, and nothing of them gets out."""

import contextlib
import copy
import gc
import io
import pickle
import re
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler

import attention_definition as definition
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small import tiny_llama
from tolerance import assert_close
from torch import Tensor, nn

import nestling
from nestling.config.schema import MemoryConfig
from nestling.core.errors import ConfigError, ContextError, PrivateStateError
from nestling.inference.cache import new_cache
from nestling.models.streams import StreamCache, StreamLayer
from nestling.models.window import reader_of, use_window
from nestling.tasks.text import continuing

IDS = torch.randint(0, 97, (2, 41), generator=torch.Generator().manual_seed(0))

WAYS = {
    "window": None,
    "memory": MemoryConfig(seed=7, rank=4, layers="0,2", window=5, sinks=2, forget=True),
    "memory, no window": MemoryConfig(seed=7, rank=4, layers="0,2", window=0),
    "address": MemoryConfig(seed=7, rank=4, layers="1-2", window=5, sinks=2, address="0.1", mix="add"),
    "address, no window": MemoryConfig(seed=7, rank=4, layers="0,2", window=0, address="0.0"),
    "bound": MemoryConfig(seed=7, rank=4, layers="1-2", window=5, sinks=2, address="0.1,1.0", bind=True, mix="add"),
}


def reading(way: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model that reads in one of these ways, with trained rules."""
    model = tiny_llama().requires_grad_(False)
    model = definition.exact(model) if dtype == torch.float64 else model.to(dtype)
    config = WAYS[way]
    if config is None:
        use_window(model, window=4, sinks=1)
        return model
    adapter = nestling.attach(model, config)
    drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1)).numpy()
    adapter.load_vector(adapter.vector() + 0.3 * drawn)
    return model


EXACT: dict[str, nn.Module] = {}


def exact(way: str) -> nn.Module:
    return EXACT.setdefault(way, reading(way, dtype=torch.float64))


@torch.no_grad()
def whole(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


@torch.no_grad()
def step(model: nn.Module, ids: Tensor, cache: object, **more: object) -> Tensor:
    return model(ids, **continuing(model, cache), **more).logits


def cut(ids: Tensor, at: set[int]) -> list[Tensor]:
    bounds = [0, *sorted(at), ids.shape[1]]
    return [ids[:, a:b] for a, b in pairwise(bounds)]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(at=st.sets(st.integers(1, 40)) | st.just(set(range(1, 41))))
def test_any_pieces_equal_one_pass(way: str, at: set[int]) -> None:
    model = exact(way)
    cache = new_cache(model)
    pieces = torch.cat([step(model, piece, cache) for piece in cut(IDS, at)], 1)
    if not hasattr(model, "expected"):
        model.expected = whole(model, IDS)
    assert_close(pieces, model.expected)


def test_single_tokens_equal_one_pass_also_in_float32(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)
    pieces = torch.cat([step(model, piece, cache) for piece in IDS.split(1, 1)], 1)
    torch.testing.assert_close(pieces, whole(model, IDS), rtol=1e-4, atol=1e-4)


def test_a_stream_read_with_gradients_equals_one_read_without(way: str) -> None:
    model = exact(way)
    with torch.enable_grad():
        cache = new_cache(model)
        pieces = [model(piece, **continuing(model, cache)).logits for piece in cut(IDS, {7, 8, 30})]
        held = cache.layers[0].tensors()
        cache.reset()
    assert not any(t.any() for t in held.values())
    with torch.inference_mode():
        model(IDS, **continuing(model, cache))
    cache.reset()
    assert cache.nbytes == 0
    assert_close(torch.cat(pieces, 1).detach(), whole(model, IDS))


def test_two_streams_in_turns_equal_two_by_themselves_bit_for_bit(way: str) -> None:
    model = reading(way)
    alone = []
    for row in IDS:
        cache = new_cache(model)
        alone.append([step(model, piece, cache) for piece in cut(row[None], {3, 4, 17})])
    caches = [new_cache(model), new_cache(model)]
    pieces = [cut(row[None], {3, 4, 17}) for row in IDS]
    for i in range(4):
        for j in (0, 1):
            assert torch.equal(step(model, pieces[j][i], caches[j]), alone[j][i])
    caches[0].reset()
    for i in range(4):  # another stream in the same object
        assert torch.equal(step(model, pieces[1][i], caches[0]), alone[1][i])


def padded(rows: list[Tensor], places: list[list[int]], columns: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens at the given columns; the rest is padding, of a token that would be seen."""
    ids, mask = torch.full((len(rows), columns), 96), torch.zeros(len(rows), columns, dtype=torch.int64)
    for i, (row, where) in enumerate(zip(rows, places, strict=True)):
        ids[i, where], mask[i, where] = row, 1
    return ids, mask


PLACES = {
    "left": [list(range(9)), list(range(4, 9)), list(range(8, 9))],
    "right": [list(range(9)), list(range(5)), [0]],
    "mixed": [list(range(9)), [1, 2, 3, 4, 5], [3]],
    "with gaps": [[0, 1, 5, 6, 8], [2, 4, 6, 7], [0, 1, 2, 3, 7]],
    "one row of padding alone": [list(range(9)), [], [8]],
}


@pytest.mark.parametrize("places", PLACES)
def test_padding_is_not_read(way: str, places: str) -> None:
    if WAYS[way] is not None and not WAYS[way].window and places == "with gaps":
        pytest.skip("transformers' own attention counts gaps as positions")
    model, where = exact(way), PLACES[places]
    rows = [IDS[0, : len(w)] + i for i, w in enumerate(where)]
    ids, mask = padded([r % 96 for r in rows], where, 9)
    with torch.no_grad():
        got = model(ids, attention_mask=mask, use_cache=False).logits
    for i, (row, w) in enumerate(zip(rows, where, strict=True)):
        if w:
            assert_close(got[i, w], whole(model, row[None] % 96)[0])
    assert got.isfinite().all() or not WAYS[way].window


@pytest.mark.parametrize("way", ["window", "memory", "address", "bound"])
@settings(max_examples=10)
@given(data=st.data())
def test_padded_pieces_of_streams_equal_the_streams(way: str, data: st.DataObject) -> None:
    """Each row has its real tokens anywhere in each piece, also none; it reads them as if it were alone."""
    model, real, got = exact(way), [[], [], []], [[], [], []]
    cache = new_cache(model)
    for columns in data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5)):
        where = [sorted(data.draw(st.sets(st.integers(0, columns - 1)))) for _ in range(3)]
        rows = [(IDS[0, : len(w)] + i + len(real[i])) % 96 for i, w in enumerate(where)]
        ids, mask = padded(rows, where, columns)
        logits = step(model, ids, cache, attention_mask=mask)
        for i, w in enumerate(where):
            real[i] += rows[i].tolist()
            got[i] += list(logits[i, w])
    for tokens, logits in zip(real, got, strict=True):
        if tokens:
            assert_close(torch.stack(logits), whole(model, torch.tensor([tokens]))[0])


@pytest.mark.parametrize("way", ["memory, no window", "address, no window"])
def test_without_a_window_padding_must_be_told_again(way: str) -> None:
    model = reading(way)
    ids, mask = padded([IDS[0, :5], IDS[1, :3]], [[0, 1, 2, 3, 4], [2, 3, 4]], 5)
    cache = new_cache(model)
    step(model, ids, cache, attention_mask=mask)
    for more in ({}, {"attention_mask": torch.ones(2, 4)}):
        with pytest.raises(ConfigError, match="earlier pieces"):
            step(model, IDS[:, 20:24], cache, **more)
    got = step(model, IDS[:, 20:24], cache, attention_mask=torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], 1))
    alone = whole(model, torch.cat([IDS[1:, :3], IDS[1:, 20:24]], 1))[:, 3:]
    torch.testing.assert_close(got[1:], alone, rtol=1e-4, atol=1e-4)


def greedy(model: nn.Module, row: Tensor, count: int) -> list[int]:
    """The most likely next tokens, each from a pass over the whole text."""
    ids = row[None]
    for _ in range(count):
        ids = torch.cat([ids, whole(model, ids)[:, -1:].argmax(-1)], 1)
    return ids[0, len(row) :].tolist()


def generate(model: nn.Module, ids: Tensor, **more: object) -> Tensor:
    more.setdefault("attention_mask", torch.ones_like(ids))  # else every 0 would be taken for padding
    return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **more)[:, ids.shape[1] :]


def test_plain_generate_is_the_greedy_loop(way: str) -> None:
    model = exact(way)
    rows = [IDS[0, :13], IDS[1, :6], IDS[0, 20:21]]
    ids, mask = padded(rows, [list(range(13 - len(r), 13)) for r in rows], 13)
    expected = [greedy(model, row, 8) for row in rows]
    assert generate(model, ids, attention_mask=mask).tolist() == expected
    assert generate(model, rows[0][None]).tolist() == expected[:1]


def test_beam_search_is_the_same_with_and_without_a_cache(way: str) -> None:
    model = exact(way)
    with_cache = generate(model, IDS[:, :9], num_beams=3)
    assert torch.equal(with_cache, generate(model, IDS[:, :9], num_beams=3, use_cache=False))
    assert not torch.equal(with_cache, generate(model, IDS[:, :9]))  # a case in which beams are swapped


def test_generate_goes_on_with_a_stream_that_was_read_before(way: str) -> None:
    model = exact(way)
    cache = new_cache(model)
    step(model, IDS[:, :15], cache)
    name = next(n for n in continuing(model, cache) if n != "use_cache")
    assert torch.equal(generate(model, IDS[:, :20], **{name: cache}), generate(model, IDS[:, :20]))
    assert cache.get_seq_length() == 20 + 8 - 1


@pytest.mark.parametrize(
    ("way", "before"), [("memory", 0), ("address", 4 * 8 * 4), ("bound", 3 * 4 * 8 * 4)]
)  # of four tokens
def test_memory_does_not_grow_with_the_stream(way: str, before: int) -> None:
    config = WAYS[way]
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = reading(way, dtype=dtype)
        cache = new_cache(model)
        ids = torch.randint(0, 97, (1, 500), generator=torch.Generator().manual_seed(0))
        sizes = []  # `before`: float32, whatever the model is
        for piece in cut(ids, {10, 11, 70, 200, 201}):
            step(model, piece, cache)
            sizes.append(cache.nbytes)
        keys_and_values = 3 * 2 * (config.window + config.sinks) * 2 * 8 * size
        assert sizes == [keys_and_values + 2 * 2 * 8 * 8 * 4 + before + 3 * 8] * 6  # and a count of 8 bytes a layer
        held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in layer.tensors().values())
        assert held == cache.nbytes  # no view keeps something larger alive


def test_rows_of_a_stream_can_be_repeated_reordered_and_chosen(way: str) -> None:
    model = exact(way)
    ids = torch.cat([IDS, IDS.flip(1)])
    cache = new_cache(model)
    step(model, ids[:, :20], cache)
    cache.batch_repeat_interleave(2)
    order = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    for change in (None, "reorder_cache", "batch_select_indices"):
        if change is not None:
            pick = torch.tensor([5, 0, 3, 3])[: len(order)]
            getattr(cache, change)(pick)
            order = order[pick]
            pick = None
        twin = new_cache(model)
        step(model, ids[order, : cache.get_seq_length()], twin)
        nxt = cache.get_seq_length()
        expected = step(model, ids[order, nxt : nxt + 5], twin)
        assert_close(step(model, ids[order, nxt : nxt + 5], cache), expected)
        if change == "reorder_cache":
            cache.batch_repeat_interleave(2)
            order = order.repeat_interleave(2)
    new_cache(model).batch_repeat_interleave(2)  # an empty one has no rows


def test_reset_overwrites_what_was_held(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)
    first = step(model, IDS[:, :20], cache)
    held = [tensor for layer in cache.layers for tensor in layer.tensors().values()]
    assert sum(int(t.count_nonzero()) for t in held) > 100
    cache.reset()
    assert not any(t.any() for t in held)
    assert (cache.nbytes, cache.get_seq_length()) == (0, 0)
    assert torch.equal(step(model, IDS[:, :20], cache), first)


def test_a_cache_of_another_kind_is_refused() -> None:
    model = reading("memory")
    shapes = [(3, 4, 2), (3, 5, 1), (3, 0, 0), (2, 5, 2), (4, 5, 2)]
    for layers, window, sinks in shapes:
        with pytest.raises(ContextError, match="another window or model"):
            step(model, IDS, StreamCache(layers, window=window, sinks=sinks))
    filled = transformers.DynamicCache()
    with torch.no_grad():
        tiny_llama()(IDS, **continuing(model, filled))
    for other in (filled, ((IDS, IDS),)):
        with pytest.raises(ContextError, match="in another form"):
            step(model, IDS, other)
    reader = reader_of(model)
    assert reader.stream is None


def test_an_ordinary_cache_is_replaced_once_and_never_silently_forgotten() -> None:
    model, ordinary = reading("memory"), transformers.DynamicCache()
    with torch.no_grad():
        output = model(IDS[:, :20], **continuing(model, ordinary))
    cache = output.get("cache", output.get("past_key_values"))
    assert isinstance(cache, StreamCache)
    assert ordinary.get_seq_length() == 0
    step(model, IDS[:, 20:], cache)
    with pytest.raises(ContextError, match="in another form"):
        step(model, IDS[:, 20:], ordinary)


def test_a_model_that_reads_otherwise_refuses_a_stream(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)
    step(model, IDS[:, :20], cache)
    before = cache.nbytes
    with pytest.raises(ContextError, match="belongs to a model with a window or a memory"):
        step(tiny_llama(), IDS[:, 20:], cache)
    assert cache.nbytes == before


def test_no_tokens_are_refused(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)
    for at in (0, 5):
        step(model, IDS[:, at : at + 5], cache)
        with pytest.raises(ConfigError, match="no tokens"):
            step(model, IDS[:, :0], cache)


def test_without_gradients_a_pass_gives_a_cache_and_with_them_none(way: str) -> None:
    model = reading(way)

    def cache_of(**more: object) -> object:
        output = model(IDS, **more)
        return output.get("cache", output.get("past_key_values"))

    with torch.no_grad():
        assert isinstance(cache_of(), StreamCache)
        assert isinstance(cache_of(use_cache=True), StreamCache)
        assert cache_of(use_cache=False) is None
        model.config.use_cache = False
        assert cache_of() is None
        model.config.use_cache = True
    assert cache_of() is None
    assert cache_of(use_cache=True) is None
    model.train()
    with torch.no_grad():
        assert cache_of() is None
    gc.collect()
    assert reader_of(model).stream is None


# What is private.


@contextlib.contextmanager
def broken(module: nn.Module) -> Iterator[None]:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("in the midst")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_after_a_pass_the_model_holds_nothing_of_the_stream(way: str) -> None:
    model = reading(way)
    reader, layers = reader_of(model), model.model.layers

    def empty() -> bool:
        kept = [attention.nestling.kept for attention in reader.layers]
        return reader.stream is None and reader.rows is None and not any(kept)

    cache = new_cache(model)
    ids, mask = padded(list(IDS[:, :9]), [list(range(9)), list(range(9))], 12)
    step(model, ids, cache, attention_mask=mask)
    assert empty()
    model(IDS)
    assert empty()
    places = [layers[0].self_attn.v_proj, layers[1].mlp, layers[2].self_attn.o_proj, model.model.norm]
    for where in places:
        cache = new_cache(model)
        with broken(where), pytest.raises(ZeroDivisionError):
            step(model, IDS, cache)
        assert empty()
        with pytest.raises(ContextError, match="failed midway"):  # half the layers have read it
            step(model, IDS, cache)
        cache.reset()
        step(model, IDS, cache)
        with broken(where), pytest.raises(ZeroDivisionError):
            model(IDS)  # with gradients, without a stream
        assert empty()


class _Interrupt(BaseException):
    pass


@pytest.mark.parametrize("way", ["memory", "address", "bound"])
def test_an_interrupted_pass_leaves_a_stream_that_is_refused(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)

    def interrupt(*args: object) -> None:
        raise _Interrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(_Interrupt):
        step(model, IDS, cache)
    handle.remove()
    reader_of(model).forget()
    assert not any(attention.nestling.kept for attention in reader_of(model).layers)
    with pytest.raises(ContextError, match="failed midway"):
        step(model, IDS, cache)
    assert torch.equal(step(model, IDS, new_cache(model)), step(model, IDS, new_cache(model)))


def test_a_stream_is_neither_copied_nor_pickled_nor_saved(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)
    for _ in range(2):  # empty, and with something in it
        for thing in (cache, cache.layers[0], {"kept": [cache]}, cache.layers):
            exits = [copy.deepcopy, pickle.dumps, ForkingPickler.dumps, lambda x: torch.save(x, io.BytesIO())]
            if isinstance(thing, StreamCache | StreamLayer):
                exits.append(copy.copy)
            exits += [lambda x, p=p: pickle.dumps(x, p) for p in range(6)]
            for leave in exits:
                with pytest.raises(PrivateStateError) as caught:
                    leave(thing)
                assert caught.value.exit_code == 2
        step(model, IDS, cache)
    with pytest.raises(PrivateStateError, match="cannot be unread"):
        cache.crop(1)
    with pytest.raises(TypeError):
        iter(cache)


def test_a_copy_of_the_model_takes_no_stream_along() -> None:
    model = reading("memory")
    cache = new_cache(model)
    step(model, IDS, cache)
    planted = secrets(cache)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    twin = copy.deepcopy(model)
    assert reader_of(twin).stream is None
    assert not found(planted, buffer.getvalue())


def secrets(cache: StreamCache) -> list[bytes]:
    """Eight numbers in a row of each tensor that a stream holds, as they would lie in a file."""
    planted = []
    for layer in cache.layers:
        for name, tensor in layer.tensors().items():
            row = tensor.detach().flatten()[-8:]
            if name != "count":
                assert row.count_nonzero() >= 4
                planted += [row.to(d).view(torch.uint8).numpy().tobytes() for d in (torch.float32, torch.bfloat16)]
    return planted


def found(planted: list[bytes], where: bytes) -> bool:
    return any(secret in where for secret in planted)


def test_nothing_says_what_a_stream_holds(way: str) -> None:
    model = reading(way)
    cache = new_cache(model)
    ids = IDS.clone()
    ids[0, 30:] = 77
    step(model, ids, cache)
    assert found(
        secrets(cache), pickle.dumps([t.numpy() for t in cache.layers[0].tensors().values()])
    )  # it would be seen
    values = {
        f"{x:.4f}"[:-1] for layer in cache.layers for t in layer.tensors().values() for x in t.flatten()[:50].tolist()
    }
    values -= {f"{x:.4f}"[:-1] for x in (0.0, -0.0)}
    texts = [f"{cache!r} {cache} {cache.layers!r} {reader_of(model)!r} {model!r}"]
    other = transformers.DynamicCache()
    failing = (copy.deepcopy, pickle.dumps, lambda c: step(tiny_llama(), ids, c), lambda c: step(model, ids[:, :0], c))
    failing += (lambda c: step(model, ids, c, attention_mask=ids[:, :3]), lambda c: c.crop(1))
    failing += (lambda c: (step(model, ids, other), step(model, ids, other)),)
    for fail in failing:
        with pytest.raises((PrivateStateError, ContextError, ConfigError)) as caught:
            fail(cache)
        texts.append(str(caught.value))
    for text in texts:
        shown = re.sub(r"0x[0-9a-f]+", "", text).replace(f"{cache.nbytes:,}", "")  # without addresses of objects
        assert "77" not in shown
        assert "tensor(" not in text
        assert not any(value in text for value in values if len(value) > 5)
