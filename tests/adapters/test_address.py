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
from nestling.adapters.address import TAPS, AddressHead
from nestling.config.schema import MemoryConfig
from nestling.core.errors import ConfigError
from nestling.models.streams import StreamLayer
from nestling.models.window import Seen


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(k: Tensor) -> Seen:
    """Of the rest, nothing is read."""
    return Seen(k, k, k, k)


@settings(max_examples=30)
@given(data=st.data())
def test_addresses_are_as_defined_however_a_stream_is_cut_and_padded(data: st.DataObject) -> None:
    rows, groups, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    head = AddressHead(layer=0, head=data.draw(st.integers(0, groups - 1)))
    seed = data.draw(st.integers(0, 1000))
    centre, taps = 0.3 * normal(size, seed=seed), normal(TAPS, seed=seed + 1)
    stream = StreamLayer(window=0, sinks=0)
    real: list[list[Tensor]] = [[] for _ in range(rows)]
    read: list[list[Tensor]] = [[] for _ in range(rows)]
    written: list[list[Tensor]] = [[] for _ in range(rows)]
    for number, columns in enumerate(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))):
        k = normal(rows, columns, groups, size, seed=seed + 2 + number)
        lengths = data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows) | st.just([columns] * rows))
        mask = None if lengths == [columns] * rows else torch.arange(columns) < torch.tensor(lengths)[:, None]
        read_at, write_at = head.make(seen(k), centre, taps, stream, mask)
        assert read_at.shape == write_at.shape == (rows, columns, size)
        for i, length in enumerate(lengths):
            real[i] += list(k[i, :length, head.head])
            read[i] += list(read_at[i, :length])
            written[i] += list(write_at[i, :length])
        assert stream.before is not None
        assert stream.before.shape == (rows, TAPS, size)
    for i in range(rows):
        if real[i]:
            wanted_read, wanted_written = definition.addresses_of(real[i], centre, taps)
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


def test_a_head_at_the_first_memory_or_below_it_will_do() -> None:
    assert AddressHead.of("own", first_memory=0, layers=1, groups=1) is None
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
    rules["address.centre"] = 0.1 * normal(8).float().numpy()
    rules["address.taps"] = torch.tensor([1.0, 0.7, 0.5, 0.3] if taps == 4 else [1.0, 0.7, 0.0, 0.0]).numpy()
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
