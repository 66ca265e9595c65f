from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.codec.form import FLT_MAX, Limits, key_stream
from nestling.codec.lowrank import FACTORS, factor_size, matrix_shape, orthonormal, powersgd
from nestling.core.errors import ConfigError, WireError
from nestling.core.vectors import Layout
from nestling.models.resnet import make_resnet

KEY = bytes(range(28))
WIDE = Limits(max_abs=FLT_MAX, max_norm=float("inf"))
LAYOUT = Layout.of([("conv", (6, 2, 3)), ("bias", (6,)), ("small", (2, 2)), ("linear", (5, 7)), ("empty", (0, 4))])


def normal(layout, seed=0):
    return np.random.default_rng(seed).standard_normal(layout.size).astype(np.float32)


def sent(codec, layout, x, memory=None, key=KEY):
    body = codec.encode(layout, x, key, memory)
    assert len(body) == codec.size(layout)
    return codec.decode(layout, body, WIDE, key)


def one(rows, columns):
    return Layout.of([("weight", (rows, columns))])


def reference(M, Q, rank):
    """Algorithm 1 for one worker, by NumPy's QR: the projection of M on the span of M Q."""
    P, _ = np.linalg.qr(M @ Q.reshape(-1, rank))
    return P @ (P.T @ M)


