"""The 95 % interval of an accuracy: over seeds if there are several, else over the items of one run.

Two or more seeds give mean ± t(0.975, n−1) · s / √n. A single run (or runs that agree exactly, whose spread says
nothing) gives Wilson's interval over the m test items, with p the accuracy and z = 1.96:

    (p + z²/2m ± z √(p(1−p)/m + z²/4m²)) / (1 + z²/m)

Wilson (1927); Student (1908).
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

Z = 1.959963984540054
# Student's 0.975 quantile for 1 … 10 degrees of freedom; above, the expansion around Z is good to four digits.
_T = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)


def t_quantile(freedom: int) -> float:
    """Student's 0.975 quantile, to four digits.

    >>> t_quantile(2), round(t_quantile(30), 4)
    (4.30265, 2.0423)
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, n = Z, freedom  # Abramowitz and Stegun 26.7.5
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def wilson(accuracy: float, items: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `items` tested items.

    >>> low, high = wilson(0.5, 10)
    >>> round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    """
    centre = accuracy + Z**2 / (2 * items)
    spread = Z * math.sqrt(accuracy * (1 - accuracy) / items + Z**2 / (4 * items**2))
    scale = 1 + Z**2 / items
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def interval(accuracies: Sequence[float], items: int) -> tuple[float, float] | None:
    """The 95 % interval of one row, by the rule of this module; None without a value.

    >>> low, high = interval([0.90, 0.92, 0.94], 100)
    >>> round(low, 4), round(high, 4)
    (0.8703, 0.9697)
    """
    if not accuracies:
        return None
    if not has_spread(accuracies):
        return wilson(accuracies[0], items) if items else None
    half = t_quantile(len(accuracies) - 1) * stdev(accuracies) / math.sqrt(len(accuracies))
    return fmean(accuracies) - half, fmean(accuracies) + half


def has_spread(accuracies: Sequence[float]) -> bool:
    """Whether an interval over seeds says anything: two of them differ."""
    return len(set(accuracies)) > 1
