"""FedAdam and FedYogi against Algorithm 2 of the paper, number by number."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.strategies.fedopt import adaptive

SETTINGS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-2}


def definition(rule: str, w: float, means: list[float], *, lr: float, beta1: float, beta2: float, tau: float) -> float:
    m, v = 0.0, tau**2
    for mean in means:
        delta = mean - w
        m = beta1 * m + (1 - beta1) * delta
        if rule == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            sign = (v > delta**2) - (v < delta**2)
            v = v - (1 - beta2) * delta**2 * sign
        w = w + lr * m / (sqrt(v) + tau)
    return w


@pytest.mark.parametrize("rule", ["adam", "yogi"])
@given(st.floats(-2, 2), st.lists(st.floats(-2, 2), min_size=1, max_size=6))
def test_rounds_are_those_of_the_algorithm(rule: str, start: float, means: list[float]) -> None:
    state, memory = np.float32([start]), {}
    start = float(state[0])
    for mean in means:
        state, memory = adaptive(state, np.float32([mean]), memory, rule=rule, **SETTINGS)
    wanted = definition(rule, start, [float(np.float32(mean)) for mean in means], **SETTINGS)
    # m/(√v + τ) can be as steep as 1/τ, so a float32 rounding of the state grows by up to lr/τ a round.
    assert state[0] == pytest.approx(wanted, abs=1e-4)
    assert (memory["v"] >= 0).all()


def test_first_steps_by_hand() -> None:
    """τ = 1, so v_0 = 1. Δ = 2: adam: v = 0.5 + 0.5 · 4 = 2.5; yogi: v = 1 + 0.5 · 4 = 3. Δ = 0.5 (below v): yogi
    falls by 0.5 · 0.25. No bias correction: m = 0.5 Δ."""
    settings = {"lr": 1.0, "beta1": 0.5, "beta2": 0.5, "tau": 1.0}
    zero = np.zeros(1, np.float32)
    for rule, delta, v in (("adam", 2.0, 2.5), ("yogi", 2.0, 3.0), ("adam", 0.5, 0.625), ("yogi", 0.5, 0.875)):
        state, memory = adaptive(zero, np.float32([delta]), {}, rule=rule, **settings)
        assert memory["v"][0] == v
        assert memory["m"][0] == delta / 2
        assert state[0] == pytest.approx(delta / 2 / (sqrt(v) + 1), rel=1e-6)


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_where_nothing_changes_the_state_stays_to_the_bit(rule: str) -> None:
    state = np.float32([0.1, -3.0])
    assert adaptive(state, state, {}, rule=rule, **SETTINGS)[0].tobytes() == state.tobytes()
