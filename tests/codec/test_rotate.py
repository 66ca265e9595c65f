import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nestling.codec.form import FLT_MAX, Limits, key_stream
from nestling.codec.rotate import LEVELS, rotated, runs, transform
from nestling.core.errors import WireError
from nestling.core.vectors import Layout

KEY = bytes(range(28))
WIDE = Limits(max_abs=FLT_MAX, max_norm=float("inf"))
BITS = (4, 2, 1)
CODECS = {bits: rotated(f"rotated{bits}", number, bits) for bits, number in ((4, 8), (2, 9), (1, 10))}


def flat(n):
    return Layout.of([("a", (n,))])


def normal(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def sent(bits, x, key=KEY):
    codec, layout = CODECS[bits], flat(x.size)
    return codec.decode(layout, codec.encode(layout, x, key, None), WIDE, key)


def refused(bits, n, body, limits=WIDE):
    with pytest.raises(WireError) as caught:
        CODECS[bits].decode(flat(n), body, limits, KEY)
    return caught.value.code


@cache
def hadamard(size):
    """Sylvester's matrix: the sign of entry i, j is the parity of the bits that i and j share."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def rotation(n, key):
    """The whole rotation as one matrix: each block's H D / √d, one after the other."""
    signs = key_stream(key, "rotate").signs(4 * n + 4096).tolist()
    whole = np.eye(n)
    for start, size, count in runs(n):
        for index in range(count):
            own = slice(start + index * size, start + (index + 1) * size)
            drawn, signs = np.diag(signs[:size]), signs[size:]
            whole[own] = hadamard(size) @ drawn @ whole[own] / math.sqrt(size)
    return whole


def owners(n):
    """For each number the block whose scale it has: the last one that covers it."""
    owner, block = [0] * n, 0
    for start, size, count in runs(n):
        for index in range(count):
            owner[start + index * size : start + (index + 1) * size] = [block] * size
            block += 1
    return np.array(owner, int), block


def reference_decode(bits, n, body, key):
    """The definition: one number at a time, then a matrix."""
    owner, blocks = owners(n)
    half = LEVELS[bits]
    levels = [-level / 4096 for level in reversed(half)] + [level / 4096 for level in half]
    scales = np.frombuffer(body[: 4 * blocks], "<f4").astype(float)
    packed = int.from_bytes(body[4 * blocks :], "little")
    z = [scales[owner[i]] * levels[packed >> i * bits & 2**bits - 1] for i in range(n)]
    return rotation(n, key).T @ np.array(z)


@pytest.mark.parametrize(("bits", "size"), [(4, 648), (2, 328), (1, 168)])
def test_sizes_of_1280_numbers(bits, size):
    twenty = Layout.of((f"conv{index}", (64,)) for index in range(20))
    assert CODECS[bits].size(twenty) == len(CODECS[bits].encode(twenty, normal(1280), KEY, None)) == size


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_those_of_lloyd_and_max(bits):
    """Each level is the mean of a standard normal between the midpoints to its neighbours, in units of 2^−12."""

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    count = 2 ** (bits - 1)
    levels = [3 * (i + 0.5) / count for i in range(count)]
    for _ in range(1000):
        edges = [0.0] + [(a + b) / 2 for a, b in pairwise(levels)] + [40.0]
        masses = [(math.erf(b / 2**0.5) - math.erf(a / 2**0.5)) / 2 for a, b in pairwise(edges)]
        levels = [(density(a) - density(b)) / m for (a, b), m in zip(pairwise(edges), masses, strict=True)]
    assert [round(4096 * level) for level in levels] == list(LEVELS[bits])


def test_blocks_by_hand():
    assert runs(0) == []
    assert runs(3) == [(0, 1, 3)]
    assert runs(72) == [(0, 64, 1), (8, 64, 1)]
    assert runs(1280) == [(0, 1024, 1), (1024, 256, 1)]
    assert runs(1283) == [(0, 1024, 1), (1024, 256, 1), (1027, 256, 1)]
    assert runs(3 * 4096 + 512) == [(0, 4096, 3), (12288, 256, 2)]


@given(st.integers(0, 70_000))
def test_blocks_cover_every_number_and_cost_little(n):
    covered = sum(size * count for _, size, count in runs(n))
    blocks = sum(count for _, _, count in runs(n))
    assert covered - n < (256 if n >= 256 else 64)
    assert blocks <= max(4, -(-n // 256))
    assert blocks <= n // 4096 + 7
    if n:
        assert (np.bincount(owners(n)[0], minlength=blocks) > 0).all()


@pytest.mark.parametrize("size", [1, 2, 4, 64, 256])
def test_transform_is_hadamards(size):
    rows = np.random.default_rng(size).integers(-9, 9, (5, size)).astype(float)
    assert transform(rows).tolist() == (rows @ hadamard(size)).tolist()


@pytest.mark.parametrize("n", [1, 3, 5, 72, 256, 300, 511])
def test_the_rotation_is_orthogonal(n):
    R = rotation(n, KEY)
    assert np.abs(R @ R.T - np.eye(n)).max() < 1e-12


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 2, 7, 72, 255, 257, 300, 511, 600])
def test_decoder_follows_its_definition(bits, n):
    codec = CODECS[bits]
    body = codec.encode(flat(n), normal(n, n), KEY, None)
    wanted = reference_decode(bits, n, body, KEY)
    got = codec.decode(flat(n), body, WIDE, KEY)
    assert got.dtype == np.float32
    assert np.abs(got - wanted).max() <= 1e-7 * np.abs(wanted).max()


@pytest.mark.parametrize("bits", BITS)
def test_sums_of_one_scale_are_exact(bits):
    """With one scale a block the decoded bits are those of integers, in any order of additions."""
    codec, n = CODECS[bits], 1280
    body = bytearray(np.random.default_rng(1).bytes(codec.size(flat(n))))
    scales = np.array([0.1, 123.456], "<f4")
    body[:8] = scales.tobytes()
    codes = int.from_bytes(body[8:], "little")
    levels = [-level for level in reversed(LEVELS[bits])] + list(LEVELS[bits])
    whole = [levels[codes >> i * bits & 2**bits - 1] for i in range(n)]
    signs = key_stream(KEY, "rotate").signs(n).astype(int)
    for scale, first, size in zip(scales, (0, 1024), (1024, 256), strict=True):
        integers = hadamard(size).astype(int) @ np.array(whole[first : first + size]) * signs[first : first + size]
        wanted = [np.float32(float(scale) * int(i) * 2.0**-12 / math.isqrt(size)) for i in integers]
        got = codec.decode(flat(n), bytes(body), WIDE, KEY)[first : first + size]
        assert got.tobytes() == np.array(wanted, np.float32).tobytes()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [9, 300, 600])
