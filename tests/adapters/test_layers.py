"""The text that chooses layers: what it stands for, and everything it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.adapters.layers import layer_numbers
from nestling.core.errors import ConfigError


@pytest.mark.parametrize(
    ("layers", "count", "numbers"),
    [
        ("all", 4, [0, 1, 2, 3]),
        ("17-23", 30, [17, 18, 19, 20, 21, 22, 23]),
        ("3,7,11", 30, [3, 7, 11]),
        ("11,3,7", 30, [3, 7, 11]),
        ("3, 7, 11", 30, [3, 7, 11]),
        ("0", 1, [0]),
        ("5-5", 6, [5]),
        ("0,2-3", 4, [0, 2, 3]),
        ("upper:1", 3, [0, 1, 2]),
        ("upper:1.0", 3, [0, 1, 2]),
        ("upper:.5", 4, [2, 3]),
        ("upper:0.001", 30, [29]),
        ("upper:0.5", 5, [2, 3, 4]),  # 2.5 is rounded up, by no means to the even 2
        ("upper:0.49", 5, [3, 4]),
        ("upper:0.29", 50, list(range(35, 50))),  # 14.5, as a float a little less
        ("upper:0.4", 30, list(range(18, 30))),
    ],
)
def test_what_the_text_stands_for(layers: str, count: int, numbers: list[int]) -> None:
    assert layer_numbers(layers, count) == numbers


@pytest.mark.parametrize(
    "layers",
    [
        "", " ", "All", "none", "upper", "upper:", "upper:0", "upper:0.0", "upper:1.01", "upper:-0.5", "upper:nan",
        "upper:1e-1", "upper:0,5", "upper: 0.5", "upper:" + "9" * 5000, "upper:0." + "0" * 5000 + "1", "12", "3,12",
        "9-12", "5-3", "-1", "1-", "1-2-3", "1,", ",1", "1,,2", "1,  2", "1 ,2", " 1", "1 ", "1.5", "3,3", "2-5,4", "٣",
        "1;2", "9" * 5000, "0-999999999", "0-11," * 10_000 + "0",
    ],
)  # fmt: skip
def test_what_is_refused(layers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_numbers(layers, 12)
    assert caught.value.where == "adapter.layers"
    assert caught.value.remedy
    assert len(str(caught.value)) < 250


def test_a_model_without_layers_has_none_to_choose() -> None:
    with pytest.raises(ConfigError, match="a model that has none"):
        layer_numbers("all", 0)


@given(st.integers(1, 200), st.integers(1, 1000))
def test_a_share_is_the_last_layers_and_nearest_to_it(count: int, thousandths: int) -> None:
    numbers = layer_numbers(f"upper:{thousandths / 1000:.3f}", count)
    assert numbers == list(range(count - len(numbers), count))
    asked = thousandths * count  # in thousandths of a layer
    assert len(numbers) == 1 or abs(1000 * len(numbers) - asked) <= 500
    assert 1000 * len(numbers) >= min(asked, 500)


@given(st.sets(st.integers(0, 49), min_size=1))
def test_a_list_of_numbers_is_read_back_in_any_order(numbers: set[int]) -> None:
    assert layer_numbers(",".join(map(str, numbers)), 50) == sorted(numbers)
