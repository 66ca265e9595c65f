"""The PyTorch form against the float64 definition, across its chunk boundaries."""

import contextlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nestling.kernels.signs import portable, reference

KEY = (77, 88)


@pytest.mark.parametrize("rank", [1, 7, 32, 33, 64, 100])
@pytest.mark.parametrize(
    ("rows", "chunk_words"),
    [(1, portable.CHUNK_WORDS), (5, 1), (4095, 1000), (4097, 1000), (20001, portable.CHUNK_WORDS // 16)],
)
def test_products_equal_the_definition(rows: int, chunk_words: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "CHUNK_WORDS", chunk_words)
    rng = np.random.default_rng(rows + rank)
    y, g, base = (rng.standard_normal(count).astype(np.float32) for count in (rank, rows, rows))
    out = torch.empty(rows)
    portable.expand(KEY, torch.from_numpy(y), base=torch.from_numpy(base), out=out)
    exact = base + reference.expand(KEY, y.astype(np.float64), rows)
    assert abs(out.numpy() - exact).max() <= 3e-7 * (abs(y).sum() + abs(base).max())
    sums = portable.reduce(KEY, torch.from_numpy(g), rank)
    exact = reference.reduce(KEY, g.astype(np.float64), rank)
    assert abs(sums.numpy() - exact).max() <= 1e-6 * np.linalg.norm(g)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_base_keeps_its_dtype_and_is_added_to_in_float32_or_more(dtype: torch.dtype) -> None:
    base = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.tensor([0.25, -0.125, 1.0])
    out = torch.empty(300, dtype=dtype)
    portable.expand(KEY, y, base=base, out=out)
    change = torch.from_numpy(reference.expand(KEY, y.numpy(), 300))
    assert torch.equal(out, (base.to(torch.promote_types(dtype, torch.float32)) + change).to(dtype))


DIGEST = """
import hashlib, torch
from nestling.kernels.signs import portable
out = torch.empty(70_001)
portable.expand((77, 88), torch.full((33,), 0.5), base=torch.zeros(70_001), out=out)  # halves add up exactly
words = portable.words((77, 88), 0, 50_000, torch.device("cpu"))
print(hashlib.sha256(words.numpy().tobytes() + out.numpy().tobytes()).hexdigest())
"""


def test_cat_100_a_processor_without_wide_vectors_gives_the_same_bits() -> None:
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(DIGEST, {})
    plain = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", DIGEST], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout == here.getvalue()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_cat_102_a_gpu_gives_the_words_and_signs_of_a_cpu() -> None:
    y, results = torch.full((33,), 0.5), []
    for device in ("cpu", "cuda"):
        out = torch.empty(70_001, device=device)
        portable.expand(KEY, y.to(device), base=torch.zeros(70_001, device=device), out=out)
        words = portable.words(KEY, 0, 50_000, torch.device(device))
        results.append((words.cpu().numpy().tobytes(), out.cpu().numpy().tobytes()))
    assert results[0] == results[1]