def test_encoder_chooses_the_nearest_level_and_the_least_squares_scale(bits, n):
    x = normal(n, 3) * np.linspace(1, 9, n).astype(np.float32)
    body = CODECS[bits].encode(flat(n), x, KEY, None)
    owner, blocks = owners(n)
    z = rotation(n, KEY) @ x.astype(float)
    half = np.array(LEVELS[bits]) / 4096
    levels = np.concatenate((-half[::-1], half))
    packed = int.from_bytes(body[4 * blocks :], "little")
    codes = np.array([packed >> i * bits & 2**bits - 1 for i in range(n)])
    for block, scale in enumerate(np.frombuffer(body[: 4 * blocks], "<f4")):
        own, chosen = z[owner == block], levels[codes[owner == block]]
        unit = own / math.sqrt(np.mean(own**2))
        assert (np.abs(unit - chosen) <= np.abs(unit[:, None] - levels).min(axis=1) + 1e-9).all()
        assert scale == pytest.approx(chosen @ own / (chosen @ chosen), rel=1e-6)


def test_two_bits_by_hand():
    """Blocks of one number: no more than a sign; x / rms = ±1 is nearest to level 1.51, whose scale makes it exact."""
    x = np.array([3.0, -0.5], np.float32)
    signs = key_stream(KEY, "rotate").signs(2)
    body = CODECS[2].encode(flat(2), x, KEY, None)
    scales = np.frombuffer(body[:8], "<f4")
    assert scales.tolist() == [np.float32(3.0 / (6187 / 4096)), np.float32(0.5 / (6187 / 4096))]
    codes = [3 if value > 0 else 0 for value in signs * x]
    assert body[8] == codes[0] | codes[1] << 2
    np.testing.assert_allclose(sent(2, x), x, rtol=1e-7)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.0095), (2, 0.1175), (1, 0.3634)])
