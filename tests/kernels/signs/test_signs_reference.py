"""The definition, on bits read by hand from pure Python words, and the four generators against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.seeds import words, words_python
from nestling.kernels.signs import cpu, portable, reference

WORD = st.integers(0, 2**32 - 1)
KEYS = st.tuples(WORD, WORD)


@given(KEYS, st.one_of(st.integers(0, 2**20), st.integers(2**32 - 5, 2**32 + 5)), st.integers(0, 70))
def test_cat_099_four_generators_one_stream(key: tuple[int, int], first_block: int, blocks: int) -> None:
    expected = words_python(key, 4 * first_block, 4 * blocks)
    assert words(key, 4 * first_block, 4 * blocks).tolist() == expected
    assert cpu.words(key, first_block, blocks).tolist() == expected
    assert portable.words(key, first_block, blocks, torch.device("cpu")).tolist() == expected


@given(KEYS, st.integers(1, 9), st.integers(1, 100))
def test_signs_are_the_documented_bits(key: tuple[int, int], rows: int, rank: int) -> None:
    W = -(-rank // 32)
    drawn = words_python(key, 0, rows * W)
    by_hand = [[2 * (drawn[i * W + j // 32] >> j % 32 & 1) - 1 for j in range(rank)] for i in range(rows)]
    U = reference.sign_matrix(key, rows, rank)
    assert U.tolist() == by_hand
    y, g = np.arange(1.0, rank + 1), np.arange(1.0, rows + 1)
    np.testing.assert_array_equal(reference.expand(key, y, rows), np.array(by_hand) @ y)
    np.testing.assert_array_equal(reference.reduce(key, g, rank), np.array(by_hand).T @ g)


@pytest.mark.parametrize("rank", [1, 7, 33, 64])
@pytest.mark.parametrize("rows", [1, 5, 4097])
def test_every_product_reads_the_same_signs(rows: int, rank: int) -> None:
    """Unit vectors pick single signs out of each implementation, exactly."""
    key, U = (5, 6), reference.sign_matrix((5, 6), rows, rank)
    for j in {0, rank // 2, rank - 1}:
        y = np.zeros(rank, np.float32)
        y[j] = 1
        out = np.empty(rows, np.float32)
        cpu.expand(key, y, base=np.zeros(rows, np.float32), out=out)
        np.testing.assert_array_equal(out, U[:, j])
        portable.expand(key, torch.from_numpy(y), base=torch.zeros(rows), out=torch.from_numpy(out))
        np.testing.assert_array_equal(out, U[:, j])
    for i in {0, rows // 2, rows - 1}:
        g = np.zeros(rows, np.float32)
        g[i] = 1
        np.testing.assert_array_equal(cpu.reduce(key, g, rank), U[i])
        np.testing.assert_array_equal(portable.reduce(key, torch.from_numpy(g), rank).numpy(), U[i])
