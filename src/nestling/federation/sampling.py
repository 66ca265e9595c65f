"""Who is asked in a round: a seeded draw that depends on (seed, round) alone, or a secret one that nothing decides.

Noise protects a client better if nobody can tell whether it took part at all (amplification by sampling: Li et al.,
arXiv 1101.2604; for Gaussians, Mironov et al., arXiv 1908.10530). That holds for draws which are independent of each
other and stay secret, so `poisson_cohort` asks the operating system and knows no seed: a run's own is in its settings.
"""

import secrets
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


def poisson_cohort(clients: Sequence[int], *, count: int) -> list[int]:
    """Each of the clients with probability `count` / all, exactly and on its own; in increasing order, maybe none.

    >>> set(poisson_cohort(range(100), count=50)) <= set(range(100))
    True
    """
    return sorted(client for client in clients if secrets.randbelow(len(clients)) < count)
