"""Who holds which items: Dirichlet shares of every class, equal random shares, or whole groups.

    for each class c:  (p_1 … p_K) ~ Dirichlet(α, …, α);  client k gets the p_k-part of the items of class c

(Hsu et al., arXiv 1909.06335). Drawn from the project's own integer stream, so that a seed gives the same partition on
every machine and version.
"""

import numpy as np
from jaxtyping import Int

from nestling.core.seeds import Stream


def dirichlet_shares(
    labels: Int[np.ndarray, " n"], *, clients: int, alpha: float, seed: int
) -> list[Int[np.ndarray, " _"]]:
    """Indices of each client's items, sorted. Every item goes to exactly one client; a client may get none.

    Args:
        labels: class of each item.
        clients: how many clients.
        alpha: concentration; small means that a class lies with few clients.
        seed: of the run.

    >>> shares = dirichlet_shares(np.repeat([0, 1], 50), clients=3, alpha=0.1, seed=0)
    >>> sum(len(s) for s in shares)
    100
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        items = np.flatnonzero(labels == label)
        items = items[Stream(seed, "partition-order", str(label)).permutation(len(items))]
        shares = Stream(seed, "partition-shares", str(label)).dirichlet([alpha] * clients)
        cuts = np.floor(np.cumsum(shares)[:-1] * len(items) + 0.5).astype(np.int64)
        for client, part in enumerate(np.split(items, cuts)):
            parts[client].append(part)
    return [np.sort(np.concatenate(p)) for p in parts]


def iid_shares(count: int, *, clients: int, seed: int) -> list[Int[np.ndarray, " _"]]:
    """Equal random shares (sizes differ by at most one).

    >>> [len(s) for s in iid_shares(10, clients=3, seed=0)]
    [4, 3, 3]
    """
    order = Stream(seed, "partition-order", "iid").permutation(count)
    return [np.sort(part) for part in np.array_split(order, clients)]


def group_shares(groups: Int[np.ndarray, " n"], *, clients: int, seed: int) -> list[Int[np.ndarray, " _"]]:
    """Whole groups, in a random order each to the client that holds the fewest items so far: indices, sorted.

    Args:
        groups: number of the group of each item.
        clients: how many clients; those that no group is left for get none.
        seed: of the run.

    >>> [s.tolist() for s in group_shares(np.array([0, 0, 0, 1, 2, 2]), clients=2, seed=0)]
    [[4, 5], [0, 1, 2, 3]]
    """
    names, sizes = np.unique(groups, return_counts=True)
    holder, held = np.zeros(len(names), np.int64), np.zeros(clients, np.int64)
    for group in Stream(seed, "partition-order", "groups").permutation(len(names)):
        holder[group] = held.argmin()
        held[holder[group]] += sizes[group]
    owner = holder[np.searchsorted(names, groups)]
    return [np.flatnonzero(owner == client) for client in range(clients)]
