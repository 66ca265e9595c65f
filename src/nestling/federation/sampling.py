"""Who is asked in a round: a seeded draw that depends on (seed, round) alone."""

from collections.abc import Sequence

from nestling.core.seeds import Stream


def cohort(clients: Sequence[int], *, count: int, seed: int, round: int) -> list[int]:
    """`count` of the clients, in increasing order; 0 means all of them.

    >>> cohort([0, 1, 2, 3], count=0, seed=0, round=1)
    [0, 1, 2, 3]
    >>> len(cohort(range(100), count=8, seed=0, round=1))
    8
    """
    if not count:
        return list(clients)
    drawn = Stream(seed, "cohort", str(round)).permutation(len(clients))[:count]
    return sorted(clients[int(i)] for i in drawn)
