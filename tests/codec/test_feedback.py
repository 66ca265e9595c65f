import numpy as np
import pytest

from nestling.codec.codecs import CODECS, Limits, decode_body, encode_body
from nestling.codec.feedback import compensated, keep_error
from nestling.codec.form import FLT_MAX
from nestling.core.errors import ContextError
from nestling.core.vectors import Layout

LAYOUT = Layout.of([("w", (20, 6)), ("empty", (0,)), ("b", (17,))])
WIDE = Limits(max_abs=FLT_MAX, max_norm=float("inf"))
EVERY = [*CODECS, "topk@0.1", "randomk@0.1", "powersgd@1"]


def rounds_of(codec, vectors, *, stochastic=False):
    """What arrives of each vector under error feedback, and the memory in the end."""
    memory, arrived = {}, []
    for number, vector in enumerate(vectors):
        key = number.to_bytes(28, "little")
        sent = compensated(vector, memory)
        body = encode_body(codec, LAYOUT, sent, key=key, memory=memory, stochastic=stochastic)
        arrived.append(decode_body(codec, LAYOUT, body, WIDE, key=key))
        keep_error(sent, arrived[-1], memory)
    return np.array(arrived, np.float64), memory


def vectors_of(count, seed=0):
    random = np.random.default_rng(seed)
    return (random.standard_normal((count, LAYOUT.size)) + random.standard_normal(LAYOUT.size)).astype(np.float32)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("codec", EVERY)
def test_what_arrived_and_what_is_kept_are_all_there_was(codec, stochastic):
    if stochastic and not codec.startswith("int"):
        pytest.skip("only integers round stochastically")
    vectors = vectors_of(25)
    arrived, memory = rounds_of(codec, vectors, stochastic=stochastic)
    total = vectors.astype(np.float64).sum(0)
    # Two float32 roundings a round, of numbers that are as large as what was summed and kept.
    largest = np.abs(arrived).max() + np.abs(memory["error"]).max() + np.abs(vectors).max()
    np.testing.assert_allclose(arrived.sum(0) + memory["error"], total, rtol=0, atol=2 * 25 * largest * 2**-24)
    if codec == "float32":
        assert not memory["error"].any()


@pytest.mark.parametrize("codec", [name for name in EVERY if name != "float32"])
def test_the_error_kept_stays_bounded(codec):
    """Karimireddy et al., lemma 3: ‖e‖² ≤ 4 (1 − δ) / δ² max‖v‖², so four times as many rounds keep no larger error."""
    sizes = [np.linalg.norm(rounds_of(codec, vectors_of(count, 1))[1]["error"]) for count in (40, 160)]
    assert sizes[1] < 1.7 * sizes[0] + 1e-3


def test_without_feedback_two_bits_lose_small_numbers_for_good():
    """The property that feedback is for: numbers below half a step never arrive alone, and do with it."""
    vector = np.full(LAYOUT.size, 0.1, np.float32)
    vector[0] = 1.0
    alone = decode_body("int2-tensor", LAYOUT, encode_body("int2-tensor", LAYOUT, vector), WIDE)
    assert not alone[1:120].any()
    arrived, _ = rounds_of("int2-tensor", np.repeat(vector[None], 200, 0))
    np.testing.assert_allclose(arrived.mean(0), vector, atol=0.02)


def test_a_memory_of_another_vector_is_refused():
    vector = np.zeros(3, np.float32)
    assert compensated(vector, {}) is vector
    for error in (np.zeros(4, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)):
        with pytest.raises(ContextError, match="error feedback"):
            compensated(vector, {"error": error})
