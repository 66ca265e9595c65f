"""A share of the numbers as float32 and none of the others: the largest, or ones that both sides draw alike.

    k = max(1, round(share · n)) of n numbers
    top-k:     positions of the k largest |x| (of equals, the first), then their values
    random k:  values alone, at positions drawn from the message's key

Source: Stich, Cordonnier & Jaggi, "Sparsified SGD with memory" (arXiv 1809.07599). What is not sent is meant to be
added to the next round's vector (error feedback), and that is why random k does not multiply by n / k: the multiple is
right on average, but its error, (n / k − 1) ‖x‖², would be fed back and grow, while what is sent here is a projection
of x and its error never exceeds x. Without error feedback random k loses all but the share, and that is its use as a
baseline. Where we differ: positions are written in a length known beforehand (positions.py), not as 32 bits each.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from nestling.codec.form import Body, Codec, Limits, Memory, key_stream
from nestling.codec.positions import Positions, decode_positions, encode_positions, size_of
from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.core.vectors import Layout, Vector


def topk(share: float) -> Codec:
    """The codec `topk@share` (number 11), which keeps the largest numbers.

    Raises `ConfigError` unless 0 < share ≤ 1, with at most six digits, so that the name says all.

    >>> layout, codec = Layout.of([("a", (8,))]), topk(0.25)
    >>> body = codec.encode(layout, np.array([0, 3, 1, 0, -5, 0, 2, 1], np.float32), bytes(28), None)
    >>> len(body), codec.decode(layout, body, Limits(), bytes(28)).tolist()
    (9, [0.0, 3.0, 0.0, 0.0, -5.0, 0.0, 0.0, 0.0])
    """
    k = partial(kept, _checked(share))
    return Codec(f"topk@{share:g}", 11, partial(_top_size, k), partial(_encode_top, k), partial(_decode_top, k))


def randomk(share: float) -> Codec:
    """The codec `randomk@share` (number 12), which keeps numbers drawn at random. Raises `ConfigError` as `topk`.

    >>> layout, codec = Layout.of([("a", (8,))]), randomk(0.25)
    >>> body = codec.encode(layout, np.ones(8, np.float32), bytes(28), None)
    >>> len(body), codec.decode(layout, body, Limits(), bytes(28)).sum()
    (8, np.float32(2.0))
    """
    k = partial(kept, _checked(share))
    return Codec(
        f"randomk@{share:g}", 12, partial(_random_size, k), partial(_encode_random, k), partial(_decode_random, k)
    )


def kept(share: float, n: int) -> int:
    """How many of n numbers are sent: the nearest to share · n (the even one of two), at least 1 if there are any.

    >>> kept(0.0001, 11_173_962), kept(0.01, 7), kept(0.5, 0)
    (1117, 1, 0)
    """
    return min(n, max(1, round(share * n)))


def largest(vector: Vector, k: int) -> Positions:
    """int64[k], rising: positions of the k largest absolute values of float32[n]; of equal ones, the first.

    >>> largest(np.array([2, -3, 3, 2, 2], np.float32), 3).tolist()
    [0, 1, 2]
    """
    if k == 0:
        return np.empty(0, np.int64)
    sizes = np.abs(vector)
    least = np.partition(sizes, sizes.size - k)[sizes.size - k]
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate((above, equal[: k - above.size])))


def drawn(stream: Stream, n: int, k: int) -> Positions:
    """int64[k], rising: k of the numbers 0 … n − 1, all sets equally likely. n ≤ 2^32.

    They are the first k values that differ in `stream.integers(…, n)`. If k > n / 2 those are the n − k left out.

    >>> drawn(Stream(7, "randomk", "a"), 10, 3).tolist()
    [5, 6, 7]
    """
    if 2 * k > n:
        keep = np.ones(n, bool)
        keep[drawn(stream, n, n - k)] = False
        return np.flatnonzero(keep)
    count, first = k, np.empty(0, np.int64)
    values = np.empty(0, np.int64)
    while first.size < k:
        count += count // 2 + 16
        values = stream.integers(count, n)
        first = np.sort(np.unique(values, return_index=True)[1])
    return np.sort(values[first[:k]])


def _checked(share: float) -> float:
    if not 0.0 < share <= 1.0 or float(f"{share:g}") != share:
        raise ConfigError(
            f"a share of {share!r} cannot be kept",
            where="codec",
            remedy="Give a number above 0 and at most 1, of up to six digits, such as 0.01.",
        )
    return share


Count = Callable[[int], int]


def _top_size(count: Count, layout: Layout) -> int:
    k = count(layout.size)
    return size_of(layout.size, k) + 4 * k


def _encode_top(count: Count, layout: Layout, vector: Vector, key: bytes, memory: Memory | None) -> bytes:
    positions = largest(vector, count(layout.size))
    return encode_positions(positions, layout.size) + _written(vector[positions])


def _decode_top(count: Count, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    n, k = layout.size, count(layout.size)
    split = size_of(n, k)
    return _placed(n, decode_positions(body[:split], n, k), body[split:])


def _random_size(count: Count, layout: Layout) -> int:
    return 4 * count(layout.size)


def _encode_random(count: Count, layout: Layout, vector: Vector, key: bytes, memory: Memory | None) -> bytes:
    return _written(vector[_drawn(count, layout, key)])


def _decode_random(count: Count, layout: Layout, body: Body, limits: Limits, key: bytes) -> Vector:
    return _placed(layout.size, _drawn(count, layout, key), body)


def _drawn(count: Count, layout: Layout, key: bytes) -> Positions:
    return drawn(key_stream(key, "randomk"), layout.size, count(layout.size))


def _written(values: Vector) -> bytes:
    return values.astype("<f4").tobytes()


def _placed(n: int, positions: Positions, values: Body) -> Vector:
    vector = np.zeros(n, np.float32)
    vector[positions] = np.frombuffer(values, "<f4")
    return vector
