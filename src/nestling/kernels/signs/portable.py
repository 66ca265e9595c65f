"""The sign map in plain PyTorch, for any device: the same words as the CPU kernels, in bounded pieces.

Philox needs only int64, where 32 × 32-bit products wrap harmlessly. Rows are taken in chunks of 2^18 words, so the
temporaries stay below 64 MB whatever the tensor; sums run through elementwise products and `sum`, never a matrix
product, so a reduced matmul precision (TF32) cannot touch them, nor atomics their order.
"""

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from nestling.core.seeds import MULTIPLIERS, ROUNDS, WEYL, Key
from nestling.kernels.signs.reference import words_per_row

CHUNK_WORDS = 1 << 18
_MASK = 0xFFFFFFFF


def words(key: Key, first_block: int, blocks: int, device: torch.device) -> Int64[Tensor, " words"]:
    """The 4·blocks words from block `first_block` on, as int64 in 0 … 2^32 − 1.

    >>> words((0, 0), 0, 1, torch.device("cpu"))[0].item() == 0x6627E8D5
    True
    """
    block = torch.arange(first_block, first_block + blocks, dtype=torch.int64, device=device)
    c0, c1, c2, c3 = block & _MASK, block >> 32 & _MASK, torch.zeros_like(block), torch.zeros_like(block)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (p1 >> 32 & _MASK) ^ c1 ^ k0, (p0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1).reshape(-1)


def expand(key: Key, y: Float32[Tensor, " rank"], *, base: Float[Tensor, " rows"], out: Float[Tensor, " rows"]) -> None:
    """out = base + U y on the device of `out`, added in float32 (float64 for a float64 base), then cast.

    >>> out = torch.empty(2)
    >>> expand((1, 2), torch.tensor([1.0, 10.0]), base=torch.zeros(2), out=out)
    >>> out.tolist()
    [9.0, 9.0]
    """
    W, rows = words_per_row(y.numel()), out.numel()
    columns = torch.zeros(32 * W, dtype=torch.float32, device=y.device)
    columns[: y.numel()] = y
    table = (columns.reshape(4 * W, 1, 8) * _byte_signs(y.device)).sum(-1)  # all 256 signed sums of each eight columns
    precision = torch.promote_types(base.dtype, torch.float32)
    for low, high in _chunks(rows, W):
        drawn = _rows(key, low, high, W, out.device)
        total = torch.zeros(high - low, dtype=torch.float32, device=out.device)
        for k in range(4 * W):
            total += table[k][_byte(drawn, k)]
        out[low:high] = base[low:high].to(precision) + total


def reduce(key: Key, g: Float32[Tensor, " rows"], rank: int) -> Float32[Tensor, " rank"]:
    """Uᵀ g on the device of `g`.

    >>> reduce((1, 2), torch.tensor([1.0, 10.0]), 2).tolist()
    [-11.0, 11.0]
    """
    W = words_per_row(rank)
    total = torch.zeros(4 * W, 8, dtype=torch.float32, device=g.device)
    signs = _byte_signs(g.device)
    for low, high in _chunks(g.numel(), W):
        drawn, values = _rows(key, low, high, W, g.device), g[low:high, None]
        for k in range(-(-rank // 8)):
            total[k] += (signs[_byte(drawn, k)] * values).sum(0)
    return total.reshape(-1)[:rank].clone()


def _byte_signs(device: torch.device) -> Float32[Tensor, "256 8"]:
    """Row b holds the eight signs of byte b, lowest bit first."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).to(torch.float32)


def _byte(drawn: Int64[Tensor, "rows W"], k: int) -> Int64[Tensor, " rows"]:
    """Byte k of each row's words, lowest byte first."""
    return drawn[:, k // 4] >> 8 * (k % 4) & 255


def _rows(key: Key, low: int, high: int, W: int, device: torch.device) -> Int64[Tensor, "rows W"]:
    """The words of rows low … high − 1; `low` is a multiple of 4, hence the start of a block."""
    count = (high - low) * W
    return words(key, low * W // 4, -(-count // 4), device)[:count].reshape(high - low, W)


def _chunks(rows: int, W: int) -> list[tuple[int, int]]:
    step = max(4, CHUNK_WORDS // W // 4 * 4)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]
