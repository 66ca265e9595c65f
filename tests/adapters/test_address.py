"""Addresses of tokens, against their definition written out in loops; and what they are for: a value is written under
the address that a question reads with, wherever the same tokens stand before both."""

import attention_definition as definition
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import tiny_llama
from tolerance import assert_close
from torch import Tensor

import nestling
from nestling.adapters.address import CENTRED_ON, TAPS, AddressHead, address_heads, first_centres, token_signs
from nestling.config.schema import MemoryConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream, key, words_python
from nestling.models.streams import StreamLayer
from nestling.models.window import Seen


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(k: Tensor, ids: Tensor | None = None) -> Seen:
    """Of the rest, nothing is read."""
    return Seen(k, k, k, k, ids)


@settings(max_examples=30)
@given(data=st.data())
def test_addresses_are_as_defined_however_a_stream_is_cut_and_padded(data: st.DataObject) -> None:
    rows, groups, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    head = AddressHead(layer=0, head=data.draw(st.integers(0, groups - 1)))
    signs = token_signs(data.draw(st.integers(0, 9)), 7, size) if data.draw(st.booleans()) else None
    seed = data.draw(st.integers(0, 1000))
    centre, taps = 0.3 * normal(size, seed=seed), normal(TAPS, seed=seed + 1)
    stream = StreamLayer(window=0, sinks=0)
    real: list[list[Tensor]] = [[] for _ in range(rows)]
    tokens: list[list[int]] = [[] for _ in range(rows)]
    read: list[list[Tensor]] = [[] for _ in range(rows)]
    written: list[list[Tensor]] = [[] for _ in range(rows)]
    for number, columns in enumerate(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))):
        k = normal(rows, columns, groups, size, seed=seed + 2 + number)
        lengths = data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows) | st.just([columns] * rows))
        mask = None if lengths == [columns] * rows else torch.arange(columns) < torch.tensor(lengths)[:, None]
        ids = torch.randint(0, 7, (rows, columns), generator=torch.Generator().manual_seed(seed + number))
        read_at, write_at = head.make(seen(k, ids), centre, taps, stream, mask, signs)
        assert read_at.shape == write_at.shape == (rows, columns, size)
        for i, length in enumerate(lengths):
            real[i] += list(k[i, :length, head.head])
            tokens[i] += ids[i, :length].tolist()
            read[i] += list(read_at[i, :length])
            written[i] += list(write_at[i, :length])
        assert stream.before is not None
        assert stream.before.shape == (rows, TAPS, 1 if signs is None else 2, size)
    for i in range(rows):
        if real[i]:
            bound = None if signs is None else [signs[token].double() for token in tokens[i]]
            wanted_read, wanted_written = definition.addresses_of(real[i], centre, taps, bound)
            assert_close(torch.stack(read[i]), torch.stack(wanted_read))
            assert_close(torch.stack(written[i]), torch.stack(wanted_written))


def test_before_a_stream_there_is_nothing() -> None:
    """The first token writes nowhere, and a tap that reaches back before the beginning finds nothing."""
    k, centre = normal(1, 6, 1, 3), 0.2 * normal(3, seed=2)
    unit = torch.nn.functional.normalize(torch.nn.functional.normalize(k[0, :, 0], dim=-1) - centre, dim=-1)
    for j in range(TAPS):
        taps = torch.eye(TAPS, dtype=torch.float64)[j]
        read_at, write_at = AddressHead(0, 0).make(seen(k), centre, taps, None, None)
        assert not read_at[0, :j].any()
        assert not write_at[0, : j + 1].any()
        assert_close(read_at[0, j:], unit[: 6 - j])
        assert torch.equal(write_at[0, 1:], read_at[0, :-1])


def test_gradients_are_finite_where_there_is_nothing() -> None:
    centre, taps = torch.zeros(3, requires_grad=True), torch.tensor([1.0, 1.0, 0.0, 0.0], requires_grad=True)
    k = normal(2, 1, 1, 3).float()
    read_at, write_at = AddressHead(0, 0).make(seen(k), centre, taps, None, None)
    (read_at.sum() + 1e6 * write_at.sum()).backward()
    assert centre.grad.isfinite().all()
    assert taps.grad.isfinite().all()


