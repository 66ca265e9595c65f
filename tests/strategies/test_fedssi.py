"""FedSSI against a slow definition in plain numbers, and FedAvg where it says it is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quadratic import Quadratic, number, value, values

from nestling.config.schema import LocalConfig
from nestling.federation.local import train_by_rule
from nestling.strategies import fedssi

SGD = LocalConfig(
    optimizer="sgd", lr=0.1, momentum=0.0, decay="none", rule="ssi", ssi_strength=0.3, ssi_lambda=0.25, batch_size=1
)


def definition(start: float, centres: list[float], omega: float, *, lr: float, a: float, lam: float) -> tuple:
    """(w after the round, Ω after the round) of one number with the loss (w − c)²/2, as in the module's docstring."""
    v, s = start, 0.0
    for c in centres:
        g = v - c
        step = -lr * (g + (1 - lam) / (2 * lam) * (v - start))
        s += -g * step
        v += step
    w = start
    for c in centres:
        w -= lr * ((w - c) + 2 * a * omega * (w - start))
    return w, 0.9 * omega + max(s, 0.0) / ((v - start) ** 2 + 1e-3)


def trained(start: list[float], centres: list[float], memory: dict, config: LocalConfig = SGD) -> tuple[list, dict]:
    adapter = number(*start)
    kept = train_by_rule(
        adapter.frozen.model, adapter, Quadratic(centres), config, memory, client=0, seed=0, epochs=range(1), of=1
    )
    return values(adapter), kept


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4), st.floats(-1, 1))
def test_three_rounds_as_defined(centres: list[float], start: float) -> None:
    memory, omega, w, at = {}, 0.0, start, start
    for _ in range(3):
        [w], memory = trained([w], centres, memory)
        at, omega = definition(at, centres, omega, lr=0.1, a=0.3, lam=0.25)
        assert w == pytest.approx(at, rel=1e-4, abs=1e-5)
        assert memory["rule.omega.0"] == pytest.approx(omega, rel=1e-3, abs=1e-5)


def test_the_importance_of_two_steps_by_hand() -> None:
    """λ = 1, so v is pulled nowhere: from 0 to c = 1 with η = 0.5, g = −1, −0.5 and δv = 0.5, 0.25: s = 0.625."""
    config = LocalConfig(
        optimizer="sgd", lr=0.5, momentum=0.0, decay="none", rule="ssi", ssi_lambda=1.0, batch_size=1
    )  # fmt: skip
    _, kept = trained([0.0], [1.0, 1.0], {}, config)
    assert kept["rule.omega.0"] == pytest.approx(0.625 / (0.75**2 + 1e-3), rel=1e-5)


def test_a_move_against_the_gradient_counts_for_nothing() -> None:
    v = torch.zeros(1)
    path = fedssi.Path([v])
    path.before_step([torch.ones(1)])
    v += 1
    path.after_step()
    assert path.importance()[0] < 0
    assert fedssi.next_omega({}, path.importance())["rule.omega.0"].tolist() == [0.0]


def test_a_first_round_is_fedavg_to_the_bit_and_a_second_one_is_held_back() -> None:
    plain = LocalConfig(optimizer="adamw", lr=0.1, decay="none", batch_size=1)
    ssi = LocalConfig(optimizer="adamw", lr=0.1, decay="none", batch_size=1, rule="ssi", ssi_strength=1.0)
    start, centres = [0.0, 0.5], [1.0, 2.0, 1.5]
    one, memory = trained(start, centres, {}, ssi)
    assert one == trained(start, centres, {}, plain)[0]
    again = trained(start, centres, memory, ssi)[0]
    assert np.abs(again[0]) < np.abs(one[0])
    no_strength = LocalConfig(optimizer="adamw", lr=0.1, decay="none", batch_size=1, rule="ssi", ssi_strength=0.0)
    assert trained(start, centres, memory, no_strength)[0] == one


def test_every_parameter_has_its_own_importance() -> None:
    """The second number is where its loss is least, so nothing is learnt about it."""
    _, kept = trained([0.0, 1.0], [1.0], {})
    assert kept["rule.omega.0"][0] > 0
    assert kept["rule.omega.1"][0] == 0
    assert {array.dtype for array in kept.values()} == {np.dtype(np.float32)}


def test_what_the_client_kept_is_left_alone() -> None:
    memory = {"rule.omega.0": np.ones(1, np.float32)}
    trained([0.0], [1.0], memory)
    assert memory["rule.omega.0"].tolist() == [1.0]


def test_the_adapter_is_put_back_before_training() -> None:
    adapter = number(0.0)
    config = LocalConfig(optimizer="sgd", lr=0.1, momentum=0.0, decay="none", rule="ssi")
    train_by_rule(adapter.frozen.model, adapter, Quadratic([1.0]), config, {}, client=0, seed=0, epochs=range(1), of=1)
    assert value(adapter) == pytest.approx(0.1)  # one step, not two
