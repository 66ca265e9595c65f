"""Streams: published vectors, golden digests, and every draw recomputed from words in plain Python integers."""

import hashlib
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core import seeds
from nestling.core.errors import ConfigError, SeedError
from nestling.core.seeds import Stream, check_seed, dirichlet, key, philox_block, self_test, words, words_python

SEEDS = st.integers(0, 2**64 - 1)
WORD = st.integers(0, 2**32 - 1)
KEYS = st.tuples(WORD, WORD)


@pytest.mark.parametrize(("counter", "of_key", "expected"), seeds.KNOWN_ANSWERS)
def test_cat_097_known_answers(counter: seeds.Block, of_key: seeds.Key, expected: seeds.Block) -> None:
    assert philox_block(counter, of_key) == expected


def test_self_test_passes_here_and_notices_a_wrong_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    self_test()
    monkeypatch.setattr(seeds, "WEYL", (0x9E3779B9, 0xBB67AE84))
    with pytest.raises(SeedError, match="known answers"):
        self_test()


def test_self_test_notices_numpy_words_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_blocks", lambda key, first, count: np.zeros((count, 4), np.uint64))
    with pytest.raises(SeedError, match="disagree"):
        self_test()


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, float("nan"), "0x1", None, np.int64(3)])
def test_cat_021_seeds_refused(seed: object) -> None:
    with pytest.raises(SeedError):
        check_seed(seed)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_cat_021_seeds_accepted(seed: int) -> None:
    assert check_seed(seed) == seed
    assert Stream(seed, "proj", "a").words(3).shape == (3,)


@pytest.mark.parametrize("purpose", ["", "a/b"])
def test_a_purpose_is_one_word(purpose: str) -> None:
    with pytest.raises(ConfigError):
        key(0, purpose, "a")


def test_key_is_the_documented_hash() -> None:
    name = "signs-u/couche-é".encode()
    hashed = hashlib.sha256(b"fedseed/v1\0" + (9).to_bytes(8, "little") + len(name).to_bytes(4, "little") + name)
    expected = tuple(int.from_bytes(hashed.digest()[i : i + 4], "little") for i in (0, 4))
    assert key(9, "signs-u", "couche-é") == expected


@given(SEEDS, SEEDS)
def test_seed_purpose_and_name_each_change_the_key(seed: int, other: int) -> None:
    here = key(seed, "a", "b/c")
    assert key(seed, "b", "b/c") != here
    assert key(seed, "a", "b/d") != here
    assert seed == other or key(other, "a", "b/c") != here


@given(KEYS, st.one_of(st.integers(0, 2**40), st.integers(2**34 - 9, 2**34 + 9)), st.integers(0, 40))
def test_cat_099_cat_101_numpy_words_are_the_python_words(of_key: seeds.Key, start: int, many: int) -> None:
    fast = words(of_key, start, many)
    assert fast.dtype == np.uint32
    assert fast.tolist() == words_python(of_key, start, many)


def test_the_last_words_of_all() -> None:
    assert words((1, 2), 2**66 - 5, 5).tolist() == words_python((1, 2), 2**66 - 5, 5)
    for start, many in ((2**66 - 5, 6), (-1, 2), (0, -1)):
        with pytest.raises(ConfigError):
            words((1, 2), start, many)


@given(st.integers(0, 50_000), st.integers(0, 50_000))
def test_cat_100_any_cut_gives_the_same_words(a: int, b: int) -> None:
    start, end = sorted((a, b))
    whole = words((3, 4), 0, 50_000)
    np.testing.assert_array_equal(words((3, 4), start, end - start), whole[start:end])


GOLDEN = {
    (0, "signs-u", "layer1.0.conv1.weight"): "23a9603ac3f64040e24f8a3ce3092b382382a20d3a96db3640bee48723614314",
    (1, "batch", "client-3/round-7"): "adf0ff490f477fb2e12d905c7702c18d6879f628fe18b2fde316c8f19d3641a2",
    (2**64 - 1, "partition", "digits"): "b3026fb6873c8cb6fbd87d6bb095154c904fc1e06f314656144d2e20cf4de000",
}


@pytest.mark.parametrize(("seed", "purpose", "name"), GOLDEN)
def test_cat_098_golden_digests(seed: int, purpose: str, name: str) -> None:
    """Every draw of a stream, hashed: these may never change under the scheme's version 1."""
    stream = Stream(seed, purpose, name)
    hashed = hashlib.sha256(stream.words(40_000, start=3).astype("<u4").tobytes())
    hashed.update(stream.signs(1001).astype("<f4").tobytes())
    for high in (1, 10, 3_000_000_000, 2**32):
        hashed.update(stream.integers(500, high).astype("<i8").tobytes())
    hashed.update(stream.permutation(1000).astype("<i8").tobytes())
    for alpha in (1e-3, 0.1, 1.0, 2.5, 100.0):
        hashed.update(stream.dirichlet([alpha] * 7).astype("<f8").tobytes())
    assert hashed.hexdigest() == GOLDEN[seed, purpose, name]