def test_short_numbers_make_float32_addresses() -> None:
    k = normal(2, 5, 1, 4).bfloat16()
    stream = StreamLayer(window=0, sinks=0)
    made = AddressHead(0, 0).make(seen(k), torch.zeros(4), torch.ones(TAPS), stream, None)
    assert {each.dtype for each in made} == {stream.before.dtype} == {torch.float32}
    wanted = definition.addresses_of(list(k[0, :, 0].double()), torch.zeros(4).double(), torch.ones(TAPS).double())
    assert_close(made[0][0], torch.stack(wanted[0]))


def test_what_a_stream_keeps_has_no_graph() -> None:
    """Else it would hold every earlier piece."""
    for mask in (None, torch.tensor([[True, False]])):
        stream, centre = StreamLayer(window=0, sinks=0), torch.zeros(3, requires_grad=True)
        AddressHead(0, 0).make(seen(normal(1, 2, 1, 3)), centre, torch.ones(TAPS), stream, mask)
        assert not stream.before.requires_grad
        assert stream.before.untyped_storage().nbytes() == TAPS * 3 * 8


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@torch.no_grad()
def test_a_centre_begins_at_the_mean_key_over_random_tokens(family: str) -> None:
    model, heads = tiny_llama(family), (AddressHead(0, 1), AddressHead(2, 0))
    ids = torch.from_numpy(Stream(7, "memory", "address.centre").integers(CENTRED_ON, model.config.vocab_size))
    kept = dict[int, Tensor]()
    for number, layer in enumerate(model.model.layers):
        source = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
        source.register_forward_hook(lambda module, args, out, number=number: kept.__setitem__(number, out))
    model(ids[None], use_cache=False)
    keys = [kept[h.layer].reshape(CENTRED_ON, -1, model.config.head_dim)[4:, h.head].double() for h in heads]
    wanted = torch.stack([torch.stack([key / key.norm() for key in each]).mean(0) for each in keys])
    got = first_centres(model, heads, seed=7)
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() <= 0.5 / 2**12 + 1e-6
    assert not (got * 2**12 % 1).any()
    assert len(model.model.layers) == 3
    assert (
        nestling.attach(model, MemoryConfig(seed=7, rank=2, window=4, layers="2", address="2.0,0.1"))
        .weights()["address.centre"]
        .equal(got)
    )
    assert not first_centres(tiny_llama(family).to("meta"), heads, seed=7).any()


def test_signs_are_those_of_the_stream_token_after_token() -> None:
    words = words_python(key(3, "memory", "address.signs"), 0, 3)
    bits = [word >> place & 1 for word in words for place in range(32)]
    wanted = torch.tensor(bits[: 9 * 10]).view(9, 10) * 2 - 1
    assert token_signs(3, 9, 10).dtype == torch.int8
    assert torch.equal(token_signs(3, 9, 10).long(), wanted)
    assert not torch.equal(token_signs(4, 9, 10), token_signs(3, 9, 10))


def test_bound_addresses_of_one_context_are_far_apart_unless_the_token_is_the_same() -> None:
    """The same key at every token, as of a head that sees what a number belongs to and not its digits."""
    k, signs = normal(1, 1, 1, 64).expand(1, 10, 1, 64), token_signs(0, 10, 64)
    centre, taps = torch.zeros(64), torch.tensor([1.0, 0.0, 0.0, 0.0])
    read_at, _ = AddressHead(0, 0).make(seen(k), centre, taps, None, None)
    assert_close(read_at[0] @ read_at[0].T, torch.ones(10, 10, dtype=torch.float64))
    read_at, write_at = AddressHead(0, 0).make(seen(k, torch.arange(10)[None]), centre, taps, None, None, signs)
    alike = read_at[0] @ read_at[0].T
    assert_close(alike.diagonal(), torch.ones(10, dtype=torch.float64))
    assert (alike - torch.eye(10)).abs().max() < 0.6
    again, _ = AddressHead(0, 0).make(seen(k, torch.full((1, 10), 7)), centre, taps, None, None, signs)
    assert_close(again[0, 0] @ write_at[0, 8], torch.tensor(1.0, dtype=torch.float64))  # what stood behind the 7


