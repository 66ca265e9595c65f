"""FedAvg's server half: the weighted mean of the replies, the same bits in any order of arrival.

    w ← w + Σ n_k Δ_k / Σ n_k        (replies are differences Δ_k)
    w ←     Σ n_k w_k / Σ n_k        (replies are states w_k)

McMahan et al., arXiv 1602.05629. Floating-point sums depend on their order, so we add integers: every number is
rounded once to a multiple of 2^-F and multiplied by its integer weight, int64 sums are exact, and one division ends it.
F is the largest that cannot overflow for the run's cohort, weights and bound on magnitudes.
"""

from collections.abc import Sequence
from math import ceil, log2

import numpy as np

from nestling.core.errors import ConfigError
from nestling.core.vectors import Vector

MAX_FRACTION_BITS = 40
MIN_FRACTION_BITS = 20


def fraction_bits(*, total_weight: int, max_abs: float) -> int:
    """F such that total_weight · max_abs · 2^F < 2^62. Raises `ConfigError` if fewer than 20 bits would be left.

    >>> fraction_bits(total_weight=3500, max_abs=1e4)
    36
    """
    bits = min(MAX_FRACTION_BITS, 62 - ceil(log2(total_weight + 1)) - ceil(log2(max_abs + 1)))
    if bits < MIN_FRACTION_BITS:
        raise ConfigError(
            f"{total_weight:,} examples times numbers up to {max_abs:g} leave {bits} bits for fractions",
            where="server.max_abs",
            remedy="Lower server.max_abs, or weigh clients uniformly.",
        )
    return bits


class RunningMean:
    """Σ n_k x_k / Σ n_k over replies that come one by one: fixed point with `bits` fraction bits, 24 bytes a number.

    Args:
        size: n, the length of every vector.
        bits: from `fraction_bits`, for the sum of all weights that will be added; a larger sum would overflow.

    >>> mean = RunningMean(2, bits=36)
    >>> mean.add(np.float32([1, 2]), 1)
    >>> mean.add(np.float32([3, 6]), 3)
    >>> mean.weight, mean.mean()
    (4, array([2.5, 5. ], dtype=float32))
    """

    def __init__(self, size: int, bits: int) -> None:
        self.weight = 0
        self._scale = 2.0**bits
        self._total = np.zeros(size, np.int64)
        self._wide, self._fixed = np.empty(size), np.empty(size, np.int64)  # of the reply being added

    def add(self, vector: Vector, weight: int) -> None:
        """Count `vector`, float32[n], finite and within the bound that `bits` was made for, `weight` ≥ 1 times."""
        total, wide, fixed = self._total, self._wide, self._fixed
        assert vector.shape == total.shape  # one number would spread over all
        wide[:] = vector
        np.multiply(wide, self._scale, wide)
        np.rint(wide, wide)
        fixed[:] = wide
        np.multiply(fixed, weight, fixed)
        np.add(total, fixed, total)
        self.weight += weight

    def mean(self) -> Vector:
        """The mean of what was added so far, float32[n], independent of the order. Something must have been added."""
        assert self.weight > 0
        # One rounding to float64 (53 bits), one division, one rounding to float32.
        return (self._total.astype(np.float64) / (float(self.weight) * self._scale)).astype(np.float32)


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[int], *, bits: int) -> Vector:
    """Σ n_k x_k / Σ n_k in fixed point with `bits` fraction bits; float32[n], independent of the order of the replies.

    Args:
        vectors: one float32[n] per reply, finite, within the bound that `bits` was made for.
        weights: one integer ≥ 1 per reply.
        bits: from `fraction_bits`.

    >>> weighted_mean([np.float32([1, 2]), np.float32([3, 6])], [1, 3], bits=36)
    array([2.5, 5. ], dtype=float32)
    """
    mean = RunningMean(vectors[0].size, bits)
    for vector, weight in zip(vectors, weights, strict=True):
        mean.add(vector, weight)
    return mean.mean()
