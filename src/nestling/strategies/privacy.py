"""Client-level differential privacy: clip every reply, add noise to the sum once, and account for what that spends.

    w ← w + (Σ_k Δ_k min(1, C/‖Δ_k‖) + N(0, z²C² I)) / m        m: clients planned for the round, not those that came
    C ← C exp(−η (b̄ − γ))        b̄ = ½ + (Σ_k (b_k − ½) + N(0, σ_b²)) / m,   b_k = 1 if ‖Δ_k‖ ≤ C, else 0

McMahan et al., arXiv 1710.06963; clipping to the quantile γ: Andrew et al., arXiv 1905.03871, Algorithm 1. The server
is trusted and sees the replies; what it publishes hardly depends on whether any one client took part. The guarantee is
(ε, δ) for adding or removing one client; it covers the state and C, not how many replied, when, or their metrics.

Floating-point noise leaks through its low bits (Mironov 2012), so we sum integers: a reply is rounded towards zero to a
grid, its norm is checked as an integer, and the noise is discrete Gaussian (Canonne, Kamath, Steinke, arXiv 2004.00010,
Algorithms 1 to 3). We choose the grid so that the noise is about 2^24 steps, where all of that fits int64 and NumPy
draws exactly; a float32 has no more than 24 bits, and what rounding n replies loses is below n/2^24 of the noise.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, exp, floor, inf, isfinite, log2, sqrt
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int64

from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.vectors import Vector, norm

Steps = Int64[np.ndarray, "n"]

_NOISE, _BOUND = 2.0**24, 2.0**30
"""The most steps that the noise's standard deviation and a clipped reply's norm have: their squares fit int64."""
_TAIL = 64
"""Noise is drawn given that it is below so many standard deviations; beyond lies less than e^-2000."""
_BATCH = 1 << 20
SMALLEST_CLIP, LARGEST_CLIP = 2.0**-60, 2.0**60


@dataclass(frozen=True)
class Grid:
    """The grid of one noised sum: steps of 2^-bits, and in steps the largest norm of a reply and the noise."""

    bits: int
    bound: int
    sigma: int


def grid(clip: float, noise_multiplier: float) -> Grid:
    """The grid for replies clipped to `clip` and noise of standard deviation noise_multiplier · clip.

    `bound` ≤ clip · 2^bits and `sigma` ≥ noise_multiplier · bound, both whole. `sigma` is more than 2^22 from a
    multiplier of 2^-6 on; without noise it is 0. Raises `ConfigError` if the two cannot be used.

    >>> grid(0.5, 1.0)
    Grid(bits=25, bound=16777216, sigma=16777216)
    """
    if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
        raise ConfigError(f"{clip!r} is not allowed", where="clip", remedy="Give the norm of a typical reply.")
    if not 0 <= noise_multiplier <= 2**20:  # written so that NaN fails
        raise ConfigError(f"{noise_multiplier!r} is not allowed", where="noise_multiplier", remedy="Give 0 to 2^20.")
    most = min(_BOUND, _NOISE / noise_multiplier) if noise_multiplier else _BOUND
    bits = floor(log2(most / clip))
    bound = floor(clip * 2.0**bits)
    return Grid(bits, bound, ceil(Fraction(noise_multiplier) * bound))


def clipped(vector: Vector, on: Grid) -> Steps:
    """One reply, float32[n], in steps of the grid, scaled down to the clip norm if it is longer; zero stays zero.

    The integers' norm is at most `on.bound`, exactly. Raises `WireError` (`non_finite`) for NaN and infinity.

    >>> clipped(np.float32([3, 4]), Grid(bits=1, bound=5, sigma=0))  # clip = 2.5
    array([3, 4])
    """
    if not np.isfinite(vector).all():
        raise WireError("non_finite", "contains NaN or infinite numbers", remedy="The sender diverged; drop it.")
    length = norm(vector) * 2.0**on.bits
    scale = min(1.0, on.bound / length) if length else 1.0
    while True:
        # Towards zero: no coordinate grows. The float64 scale may be too large by a few 2^-53, which the check sees.
        steps: Steps = np.trunc(vector.astype(np.float64) * scale * 2.0**on.bits).astype(np.int64)
        if int(steps @ steps) <= on.bound**2:
            return steps
        scale *= 1 - 2.0**-40


def noised_mean(vectors: Sequence[Vector], *, size: int, clip: float, noise_multiplier: float, cohort: int) -> Vector:
    """(Σ_k clipped Δ_k + noise) / cohort: float32[size], different each time it is called.

    Args:
        vectors: the differences Δ_k that came, float32[size] each, finite; every one counts the same. May be empty.
        size: length of each.
        clip: C.
        noise_multiplier: z; 0: clipping alone, which is not private.
        cohort: clients planned for the round; the expected number where each joins with a probability.

    >>> noised_mean([np.float32([3, 4])], size=2, clip=2.5, noise_multiplier=0.0, cohort=2)
    array([0.75, 1.  ], dtype=float32)
    """
    on = grid(clip, noise_multiplier)
    total = discrete_gaussian(size, on.sigma)
    for vector in vectors:
        total += clipped(vector, on)
    return (total.astype(np.float64) / (cohort * 2.0**on.bits)).astype(np.float32)


def private_mean(
    vectors: Sequence[Vector],
    memory: Mapping[str, np.ndarray],
    *,
    size: int,
    clip: float,
    noise_multiplier: float,
    cohort: int,
    quantile: float,
    clip_lr: float,
    count_noise: float,
) -> tuple[Vector, dict[str, np.ndarray]]:
    """`noised_mean`, and with it the next round's clip norm: `clip`, float64[], the memory of the rule.

    The mean and the count of unclipped replies together cost what `noise_multiplier` alone would.

    Args:
        memory: empty before the first round.
        clip: C of the first round.
        quantile: γ, the share of replies that are not to be clipped.
        clip_lr: η; the paper's is 0.2.
        count_noise: σ_b; the paper's is cohort / 20.

    The rest is as in `noised_mean`. Raises `ConfigError` if the count leaves no noise to the mean.

    >>> settings = {"clip": 1.0, "noise_multiplier": 0.0, "quantile": 0.5, "clip_lr": 0.2, "count_noise": 1e-9}
    >>> mean, memory = private_mean([np.float32([3, 4])] * 2, {}, size=2, cohort=2, **settings)
    >>> mean, memory["clip"].round(6)  # both were clipped: C grows by exp(0.2 · 0.5)
    (array([0.6, 0.8], dtype=float32), np.float64(1.105171))
    """
    now = float(memory.get("clip", clip))
    # Mean and count, each over its noise, are one vector with standard normal noise, which a client moves by at most
    # (z_Δ^-2 + (2 σ_b)^-2)^½ = 1/z: one Gaussian mechanism of multiplier z. Both are of the same replies, so where
    # those were drawn in secret that one was sampled, once, and (z, sampling rate) accounts for the two together.
    z = mean_noise_multiplier(noise_multiplier, count_noise)
    mean = noised_mean(vectors, size=size, clip=now, noise_multiplier=z, cohort=cohort)
    unclipped = sum(norm(vector) <= now for vector in vectors)
    # b − ½ is ±½: removing a client moves the sum by ½, in a grid of halves by 1.
    on = grid(1.0, 2 * count_noise)
    halves = (2 * unclipped - len(vectors)) * on.bound + int(discrete_gaussian(1, on.sigma)[0])
    share = 0.5 + halves / (2.0 * on.bound * cohort)
    # Whatever the noise, the next C can be used: bounds that do not look at the replies cost nothing.
    change = exp(min(max(-clip_lr * (share - quantile), -30.0), 30.0))
    return mean, {"clip": np.array(min(max(now * change, SMALLEST_CLIP), LARGEST_CLIP))}


def mean_noise_multiplier(noise_multiplier: float, count_noise: float) -> float:
    """z_Δ = (z^-2 − (2 σ_b)^-2)^-½: what the mean gets where a count with noise σ_b is published beside it.

    Raises `ConfigError` if z ≥ 2 σ_b.

    >>> round(mean_noise_multiplier(0.6, 0.375), 6)
    1.0
    """
    if not 0 <= noise_multiplier < 2 * count_noise < inf:
        raise ConfigError(
            f"{count_noise:g} is too little noise on the count for a noise multiplier of {noise_multiplier:g}",
            where="count_noise",
            remedy=f"Give well above {noise_multiplier / 2:g}, or a fixed clip norm.",
        )
    return (noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5 if noise_multiplier else 0.0


# The noise. Every number comes from the operating system's generator: nothing here can be seeded, and a round that is
# repeated after a crash gets other noise. All arithmetic is of whole numbers below 2^63.


def discrete_gaussian(size: int, sigma: int) -> Steps:
    """int64[size] of P(y) ∝ exp(−y² / 2σ²) over the whole numbers; `sigma` in 0 … 2^24, and 0 is no noise.

    Discrete Laplace numbers of scale σ, each kept with probability exp(−(|y| − σ)² / 2σ²). The paper's scale is
    ⌊σ⌋ + 1; any gives the same distribution, and with σ itself, a whole number here, the fraction stays small.

    >>> discrete_gaussian(3, 0)
    array([0, 0, 0])
    """
    assert 0 <= sigma <= _NOISE, "a grid from `grid`"
    noise = np.zeros(size, np.int64)
    done = 0 if sigma else size
    while done < size:
        y = _discrete_laplace(min(size - done + 16, _BATCH), sigma)
        above = np.square(np.abs(y) - sigma)
        whole, rest = np.divmod(above, 2 * sigma**2)
        kept = y[(_successes(y.size) >= whole) & _exp_trial(rest, 2 * sigma**2)][: size - done]
        noise[done : done + kept.size] = kept
        done += kept.size
    return noise


def _discrete_laplace(tries: int, scale: int) -> Steps:
    """Up to `tries` numbers of P(y) ∝ exp(−|y| / scale); those that do not come to anything are left out."""
    low = _below(scale, tries)
    low = low[_exp_trial(low, scale)]
    high, sign = _successes(low.size), _below(2, low.size)
    kept = (high < _TAIL) & ((low > 0) | (high > 0) | (sign == 0))  # zero has one sign
    laplace: Steps = ((low + scale * high) * (1 - 2 * sign))[kept]
    return laplace


def _successes(count: int) -> Steps:
    """int64[count]: how many trials of probability e^-1 succeed before the first fails; P(≥ k) = e^-k."""
    successes = np.zeros(count, np.int64)
    alive = np.arange(count)
    while alive.size:
        alive = alive[_exp_trial(np.ones(alive.size, np.int64), 1)]
        successes[alive] += 1
    return successes


def _exp_trial(numerator: Steps, denominator: int) -> np.ndarray:
    """bool[n]: true with probability exp(−numerator / denominator), for fractions in 0 … 1.

    Trials of probability γ, γ/2, γ/3, … until one fails: the first k succeed with γ^k / k!, an even number of them
    with Σ (−γ)^k / k!.
    """
    even = np.ones(numerator.shape, np.bool_)
    alive = np.arange(numerator.size)
    divisor = 1
    while alive.size:
        alive = alive[_below(denominator * divisor, alive.size) < numerator[alive]]
        even[alive] ^= True
        divisor += 1
    return even


def _below(limit: int, count: int) -> Steps:
    """int64[count], each of 0 … limit − 1 as likely: words that would favour the low ones are drawn again."""
    last = (2**64 // limit) * limit - 1
    words = np.frombuffer(os.urandom(8 * count), np.uint64).copy()
    while (again := words > np.uint64(last)).any():
        words[again] = np.frombuffer(os.urandom(8 * int(again.sum())), np.uint64)
    return (words % np.uint64(limit)).astype(np.int64)


# The accounting, by Google's dp-accounting. That the noise is discrete changes nothing: the sum plus continuous
# Gaussian noise of variance σ² − τ², then rounded at random to the grid (a discrete Gaussian of variance τ² about it),
# is discrete Gaussian of variance σ² up to a factor 1 ± 4 exp(−2π² τ²) (Peikert, CRYPTO 2010, Theorem 3.1). Rounding
# is after the fact, so with τ = 4 and σ ≥ 2^10 steps, ε is that of a multiplier smaller by less than 2^-16, and with
# the 2^22 to 2^24 steps here by 2^-41, below what an accountant resolves. It holds for every draw of clients, and so
# for the mixture over draws that sampling makes of them.
#
# What clients keep from round to round (error feedback, an optimiser) hangs on the draws of rounds before. Rounds add
# up all the same: fix the draws of all others, which do not depend on this client, and what is published so far; then
# the round is, with or without it, a mixture over its own draw, made anew, of sums that differ by one clipped reply.


_LITTLE_NOISE = 0.01
"""Below it a round's ε is above 5,000: sampling takes about ln(1 / rate) off that, and an accountant may overflow."""