@torch.no_grad()
def test_tokens_must_be_known_to_be_bound_to() -> None:
    model = tiny_llama()
    adapter = nestling.attach(model, MemoryConfig(seed=7, rank=2, layers="1-2", window=4, address="0.1", bind=True))
    ids = torch.arange(9)[None]
    wanted = model(ids, use_cache=False).logits
    with pytest.raises(ConfigError, match="was given embeddings alone") as caught:
        model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False)
    assert caught.value.where == "adapter.bind"
    assert torch.equal(model(ids, use_cache=False).logits, wanted)
    with adapter.switch(memory=False):
        model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False)


@torch.no_grad()
def test_tokens_of_a_pass_that_failed_are_not_taken_for_those_of_the_next() -> None:
    model = tiny_llama()
    nestling.attach(model, MemoryConfig(seed=7, rank=2, window=4, layers="1-2", address="0.1", bind=True))
    ids = torch.arange(9)[None]

    def interrupt(module: object, args: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, use_cache=False)
    hook.remove()
    with pytest.raises(ConfigError, match="was given embeddings alone"):
        model(inputs_embeds=model.get_input_embeddings()(ids + 3), use_cache=False)


def test_dropout_and_the_random_state_have_no_part_in_a_centre() -> None:
    def start() -> Tensor:
        model = tiny_llama()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        adapter = nestling.attach(model.train(), MemoryConfig(seed=7, rank=2, window=4, layers="2", address="2.0"))
        assert all(module.training for module in model.modules())
        return adapter.weights()["address.centre"].detach()

    before = torch.get_rng_state()
    first = start()
    torch.manual_seed(99)
    assert torch.equal(start(), first)
    torch.set_rng_state(before)


def test_a_model_that_grew_is_refused() -> None:
    model = tiny_llama()
    nestling.attach(model, MemoryConfig(seed=7, rank=2, window=4, layers="2", address="2.0", bind=True))
    model.resize_token_embeddings(model.config.vocab_size + 3)
    with pytest.raises(ConfigError, match="more tokens than when the adapter was put on"):
        model(torch.arange(9)[None], use_cache=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("30.0", "names no key head: there are layers 0 to 29, each with heads 0 to 2"),
        ("18.3", "names no key head"),
        ("999999999.0", "names no key head"),
        ("21.2", "above layer 20, which has a memory already"),
        ("29.0", "above layer 20"),
    ],
)
def test_a_head_that_cannot_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        AddressHead.of(text, first_memory=20, layers=30, groups=3)
    assert caught.value.where == "adapter.address"
    assert caught.value.remedy


def test_two_heads_of_one_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="two heads of one layer") as caught:
        address_heads("17.1,17.0", first_memory=20, layers=30, groups=3)
    assert caught.value.where == "adapter.address"


def test_a_head_at_the_first_memory_or_below_it_will_do() -> None:
    assert address_heads("own", first_memory=0, layers=1, groups=1) == ()
    for text in ("20.2", "0.0"):
        head = AddressHead.of(text, first_memory=20, layers=30, groups=3)
        assert f"{head.layer}.{head.head}" == text


@pytest.mark.parametrize("taps", [2, 4])
@torch.no_grad()
def test_a_value_is_written_where_the_same_tokens_ask_for_it(taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far apart they are: both lie outside each other's window, at other positions of other pieces."""
    made: list[tuple[Tensor, Tensor]] = []
    make = AddressHead.make
    monkeypatch.setattr(AddressHead, "make", lambda *args: made.append(make(*args)) or made[-1])
    model = definition.exact(tiny_llama())
    adapter = nestling.attach(model, MemoryConfig(seed=7, rank=2, layers="0-2", window=4, sinks=2, address="0.1"))
    rules = adapter.layout.unpack(adapter.vector())
    rules["address.centre"] = 0.1 * normal(1, 8).float().numpy()
    rules["address.taps"] = torch.tensor([[1.0, 0.7, 0.5, 0.3] if taps == 4 else [1.0, 0.7, 0.0, 0.0]]).numpy()
    adapter.load_vector(adapter.layout.pack(rules))
    name, filler = [90, 91, 92, 93][-taps:], list(range(5, 45))
    ids = [*filler[:11], *name, 77, *filler[11:], *name]
    value = 11 + taps
    model(torch.tensor([ids]), use_cache=False)
    [(read_at, write_at)] = made
    assert len(ids) - value > 4 + 2
    found = write_at[0] @ read_at[0, -1]
    assert_close(write_at[0, value], read_at[0, -1])
    assert int(found.argmax()) == value
    assert found.topk(2).values[1] < 0.999  # and nowhere else
