"""Shares of items: all of them, each once, the same for a seed, and as uneven as alpha says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.config.schema import ServerConfig
from nestling.core.errors import ConfigError
from nestling.tasks.partition import dirichlet_shares, group_shares, iid_shares

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(np.array)
SEEDS = st.integers(0, 2**64 - 1)


def skew(shares: list[np.ndarray], labels: np.ndarray) -> float:
    """Mean over classes of the largest client's part of the class: 1/clients if even, 1 if each lies with one."""
    counts = np.array([[np.sum(labels[s] == c) for c in np.unique(labels)] for s in shares])
    return float((counts.max(0) / counts.sum(0)).mean())


@given(LABELS, st.integers(1, 9), st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 7.5, 100.0]), SEEDS)
def test_every_item_goes_to_exactly_one_client(labels, clients, alpha, seed) -> None:
    shares = dirichlet_shares(labels, clients=clients, alpha=alpha, seed=seed)
    assert len(shares) == clients
    assert np.sort(np.concatenate(shares)).tolist() == list(range(len(labels)))
    assert all(np.all(np.diff(share) > 0) for share in shares)


@given(st.integers(1, 80), st.integers(1, 20), SEEDS)
def test_equal_shares_hold_every_item_once_and_differ_by_one_at_most(count, clients, seed) -> None:
    shares = iid_shares(count, clients=clients, seed=seed)
    sizes = [len(share) for share in shares]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1
    assert np.sort(np.concatenate(shares)).tolist() == list(range(count))
    assert all(np.all(np.diff(share) > 0) for share in shares)


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@given(LABELS, st.integers(1, 6), SEEDS)
def test_groups_stay_whole_and_no_client_is_ahead_by_more_than_one_group(groups, clients, seed) -> None:
    shares = group_shares(groups, clients=clients, seed=seed)
    assert len(shares) == clients
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(groups)))
    owned = [set(groups[share].tolist()) for share in shares]
    assert sum(map(len, owned)) == len(set(groups.tolist()))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= np.bincount(groups).max()
    assert same(group_shares(groups, clients=clients, seed=seed), shares)


def test_a_seed_decides() -> None:
    labels = np.arange(200) % 10
    first = dirichlet_shares(labels, clients=5, alpha=0.5, seed=3)
    state = np.random.get_state()[1].copy()
    assert same(first, dirichlet_shares(labels, clients=5, alpha=0.5, seed=3))
    assert not same(first, dirichlet_shares(labels, clients=5, alpha=0.5, seed=4))
    assert same(iid_shares(50, clients=4, seed=3), iid_shares(50, clients=4, seed=3))
    assert not same(iid_shares(50, clients=4, seed=3), iid_shares(50, clients=4, seed=4))
    assert np.array_equal(np.random.get_state()[1], state)


def test_a_known_partition() -> None:
    """The same on every machine and version; frozen here."""
    labels = np.array([0, 1, 2] * 4)
    shares = dirichlet_shares(labels, clients=3, alpha=0.5, seed=0)
    assert [share.tolist() for share in shares] == KNOWN
    assert [share.tolist() for share in iid_shares(7, clients=3, seed=0)] == KNOWN_IID


def test_classes_are_shared_independently_of_each_other() -> None:
    """What one class is given does not depend on which others there are."""
    labels = np.repeat([0, 1, 2], 30)
    both = dirichlet_shares(labels, clients=4, alpha=0.3, seed=1)
    alone = dirichlet_shares(labels[:30], clients=4, alpha=0.3, seed=1)
    assert same([share[share < 30] for share in both], alone)
    parts = [[int(np.sum(labels[s] == c)) for s in both] for c in range(3)]
    assert parts[0] != parts[1] != parts[2]


@pytest.mark.parametrize("seed", range(5))
def test_a_small_alpha_is_more_uneven_than_a_large_one(seed) -> None:
    labels = np.arange(1000) % 10
    values = [skew(dirichlet_shares(labels, clients=8, alpha=a, seed=seed), labels) for a in (0.01, 0.1, 1.0, 100.0)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.9
    assert values[-1] < 0.2


def test_mean_shares_are_even() -> None:
    labels = np.zeros(100, np.int64)
    sizes = np.mean([[len(s) for s in dirichlet_shares(labels, clients=4, alpha=1.0, seed=i)] for i in range(150)], 0)
    assert np.abs(sizes - 25).max() < 5


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_means_nothing_is_refused(alpha) -> None:
    with pytest.raises(ConfigError):
        dirichlet_shares(np.zeros(3, np.int64), clients=2, alpha=alpha, seed=0)


KNOWN = [[2, 10], [0, 3, 5, 8, 9, 11], [1, 4, 6, 7]]
KNOWN_IID = [[2, 4, 5], [0, 1], [3, 6]]


def most_over_median(clients: int, seed: int) -> float:
    """Of the 3,500 items in ten classes by α = 0.1: the largest share over the median of those that hold any."""
    labels = np.arange(3500) % 10
    sizes = [len(share) for share in dirichlet_shares(labels, clients=clients, alpha=0.1, seed=seed) if len(share)]
    return max(sizes) / float(np.median(sizes))


@pytest.mark.parametrize("clients", [8, 20])
def test_honest_clients_are_no_outliers_by_their_number_of_items(clients: int) -> None:
    assert max(most_over_median(clients, seed) for seed in range(40)) < ServerConfig().outlier


def test_but_in_a_large_cohort_one_of_them_can_be() -> None:
    assert max(most_over_median(100, seed) for seed in range(40)) > ServerConfig().outlier
