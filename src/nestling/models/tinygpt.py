"""A small GPT: tokens and learned positions, blocks of causal attention and a feed-forward part, a linear head.

    x = E[token] + P[position]
    x ← x + Out(attention(Norm₁ x))     x ← x + Down(GELU(Up(Norm₂ x)))     in each block
    logits = H · Norm x

The decoder-only network of GPT-2 (Radford et al., 2019): normalised before each part, residual projections drawn
smaller by √(2 · layers). Here nothing has a bias but the norms, and there is no dropout. The head is not tied to the
embedding: FLITE leaves the classifier frozen and an adapter may name the embedding, which a tie would turn into one
choice; over 256 bytes a second matrix costs little. All attention heads are `HEAD` channels wide, so that equal weights
always mean equal models, and the base's hash says all.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestling.core.errors import ConfigError
from nestling.core.seeds import check_seed

HEAD = 32
"""Channels of an attention head."""


class Block(nn.Module):
    """Causal attention, then a feed-forward part four times as wide, each beside what it is added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)  # [3, b, heads, t, HEAD]
        q, k, v = heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A decoder-only language model; position t of its output predicts token t + 1. Raises `ConfigError` for more
    tokens than `context`.

    >>> model = TinyGPT(vocabulary=256, width=32, layers=1, context=16)
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, *, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t vocabulary"]:
        length, most = tokens.shape[1], self.positions.num_embeddings
        if length > most:
            raise ConfigError(
                f"{length} tokens are more than the {most} positions that the model has",
                where="base.context",
                remedy="Give shorter blocks, or a model with a longer context.",
            )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_tinygpt(*, vocabulary: int, width: int, layers: int, context: int, seed: int) -> TinyGPT:
    """A randomly initialised network.

    Args:
        vocabulary: how many tokens there are.
        width: channels, a multiple of `HEAD`.
        layers: blocks.
        context: the longest input, in tokens.
        seed: decides the initial weights.

    Raises `ConfigError` for a width that is no multiple of `HEAD`, `SeedError` for a bad seed.

    >>> sum(p.numel() for p in make_tinygpt(vocabulary=256, width=64, layers=2, context=128, seed=0).parameters())
    139904
    """
    if width % HEAD or width < HEAD:
        raise ConfigError(
            f"{width} is not a multiple of {HEAD}",
            where="base.width",
            remedy=f"Attention heads are {HEAD} channels wide: give 32, 64, 128 or 256.",
        )
    check_seed(seed)
    with torch.random.fork_rng(devices=[]):  # the caller's generator is left as it was
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed every GPU's generator
        return TinyGPT(vocabulary=vocabulary, width=width, layers=layers, context=context)