def spent(rounds: Iterable[tuple[float, float]], delta: float) -> float:
    """ε at `delta` of all rounds together, each given as (noise multiplier, sampling rate); 0 for none.

    The sampling rate is below 1 only where the server keeps secret who took part and every client took part with that
    probability, on its own (Poisson sampling); for any other cohort give 1. Rounds may differ, and one that was
    repeated counts twice. Adding or removing one client; privacy loss distributions, and the exact formula for
    Gaussians (Balle & Wang, arXiv 1805.06530) where nothing is sampled. `inf` if a round had no noise.

    Raises `ConfigError` for a number out of range, `ContextError` if dp-accounting is not installed.
    """
    counts = Counter(rounds)
    for noise_multiplier, sampling_rate in counts:
        _check(noise_multiplier, sampling_rate, delta)
    if not counts:
        return 0.0
    if any(noise_multiplier == 0 for noise_multiplier, _ in counts):
        return inf
    dp = _accounting()
    # Rounds without sampling are one Gaussian together, and so are those that it cannot help, for it never costs.
    sampled = {(z, rate): n for (z, rate), n in counts.items() if rate < 1 and z >= _LITTLE_NOISE}
    precision = sum(n * key[0] ** -2 for key, n in counts.items() if key not in sampled)
    if not sampled:
        return float(dp.get_epsilon_gaussian(precision**-0.5, delta))
    accountant = _accountant(dp, min(z for z, _ in sampled))
    if precision:
        accountant.compose(dp.GaussianDpEvent(precision**-0.5))
    for (z, rate), n in sampled.items():
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), n)
    return float(accountant.get_epsilon(delta))


