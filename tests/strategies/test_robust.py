"""Robust rules against slow definitions in plain Python, and the bound by which a hostile minority can move each."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.core.errors import ConfigError
from nestling.strategies.robust import (
    BLOCK,
    aggregate,
    bounded_norms,
    centred_clipping,
    coordinate_median,
    fewest_replies,
    geometric_median,
    multi_krum,
    shortened,
    trimmed_mean,
)

RULES = ("median", "trimmed", "krum", "rfa", "clipping")
HUGE = float(np.finfo(np.float32).max)
NUMBERS = st.floats(-1e4, 1e4, width=32)


@st.composite
def tables(draw, *, least: int = 1, numbers=NUMBERS) -> np.ndarray:
    """float32[n, d] with n up to 9 and d up to 4, some rows alike."""
    n, d = draw(st.integers(least, 9)), draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(numbers, min_size=d, max_size=d), min_size=1, max_size=n))
    return np.float32([rows[i % len(rows)] for i in range(n)])


def normal(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def by(rule: str, x: np.ndarray, *, share: float = 0.2, weights: list[int] | None = None, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(len(x))
    return aggregate(x, weights or [1] * len(x), rule, hostile_share=share, order=order)


# Slow definitions: lists of floats, one formula a line.


def apart(a, b) -> float:
    return math.sqrt(math.fsum((p - q) ** 2 for p, q in zip(a, b, strict=True)))


def slow_trimmed(rows: list[list[float]], drop: int) -> list[float]:
    kept = [sorted(column)[drop : len(rows) - drop] for column in zip(*rows, strict=True)]
    return [math.fsum(column) / len(column) for column in kept]


def slow_krum(rows: list[list[float]], hostile: int) -> list[float]:
    n, scores = len(rows), []
    for k, row in enumerate(rows):
        nearest = sorted(apart(row, other) ** 2 for i, other in enumerate(rows) if i != k)[: n - hostile - 2]
        scores.append((math.fsum(nearest), k))
    chosen = [rows[k] for _, k in sorted(scores)[: n - hostile]]
    return [math.fsum(column) / len(chosen) for column in zip(*chosen, strict=True)]


def slow_clipping(rows: list[list[float]], centre: list[float], radius: float, iterations: int, order, bucket: int):
    rows = [rows[k] for k in order]
    groups = [rows[at : at + bucket] for at in range(0, len(rows), bucket)]
    rows = [[math.fsum(column) / len(group) for column in zip(*group, strict=True)] for group in groups]
    for _ in range(iterations):
        moved = [0.0] * len(centre)
        for row in rows:
            cut = min(1.0, radius / (apart(row, centre) or 1.0))
            moved = [m + (x - v) * cut / len(rows) for m, x, v in zip(moved, row, centre, strict=True)]
        centre = [v + m for v, m in zip(centre, moved, strict=True)]
    return centre


def slow_objective(rows: list[list[float]], weights: list[int], point) -> float:
    return math.fsum(w * apart(row, point) for row, w in zip(rows, weights, strict=True))


def cut(rows: list[np.ndarray], *, times: float) -> tuple[list[np.ndarray], list[int]]:
    """`bounded_norms`, and which of the rows are not the ones given."""
    got = bounded_norms(rows, times=times)
    return got, [k for k, (new, old) in enumerate(zip(got, rows, strict=True)) if new is not old]


# Median and trimmed mean.


@given(tables())
def test_the_median_is_that_of_the_standard_library(x: np.ndarray) -> None:
    columns = x.astype(float).T.tolist()
    assert coordinate_median(x).tolist() == np.float32([statistics.median(c) for c in columns]).tolist()


@given(tables(), st.data())
def test_the_trimmed_mean_is_its_definition(x: np.ndarray, data) -> None:
    drop = data.draw(st.integers(0, (len(x) - 1) // 2))
    np.testing.assert_allclose(trimmed_mean(x, drop=drop), slow_trimmed(x.tolist(), drop), rtol=2e-7, atol=1e-9)


@given(tables(), st.randoms(use_true_random=False), st.data())
def test_median_and_trimmed_mean_have_the_same_bits_in_any_order(x: np.ndarray, random, data) -> None:
    x = np.where(x == 0, np.copysign(0, np.arange(x.size).reshape(x.shape) % 2 - 0.5), x).astype(np.float32)  # ±0
    mixed = x[random.sample(range(len(x)), len(x))]
    drop = data.draw(st.integers(0, (len(x) - 1) // 2))
    assert coordinate_median(mixed).tobytes() == coordinate_median(x).tobytes()
    assert trimmed_mean(mixed, drop=drop).tobytes() == trimmed_mean(x, drop=drop).tobytes()


def test_blocks_of_columns_join() -> None:
    """More numbers than are taken at a time, by columns (median) and by rows (distances)."""
    x = normal(5, BLOCK // 2 + 3)
    assert coordinate_median(x).tolist() == np.median(x, axis=0).tolist()
    x = normal(BLOCK // 64 + 5, 100)
    lengths = np.linalg.norm(x.astype(np.float64), axis=1)
    clipped = cut(list(x), times=1.1)[1]
    assert clipped == np.flatnonzero(lengths > 1.1 * np.median(lengths)).tolist()
    assert 0 < len(clipped) < len(x)


# Multi-Krum.


@given(tables(least=3, numbers=st.integers(-8, 8).map(float)), st.data())
def test_krum_is_its_definition_ties_included(x: np.ndarray, data) -> None:
    """Small integers make ties common, and all squares exact."""
    hostile = data.draw(st.integers(0, (len(x) - 3) // 2))
    np.testing.assert_allclose(multi_krum(x, hostile=hostile), slow_krum(x.tolist(), hostile), rtol=2e-7, atol=1e-9)


def test_krum_by_hand() -> None:
    """Scores, over the two nearest of five, f = 1: 5, 2, 2, 5, and a lot; the last is left out."""
    assert multi_krum(np.float32([[0], [1], [2], [3], [50]]), hostile=1).tolist() == [1.5]
    # A tie of the last place, 0 and 3 with one neighbour each at distance 1: the earlier row is taken.
    x = np.float32([[0], [1], [10], [11], [20], [21], [90]])
    assert multi_krum(x, hostile=2).tolist() == np.float32([(0 + 1 + 10 + 11 + 20) / 5]).tolist()


def test_krum_sees_small_distances_far_from_zero() -> None:
    """At 1e6 squared lengths are 1e12 · d and these distances 1/16: float32 products would lose them altogether."""
    offsets = np.float32([[0, 0], [0.0625, 0], [0, 0.0625], [0.0625, 0.0625], [0.5, 0.5]])
    assert (multi_krum(offsets + np.float32(1e6), hostile=1) == np.float32(1e6 + 0.03125)).all()


# The geometric median.


def test_the_geometric_median_by_hand() -> None:
    corner = math.sqrt(3) / 2
    triangle = np.float32([[1, 0], [-0.5, corner], [-0.5, -corner]])
    np.testing.assert_allclose(geometric_median(triangle, [1, 1, 1]), [0, 0], atol=1e-6)
    obtuse = np.float32([[0, 0], [10, 1], [-10, 1]])  # an angle over 120°: that corner itself
    np.testing.assert_allclose(geometric_median(obtuse, [1, 1, 1], iterations=2000), [0, 0], atol=1e-4)
    # Fermat's point sees each pair of corners under 120°; the median of each coordinate is the corner (0, 0).
    fermat = (1 - 1 / math.sqrt(3)) / 2
    right = np.float32([[0, 0], [1, 0], [0, 1]])
    np.testing.assert_allclose(geometric_median(right, [1, 1, 1]), [fermat, fermat], atol=1e-5)
    assert geometric_median(np.float32([[1], [5], [9]]), [1, 1, 3]).tolist() == [9.0]  # more than half the weight


@settings(max_examples=30)
@given(tables(), st.data())
def test_no_neighbour_and_no_input_is_better_than_the_geometric_median(x: np.ndarray, data) -> None:
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(x), max_size=len(x)))
    rows, point = x.tolist(), geometric_median(x, weights, iterations=300).astype(float)
    best, spread = slow_objective(rows, weights, point), max(apart(row, point) for row in rows)
    slack = 1e-4 * spread * sum(weights) + 1e-6 * float(np.abs(x).max()) * sum(weights)
    random = np.random.default_rng(0)
    for other in [*rows, *(point + 0.1 * spread * random.normal(size=(8, len(point))))]:
        assert best <= slow_objective(rows, weights, other) + slack


@settings(max_examples=30)
@given(tables())
def test_a_weight_is_so_many_copies(x: np.ndarray) -> None:
    weights = [1 + k % 3 for k in range(len(x))]
    copies = np.repeat(x, weights, axis=0)
    scale = 1e-6 * float(np.abs(x).max()) + 1e-30
    np.testing.assert_allclose(geometric_median(x, weights), geometric_median(copies, [1] * len(copies)), atol=scale)


def test_the_default_number_of_iterations_is_enough() -> None:
    for n, d in ((50, 162), (10, 3), (9, 1)):
        x = normal(n, d)
        x[: n // 4] *= 1e6
        exact = geometric_median(x, [1] * n, smoothing=1e-9, iterations=5000)
        assert apart(geometric_median(x, [1] * n), exact) <= 1e-3 * statistics.median(apart(row, exact) for row in x)


# Centred clipping.


@given(tables(), st.floats(0, 2e4), st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_clipping_is_its_definition(x: np.ndarray, radius: float, iterations: int, bucket: int, random) -> None:
    order = np.array(random.sample(range(len(x)), len(x)))
    centre = np.linspace(-3, 5, x.shape[1])
    got = centred_clipping(x, centre, radius=radius, iterations=iterations, order=order, bucket=bucket)
    wanted = slow_clipping(x.tolist(), centre.tolist(), radius, iterations, order.tolist(), bucket)
    np.testing.assert_allclose(got, wanted, rtol=2e-7, atol=1e-6)


def test_clipping_by_hand() -> None:
    x, order = np.float32([[2, 0], [0, 30], [4, 0], [0, 10]]), np.array([0, 2, 3, 1])
    # Groups (0, 2) and (3, 1): means (3, 0) and (0, 20); the second is cut to length 5.
    got = centred_clipping(x, np.zeros(2), radius=5.0, iterations=1, order=order, bucket=2)
    assert got.tolist() == [1.5, 2.5]
    with pytest.raises(AssertionError):
        centred_clipping(x, np.zeros(2), radius=5.0, iterations=1, order=np.array([0, 0, 1, 2]), bucket=2)


def test_clipping_of_honest_vectors_alike_is_near_their_mean() -> None:
    x = normal(40, 200) + np.float32(3)
    error = apart(by("clipping", x), x.mean(axis=0)) / apart(x[0], x.mean(axis=0))
    assert error < 0.01


# Norms.


@given(tables(), st.sampled_from([0.5, 1.0, 2.0]))
def test_bounded_norms_are_their_definition_and_leave_the_rest_alone(x: np.ndarray, times: float) -> None:
    before, rows = x.copy(), list(x)
    got, clipped = cut(rows, times=times)
    lengths = [apart(row, [0.0] * len(row)) for row in x.tolist()]
    limit = times * statistics.median(lengths)
    assert x.tobytes() == before.tobytes()
    for k, length in enumerate(lengths):
        if k in clipped:
            assert length > limit * (1 - 1e-12)
            np.testing.assert_allclose(got[k], x[k].astype(float) * (limit / length), rtol=2e-7, atol=1e-37)
            assert got[k].tobytes() == shortened(x[k], limit=limit).tobytes() or length == pytest.approx(limit)
        else:
            assert length <= limit * (1 + 1e-12)
            assert got[k].tobytes() == x[k].tobytes()


def test_bounded_norms_of_nothing_of_zeros_and_of_the_largest_numbers() -> None:
    assert bounded_norms([], times=2.0) == []
    zeros = list(np.zeros((3, 2), np.float32))
    assert cut(zeros, times=2.0)[1] == []
    got, clipped = cut(list(np.float32([[0, 0], [0, 0], [3, -4]])), times=2.0)
    assert ([x.tolist() for x in got], clipped) == ([[0, 0], [0, 0], [0, 0]], [2])
    got, clipped = cut(list(np.float32([[0, 0], [3, 4], [0, 10]])), times=1.0)  # a zero below the limit stays
    assert ([x.tolist() for x in got], clipped) == ([[0, 0], [3, 4], [0, 5]], [2])
    got, clipped = cut(list(np.float32([[1e-45, 0], [1, 0], [HUGE, HUGE]])), times=2.0)
    np.testing.assert_allclose(got[2], [math.sqrt(2)] * 2, rtol=2e-7)
    assert clipped == [2]
    assert cut(list(np.full((3, 5), HUGE, np.float32)), times=1.0)[1] == []


def test_a_vector_within_the_limit_is_itself() -> None:
    x = np.float32([3, -4])
    assert shortened(x, limit=5.0) is x
    assert shortened(x, limit=2.5).tolist() == [1.5, -2.0]
    assert shortened(x, limit=0.0).tolist() == [0, 0]
    zero = np.zeros(2, np.float32)
    assert shortened(zero, limit=0.0) is zero


# What all rules share.


@pytest.mark.parametrize("rule", RULES)
def test_one_vector_equal_vectors_and_zeros(rule: str) -> None:
    one = np.float32([[1.5, -2, 0]])
    if rule != "krum":
        assert by(rule, one).tolist() == one[0].tolist()
    for row in (one, np.zeros((1, 3), np.float32), np.full((1, 2), np.float32(HUGE)), np.full((1, 1), -1e-45, "f4")):
        assert by(rule, np.repeat(row, 7, axis=0)).tolist() == row[0].tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("d", [1, 2, 40])
def test_moving_and_scaling_the_vectors_moves_and_scales_the_result(rule: str, d: int) -> None:
    """All rules; of numbers with few bits, so that the vectors themselves are moved and scaled exactly."""
    x = (np.random.default_rng(d).integers(-(2**10), 2**10, (11, d)) / 2**8).astype(np.float32)
    shift = np.arange(d).astype(np.float32) - np.float32(64)
    plain = by(rule, x)
    np.testing.assert_allclose(by(rule, x + shift), plain + shift, atol=1e-5)
    np.testing.assert_allclose(by(rule, x * np.float32(-(2**-10))), plain * np.float32(-(2**-10)), atol=1e-5 / 2**10)
    np.testing.assert_allclose(by(rule, x * np.float32(2**30)), plain * np.float32(2**30), rtol=1e-5, atol=1e-5 * 2**30)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30)
@given(x=tables(least=5), random=st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rule: str, x: np.ndarray, random) -> None:
    """To rounding, and for krum as far as scores differ; `order` is permuted along with the rows."""
    x = x + normal(*x.shape, seed=3)  # no ties
    mixed = np.array(random.sample(range(len(x)), len(x)))
    order = np.random.default_rng(1).permutation(len(x))
    weights = [1 + k % 4 for k in range(len(x))]
    plain = aggregate(x, weights, rule, hostile_share=0.2, order=order)
    places = np.argsort(mixed)  # row k of x is row places[k] of x[mixed]
    again = aggregate(x[mixed], [weights[k] for k in mixed], rule, hostile_share=0.2, order=places[order])
    np.testing.assert_allclose(again, plain, atol=1e-6 * float(np.abs(x).max()))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30)
@given(x=tables(least=5, numbers=st.floats(-HUGE, HUGE, width=32)))
def test_results_are_finite_and_lie_between_the_least_and_the_largest(rule: str, x: np.ndarray) -> None:
    with np.errstate(all="raise", under="ignore"):
        got = by(rule, x)
    slack = np.abs(x).astype(np.float64).max(axis=0) * (1e-12 if rule in ("rfa", "clipping") else 0)
    assert got.dtype == np.float32
    assert np.isfinite(got).all()
    assert (got >= x.min(axis=0) - slack).all()
    assert (got <= x.max(axis=0) + slack).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [10.0, 1e4, 1e30, 3e38])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_hostile_vectors_move_the_result_by_no_more_than_the_honest_ones_allow(
    rule: str, size: float, alike: bool, share: float
) -> None:
    """The bounds are computed of the honest vectors: their range, diameter, or largest distance from the median."""
    n, d = 21, 6
    f = int(share * n)
    x = normal(n, d, seed=7)
    rows = np.random.default_rng(5).permutation(n)[:f]
    x[rows] = np.float32(size) * (np.ones(d, np.float32) if alike else np.clip(normal(f, d, seed=9), -1, 1))
    honest = np.delete(x, rows, axis=0).astype(np.float64)
    got = by(rule, x, share=share).astype(np.float64)
    low, high = honest.min(axis=0), honest.max(axis=0)
    diameter = max(apart(a, b) for a in honest for b in honest)
    if rule in ("median", "trimmed"):
        assert (got >= low).all()
        assert (got <= high).all()
    elif rule == "krum":
        # A hostile vector is chosen only if its n − f − 2 nearest, n − 2f − 1 of them honest, are as near as theirs.
        assert min(apart(got, a) for a in honest) <= diameter * (1 + math.sqrt((n - f - 2) / (n - 2 * f - 1)))
    else:
        start = np.median(x.astype(np.float64), axis=0)
        reach = max(apart(a, start) for a in honest)
        limit = (2.5 - 2 * f / n) / (1 - 2 * f / n) * reach if rule == "rfa" else 3 * reach  # three steps of a radius
        assert apart(got, start) <= limit * (1 + 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_far_hostile_vectors_leave_the_result_near_the_honest_mean(rule: str) -> None:
    """The bounds above are not what happens: 20 % at 1000 times the length, in one direction."""
    x = normal(50, 162, seed=1) + np.float32(1)
    mean = x[10:].mean(axis=0)
    x[:10] = 1000 * normal(1, 162, seed=2)
    error = apart(by(rule, x), mean) / math.hypot(*mean)
    assert apart(x.mean(axis=0), mean) / math.hypot(*mean) > 100
    assert error < 0.5


def test_only_rfa_heeds_weights() -> None:
    x = normal(9, 3)
    heavy = [1] * 8 + [100]
    for rule in RULES:
        assert (by(rule, x, weights=heavy).tolist() == by(rule, x).tolist()) == (rule != "rfa")
    np.testing.assert_allclose(by("rfa", x, weights=heavy), x[8], atol=1e-4)


def test_only_clipping_heeds_the_order_and_only_with_few_hostile() -> None:
    x = normal(12, 3) ** 3
    for rule in RULES:
        for share, groups in ((0.1, rule == "clipping"), (0.3, False)):
            assert (by(rule, x, share=share, seed=1).tolist() != by(rule, x, share=share, seed=2).tolist()) == groups


def test_the_inputs_are_left_alone() -> None:
    x = normal(9, 3)
    before = x.copy()
    for rule in RULES:
        by(rule, x)
    assert x.tobytes() == before.tobytes()


# Too few.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.29, 0.3, 0.48])
def test_the_fewest_replies_are_enough_and_one_less_is_not(rule: str, share: float) -> None:
    asked = 100
    fewest = fewest_replies(rule, hostile_share=share, asked=asked)
    assert fewest == 2 * round(share * asked) + (3 if rule == "krum" else 1)
    x = normal(fewest, 2)
    settings = {"hostile_share": share, "asked": asked}
    aggregate(x, [1] * fewest, rule, order=np.arange(fewest), **settings)
    with pytest.raises(ConfigError, match=rf"hostile_share: .* needs {fewest} replies or more, not {fewest - 1}"):
        aggregate(x[1:], [1] * (fewest - 1), rule, order=np.arange(fewest - 1), **settings)


def test_too_few_are_found_before_the_first_round() -> None:
    assert fewest_replies("krum", hostile_share=0.2, asked=5) == 5
    assert fewest_replies("krum", hostile_share=0.0, asked=3) == 3
    with pytest.raises(ConfigError, match="krum with 1 hostile needs 5 replies or more, not 4"):
        fewest_replies("krum", hostile_share=0.25, asked=4)
    with pytest.raises(ConfigError, match="needs 1 replies or more, not 0"):
        fewest_replies("median", hostile_share=0.2, asked=0)
    for share in (-0.1, 0.5, math.nan):
        with pytest.raises(ConfigError, match=r"hostile_share: is .* no rule withstands a half"):
            fewest_replies("median", hostile_share=share, asked=10)


def test_rules_called_by_themselves_say_what_they_need() -> None:
    with pytest.raises(ConfigError, match="trimmed with 1 hostile needs 3"):
        trimmed_mean(np.zeros((2, 1), np.float32), drop=1)
    with pytest.raises(ConfigError, match="krum with 1 hostile needs 5"):
        multi_krum(np.zeros((4, 1), np.float32), hostile=1)
    with pytest.raises(ConfigError, match="not 0"):
        trimmed_mean(np.zeros((0, 1), np.float32), drop=0)
