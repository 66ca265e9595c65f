"""Layouts: named tensors to a flat vector and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.errors import ContextError
from nestling.core.vectors import Layout

ENTRIES = st.lists(
    st.tuples(st.text(min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    unique_by=lambda entry: entry[0],
    max_size=5,
)


def filled(layout: Layout) -> dict[str, np.ndarray]:
    return {
        name: np.arange(layout.slice(name).start, layout.slice(name).stop, dtype=np.float32).reshape(shape)
        for name, shape in layout
    }


@given(ENTRIES)
def test_tensors_come_back_as_they_were(entries) -> None:
    layout = Layout.of(entries)
    tensors = filled(layout)
    vector = layout.pack(dict(reversed(tensors.items())))  # whatever their order
    assert vector.tolist() == list(range(layout.size))
    assert vector.dtype == np.float32
    back = layout.unpack(vector)
    assert list(back) == [name for name, _ in entries]
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    assert all(back[name].shape == shape for name, shape in entries)
    assert list(layout) == entries
    assert layout.size == sum(layout.sizes)


def test_unpacking_gives_views_and_packing_copies() -> None:
    layout = Layout.of([("a", (2,)), ("b", ())])
    vector = np.zeros(3, np.float32)
    layout.unpack(vector)["a"][1] = 7
    assert vector.tolist() == [0, 7, 0]
    a = np.ones(2, np.float32)
    packed = layout.pack({"a": a, "b": np.array(2.0)})
    a[:] = 5
    assert packed.tolist() == [1, 1, 2]


def test_layouts_are_equal_by_content_and_order() -> None:
    entries = [("a", (2,)), ("b", (3,))]
    assert Layout.of(entries) == Layout.of(iter(entries))
    assert hash(Layout.of(entries)) == hash(Layout.of(entries))
    assert Layout.of(entries) != Layout.of(reversed(entries))


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ContextError, match="b: occurs twice"):
        Layout.of([("a", (1,)), ("b", (1,)), ("b", (2,))])


def test_tensors_that_are_not_the_layouts_are_refused() -> None:
    layout = Layout.of([("a", (2, 3)), ("b", (4,))])
    good = filled(layout)
    for bad, message in (
        ({"a": good["a"]}, r"missing \['b'\]"),
        (good | {"c": good["b"]}, r"unexpected \['c'\]"),
        (good | {"a": good["a"].T}, r"a: has shape \(3, 2\)"),
        (good | {"b": good["b"][None]}, "b: has shape"),
    ):
        with pytest.raises(ContextError, match=message):
            layout.pack(bad)
    for length in (9, 11, 0):
        with pytest.raises(ContextError, match=f"has shape .{length}"):
            layout.unpack(np.zeros(length, np.float32))


def test_an_unknown_name_has_no_slice() -> None:
    with pytest.raises(KeyError):
        Layout.of([("a", (1,))]).slice("b")