@pytest.mark.parametrize("spread", [1, 10])
def test_error_is_that_of_a_normal_whatever_the_layers_scales(bits, error, spread):
    errors = []
    for seed in range(25):
        scales = spread ** np.random.default_rng(seed).random(20)
        x = normal(1280, seed) * np.repeat(scales, 64).astype(np.float32)
        left = (sent(bits, x, bytes([seed])) - x).astype(float)
        errors.append(left @ left / (x.astype(float) @ x))
    assert np.mean(errors) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("bits", BITS)
@given(
    x=st.integers(0, 700).flatmap(
        lambda n: hnp.arrays(np.float32, n, elements=st.floats(-(2.0**99), 2.0**99, width=32), fill=st.just(0.0))
    )
)
@example(x=np.zeros(0, np.float32))
@example(x=np.ones(256, np.float32))
@example(x=np.eye(1, 5000, 17, dtype=np.float32)[0])
@settings(deadline=None, max_examples=25)
def test_error_never_exceeds_the_vector(bits, x):
    """x̂ is the projection on the levels chosen, so ‖x − x̂‖ ≤ ‖x‖ and ‖x̂‖ ≤ ‖x‖."""
    decoded = sent(bits, x).astype(float)
    norm = np.linalg.norm(x.astype(float))
    slack = 1e-6 * norm + 1e-36
    assert decoded.shape == x.shape
    assert np.linalg.norm(decoded - x) <= norm + slack
    assert np.linalg.norm(decoded) <= norm + slack


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 63, 300, 1280, 9000])
def test_all_zero_is_exactly_zero(bits, n):
    zeros = np.zeros(n, np.float32)
    assert sent(bits, zeros).tobytes() == zeros.tobytes()
    assert not any(CODECS[bits].encode(flat(n), -zeros, KEY, None))


def test_a_block_of_zeros_beside_another():
    x = normal(1280)
    x[:1024] = 0.0
    assert sent(4, x)[:1024].tobytes() == bytes(4096)
    assert np.abs(sent(4, x)[1024:] - x[1024:]).max() < 0.6


@pytest.mark.parametrize("bits", BITS)
def test_blocks_of_a_long_vector_do_not_touch_each_other(bits):
    """Blocks are transformed many at a time: each decodes to the same bits when all the others are zero."""
    x = normal(4096 * 66 + 256)
    together = sent(bits, x)
    for block in (0, 63, 64, 65):
        alone = np.zeros_like(x)
        own = slice(4096 * block, 4096 * (block + 1))
        alone[own] = x[own]
        decoded = sent(bits, alone)
        assert decoded[own].tobytes() == together[own].tobytes()
        assert np.count_nonzero(decoded) <= 4096


def test_keys_turn_the_vector_differently():
    layout, x = flat(300), normal(300)
    body = CODECS[4].encode(layout, x, KEY, None)
    assert body != CODECS[4].encode(layout, x, bytes(28), None)
    wrong = CODECS[4].decode(layout, body, WIDE, bytes(28)) - x
    assert wrong @ wrong > x @ x


def test_scales_are_checked():
    body = bytearray(CODECS[2].encode(flat(1280), normal(1280), KEY, None))
    for value in (np.nan, np.inf, -1.0, -0.0, 1e-45, 1.1754942e-38):
        for offset in (0, 4):
            wrong = bytearray(body)
            wrong[offset : offset + 4] = np.array([value], "<f4").tobytes()
            assert refused(2, 1280, bytes(wrong)) == "scale"
    assert refused(2, 1280, bytes(CODECS[2].encode(flat(1280), 1e5 * normal(1280), KEY, None)), Limits()) == "scale"


def test_unused_bits_and_codes_without_a_scale_are_refused():
    body = CODECS[1].encode(flat(9), normal(9), KEY, None)
    assert refused(1, 9, body[:-1] + bytes([body[-1] | 0x80])) == "nibble_pad"
    zero = CODECS[4].encode(flat(1280), np.zeros(1280, np.float32), KEY, None)
    assert refused(4, 1280, zero[:-1] + b"\x10") == "code_range"


def test_numbers_a_scale_cannot_say():
    with pytest.raises(WireError, match="overflow"):
        CODECS[1].encode(flat(4), np.full(4, FLT_MAX, np.float32), KEY, None)
    tiny = np.full(300, 1e-45, np.float32)
    assert sent(4, tiny).tolist() == [0.0] * 300
