"""The weighted mean: the same bits in any order, as near to the true mean as float32 allows, and never an overflow."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nestling.core.errors import ConfigError
from nestling.strategies.fedavg import MAX_FRACTION_BITS, MIN_FRACTION_BITS, RunningMean, fraction_bits, weighted_mean

NUMBERS = st.floats(-1e4, 1e4, width=32)
REPLIES = st.lists(st.tuples(st.lists(NUMBERS, min_size=3, max_size=3), st.integers(1, 10**5)), min_size=1, max_size=8)


def mean_of(replies: list[tuple[list[float], int]], *, max_abs: float = 1e4) -> np.ndarray:
    vectors, weights = [np.float32(v) for v, _ in replies], [w for _, w in replies]
    return weighted_mean(vectors, weights, bits=fraction_bits(total_weight=sum(weights), max_abs=max_abs))


@given(REPLIES, st.randoms(use_true_random=False))
def test_the_order_of_replies_does_not_change_a_bit(replies, random) -> None:
    shuffled = list(replies)
    random.shuffle(shuffled)
    assert mean_of(shuffled).tobytes() == mean_of(replies).tobytes()


@given(REPLIES)
def test_the_mean_is_the_exact_one_but_for_the_fraction_bits_and_one_rounding(replies) -> None:
    got, weights = mean_of(replies), [w for _, w in replies]
    bits = fraction_bits(total_weight=sum(weights), max_abs=1e4)
    assert got.dtype == np.float32
    for i in range(3):
        exact = sum(Fraction(float(np.float32(v[i]))) * w for v, w in replies) / sum(weights)
        half_a_step = Fraction(float(np.spacing(np.abs(got[i])))) / 2
        slack = Fraction(1, 2 ** (bits + 1)) + abs(exact) / 2**51
        assert abs(Fraction(float(got[i])) - exact) <= half_a_step + slack


def test_by_hand() -> None:
    replies = [([1.0, -2.0, 0.0], 1), ([3.0, 6.0, 0.0], 3)]
    assert mean_of(replies).tolist() == [2.5, 4.0, 0.0]
    assert mean_of([([0.1, -7.25, 1e4], 9)]).tolist() == np.float32([0.1, -7.25, 1e4]).tolist()  # one reply is kept


@given(st.integers(1, 2**40), st.floats(1e-6, 1e9))
def test_fraction_bits_never_overflow_and_waste_at_most_two(total_weight: int, max_abs: float) -> None:
    try:
        bits = fraction_bits(total_weight=total_weight, max_abs=max_abs)
    except ConfigError:
        bits = MIN_FRACTION_BITS - 1
    product = total_weight * Fraction(max_abs)
    if bits >= MIN_FRACTION_BITS:
        assert bits <= MAX_FRACTION_BITS
        assert product * 2**bits < 2**62
    if bits < MAX_FRACTION_BITS:
        assert (total_weight + 1) * (Fraction(max_abs) + 1) * 2 ** (bits + 3) >= 2**62


@given(st.integers(1, 2**22), st.integers(1, 50), st.sampled_from([1.0, 1e3, 1e4, 65504.0]), st.booleans())
def test_the_largest_numbers_and_weights_do_not_overflow(weight, clients, max_abs, negative) -> None:
    """All replies at the bound: the mean is the bound."""
    try:
        bits = fraction_bits(total_weight=weight * clients, max_abs=max_abs)
    except ConfigError:
        assume(False)
    bound = np.float32(-max_abs if negative else max_abs)
    vectors = [np.full(2, bound)] * clients
    assert weighted_mean(vectors, [weight] * clients, bits=bits).tolist() == [bound, bound]


def test_too_few_fraction_bits_are_an_error_with_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"server\.max_abs: .* leave 1\d bits.*weigh clients uniformly"):
        fraction_bits(total_weight=2**30, max_abs=1e4)
    assert fraction_bits(total_weight=2**28 - 1, max_abs=float(2**14 - 1)) == MIN_FRACTION_BITS
    with pytest.raises(ConfigError):
        fraction_bits(total_weight=2**28, max_abs=float(2**14 - 1))
    assert fraction_bits(total_weight=1, max_abs=1e-9) == MAX_FRACTION_BITS


def test_replies_and_weights_of_different_number_are_our_own_bug() -> None:
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([np.zeros(1, np.float32)] * 2, [1], bits=30)


def test_the_inputs_are_left_alone() -> None:
    vectors = [np.float32([1, 2]), np.float32([5, 6])]
    weighted_mean(vectors, [1, 1], bits=36)
    assert [v.tolist() for v in vectors] == [[1, 2], [5, 6]]


def formula(vectors: list[np.ndarray], weights: list[int], bits: int) -> np.ndarray:
    """The fixed-point mean in Python's integers: nothing overflows, and one division is rounded to float32."""
    columns = zip(*[[round(Fraction(float(x)) * 2**bits) for x in v] for v in vectors], strict=True)
    totals = [sum(x * w for x, w in zip(column, weights, strict=True)) for column in columns]
    return np.float32([float(total) / (float(sum(weights)) * 2.0**bits) for total in totals])


@given(REPLIES)
def test_a_running_mean_is_at_any_time_that_of_what_was_added_to_the_bit(replies) -> None:
    bits = fraction_bits(total_weight=sum(w for _, w in replies), max_abs=1e4)
    running, vectors, weights = RunningMean(3, bits), [], []
    for numbers, weight in replies:
        vectors.append(np.float32(numbers))
        weights.append(weight)
        running.add(vectors[-1], weight)
        assert running.weight == sum(weights)
        assert running.mean().tobytes() == formula(vectors, weights, bits).tobytes()
        assert running.mean().tobytes() == weighted_mean(vectors, weights, bits=bits).tobytes()


def test_a_running_mean_keeps_nothing_of_a_reply() -> None:
    running, vector = RunningMean(2, 30), np.float32([1, 2])
    running.add(vector, 1)
    vector[:] = 9
    first = running.mean()
    running.add(np.float32([3, 8]), 1)
    assert (first.tolist(), running.mean().tolist()) == ([1, 2], [2, 5])


def test_a_running_mean_needs_no_memory_for_each_reply() -> None:
    size, vector = 10_000, np.ones(10_000, np.float32)
    tracemalloc.start()
    running = RunningMean(size, 30)
    made = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in range(20):
        running.add(vector, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made < 25 * size
    assert peak - made < size  # less than any array of this length


def test_a_vector_of_another_length_is_our_own_bug() -> None:
    for size in (1, 3):
        with pytest.raises(AssertionError):
            RunningMean(2, 30).add(np.ones(size, np.float32), 1)
    with pytest.raises(AssertionError):
        RunningMean(2, 30).mean()
