"""Cohorts: a draw that depends on seed and round alone, without favourites."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nestling.federation.sampling import cohort


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=1, max_size=30).map(sorted), st.data())
def test_a_cohort_is_so_many_different_clients_in_order(clients: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(clients)))
    seed, number = data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(1, 10**6))
    drawn = cohort(clients, count=count, seed=seed, round=number)
    assert len(drawn) == count
    assert set(drawn) <= set(clients)
    assert drawn == sorted(set(drawn))
    assert drawn == cohort(clients, count=count, seed=seed, round=number)


def test_none_or_all_is_everybody() -> None:
    assert cohort([5, 3, 9], count=0, seed=1, round=1) == [5, 3, 9]
    assert cohort([3, 5, 9], count=3, seed=1, round=1) == [3, 5, 9]


def test_rounds_and_seeds_draw_others() -> None:
    drawn = {tuple(cohort(range(100), count=10, seed=s, round=r)) for s in range(5) for r in range(1, 6)}
    assert len(drawn) == 25


def test_everybody_is_asked_about_as_often() -> None:
    asked = Counter(c for r in range(1, 401) for c in cohort(range(20), count=5, seed=3, round=r))
    # Each of 20 is asked with probability 1/4: 100 times of 400, standard deviation 8.7; five of those to either side.
    assert len(asked) == 20
    assert all(abs(times - 100) < 44 for times in asked.values())