@given(SEEDS, st.integers(0, 200))
def test_signs_are_the_bits_lowest_first(seed: int, many: int) -> None:
    stream = Stream(seed, "signs-v", "a")
    bits = [word >> b & 1 for word in words_python(stream.key, 0, -(-many // 32)) for b in range(32)]
    signs = stream.signs(many)
    assert signs.dtype == np.float32
    assert signs.tolist() == [1.0 if bit else -1.0 for bit in bits[:many]]


@given(SEEDS, st.integers(0, 60), st.one_of(st.integers(1, 2**32), st.just(2**31 + 1)))
def test_integers_follow_lemire_word_by_word(seed: int, many: int, high: int) -> None:
    stream = Stream(seed, "batch", "a")
    drawn_words = words_python(stream.key, 0, 400)
    expected = [word * high >> 32 for word in drawn_words if (word * high) % 2**32 >= 2**32 % high]
    drawn = stream.integers(many, high)
    assert drawn.dtype == np.int64
    assert drawn.tolist() == expected[:many]


@given(SEEDS, st.integers(0, 300), st.integers(1, 2**32))
def test_more_integers_keep_the_first_ones(seed: int, many: int, high: int) -> None:
    stream = Stream(seed, "batch", "a")
    assert stream.integers(300, high)[:many].tolist() == stream.integers(many, high).tolist()


def test_integers_reach_every_value_about_equally() -> None:
    counts = np.bincount(Stream(5, "batch", "a").integers(60_000, 6), minlength=6)
    assert len(counts) == 6
    assert abs(counts - 10_000).max() < 500  # five standard deviations are 456


@pytest.mark.parametrize("high", [0, -1, 2**32 + 1])
def test_integers_refuse_other_ranges(high: int) -> None:
    with pytest.raises(ConfigError):
        Stream(0, "batch", "a").integers(3, high)


@given(SEEDS, st.integers(0, 50))
def test_permutation_sorts_63_bit_keys(seed: int, n: int) -> None:
    stream = Stream(seed, "batch", "a")
    drawn = words_python(stream.key, 0, 2 * n)
    keys = [(drawn[2 * i] | drawn[2 * i + 1] << 32) >> 1 for i in range(n)]
    assert stream.permutation(n).tolist() == sorted(range(n), key=lambda i: keys[i])


@given(SEEDS, st.lists(st.floats(5e-324, 50.0), min_size=1, max_size=5))
def test_dirichlet_from_python_words_is_bit_identical_and_sums_to_one(seed: int, alpha: list[float]) -> None:
    stream = Stream(seed, "partition", "a")
    shares = stream.dirichlet(alpha)
    endless = (word for block in count() for word in words_python(stream.key, 4 * block, 4))
    assert shares.tobytes() == dirichlet(endless, alpha).tobytes()
    assert (shares >= 0).all()
    assert abs(shares.sum() - 1) < 1e-12


def test_dirichlet_does_not_depend_on_the_c_decimal() -> None:
    """Python's own `decimal` gives the same digits as libmpdec: nothing rests on the platform's mathematics."""
    alpha = [0.05, 0.7, 3.4, 1e-300]
    script = (
        "import sys; sys.modules['_decimal'] = None\n"
        "from nestling.core.seeds import Stream\n"
        f"print('_pydecimal' in sys.modules, Stream(1, 'partition', 'a').dirichlet({alpha}).tobytes().hex())"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    plain, digits = printed.split()
    assert plain == "True"
    assert digits == Stream(1, "partition", "a").dirichlet(alpha).tobytes().hex()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 2.5])
def test_dirichlet_has_the_right_mean_and_variance(alpha: float) -> None:
    draws = np.array([Stream(seed, "partition", "moments").dirichlet([alpha, 2 * alpha]) for seed in range(600)])
    variance = (1 / 3) * (2 / 3) / (3 * alpha + 1)
    assert abs(draws[:, 0].mean() - 1 / 3) < 4 * np.sqrt(variance / 600)
    assert abs(draws[:, 0].var() / variance - 1) < 0.25


@pytest.mark.parametrize("alpha", [[], [0.0], [-1.0], [1.0, float("nan")], [float("inf")], [2e6]])
def test_dirichlet_refuses_other_alphas(alpha: list[float]) -> None:
    with pytest.raises(ConfigError):
        Stream(0, "partition", "a").dirichlet(alpha)
