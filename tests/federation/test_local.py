"""Local training is plain: so many passes, a fresh optimiser, and no number sent where there is none."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestling.adapters.base import attach
from nestling.adapters.full import FullAdapter
from nestling.config.schema import FullConfig, LocalConfig
from nestling.federation.local import Declined, make_optimizer, train_local


class Sum:
    """Loss of a model that is one number w: batch · w. Its gradient is the batch, so each step can be worked out."""

    def __init__(self, batches: list[float], losses: list[float] | None = None) -> None:
        self._batches, self._losses, self.epochs = batches, losses, []

    def examples(self, client: int | None) -> int:
        return 5

    def batches(self, client: int | None, *, size: int, seed: int, epoch: int) -> Iterator[float]:
        self.epochs.append((client, size, seed, epoch))
        yield from self._batches

    def loss(self, model: nn.Module, batch: float) -> Tensor:
        factor = 1.0 if self._losses is None else self._losses.pop(0)
        return model.weight.sum() * batch * factor


def train(task: Sum, config: LocalConfig, *, epochs: range = range(1), of: int = 1) -> tuple[float, float]:
    """(mean loss of the last epoch, w afterwards), from w = 1."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.eval()
    adapter = attach(model, FullConfig())
    loss = train_local(model, adapter, task, config, client=4, seed=9, epochs=epochs, of=of)
    assert model.training
    return loss, float(adapter.vector()[0])


def test_sgd_takes_the_steps_worked_out_by_hand() -> None:
    config = LocalConfig(optimizer="sgd", lr=0.1, momentum=0.0)
    loss, w = train(Sum([1.0, 2.0]), config)
    assert w == pytest.approx(1 - 0.1 * 1 - 0.1 * 2)
    assert loss == pytest.approx((1.0 + 2 * 0.9) / 2)


def test_sgd_has_the_momentum_and_decay_it_is_given() -> None:
    _, w = train(Sum([1.0, 1.0]), LocalConfig(optimizer="sgd", lr=0.1, momentum=0.5))
    assert w == pytest.approx(1 - 0.1 - 0.15)
    _, w = train(Sum([0.0]), LocalConfig(optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.5))
    assert w == pytest.approx(0.95)


def test_adamw_begins_with_a_step_of_the_learning_rate() -> None:
    _, w = train(Sum([37.0]), LocalConfig(optimizer="adamw", lr=0.1))
    assert w == pytest.approx(0.9, abs=1e-6)
    _, w = train(Sum([37.0]), LocalConfig(optimizer="adamw", lr=0.1, weight_decay=0.5))
    assert w == pytest.approx(0.95 - 0.1, abs=1e-6)


def test_each_epoch_of_the_run_is_shuffled_under_its_own_number_and_the_last_loss_is_told() -> None:
    task = Sum([1.0])
    config = LocalConfig(optimizer="sgd", lr=0.25, momentum=0.0, batch_size=7, decay="none")
    loss, w = train(task, config, epochs=range(5, 8), of=9)
    assert task.epochs == [(4, 7, 9, 5), (4, 7, 9, 6), (4, 7, 9, 7)]
    assert w == pytest.approx(0.25)
    assert loss == pytest.approx(0.5)


def test_a_linear_decay_falls_over_the_whole_run_and_not_over_one_round() -> None:
    config = LocalConfig(optimizer="sgd", lr=0.1, momentum=0.0, decay="linear")
    for epoch in range(4):
        _, w = train(Sum([1.0]), config, epochs=range(epoch, epoch + 1), of=4)
        assert w == pytest.approx(1 - 0.1 * (1 - epoch / 4))
    _, w = train(Sum([1.0]), config, epochs=range(4), of=4)
    assert w == pytest.approx(1 - 0.1 * (1 + 0.75 + 0.5 + 0.25))
    _, w = train(Sum([1.0]), config, epochs=range(9, 10), of=4)  # a round beyond the last moves nothing
    assert w == 1.0


