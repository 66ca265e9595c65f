"""Robust ways to bring n vectors together, so that a minority that sends anything at all moves the result only so far.

    a mean moves by ‖x_k‖ / n without bound        a robust rule moves by a multiple of the honest vectors' spread

Yin et al., arXiv 1803.01498 (median, trimmed mean); Blanchard et al., NeurIPS 2017 (Krum, multi-Krum); Pillutla et al.,
arXiv 1912.13445 (RFA); Karimireddy et al., arXiv 2012.10333 and 2006.09365 (centred clipping, bucketing). All sums are
float64, without BLAS, in the order of the rows: results do not depend on threads, and no square of a float32 overflows.
Every result lies, to rounding, between the smallest and the largest number of each coordinate (0 and the centre
included where there is one), so it is finite when the vectors are. We differ where the papers leave a constant free:
radius and smoothing are multiples of the median distance, and iterations start from the coordinate-wise median, so that
no setting depends on the vectors' scale.
These rules look at single replies: they cannot stand behind secure aggregation.
"""

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int

from nestling.core.errors import ConfigError
from nestling.core.vectors import Vector, norm

Rule = Literal["median", "trimmed", "krum", "rfa", "clipping"]
Vectors = Float32[np.ndarray, "k n"]
Wide = Float[np.ndarray, "n"]  # float32 or float64
Order = Int[np.ndarray, "k"]

BLOCK = 2**17  # numbers taken at a time: 1 MB of float64
CLIPPING_STEPS = 3


