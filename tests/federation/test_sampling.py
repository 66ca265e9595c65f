"""Cohorts: a draw that depends on seed and round alone, without favourites; and a secret one, which nothing decides.

A test of a secret draw fails by chance less than once in a million runs; it cannot be seeded, here neither.
"""

import inspect
import random
from collections import Counter
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.federation.sampling import cohort, poisson_cohort

SIGMAS = 6.0
"""A normal number is farther out once in 500 million; some forty are looked at."""


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


# ---- in secret


@pytest.mark.parametrize(("count", "clients"), [(1, 10), (5, 20), (19, 20), (100, 400)])
def test_everybody_is_drawn_with_the_probability_that_is_accounted_for(count: int, clients: int) -> None:
    rounds, q = 80_000 // clients, count / clients
    asked = Counter(c for _ in range(rounds) for c in poisson_cohort(range(clients), count=count))
    spread = sqrt(rounds * q * (1 - q))
    assert set(asked) <= set(range(clients))
    assert max(abs(asked[c] - rounds * q) for c in range(clients)) <= SIGMAS * spread
    assert abs(sum(asked.values()) - clients * rounds * q) <= SIGMAS * sqrt(clients) * spread


def test_how_many_are_drawn_is_binomial() -> None:
    rounds, clients = 20_000, 4
    sizes = Counter(len(poisson_cohort([3, 5, 7, 9], count=1)) for _ in range(rounds))
    assert set(sizes) <= set(range(clients + 1))
    for size in range(clients + 1):  # 0 among them: nobody is a cohort, too
        p = comb(clients, size) * 0.25**size * 0.75 ** (clients - size)
        assert abs(sizes[size] - rounds * p) <= SIGMAS * sqrt(rounds * p * (1 - p)) + 1


def test_whether_one_is_drawn_says_nothing_of_another() -> None:
    rounds, clients = 20_000, 5
    drawn = np.zeros((rounds, clients))
    for row in drawn:
        row[poisson_cohort(range(clients), count=2)] = 1
    assert np.abs(np.corrcoef(drawn.T) - np.eye(clients)).max() <= SIGMAS / sqrt(rounds)
    assert np.abs(np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1]) <= SIGMAS / sqrt(rounds)  # nor of the next round


def test_a_secret_draw_is_in_order_and_cannot_be_seeded() -> None:
    draws = []
    for _ in range(2):
        np.random.seed(0)
        random.seed(0)
        draws.append(poisson_cohort(range(1000, 0, -1), count=500))
    assert draws[0] != draws[1]
    assert draws[0] == sorted(draws[0])
    assert set(inspect.signature(poisson_cohort).parameters) == {"clients", "count"}
