"""Which layers of a model an adapter works on, written as text: one syntax for every adapter that takes layers.

    all  |  upper:F  |  numbers and ranges, parted by commas

Layers count from 0 at the input. `upper:F` are the last F · count of them, rounded to the nearest whole number (halves
up) and at least one, so that one setting fits models of any depth.
"""

import re
from fractions import Fraction

from nestling.core.errors import ConfigError

_UPPER = re.compile(r"upper:([0-9]{0,9}\.?[0-9]{1,9})")
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def layer_numbers(layers: str, count: int) -> list[int]:
    """The numbers that `layers` stands for in a model of `count` layers, rising: int[…], at least one.

    Raises `ConfigError` (where="adapter.layers") if the text is malformed, names a layer twice or one too high.

    >>> layer_numbers("upper:0.4", 30) == list(range(18, 30))
    True
    >>> layer_numbers("all", 3), layer_numbers("3,7,11", 12), layer_numbers("0,4-6", 12)
    ([0, 1, 2], [3, 7, 11], [0, 4, 5, 6])
    """
    if count < 1:
        raise _refusal(layers, "chooses layers of a model that has none", "Choose another adapter.")
    if layers == "all":
        return list(range(count))
    if upper := _UPPER.fullmatch(layers):
        share = Fraction(upper[1])  # exactly as written: as floats, 0.29 · 50 would be less than 14.5
        if not 0 < share <= 1:
            raise _refusal(layers, "is not allowed", "Give a share above 0 and up to 1, such as upper:0.4.")
        return list(range(count - max(1, int(share * count + Fraction(1, 2))), count))
    chosen: list[int] = []
    for text in re.split(", ?", layers):
        part = _PART.fullmatch(text)
        if part is None:
            raise _refusal(layers, "is not allowed", "Write all, upper:0.4, 17-23 or 3,7,11.")
        first, last = int(part[1]), int(part[2] or part[1])
        if first > last:
            raise _refusal(layers, f"counts down from {first} to {last}", "Give the lower number first.")
        if last >= count:
            raise _refusal(layers, f"names layer {last}", f"This model's layers are 0 to {count - 1}.")
        chosen += range(first, last + 1)
        if len(chosen) > count:  # before many ranges add up
            break
    if len(set(chosen)) != len(chosen):
        raise _refusal(layers, "names a layer twice", "Give each one once.")
    return sorted(chosen)


def _refusal(layers: str, cause: str, remedy: str) -> ConfigError:
    return ConfigError(f"{layers[:60]!r} {cause}", where="adapter.layers", remedy=remedy)