def coordinate_median(vectors: Vectors) -> Vector:
    """The median of each coordinate, float32[d]: the same bits in any order of the rows.

    m_j = median_k x_kj, the mean of the two middle ones if n is even. Yin et al. 2018. Fewer than n / 2 vectors cannot
    move it out of the range of the others.

    Args:
        vectors: float32[n, d], finite, n ≥ 1.

    >>> coordinate_median(np.float32([[1, 0], [2, 9], [1000, 4]]))
    array([2., 4.], dtype=float32)
    """
    return trimmed_mean(vectors, drop=(len(vectors) - 1) // 2)


def trimmed_mean(vectors: Vectors, *, drop: int) -> Vector:
    """The mean of each coordinate without its `drop` lowest and highest, float32[d]: the same bits in any order.

    t_j = (x_(drop+1)j + … + x_(n−drop)j) / (n − 2 drop), sorted by size. Yin et al. 2018. Up to `drop` vectors cannot
    move it out of the range of the others.

    Args:
        vectors: float32[n, d], finite.
        drop: how many to leave out at each end, ≥ 0. Raises `ConfigError` unless n > 2 drop.

    >>> trimmed_mean(np.float32([[1], [2], [4], [1000]]), drop=1)
    array([3.], dtype=float32)
    """
    n, d = vectors.shape
    _enough(n, 2 * drop + 1, "trimmed", drop)
    mean = np.empty(d)
    for columns in _blocks(d, n):
        kept = np.sort(vectors[:, columns], axis=0)[drop : n - drop]
        mean[columns] = kept.sum(axis=0, dtype=np.float64) / len(kept)
    return (mean + 0.0).astype(np.float32)  # + 0.0: of −0 and 0 sorting may take either


def multi_krum(vectors: Vectors, *, hostile: int) -> Vector:
    """The mean of the n − f vectors that lie closest to their neighbours, float32[d].

    score_k = Σ ‖x_k − x_i‖² over the n − f − 2 nearest i; the n − f least scores are averaged; the earlier row wins a
    tie. Blanchard et al. 2017. O(n² d) time, O(n² + d) memory beside the vectors. Differences are taken before they are
    squared: ‖x‖² + ‖y‖² − 2xy would cancel for vectors close together and far from 0.

    Args:
        vectors: float32[n, d], finite.
        hostile: f ≥ 0. Raises `ConfigError` unless n ≥ 2f + 3.

    >>> multi_krum(np.float32([[1], [2], [3], [2], [1000]]), hostile=1)
    array([2.], dtype=float32)
    """
    n, d = vectors.shape
    _enough(n, 2 * hostile + 3, "krum", hostile)
    squared = np.zeros((n, n))
    for columns in _blocks(d, n):
        block = vectors[:, columns].astype(np.float64)
        for row in range(n - 1):
            apart = block[row + 1 :] - block[row]
            squared[row, row + 1 :] += np.square(apart, out=apart).sum(axis=1)
    squared += squared.T
    np.fill_diagonal(squared, np.inf)  # nobody is its own neighbour
    scores = np.sort(squared, axis=1)[:, : n - hostile - 2].sum(axis=1)
    chosen = np.sort(np.argsort(scores, kind="stable")[: n - hostile])
    total = np.zeros(d)
    for k in chosen:
        total += vectors[k]
    return (total / len(chosen)).astype(np.float32)


def geometric_median(
    vectors: Vectors, weights: Sequence[int], *, smoothing: float = 1e-6, iterations: int = 50
) -> Vector:
    """The point with the least weighted sum of distances, float32[d], by the smoothed Weiszfeld iteration.

    β_k = n_k / max(ν, ‖x_k − v‖)        v ← v + Σ β_k (x_k − v) / Σ β_k

    RFA, Pillutla et al. 2022. Here the start is the weighted median of each coordinate instead of the mean, from which
    1e30 would take many iterations to forget; and ν begins as the weighted median distance from the start, r, and
    halves down to `smoothing` · r, for an iteration that begins on a vector with a small ν stays there. Steps shorter
    than that end it. If r is 0, more than half of the vectors by weight are one point, and it is the result. The
    objective never grows, so vectors with a share s < ½ of the weight move the result from the start by at most
    (5/2 − 2s) / (1 − 2s) times the others' largest distance from there, however many iterations are taken.

    Args:
        vectors: float32[n, d], finite, n ≥ 1.
        weights: n integers ≥ 1.
        smoothing: the last ν over r.
        iterations: at most so many. Ten are usual in many dimensions, twenty and more in a few.

    >>> geometric_median(np.float32([[-1, 0], [1, 0], [0, 1], [0, -1], [0, 1e6]]), [10, 10, 10, 10, 1]).round(2)
    array([0.  , 0.05], dtype=float32)
    """
    n, d = vectors.shape
    share = np.array(weights, np.int64)
    assert share.shape == (n,)
    point = np.empty(d)
    for columns in _blocks(d, n):
        point[columns] = _weighted_median(vectors[:, columns].astype(np.float64), share)
    distances = _distances(vectors, point)
    nu = float(_weighted_median(distances[:, None], share)[0])
    last = smoothing * nu
    if nu > 0.0:
        for _ in range(iterations):
            beta = share / np.maximum(distances, nu)
            step = _pull(vectors, point, beta) / beta.sum()
            point += step
            if sqrt(np.square(step).sum()) <= last and (nu == last or distances.min() >= nu):
                break  # not while ν is large and in force
            distances, nu = _distances(vectors, point), max(nu / 2, last)
    return point.astype(np.float32)


def centred_clipping(
    vectors: Vectors, centre: Wide, *, radius: float, iterations: int, order: Order, bucket: int
) -> Vector:
    """The centre moved by the mean of the vectors as seen from it, each cut to `radius`; float32[d].

    v ← v + mean_i (x_i − v) · min(1, τ / ‖x_i − v‖)        over the buckets' means x_i

    Karimireddy et al. 2021. Each iteration moves it by at most τ, and by f τ / n at most on account of f of n.
    Bucketing, Karimireddy et al. 2022, averages groups of `bucket` vectors first: the honest ones get more alike, and
    each hostile one spoils a group.

    Args:
        vectors: float32[n, d], finite, n ≥ 1.
        centre: float32[d] or float64[d], v to begin with.
        radius: τ ≥ 0; with 0 the result is `centre`.
        iterations: ≥ 1.
        order: int[n], the permutation by which groups are made; the caller draws it anew each round.
        bucket: the size of a group, ≥ 1; the last may be smaller. With 1 `order` changes nothing.

    >>> x, order = np.float32([[1], [3], [1000]]), np.array([2, 0, 1])
    >>> centred_clipping(x, np.float32([2]), radius=3.0, iterations=1, order=order, bucket=1)
    array([3.], dtype=float32)
    """
    point = centre.astype(np.float64)
    means = _bucket_means(vectors, order, bucket)
    for _ in range(iterations):
        distances = _distances(means, point)
        scale = np.divide(radius, distances, out=np.ones(len(means)), where=distances > radius)
        point += _pull(means, point, scale) / len(means)
    return point.astype(np.float32)


def shortened(vector: Vector, *, limit: float) -> Vector:
    """`vector` itself if its L2 norm is at most `limit`, otherwise a copy scaled down to that; float32[n].

    x · min(1, C / ‖x‖). To float32's rounding: the copy may be longer than `limit` by 6e-8 of it.

    >>> shortened(np.float32([3, 4]), limit=1.0)
    array([0.6, 0.8], dtype=float32)
    """
    length = norm(vector)
    return vector if length <= limit else (vector.astype(np.float64) * (limit / length)).astype(np.float32)


def bounded_norms(vectors: Sequence[Vector], *, times: float) -> list[Vector]:
    """Vectors no longer than `times` the median length: each is `shortened` to that, or itself.

    x_k ← x_k · min(1, C / ‖x_k‖)        C = times · median_i ‖x_i‖

    Nobody then moves a mean of n by more than C / n. Meant for differences: of states, subtract the round's start
    first. If more than half of the vectors are 0, so is C, and all others become 0.

    Args:
        vectors: float32[n] each, finite.
        times: > 0.

    >>> bounded_norms([np.float32([3, 4]), np.float32([0, 5]), np.float32([0, 50])], times=2.0)[2]
    array([ 0., 10.], dtype=float32)
    """
    limit = times * float(np.median([norm(vector) for vector in vectors])) if vectors else 0.0
    return [shortened(vector, limit=limit) for vector in vectors]


def fewest_replies(rule: Rule, *, hostile_share: float, asked: int) -> int:
    """How many replies `rule` needs to withstand f = ⌊hostile_share · asked⌋ hostile ones: 2f + 1, krum 2f + 3.

    f is a share of those asked, for hostile clients always answer. Call it once before the first round, where it
    raises `ConfigError` if even all the replies would be too few; then abandon each round with fewer usable replies
    (state and memory as they were, counted against the server's patience), as with fewer than `min_replies`.

    Raises `ConfigError` unless 0 ≤ hostile_share < 0.5 and `asked` suffices.

    >>> fewest_replies("krum", hostile_share=0.2, asked=50), fewest_replies("median", hostile_share=0.2, asked=50)
    (23, 21)
    """
    hostile = _hostile(hostile_share, asked)
    fewest = 2 * hostile + (3 if rule == "krum" else 1)
    _enough(asked, fewest, rule, hostile)
    return fewest


def aggregate(
    vectors: Vectors,
    weights: Sequence[int],
    rule: Rule,
    *,
    hostile_share: float,
    order: Order,
    asked: int | None = None,
) -> Vector:
    """One vector of n by a robust rule that withstands f = ⌊hostile_share · asked⌋ hostile ones; float32[d].

    - median: of each coordinate.        - trimmed: without the f lowest and highest of each coordinate.
    - krum: multi-Krum.                  - rfa: the geometric median; f is then a share of the weight.
    - clipping: three steps of centred clipping from the coordinate-wise median, with the median distance to it as
      radius, over means of two as long as at most a quarter of these can be hostile, otherwise over the vectors
      themselves. With 0 as centre the radius would be the length of the vectors, and the result biased towards 0
      whatever they agree on; the median is as robust, moves with the vectors (so states do as well as differences),
      and leaves their spread as radius.

    Only rfa heeds the weights, and only as far as they are honest: who claims more examples counts for more clients.

    Args:
        vectors: float32[n, d], finite, in an order that does not depend on arrival.
        weights: n integers ≥ 1.
        hostile_share: 0 ≤ share < 0.5.
        order: int[n], a permutation drawn for this round; only clipping uses it.
        asked: how many clients the round asked; None: as many as answered.

    Raises `ConfigError` if n is less than `fewest_replies`; a server abandons such a round before it comes here.

    >>> x = np.float32([[1, 1], [2, 2], [3, 3], [2, 1], [1000, -1000]])
    >>> aggregate(x, [1] * 5, "trimmed", hostile_share=0.2, order=np.arange(5)).tolist()
    [2.3333332538604736, 1.3333333730697632]
    """
    n = len(vectors)
    asked = n if asked is None else asked
    hostile = _hostile(hostile_share, asked)
    _enough(n, fewest_replies(rule, hostile_share=hostile_share, asked=asked), rule, hostile)
    if rule == "median":
        return coordinate_median(vectors)
    if rule == "trimmed":
        return trimmed_mean(vectors, drop=hostile)
    if rule == "krum":
        return multi_krum(vectors, hostile=hostile)
    if rule == "rfa":
        return geometric_median(vectors, weights)
    centre = coordinate_median(vectors)
    bucket = 2 if 4 * hostile <= (n + 1) // 2 else 1
    radius = float(np.median(_distances(_bucket_means(vectors, order, bucket), centre)))
    return centred_clipping(vectors, centre, radius=radius, iterations=CLIPPING_STEPS, order=order, bucket=bucket)


def _hostile(share: float, asked: int) -> int:
    if not 0.0 <= share < 0.5:
        raise ConfigError(
            f"is {share:g}", where="server.hostile_share", remedy="Give 0 … 0.49: no rule withstands a half."
        )
    return int(share * asked + 1e-9)  # 0.29 · 100 is 28.999999999999996


def _enough(n: int, fewest: int, rule: str, hostile: int) -> None:
    if n < fewest:
        raise ConfigError(
            f"{rule} with {hostile} hostile needs {fewest} replies or more, not {n}",
            where="server.hostile_share",
            remedy="Lower it, ask more clients, or take another rule.",
        )


def _blocks(count: int, other: int) -> Iterator[slice]:
    """Slices of an axis of `count`, so that each holds about `BLOCK` numbers given the `other` axis in full."""
    step = max(1, BLOCK // max(1, other))
    return (slice(start, start + step) for start in range(0, count, step))


def _distances(vectors: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """‖x_k − centre‖, float64[n]."""
    n, d = vectors.shape
    squared, wide = np.empty(n), centre.astype(np.float64)
    for rows in _blocks(n, d):
        apart = vectors[rows] - wide
        squared[rows] = np.square(apart, out=apart).sum(axis=1)
    return np.sqrt(squared)


def _pull(vectors: np.ndarray, centre: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Σ scale_k (x_k − centre), float64[d]."""
    n, d = vectors.shape
    total = np.zeros(d)
    for rows in _blocks(n, d):
        apart = vectors[rows] - centre
        apart *= scale[rows, None]
        total += apart.sum(axis=0)
    return total


def _weighted_median(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The median of each column, float64[c], if row k were there weights[k] times."""
    order = np.argsort(columns, axis=0, kind="stable")
    below, total = 2 * np.cumsum(weights[order], axis=0), weights.sum()
    middle = [np.argmax(reached, axis=0)[None] for reached in (below >= total, below > total)]
    low, high = (np.take_along_axis(np.take_along_axis(columns, order, axis=0), at, axis=0)[0] for at in middle)
    median: np.ndarray = (low + high) / 2
    return median


def _bucket_means(vectors: Vectors, order: np.ndarray, bucket: int) -> np.ndarray:
    """Means of groups of `bucket` rows, float64[⌈n / bucket⌉, d]; for groups of one the vectors as they are."""
    assert np.array_equal(np.sort(order), np.arange(len(vectors)))
    if bucket == 1:
        return vectors
    starts = range(0, len(vectors), bucket)
    return np.stack([vectors[order[at : at + bucket]].mean(axis=0, dtype=np.float64) for at in starts])