def epsilon(noise_multiplier: float, rounds: int, delta: float, *, sampling_rate: float = 1.0) -> float:
    """`spent` of `rounds` equal rounds."""
    return spent([(noise_multiplier, sampling_rate)] * rounds, delta)


def noise_for(epsilon: float, rounds: int, delta: float, *, sampling_rate: float = 1.0) -> float:
    """The smallest noise multiplier with which `rounds` rounds spend at most `epsilon` at `delta`, to 0.1 % above.

    Raises as `spent`.
    """
    _check(1.0, sampling_rate, delta)
    if not 0 < epsilon < inf or rounds < 1:
        raise ConfigError(
            f"{rounds} rounds with epsilon = {epsilon:g} cannot be", where="epsilon", remedy="Give more than 0."
        )
    dp = _accounting()
    # Enough if nothing is sampled; the last factor is the search's tolerance.
    most = float(dp.get_sigma_gaussian(epsilon, delta)) * sqrt(rounds) * (1 + 1e-9)
    if sampling_rate == 1 or most < _LITTLE_NOISE:
        return most
    least = most / 2
    while spent([(least, sampling_rate)] * rounds, delta) <= epsilon:
        least /= 2
    return float(
        dp.calibrate_dp_mechanism(
            lambda: _accountant(dp, least),
            lambda z: dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(z)), rounds),
            epsilon,
            delta,
            dp.ExplicitBracketInterval(least, 2 * least),
            tol=1e-3 * least,
        )
    )


def _accountant(dp: ModuleType, smallest: float) -> Any:
    """Losses are kept to 1e-4, which is plenty; with little noise they are large, and there would be too many."""
    return dp.pld.PLDAccountant(value_discretization_interval=1e-4 / min(1.0, smallest) ** 2)


def _check(noise_multiplier: float, sampling_rate: float, delta: float) -> None:
    if not (noise_multiplier >= 0 and isfinite(noise_multiplier) and 0 < sampling_rate <= 1 and 0 < delta < 1):
        raise ConfigError(
            f"noise multiplier {noise_multiplier:g}, sampling rate {sampling_rate:g} and delta {delta:g} cannot be",
            where="privacy",
            remedy="A noise multiplier is at least 0, a sampling rate in (0, 1], and delta between 0 and 1.",
        )


def _accounting() -> ModuleType:
    try:
        import dp_accounting  # seconds, for it brings SciPy, and only for those who use it
    except ImportError as error:
        raise ContextError(
            f"privacy accounting needs the package dp-accounting ({error})",
            where="privacy",
            remedy='pip install "nestling[dp]"',
        ) from error
    accounting: ModuleType = dp_accounting
    return accounting
