"""The one table of tolerances: relative to the largest entry of the definition's result, per dtype of the fast path.

It is the same on every machine; a test that needs more is a finding, not a reason to widen it.
"""

import torch

RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """`got` equals the float64 definition `wanted` within the table's row for `got`'s dtype (or `dtype`)."""
    limit = RELATIVE[dtype or got.dtype]
    scale = max(float(wanted.double().abs().max()), 1e-30) if wanted.numel() else 1.0
    error = float((got.double() - wanted.double()).abs().max()) / scale if wanted.numel() else 0.0
    assert got.shape == wanted.shape
    assert error <= limit, f"relative error {error:.2e} > {limit:.0e}"
