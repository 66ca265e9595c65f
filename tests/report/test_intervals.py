"""Intervals against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.report.intervals import interval, t_quantile, wilson


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (11, 2.2010), (12, 2.1788), (30, 2.0423), (120, 1.9799)],
)
def test_students_quantile_is_that_of_the_printed_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-5)


def test_t_interval_by_hand():
    # mean 0.92, s = 0.02, s / sqrt(3) = 0.011547, t(2) = 4.30265: half width 0.049683
    assert interval([0.90, 0.92, 0.94], 100) == pytest.approx((0.870317, 0.969683), abs=1e-6)


def test_wilson_interval_by_hand():
    # p = 0.9, m = 100, z² = 3.841459: centre p + z²/2m = 0.919207, under the root p(1-p)/m + z²/4m² = 0.000996036,
    # both over 1 + z²/m = 1.038415
    centre, spread = 0.9192073 / 1.03841459, 1.959964 * math.sqrt(0.0009960365) / 1.03841459
    assert wilson(0.9, 100) == pytest.approx((centre - spread, centre + spread), abs=1e-6)
    assert interval([0.9], 100) == wilson(0.9, 100)


def test_equal_runs_do_not_claim_certainty():
    assert interval([0.9, 0.9, 0.9], 100) == wilson(0.9, 100)
    assert interval([], 100) is None


@given(st.integers(1, 10_000).flatmap(lambda items: st.tuples(st.integers(0, items), st.just(items))))
def test_wilson_holds_its_share_and_stays_within_0_and_1(case):
    right, items = case
    low, high = wilson(right / items, items)
    assert 0 <= low <= right / items + 1e-12
    assert right / items - 1e-12 <= high <= 1
