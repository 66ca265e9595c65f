"""The CPU kernels against the float64 definition, at odd sizes, for any thread count and from several threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.kernels.signs import cpu, reference

KEY = (0x1234, 0xABCD)
ROWS = [1, 5, 1023, 4095, 4097, 20001]
RANKS = [1, 7, 32, 33, 64, 100]
LARGE = cpu.PARALLEL_ROWS + 12_345  # enough for the thread pool to be used


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def expanded(y: np.ndarray, base: np.ndarray, threads: int = 1) -> np.ndarray:
    out = np.full_like(base, np.nan)
    cpu.expand(KEY, y, base=base, out=out, threads=threads)
    return out


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("rows", ROWS)
def test_products_equal_the_definition(rows: int, rank: int) -> None:
    y, g, base = normal(rank), normal(rows, 1), normal(rows, 2)
    exact = base + reference.expand(KEY, y.astype(np.float64), rows)
    assert abs(expanded(y, base) - exact).max() <= 3e-7 * (abs(y).sum() + abs(base).max())
    exact = reference.reduce(KEY, g.astype(np.float64), rank)
    sums = cpu.reduce(KEY, g, rank)
    assert sums.shape == (rank,)
    assert abs(sums - exact).max() <= 1e-6 * np.linalg.norm(g)


@pytest.mark.parametrize("rank", [7, 33, 64])
def test_cat_100_any_thread_count_gives_the_same_bits(rank: int) -> None:
    y, g = normal(rank), normal(LARGE, 1)
    first, sums = expanded(y, g), cpu.reduce(KEY, g, rank)
    for threads in (2, 3):
        assert expanded(y, g, threads).tobytes() == first.tobytes()
        assert cpu.reduce(KEY, g, rank, threads=threads).tobytes() == sums.tobytes()


def test_a_row_does_not_depend_on_how_many_follow_it() -> None:
    y, base = normal(33), normal(20001)
    assert expanded(y, base)[:4097].tobytes() == expanded(y, base[:4097].copy()).tobytes()


def test_base_may_be_overwritten_in_place() -> None:
    y, base = normal(64), normal(5000)
    expected = expanded(y, base)
    cpu.expand(KEY, y, base=base, out=base)
    assert base.tobytes() == expected.tobytes()


def test_a_read_only_base_will_do() -> None:
    y, base = normal(7), normal(50)
    expected = expanded(y, base)
    base.flags.writeable = False
    assert expanded(y, base).tobytes() == expected.tobytes()


@given(st.integers(1, 5000), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_adjoint_identity(rows: int, rank: int, seed: int) -> None:
    y, g = normal(rank, seed), normal(rows, seed + 1)
    left = float(expanded(y, np.zeros(rows, np.float32)).astype(np.float64) @ g)
    right = float(cpu.reduce(KEY, g, rank) @ y)
    assert abs(left - right) <= 1e-6 * np.linalg.norm(g) * np.linalg.norm(y) * np.sqrt(rank) + 1e-9


def test_two_python_threads_at_once() -> None:
    y, g = normal(64), normal(LARGE, 1)
    expected = expanded(y, g).tobytes(), cpu.reduce(KEY, g, 64).tobytes()
    with ThreadPoolExecutor(2) as pool:
        pairs = pool.map(
            lambda _: (expanded(y, g, threads=2).tobytes(), cpu.reduce(KEY, g, 64, threads=2).tobytes()), range(6)
        )
    assert set(pairs) == {expected}


@pytest.mark.parametrize("bad", [np.zeros(10, np.float64), np.zeros(20, np.float32)[::2]])
def test_other_arrays_are_refused_not_misread(bad: np.ndarray) -> None:
    with pytest.raises(TypeError):
        cpu.reduce(KEY, bad, 3)


def test_kernels_compile_where_no_cache_can_be_written() -> None:
    """A function without a source file is one Numba has nowhere to cache."""
    from numba.core import types

    scope: dict = {}
    exec(compile("def double(x):\n    x[0] *= 2\n", "<no file>", "exec"), scope)
    array = np.ones(1, np.float32)
    cpu._compiled(types.Array(types.float32, 1, "C"))(scope["double"])(array)
    assert array[0] == 2


def test_importing_the_package_does_not_import_numba() -> None:
    script = "import sys, nestling.kernels.signs.dispatch; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