def test_an_optimiser_starts_afresh_each_time() -> None:
    adapter = attach(nn.Linear(1, 1, bias=False), FullConfig())
    for config in (LocalConfig(optimizer="sgd"), LocalConfig(optimizer="adamw")):
        optimizer = make_optimizer(adapter, config)
        assert not optimizer.state
        assert [group["lr"] for group in optimizer.param_groups] == [config.lr]


# Gates, warm-up and clipping.


class Pair(nn.Module):
    """Two numbers, both 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))


class Gated(FullAdapter):
    """Trains both; the second is a gate."""

    def gates(self) -> list[nn.Parameter]:
        return [self.frozen.model.gate]


class Both(Sum):
    """Loss of both numbers: batch · (weight + gate)."""

    def loss(self, model: nn.Module, batch: float) -> Tensor:
        return (model.weight + model.gate).sum() * batch


def train_gated(batches: list[float], **settings: float) -> tuple[float, float]:
    """(weight, gate) afterwards, both from 1, by plain gradient descent."""
    model = Pair()
    adapter = Gated(model, FullConfig())
    config = LocalConfig(optimizer="sgd", momentum=0.0, **settings)
    train_local(model, adapter, Both(batches), config, client=0, seed=0, epochs=range(1), of=1)
    return model.weight.item(), model.gate.item()


def test_gates_have_a_learning_rate_of_their_own_and_no_decay() -> None:
    assert train_gated([1.0], lr=0.1, gate_lr=0.3) == pytest.approx((0.9, 0.7))
    assert train_gated([1.0], lr=0.1) == pytest.approx((0.9, 0.9))
    assert train_gated([0.0], lr=0.1, gate_lr=0.3, weight_decay=0.5) == pytest.approx((0.95, 1.0))


def test_the_rate_of_gates_decays_as_the_other_does() -> None:
    model = Pair()
    adapter = Gated(model, FullConfig())
    config = LocalConfig(optimizer="sgd", momentum=0.0, lr=0.1, gate_lr=0.4)
    train_local(model, adapter, Both([1.0]), config, client=0, seed=0, epochs=range(1, 2), of=4)
    assert (model.weight.item(), model.gate.item()) == pytest.approx((1 - 0.075, 1 - 0.3))


def test_the_first_steps_are_smaller_with_a_warm_up() -> None:
    weight, _ = train_gated([1.0] * 5, lr=0.1, warmup=3)
    assert weight == pytest.approx(1 - 0.1 * (1 / 4 + 2 / 4 + 3 / 4 + 1 + 1))


def test_a_gradient_is_clipped_as_a_whole() -> None:
    w, g = train_gated([30.0], lr=0.1, clip=1.0)
    assert (w, g) == pytest.approx((1 - 0.1 / 2**0.5, 1 - 0.1 / 2**0.5), abs=1e-5)
    assert train_gated([0.5], lr=0.1, clip=1.0) == pytest.approx((0.95, 0.95))  # short enough already


def test_cat_045_training_stops_at_the_step_where_the_loss_is_no_number() -> None:
    task = Sum([1.0] * 4, losses=[1.0, 1.0, np.nan, 1.0])
    with pytest.raises(Declined) as caught:
        train(task, LocalConfig(optimizer="sgd", lr=0.1))
    assert caught.value.code == "loss_not_finite"
    assert len(task._losses) == 1  # the fourth batch was not touched


def test_cat_040_no_items_is_no_training() -> None:
    task = Sum([1.0])
    task.examples = lambda client: 0
    with pytest.raises(Declined) as caught:
        train(task, LocalConfig())
    assert caught.value.code == "no_data"
    assert task.epochs == []


def test_cat_043_items_that_make_no_batch_are_no_weight_without_a_step() -> None:
    with pytest.raises(Declined) as caught:
        train(Sum([]), LocalConfig())
    assert caught.value.code == "no_data"
