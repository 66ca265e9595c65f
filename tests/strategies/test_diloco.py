"""DiLoCo: Nesterov's form against torch, FedAvg to the bit where it is FedAvg, and an optimiser that goes on."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from quadratic import Quadratic, number, values

from nestling.config.schema import LocalConfig
from nestling.federation.local import train_by_rule
from nestling.strategies.diloco import load_optimizer_arrays, nesterov, optimizer_arrays

VECTORS = arrays(np.float32, 5, elements=st.floats(-100, 100, width=32))


def test_two_rounds_by_hand() -> None:
    """η = 0.5, μ = 0.5. Δ = 1: m = 1, w = 2 − 0.5 · 1.5 = 1.25. Then Δ = 0.25: m = 0.75, w = 1.25 − 0.5 · 0.625."""
    state, memory = nesterov(np.float32([2]), np.float32([1]), {}, lr=0.5, momentum=0.5)
    assert (state.tolist(), memory["momentum"].tolist()) == ([1.25], [1.0])
    state, memory = nesterov(state, np.float32([1]), memory, lr=0.5, momentum=0.5)
    assert (state.tolist(), memory["momentum"].tolist()) == ([0.9375], [0.75])
    assert state.dtype == np.float32
    assert memory["momentum"].dtype == np.float64


@given(st.lists(VECTORS, min_size=1, max_size=5), VECTORS, st.floats(0.1, 1.5), st.floats(0.05, 0.95))
def test_it_is_torchs_nesterov_sgd(means: list, start: np.ndarray, lr: float, momentum: float) -> None:
    w = torch.nn.Parameter(torch.from_numpy(start.astype(np.float64)))
    sgd = torch.optim.SGD([w], lr=lr, momentum=momentum, nesterov=True)
    memory: dict = {}
    for mean in means:
        before = w.detach().numpy().astype(np.float32)
        with torch.no_grad():
            w.copy_(torch.from_numpy(before.astype(np.float64)))
        w.grad = w.detach() - torch.from_numpy(mean.astype(np.float64))
        sgd.step()
        got, memory = nesterov(before, mean, memory, lr=lr, momentum=momentum)
        np.testing.assert_allclose(got, w.detach().numpy(), rtol=2e-6, atol=1e-4 * 2e-6)
        np.testing.assert_allclose(memory["momentum"], sgd.state[w]["momentum_buffer"].numpy(), rtol=1e-12, atol=1e-12)


@given(VECTORS, VECTORS, VECTORS)
def test_a_full_step_without_momentum_is_the_mean_to_the_bit(start, mean, before) -> None:
    for memory in ({}, {"momentum": before.astype(np.float64)}):
        got, _ = nesterov(start, mean + np.float32(0), memory, lr=1.0, momentum=0.0)
        assert (got + np.float32(0)).tobytes() == (mean + np.float32(0)).tobytes()


OPTIMIZERS = {
    "adamw": LocalConfig(optimizer="adamw", lr=0.05, weight_decay=0.1, decay="none", keep_optimizer=True),
    "sgd": LocalConfig(optimizer="sgd", lr=0.05, decay="none", keep_optimizer=True),
}


def train(adapter, config: LocalConfig, memory: dict, epochs: int) -> dict:
    task = Quadratic([1.0, -2.0, 0.5])
    return train_by_rule(
        adapter.frozen.model, adapter, task, config, memory, client=0, seed=0, epochs=range(epochs), of=9
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_rounds_with_the_optimiser_kept_are_one_long_one(optimizer: str) -> None:
    config = OPTIMIZERS[optimizer]
    long, short, fresh = number(3.0, -1.0), number(3.0, -1.0), number(3.0, -1.0)
    train(long, config, {}, 2)
    memory = train(short, config, {}, 1)
    train(short, config, memory, 1)
    train(fresh, config, {}, 1)
    train(fresh, config, {}, 1)
    assert values(short) == values(long)
    assert values(fresh) != values(long)  # else the state did not matter
    names = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[optimizer]
    assert set(memory) == {f"optimizer.{i}.{name}" for i in (0, 1) for name in names}
    assert {array.dtype for array in memory.values()} == {np.dtype(np.float32)}


def test_loading_keeps_the_learning_rate_and_copies_what_it_is_given() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([w], lr=0.3, momentum=0.9)
    memory = {"optimizer.0.momentum_buffer": np.float32([1, 2]), "rule.omega.0": np.zeros(1, np.float32)}
    load_optimizer_arrays(sgd, memory)
    w.grad = torch.ones(2)
    sgd.step()
    assert memory["optimizer.0.momentum_buffer"].tolist() == [1.0, 2.0]
    assert optimizer_arrays(sgd)["optimizer.0.momentum_buffer"].tolist() == pytest.approx([1.9, 2.8])
    assert sgd.param_groups[0]["lr"] == 0.3


def test_an_optimiser_that_is_not_kept_leaves_nothing() -> None:
    assert train(number(1.0), LocalConfig(optimizer="adamw"), {"optimizer.0.step": np.ones((), np.float32)}, 1) == {}
