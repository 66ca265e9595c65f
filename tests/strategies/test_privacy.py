"""Privacy: a clipped reply's integers are within the bound whatever it was, the noise is the distribution it says it
is, and ε is that of two accountants.

A test of a random draw fails by chance less than once in a million runs; the noise cannot be seeded, here neither.
"""

import inspect
import random
from fractions import Fraction
from math import erf, erfc, exp, inf, log, pi, sqrt

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.vectors import norm
from nestling.strategies import privacy
from nestling.strategies.privacy import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    Grid,
    clipped,
    discrete_gaussian,
    epsilon,
    grid,
    mean_noise_multiplier,
    noise_for,
    noised_mean,
    private_mean,
    spent,
)

SIGMAS = 5.0
"""A normal number is farther out once in 1.7 million."""

vectors = arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
clips = st.floats(SMALLEST_CLIP, LARGEST_CLIP)
multipliers = st.one_of(st.just(0.0), st.floats(2.0**-20, 2.0**20))


# ---- clipping


def test_a_clip_by_hand() -> None:
    # ‖(3, 4, 0)‖ = 5, the clip norm is 1: (0.6, 0.8, 0), and a step is 2^-24.
    on = grid(1.0, 1.0)
    assert on == Grid(bits=24, bound=2**24, sigma=2**24)
    assert clipped(np.float32([3, -4, 0]), on).tolist() == [10066329, -13421772, 0]  # ⌊0.6 · 2^24⌋, −⌊0.8 · 2^24⌋
    assert clipped(np.float32([0.25, -0.5, 0]), on).tolist() == [2**22, -(2**23), 0]  # shorter: as it is


@given(vectors, clips, multipliers)
@example(np.full(40, np.finfo(np.float32).max), SMALLEST_CLIP, 0.0)
@example(np.full(40, np.finfo(np.float32).tiny), LARGEST_CLIP, 0.0)
@example(np.float32([1 / 3] * 3), float(norm(np.float32([1 / 3] * 3))), 1.0)
def test_rounding_never_raises_the_sensitivity(vector: np.ndarray, clip: float, z: float) -> None:
    """Catalogue 94: in whole numbers and fractions, without a rounding anywhere."""
    on = grid(clip, z)
    unit = Fraction(2) ** on.bits
    assert sum(step**2 for step in clipped(vector, on).tolist()) <= on.bound**2 <= (Fraction(clip) * unit) ** 2
    assert on.sigma >= Fraction(z) * on.bound
    if z >= 2.0**-20:
        assert on.sigma >= 2**9


@given(vectors, clips)
def test_clipping_only_scales(vector: np.ndarray, clip: float) -> None:
    on = grid(clip, 1.0)
    wanted = vector.astype(np.float64) * min(1.0, clip / (norm(vector) or 1.0)) * 2.0**on.bits
    # One step for rounding, and one for the bound of the whole vector being rounded.
    assert np.abs(clipped(vector, on) - wanted).max() <= 2


