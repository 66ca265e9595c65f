import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nestling.codec.form import FLT_MAX, Limits
from nestling.codec.positions import size_of
from nestling.codec.sparsify import drawn, kept, largest, randomk, topk
from nestling.core.errors import ConfigError, WireError
from nestling.core.seeds import Stream
from nestling.core.vectors import Layout

KEY = bytes(range(28))
WIDE = Limits(max_abs=FLT_MAX, max_norm=float("inf"))
SHARES = st.sampled_from([0.0001, 0.01, 0.1, 1 / 4, 0.5, 0.75, 1.0])
VECTORS = st.integers(0, 120).flatmap(
    lambda n: hnp.arrays(np.float32, n, elements=st.floats(-FLT_MAX, FLT_MAX, width=32))
)


def flat(n):
    return Layout.of([("a", (n,))])


def sent(codec, x, key=KEY):
    layout = flat(x.size)
    body = codec.encode(layout, x, key, None)
    assert len(body) == codec.size(layout)
    return codec.decode(layout, body, WIDE, key)


def test_sizes():
    """A tenth of a per mille of ResNet-18's convolutions: the paper's 8.9 KB with plain positions, 6.6 KB here."""
    layout = flat(11_159_232)
    assert kept(0.0001, layout.size) * 8 == 8_928
    assert topk(0.0001).size(layout) == 1_116 * 4 + size_of(layout.size, 1_116) == 6_588
    assert randomk(0.0001).size(layout) == 4_464
    assert topk(0.01).size(flat(1280)) == 13 * 4 + 14
    assert topk(0.01).size(flat(0)) == randomk(0.01).size(flat(0)) == 0


@given(x=VECTORS, share=SHARES)
@example(x=np.array([1, -1, 1, 0, 1], np.float32), share=0.5)
@example(x=np.array([-0.0, 0.0], np.float32), share=1.0)
@settings(deadline=None, max_examples=40)
def test_topk_keeps_what_sorting_keeps(x, share):
    """The definition: sort by falling size, then by place; what is kept is kept to the bit and the rest is 0."""
    order = sorted(range(x.size), key=lambda i: (-abs(float(x[i])), i))
    best = sorted(order[: kept(share, x.size)])
    assert largest(x, len(best)).tolist() == best
    wanted = np.zeros_like(x)
    wanted[best] = x[best]
    decoded = sent(topk(share), x)
    assert decoded.tobytes() == wanted.tobytes()
    residual = x - decoded
    assert not residual[best].any()
    assert not best or np.abs(residual).max() <= np.abs(x[best]).min()


def test_topk_by_hand():
    x = np.array([0, 3, 1, 0, -5, 0, 2, 1], np.float32)
    body = topk(0.25).encode(flat(8), x, KEY, None)
    assert body == bytes([0b0001101]) + np.array([3, -5], "<f4").tobytes()  # high parts 0 1: 101, low parts 10 00


def test_topk_refuses_positions_that_do_not_follow_the_format():
    body = topk(0.25).encode(flat(8), np.arange(8, dtype=np.float32), KEY, None)
    with pytest.raises(WireError, match="positions"):
        topk(0.25).decode(flat(8), b"\x00" + body[1:], WIDE, KEY)


def reference_draw(stream, n, k):
    """One value after the other until k differ; the left-out ones if they are fewer."""
    if 2 * k > n:
        return sorted(set(range(n)) - set(reference_draw(stream, n, n - k)))
    found, count = [], 0
    while len(found) < k:
        count += 1
        value = int(stream.integers(count, n)[-1])
        found += [value] if value not in found else []
    return sorted(found)


@given(n=st.integers(0, 60), data=st.data())
@settings(deadline=None, max_examples=40)
def test_draws_follow_their_definition(n, data):
    k = data.draw(st.integers(0, n))
    stream = Stream(data.draw(st.integers(0, 99)), "randomk", "a")
    positions = drawn(stream, n, k)
    assert positions.tolist() == reference_draw(stream, n, k)
    assert len(set(positions.tolist())) == k
    assert positions.dtype == np.int64


def test_all_positions_are_equally_likely():
    counts = np.zeros(10)
    for seed in range(600):
        counts[drawn(Stream(seed, "randomk", "a"), 10, 3)] += 1
    assert np.abs(counts / 180 - 1).max() < 0.32  # five standard deviations


@given(x=VECTORS, share=SHARES)
@settings(deadline=None, max_examples=40)
def test_randomk_keeps_numbers_unscaled(x, share):
    decoded = sent(randomk(share), x)
    same = decoded == x
    assert np.count_nonzero(same) >= kept(share, x.size)
    assert not decoded[~same].any()
    assert sent(randomk(share), x).tobytes() == decoded.tobytes()


def test_randomk_draws_anew_with_each_key_and_feedback_brings_every_number():
    x, error, total = np.ones(50, np.float32), np.zeros(50, np.float32), np.zeros(50)
    for turn in range(100):
        message = sent(randomk(0.1), x + error, bytes([turn]))
        error = x + error - message
        total += message
    assert np.abs(total + error - 100).max() < 1e-3
    assert error.max() < 90  # the mean wait is ten rounds


def test_long_draws_are_quick():
    positions = drawn(Stream(0, "randomk", "a"), 11_000_000, 110_000)
    assert positions.size == 110_000
    assert (np.diff(positions) > 0).all()


@pytest.mark.parametrize("share", [0.0, -0.1, 1.0001, float("nan"), float("inf"), 1 / 3])
@pytest.mark.parametrize("make", [topk, randomk])
def test_shares_are_checked(make, share):
    with pytest.raises(ConfigError, match="share"):
        make(share)


def test_names_and_numbers():
    assert (topk(0.0001).name, topk(0.0001).id) == ("topk@0.0001", 11)
    assert (randomk(1.0).name, randomk(1.0).id) == ("randomk@1", 12)