def test_sizes_of_resnet18():
    """The paper's figures count the factors of the 20 convolutions; the norms' 9,600 numbers come on top."""
    model = make_resnet("resnet18", width=64, channels=3, classes=10, seed=0)
    layout = Layout.of((name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad)
    flat = sum(size for shape, size in zip(layout.shapes, layout.sizes, strict=True) if len(shape) == 1)
    assert flat == 9_600
    sizes = [powersgd(rank).size(layout) - 4 * flat for rank in (1, 2, 4)]
    assert sizes == [143_212, 286_424, 572_848]


def test_what_is_a_matrix():
    assert [matrix_shape(shape, 1) for shape in LAYOUT.shapes] == [(6, 6), None, None, (5, 7), None]
    assert [matrix_shape(shape, 2) for shape in LAYOUT.shapes] == [(6, 6), None, None, (5, 7), None]
    assert matrix_shape((6, 2, 3), 3) is None  # 3 · 12 = 36 numbers either way
    assert powersgd(2).size(LAYOUT) == 4 * (2 * 12 + 6 + 4 + 2 * 12)
    assert factor_size(LAYOUT, 2) == 2 * (6 + 7)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_follows_the_paper(rank):
    x = normal(LAYOUT)
    decoded = LAYOUT.unpack(sent(powersgd(rank), LAYOUT, x))
    starts = key_stream(KEY, "powersgd").signs(factor_size(LAYOUT, rank))
    at = 0
    for name, tensor in LAYOUT.unpack(x).items():
        if shape := matrix_shape(tensor.shape, rank):
            Q = starts[at : at + rank * shape[1]]
            at += Q.size
            wanted = reference(tensor.reshape(shape).astype(float), Q.astype(float), rank).reshape(tensor.shape)
            np.testing.assert_allclose(decoded[name], wanted, atol=2e-6)
        else:
            assert decoded[name].tobytes() == tensor.tobytes()


def test_by_hand():
    """M = (3, 4)ᵀ (2, 0, 0, 0, 0), any Q with Q₀ ≠ 0: P = ±(0.6, 0.8), Q = ±(10, 0, 0, 0, 0)."""
    layout = one(2, 5)
    x = np.outer([3, 4], [2, 0, 0, 0, 0]).astype(np.float32).ravel()
    body = np.frombuffer(powersgd(1).encode(layout, x, KEY, None), "<f4")
    sign = float(np.sign(body[0]))
    np.testing.assert_allclose(sign * body, [0.6, 0.8, 10, 0, 0, 0, 0], rtol=1e-6)


def test_decoded_bits_are_products_added_in_order():
    layout, rank, random = one(9, 11), 3, np.random.default_rng(4)
    sent_numbers = random.standard_normal(rank * 20).astype("<f4")
    got = powersgd(rank).decode(layout, sent_numbers.tobytes(), WIDE, KEY).reshape(9, 11)
    P, Q = sent_numbers[:27].reshape(9, 3), sent_numbers[27:].reshape(11, 3)
    for i in range(9):
        for j in range(11):
            total = 0.0
            for a in range(rank):
                total += float(P[i, a]) * float(Q[j, a])
            assert got[i, j] == np.float32(total)


@given(rank=st.integers(1, 4), seed=st.integers(0, 10**6), log_size=st.integers(-30, 30))
@settings(deadline=None, max_examples=25)
def test_exact_for_matrices_of_at_most_its_rank(rank, seed, log_size):
    random = np.random.default_rng(seed)
    own = random.integers(1, rank + 1)
    M = random.standard_normal((12, own)) @ random.standard_normal((own, 15)) * 10.0**log_size
    x = M.astype(np.float32).ravel()
    decoded = sent(powersgd(rank), one(12, 15), x)
    assert np.abs(decoded - x).max() <= 1e-4 * np.abs(x).max()


@given(rank=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_error_never_exceeds_the_vector(rank, seed):
    x = normal(LAYOUT, seed)
    assert np.linalg.norm(sent(powersgd(rank), LAYOUT, x) - x) <= np.linalg.norm(x) * (1 + 1e-6)


def test_warm_start_finds_the_best_approximation():
    """Singular values 8, 4, 2, 1, …: repeated steps on one matrix reach what the SVD leaves, the first does not."""
    random, layout, memory = np.random.default_rng(2), one(20, 30), {}
    U, V = (np.linalg.qr(random.standard_normal((n, 10)))[0] for n in (20, 30))
    x = (U * 2.0 ** np.arange(3, -7, -1) @ V.T).astype(np.float32).ravel()
    best = np.sqrt(sum(4.0**power for power in range(1, -7, -1)))
    errors = [np.linalg.norm(sent(powersgd(2), layout, x, memory, bytes([turn])) - x) for turn in range(12)]
    cold = np.linalg.norm(sent(powersgd(2), layout, x, None, bytes([11])) - x)
    assert errors[0] > 1.02 * best
    assert cold > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert memory[FACTORS].shape == (factor_size(layout, 2),)
    assert memory[FACTORS].dtype == np.float32


def test_error_feedback_brings_a_fixed_matrix_in_full():
    """Sending what is left of one matrix, round after round, leaves less each time and soon nothing."""
    layout, memory = LAYOUT, {}
    left = normal(layout, 3)
    norms = [np.linalg.norm(left)]
    for turn in range(30):
        left = left - sent(powersgd(1), layout, left, memory, bytes([turn]))
        norms.append(np.linalg.norm(left))
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(norms))
    assert norms[10] < 0.01 * norms[0]
    assert norms[-1] < 1e-5 * norms[0]


def test_the_mean_of_messages_with_feedback_is_the_matrix():
    """What is sent for the same update again and again averages to it, though each message has rank 1."""
    layout, memory = one(8, 9), {}
    x, error, total = normal(layout, 5), np.zeros(layout.size, np.float32), np.zeros(layout.size)
    for turn in range(100):
        message = sent(powersgd(1), layout, x + error, memory, bytes([turn]))
        error = x + error - message
        total += message
    assert np.linalg.norm(total / 100 - x) < 0.2 * np.linalg.norm(x)


def test_zero_is_exactly_zero_and_does_not_end_the_warm_start():
    layout, memory = one(6, 8), {}
    zeros = np.zeros(layout.size, np.float32)
    assert sent(powersgd(2), layout, zeros, memory).tobytes() == zeros.tobytes()
    x = np.outer(np.arange(1, 7), np.arange(1, 9)).astype(np.float32).ravel()
    np.testing.assert_allclose(sent(powersgd(2), layout, x, memory), x, rtol=1e-5)


@pytest.mark.parametrize("kept", [np.ones(3, np.float32), np.full(16, np.nan, np.float32)])
def test_a_memory_that_does_not_fit_is_replaced(kept):
    memory = {FACTORS: kept}
    x = normal(one(6, 8))
    assert sent(powersgd(2), one(6, 8), x, memory).tobytes() == sent(powersgd(2), one(6, 8), x).tobytes()
    assert memory[FACTORS].shape == (16,)
    assert np.isfinite(memory[FACTORS]).all()


@given(seed=st.integers(0, 10**6), rank=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_orthonormal_columns_span_the_same(seed, rank):
    matrix = np.random.default_rng(seed).standard_normal((9, rank)) * 10.0 ** np.arange(rank)
    P = orthonormal(matrix)
    assert np.abs(P.T @ P - np.eye(rank)).max() < 1e-12
    assert np.abs(P @ (P.T @ matrix) - matrix).max() < 1e-9 * np.abs(matrix).max()


def test_a_dependent_column_becomes_zero():
    columns = np.array([[1.0, 2, 0], [1, 2, 1], [1, 2, 0]])
    assert orthonormal(columns)[:, 1].tolist() == [0, 0, 0]
    assert np.linalg.matrix_rank(orthonormal(columns)) == 2


def test_factors_too_large_are_refused():
    with pytest.raises(WireError, match="overflow"):
        powersgd(1).encode(one(6, 8), np.full(48, FLT_MAX, np.float32), KEY, None)


@pytest.mark.parametrize("rank", [0, -1, 1025, True])
def test_rank_is_checked(rank):
    with pytest.raises(ConfigError, match="rank"):
        powersgd(rank)


def test_tensors_without_numbers():
    layout = Layout.of([("none", (0, 3)), ("scalar", ())])
    assert sent(powersgd(1), layout, np.array([2.5], np.float32)).tolist() == [2.5]