def test_cat_038_a_reply_of_zeros_is_clipped_to_zeros() -> None:
    zeros = np.zeros(5, np.float32)
    assert clipped(zeros, grid(1.0, 1.0)).tolist() == [0] * 5
    assert np.isfinite(noised_mean([zeros], size=5, clip=1.0, noise_multiplier=1.0, cohort=1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_not_clipped(bad: float) -> None:
    with pytest.raises(WireError) as caught:
        clipped(np.float32([1, bad]), grid(1.0, 1.0))
    assert caught.value.code == "non_finite"


@pytest.mark.parametrize(("clip", "z"), [(0.0, 1.0), (np.nan, 1.0), (np.inf, 1.0), (1.0, -1.0), (1.0, np.nan)])
def test_a_grid_of_nonsense_is_refused(clip: float, z: float) -> None:
    with pytest.raises(ConfigError):
        grid(clip, z)


# ---- the mean


def test_the_mean_divides_by_the_cohort_planned() -> None:
    came = [np.float32([1, 0]), np.float32([0, 1]), np.float32([0, 0])]
    mean = noised_mean(came, size=2, clip=1.0, noise_multiplier=0.0, cohort=8)
    assert mean.tolist() == [0.125, 0.125]


def test_nobody_came_and_there_is_noise_all_the_same() -> None:
    mean = noised_mean([], size=1000, clip=1.0, noise_multiplier=1.0, cohort=8)
    assert mean.std() == pytest.approx(1 / 8, rel=SIGMAS / sqrt(2 * 1000))


@pytest.mark.parametrize("clip", [1e-3, 1.0, 700.0])
def test_noise_of_the_mean_is_z_c_over_m(clip: float) -> None:
    n, z, cohort = 20_000, 0.7, 10
    reply = np.full(n, clip, np.float32)  # far too long
    noise = noised_mean([reply] * 3, size=n, clip=clip, noise_multiplier=z, cohort=cohort) - 3 * clip / sqrt(n) / cohort
    scale = z * clip / cohort
    assert abs(noise.mean()) <= SIGMAS * scale / sqrt(n)
    assert noise.std() == pytest.approx(scale, rel=SIGMAS / sqrt(2 * n))


# ---- the noise


def probabilities(sigma: int, reach: int) -> np.ndarray:
    """P(−reach), …, P(reach) of the discrete Gaussian, from its definition."""
    weight = [exp(-(y**2) / (2 * sigma**2)) for y in range(-reach, reach + 1)]
    return np.array(weight) / sum(weight)


def check_counts(counts: np.ndarray, expected: np.ndarray) -> None:
    """χ² below k + 2√(kx) + 2x, which it exceeds with probability < e^-x (Laurent & Massart 2000); e^-14 < 1e-6."""
    assert expected.min() >= 20, "too few for χ²"
    k, x = len(counts) - 1, 14.0
    assert ((counts - expected) ** 2 / expected).sum() <= k + 2 * sqrt(k * x) + 2 * x


@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_cat_095_small_noise_has_the_probabilities_of_the_definition(sigma: int) -> None:
    n, reach = 100_000, 3 * sigma
    noise = discrete_gaussian(n, sigma)
    p = probabilities(sigma, 20 * sigma)[20 * sigma - reach : 20 * sigma + reach + 1]
    inside = [(noise == y).sum() for y in range(-reach, reach + 1)]
    check_counts(np.array([*inside, (np.abs(noise) > reach).sum()]), n * np.array([*p, 1 - p.sum()]))


@pytest.mark.parametrize("sigma", [2**10 + 1, 2**24])
def test_cat_095_large_noise_is_normal_and_uses_every_step(sigma: int) -> None:
    n = 100_000
    noise = discrete_gaussian(n, sigma)
    assert abs(noise.mean()) <= SIGMAS * sigma / sqrt(n)
    assert noise.astype(float).std() == pytest.approx(sigma, rel=SIGMAS / sqrt(2 * n))
    edges = np.linspace(-3, 3, 61)
    # A step is rounded to the nearest: the edge between y and y + 1 lies at y + ½.
    below = np.array([0, *[(1 + erf((np.floor(e * sigma) + 0.5) / sigma / sqrt(2))) / 2 for e in edges], 1])
    bins = np.searchsorted(np.floor(edges * sigma), noise)
    check_counts(np.bincount(bins, minlength=62), n * np.diff(below))
    check_counts(np.bincount(noise % 64, minlength=64), np.full(64, n / 64))


def test_numbers_of_the_noise_are_independent_of_their_neighbours() -> None:
    noise = discrete_gaussian(100_000, 2**24) / 2.0**24
    for lag in (1, 2, 17):
        assert abs((noise[lag:] * noise[:-lag]).mean()) <= SIGMAS / sqrt(noise.size - lag)


def test_cat_095_the_noise_cannot_be_seeded() -> None:
    draws = []
    for _ in range(2):
        np.random.seed(0)
        random.seed(0)
        draws.append(discrete_gaussian(8, 2**24).tolist())
    assert draws[0] != draws[1]
    for function in (discrete_gaussian, noised_mean, private_mean):
        assert not {"seed", "rng", "key", "generator", "random_state"} & set(inspect.signature(function).parameters)


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 2**62 + 1])
def test_whole_numbers_are_drawn_with_equal_chance(limit: int) -> None:
    n = 50_000
    drawn = privacy._below(limit, n)
    assert drawn.min() >= 0
    assert drawn.max() < limit
    if limit > 1:
        parts = min(limit, 10)
        low = np.array([-(-i * limit // parts) for i in range(1, parts)])  # the first number of each part but one
        shares = np.diff([0, *low.tolist(), limit])
        check_counts(np.bincount(np.searchsorted(low, drawn, "right"), minlength=parts), n * (shares / limit))


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 1), (1, 3), (2**45, 2**46 + 1)])
def test_a_trial_succeeds_with_probability_exp(numerator: int, denominator: int) -> None:
    n, p = 50_000, exp(-numerator / denominator)
    share = privacy._exp_trial(np.full(n, numerator, np.int64), denominator).mean()
    assert abs(share - p) <= SIGMAS * sqrt(p * (1 - p) / n)


# ---- the clip norm that adapts


