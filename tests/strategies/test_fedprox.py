"""The pull is the gradient of the squared penalty, and a client trained with it stops where that gradient says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quadratic import Quadratic, number, value

from nestling.config.schema import LocalConfig
from nestling.federation.local import train_by_rule
from nestling.strategies.fedprox import add_pull

NUMBERS = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


@given(NUMBERS, NUMBERS, st.floats(0, 4))
def test_the_pull_is_the_gradient_of_half_mu_times_the_squared_distance(at: list, start: list, mu: float) -> None:
    w = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor(start, dtype=torch.float64)
    (torch.sin(w).sum() + mu / 2 * ((w - anchor) ** 2).sum()).backward()
    wanted = w.grad
    w.grad = None
    torch.sin(w).sum().backward()
    add_pull([w], [anchor], [mu])
    torch.testing.assert_close(w.grad, wanted, rtol=1e-12, atol=1e-12)


def test_a_strength_for_every_number_and_parameters_that_the_loss_does_not_reach() -> None:
    w, idle = torch.tensor([3.0, 3.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    w.grad = torch.tensor([1.0, 1.0])
    add_pull([w, idle], [torch.ones(2), torch.ones(1)], [torch.tensor([0.0, 2.0]), 0.5])
    assert w.grad.tolist() == [1.0, 5.0]
    assert idle.grad.tolist() == [0.5]


def test_two_steps_worked_out_by_hand() -> None:
    """From w = 1 with L = (w − 3)²/2 and μ = 0.5, η = 0.1: gradients are −2 + 0 and −1.8 + 0.5 · 0.2."""
    adapter = number(1.0)
    config = LocalConfig(optimizer="sgd", lr=0.1, momentum=0.0, decay="none", rule="prox", mu=0.5)
    task = Quadratic([3.0, 3.0])
    train_by_rule(adapter.frozen.model, adapter, task, config, {}, client=0, seed=0, epochs=range(1), of=1)
    assert value(adapter) == pytest.approx(1 + 0.1 * 2 + 0.1 * (1.8 - 0.1), abs=1e-6)


def test_trained_for_long_it_ends_between_the_optimum_and_the_start() -> None:
    """argmin (w − 3)²/2 + (μ/2)(w − 1)² = (3 + μ)/(1 + μ): at μ = 1 the middle. Twice or half the pull is elsewhere."""
    adapter = number(1.0)
    config = LocalConfig(optimizer="sgd", lr=0.2, momentum=0.0, decay="none", rule="prox", mu=1.0)
    task = Quadratic([3.0] * 100)
    train_by_rule(adapter.frozen.model, adapter, task, config, {}, client=0, seed=0, epochs=range(1), of=1)
    assert value(adapter) == pytest.approx(2.0, abs=1e-5)
    assert np.isfinite(value(adapter))
