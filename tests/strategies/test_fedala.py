"""FedALA: the blend, the steps of its weights by hand, their bounds, what is blended, and when learning ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from quadratic import Quadratic, number, values

from nestling.config.schema import LocalConfig
from nestling.core.vectors import Layout
from nestling.federation.local import shared_gradient, train_by_rule
from nestling.strategies import fedala

FLOATS = st.floats(-8, 8, width=32)
VECTORS = arrays(np.float32, 4, elements=FLOATS)


@given(VECTORS, VECTORS, arrays(np.float32, 4, elements=st.floats(0, 1, width=32)))
def test_the_blend_is_the_papers(start: np.ndarray, own: np.ndarray, weights: np.ndarray) -> None:
    got = fedala.blend(start, {"rule.local": own, "rule.weights": weights})
    np.testing.assert_allclose(got, own.astype(float) + (start.astype(float) - own) * weights, rtol=0, atol=4e-6)
    ones = np.ones(4, np.float32)
    assert fedala.blend(start, {"rule.local": own, "rule.weights": ones}).tobytes() == start.tobytes()


def slope_of(centres: list[float]):
    """Loss and gradient of Σ (ŵ − c)²/2."""
    wanted = np.float32(centres)
    return lambda state, batch: (float(((state - wanted) ** 2).sum() / 2), state - wanted)


def learn(start: list, own: list, centres: list, *, weights: list | None = None, top: slice = slice(None), rate=1.0):
    memory = {"rule.local": np.float32(own)}
    memory |= {} if weights is None else {"rule.weights": np.float32(weights)}
    return fedala.learn_weights(
        np.float32(start), memory, lambda: [None], slope_of(centres), top=top, rate=rate
    ).tolist()


def test_one_pass_worked_out_by_hand_and_clipped() -> None:
    """global − local = (0.5, −2, 1); ŵ = local + that · W; W ← W − ∇L · that, cut to 0 … 1.

    1: ŵ = 0.25, ∇ = 0.25 − 0.125: W = 0.5 − 0.125 · 0.5. 2: ŵ = −1, ∇ = −1 − 3 = −4: W = 0.5 − 8 → 0.
    3: ŵ = 0.5, ∇ = 0.5 − 2 = −1.5: W = 0.5 + 1.5 → 1.
    """
    assert learn([0.5, -2, 1], [0, 0, 0], [0.125, 3, 2], weights=[0.5] * 3) == [0.4375, 0.0, 1.0]
    assert learn([0.5, -2, 1], [0, 0, 0], [0.125, 3, 2], weights=[0.5] * 3, rate=0.0) == [0.5] * 3


def test_only_the_top_is_blended() -> None:
    assert learn([1, 1], [0, 0], [0, 0], weights=[1, 1], top=slice(1, 2)) == [1.0, 0.0]
    layout = Layout.of([("a", (2, 2)), ("b", (3,)), ("c", (1,))])
    assert [fedala.top_part(layout, p) for p in (1, 2, 3, 9, 0)] == [
        slice(7, 8), slice(4, 8), slice(0, 8), slice(0, 8), slice(0, 8),
    ]  # fmt: skip


@given(VECTORS, VECTORS, VECTORS, st.floats(0, 100))
def test_weights_stay_in_bounds_whatever_the_gradients(start, own, centres, rate: float) -> None:
    weights = np.array(learn(list(start), list(own), list(centres), rate=rate))
    assert ((weights >= 0) & (weights <= 1)).all()


def test_the_first_use_goes_on_until_losses_settle_and_later_ones_take_a_pass() -> None:
    losses: list[float] = []

    def learnt(given: list[float], memory: dict) -> int:
        losses[:] = given
        fedala.learn_weights(
            np.ones(1, np.float32), memory, lambda: [None],
            lambda state, batch: (losses.pop(0), np.zeros(1, np.float32)), top=slice(0, 1), rate=1.0,
        )  # fmt: skip
        return len(given) - len(losses)

    first = {"rule.local": np.zeros(1, np.float32)}
    assert learnt([1.0] * 99, first) == 10
    assert learnt([5.0, 4.0] + [1.0] * 99, first) == 12
    assert learnt([0.0, 9.0] * 99, first) == fedala.MOST_PASSES
    assert learnt([0.0, 9.0] * 99, first | {"rule.weights": np.ones(1, np.float32)}) == 1


def test_a_loss_that_is_no_number_leaves_the_weights_finite() -> None:
    def slope(state, batch):
        return float("nan"), np.full(1, np.nan, np.float32)

    memory = {"rule.local": np.zeros(1, np.float32), "rule.weights": np.full(1, 0.5, np.float32)}
    got = fedala.learn_weights(np.ones(1, np.float32), memory, lambda: [None], slope, top=slice(0, 1), rate=1.0)
    assert got.tolist() == [0.5]


def test_a_gradient_is_read_in_the_order_of_the_vector_and_leaves_no_trace() -> None:
    adapter = number(1.0, 2.0, 4.0)
    Quadratic([1.0]).loss(adapter.frozen.model, 1.0).backward()
    assert shared_gradient(adapter).tolist() == [0.0, 1.0, 3.0]
    assert values(adapter) == [1.0, 2.0, 4.0]
    adapter.trainable()[1].grad = None
    assert shared_gradient(adapter).tolist() == [0.0, 0.0, 3.0]


def test_two_rounds_of_a_client() -> None:
    """Loss (w − 2)²/2 each. Second round, global 0, own 1 for both numbers; only the last one is blended: the own value
    is nearer to 2, so W of it falls from 1 to 0, and training begins there."""
    config = LocalConfig(optimizer="sgd", lr=0.25, momentum=0.0, decay="none", rule="ala", batch_size=1)
    adapter, task = number(0.0, 0.0), Quadratic([2.0])

    def round(memory: dict) -> dict:
        return train_by_rule(
            adapter.frozen.model, adapter, task, config, memory, client=0, seed=0, epochs=range(1), of=1
        )

    first = round({})
    assert {name: array.tolist() for name, array in first.items()} == {"rule.local": [0.5, 0.5]}
    adapter.load_vector(np.zeros(2, np.float32))
    memory = {"rule.local": np.ones(2, np.float32)}
    second = round(memory)
    assert second["rule.weights"].tolist() == [1.0, 0.0]
    assert second["rule.local"].tolist() == [0.5, 1.25]
    assert list(memory) == ["rule.local"]


def test_the_share_of_batches_that_the_blend_learns_on() -> None:
    seen = []

    class Counted(Quadratic):
        def loss(self, model, batch):
            seen.append(batch)
            return super().loss(model, batch)

    adapter = number(0.0)
    memory = {"rule.local": np.zeros(1, np.float32), "rule.weights": np.ones(1, np.float32)}
    config = LocalConfig(optimizer="sgd", rule="ala", ala_share=0.5, batch_size=1)
    task = Counted([1.0, 2.0, 3.0, 4.0, 5.0])
    train_by_rule(adapter.frozen.model, adapter, task, config, memory, client=0, seed=0, epochs=range(1), of=1)
    assert seen == [1.0, 2.0, 3.0, *task.centres]
    assert pytest.approx(0) == memory["rule.local"][0]