def test_the_count_takes_its_part_of_the_budget() -> None:
    for z, count_noise in ((1.0, 5.0), (0.5, 0.3), (3.0, 1.51)):
        z_mean = mean_noise_multiplier(z, count_noise)
        assert z_mean**-2 + (2 * count_noise) ** -2 == pytest.approx(z**-2)
        assert z_mean > z
    with pytest.raises(ConfigError, match="count_noise"):
        mean_noise_multiplier(1.0, 0.5)


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_the_clip_norm_finds_the_quantile(quantile: float) -> None:
    n = 60
    lengths = np.exp(np.random.default_rng(0).normal(2.0, 1.0, n))
    replies = [np.float32([0.6 * length, 0.8 * length]) for length in lengths]
    memory: dict[str, np.ndarray] = {}
    for _ in range(60):
        _, memory = private_mean(
            replies, memory, size=2, clip=2.0, noise_multiplier=1.0, cohort=n, quantile=quantile, clip_lr=0.5,
            count_noise=n / 20,
        )  # fmt: skip
    # The share then varies by about 0.02.
    assert (lengths <= memory["clip"]).mean() == pytest.approx(quantile, abs=0.15)


def test_one_step_of_the_clip_norm_by_hand() -> None:
    settings = {"size": 1, "clip": 1.0, "noise_multiplier": 0.0, "quantile": 0.5, "clip_lr": 0.2, "count_noise": 1e-8}
    short, long = np.float32([0.5]), np.float32([2.0])
    for came, share in (([short], 0.5 + 0.5 / 4), ([long], 0.5 - 0.5 / 4), ([], 0.5), ([short] * 3 + [long], 0.75)):
        _, memory = private_mean(came, {}, cohort=4, **settings)
        assert float(memory["clip"]) == pytest.approx(exp(-0.2 * (share - 0.5)))
        assert memory["clip"].dtype == np.float64


def test_the_count_has_its_noise_and_the_clip_norm_stays_usable() -> None:
    settings = {"size": 1, "clip": 1.0, "noise_multiplier": 1.0, "quantile": 0.5, "clip_lr": 1.0, "cohort": 10}
    change = [-np.log(float(private_mean([], {}, count_noise=4.0, **settings)[1]["clip"])) for _ in range(200)]
    assert np.std(change) == pytest.approx(0.4, rel=SIGMAS / sqrt(2 * 200))
    memory: dict[str, np.ndarray] = {}
    for _ in range(20):
        _, memory = private_mean([], memory, count_noise=1e5, **settings)
        assert SMALLEST_CLIP <= memory["clip"] <= LARGEST_CLIP


# ---- accounting


def test_epsilon_of_one_gaussian_is_the_exact_one() -> None:
    pytest.importorskip("dp_accounting")
    # Balle & Wang's δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ).
    for sigma in (0.5, 1.0, 3.0):
        at = epsilon(sigma, 1, 1e-5)
        phi = [(1 + erf((sign / (2 * sigma) - at * sigma) / sqrt(2))) / 2 for sign in (1, -1)]
        assert phi[0] - exp(at) * phi[1] == pytest.approx(1e-5, rel=1e-4)


@pytest.mark.parametrize(("z", "rate"), [(0.5, 0.25), (1.0, 0.1), (2.0, 0.5), (1.0, 0.999999)])
def test_epsilon_of_one_sampled_gaussian_is_the_exact_one(z: float, rate: float) -> None:
    """δ(ε) = P(x > t) − e^ε Q(x > t), P = (1 − q) N(0, z²) + q N(1, z²) with the client, Q = N(0, z²) without it, and t
    where P/Q = e^ε; the other way round costs less."""
    pytest.importorskip("dp_accounting")
    at = epsilon(z, 1, 1e-5, sampling_rate=rate)
    t = z**2 * log((exp(at) - 1 + rate) / rate) + 0.5
    beyond = [erfc(x / z / sqrt(2)) / 2 for x in (t, t - 1)]
    delta = (1 - rate) * beyond[0] + rate * beyond[1] - exp(at) * beyond[0]
    assert delta == pytest.approx(1e-5, rel=5e-3)
    assert delta <= 1e-5  # what an accountant rounds, it rounds up


@pytest.mark.parametrize(("z", "rounds", "rate"), [(0.5, 20, 0.25), (2.0, 20, 0.25), (1.0, 100, 0.05)])
def test_epsilon_under_sampling_is_dp_accountings(z: float, rounds: int, rate: float) -> None:
    dp = pytest.importorskip("dp_accounting")
    accountant = dp.pld.PLDAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), rounds)
    # Ours keeps losses on a coarser grid where noise is little; never to the reader's disadvantage by more than that.
    assert epsilon(z, rounds, 1e-5, sampling_rate=rate) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("z", "rounds", "delta", "rate"),
    [
        (1.0, 10, 1e-5, 1.0), (1.0, 100, 1e-6, 0.05), (0.8, 30, 1e-5, 0.2), (5.0, 300, 1e-6, 1.0),
        (0.5, 20, 1e-5, 0.25), (1.0, 20, 1e-5, 0.25), (4.0, 20, 1e-5, 0.25), (1.0, 50, 1e-5, 0.5),
    ],
)  # fmt: skip
def test_cat_094_two_accountants_agree(z: float, rounds: int, delta: float, rate: float) -> None:
    pytest.importorskip("dp_accounting")
    accountants = pytest.importorskip("opacus.accountants")
    prv = accountants.PRVAccountant()
    prv.history = [(z, rate, rounds)]
    assert epsilon(z, rounds, delta, sampling_rate=rate) == pytest.approx(prv.get_epsilon(delta=delta), rel=0.02)


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_epsilon_grows_with_rounds_and_falls_with_noise(rate: float) -> None:
    pytest.importorskip("dp_accounting")
    by_rounds = [epsilon(1.0, rounds, 1e-5, sampling_rate=rate) for rounds in (0, 1, 10)]
    by_noise = [epsilon(z, 10, 1e-5, sampling_rate=rate) for z in (0.0, 1.0, 3.0)]
    assert by_rounds[0] == 0
    assert by_rounds == sorted(by_rounds)
    assert by_noise[0] == inf
    assert by_noise == sorted(by_noise, reverse=True)
    assert epsilon(1.0, 10, 1e-5, sampling_rate=rate / 2) < epsilon(1.0, 10, 1e-5, sampling_rate=rate)


@pytest.mark.parametrize("z", [1e-5, 1e-3, 0.0099])
def test_of_next_to_no_noise_sampling_is_not_counted_on(z: float) -> None:
    pytest.importorskip("dp_accounting")
    assert (
        epsilon(z, 20, 1e-5, sampling_rate=0.25) == epsilon(z, 20, 1e-5) > epsilon(0.01, 20, 1e-5, sampling_rate=0.25)
    )
    assert noise_for(epsilon(z, 20, 1e-5), 20, 1e-5, sampling_rate=0.25) == pytest.approx(z, rel=1e-3)


def test_rounds_that_differ_add_up() -> None:
    pytest.importorskip("dp_accounting")
    # 1/z² adds up: 1 + 4 = 5, in any order.
    assert spent([(1.0, 1.0), (0.5, 1.0)], 1e-5) == pytest.approx(epsilon(5**-0.5, 1, 1e-5))
    mixed = [(1.0, 0.1)] * 5 + [(2.0, 1.0)] * 3
    assert spent(mixed, 1e-5) == pytest.approx(spent(mixed[::-1], 1e-5))
    assert spent(mixed[:5], 1e-5) < spent(mixed, 1e-5) < spent([(1.0, 1.0)] * 8, 1e-5)
    # An unsampled round costs the same on either path.
    beside = spent([(1.0, 1.0), (50.0, 1e-4)], 1e-5)
    assert beside == pytest.approx(epsilon(1.0, 1, 1e-5), rel=1e-3)


@pytest.mark.parametrize(("target", "rounds", "rate"), [(2.0, 10, 1.0), (1.0, 20, 0.1), (30.0, 5, 0.5)])
def test_noise_for_is_enough_and_hardly_more(target: float, rounds: int, rate: float) -> None:
    pytest.importorskip("dp_accounting")
    z = noise_for(target, rounds, 1e-5, sampling_rate=rate)
    assert epsilon(z, rounds, 1e-5, sampling_rate=rate) <= target
    assert epsilon(0.99 * z, rounds, 1e-5, sampling_rate=rate) > target


@pytest.mark.parametrize(
    "bad", [(-1.0, 1.0, 0.5), (1.0, 0.0, 0.5), (1.0, 1.5, 0.5), (1.0, 1.0, 0.0), (np.nan, 1.0, 0.5)]
)
def test_numbers_that_cannot_be_accounted_are_refused(bad: tuple[float, float, float]) -> None:
    z, rate, delta = bad
    with pytest.raises(ConfigError):
        spent([(z, rate)], delta)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ContextError, match=r"nestling\[dp\]"):
        epsilon(1.0, 1, 1e-5)


def test_discrete_noise_has_the_variance_of_the_continuous() -> None:
    """What the accounting relies on: the sum over the grid differs from the integral by e^(−2π²σ²)."""
    for sigma in (1, 2, 5):
        p, y = probabilities(sigma, 20 * sigma), np.arange(-20 * sigma, 20 * sigma + 1)
        assert (p * y**2).sum() == pytest.approx(sigma**2, rel=100 * sigma**2 * exp(-2 * pi**2 * sigma**2) + 1e-12)
