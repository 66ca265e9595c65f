"""Attention over the last `window` tokens and the first few: the function itself, for a piece of a stream.

    score(t, j) = q_t·k_j · scale            for t − window < j ≤ t
    score(t, j) = R(p_t − t) q_t·k_j · scale for j < sinks and j ≤ t − window,   p_t = min(t, window + sinks − 1)

R turns a query, which is rotated to its own position t, back to where the first tokens stand right before the window
(StreamingLLM, arXiv 2309.17453, gives tokens their places in the cache; this is the same for whole pieces at once).
Positions are float32: angles within a window are off by 0.01 rad at 100,000 tokens, and by 0.06 at a million.
`attend` takes pieces of any length and says what is meant; `attend_one` takes the single tokens of which a text is
generated: the keys of the first tokens are turned, not the query, so that one product serves both kinds of key. It is
PyTorch's own attention for the rest: its last bits depend on the number of threads, and it has no second derivative.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from nestling.models.streams import Held, StreamLayer


def attend(
    q: Float[Tensor, "b t hq d"],
    k: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h d"],
    *,
    window: int,
    sinks: int,
    scale: float,
    inverse_frequencies: Tensor,
    stream: StreamLayer | None = None,
    lengths: Int64[Tensor, " b"] | None = None,
) -> Float[Tensor, "b t hq d"]:
    """Windowed attention of new tokens that follow those in `stream`, which then holds the new ones.

    Args:
        q, k, v: rotated queries and keys, and values, each row's real tokens first.
        window, sinks: see the module.
        scale: of the scores.
        inverse_frequencies: of the rotation, [d/2].
        stream: what earlier pieces left; None for a stream that begins and ends here.
        lengths: real tokens of each row; None if all are.
    """
    batch, tokens, heads, size = q.shape
    groups, wide = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    held = stream.held(k, v) if stream is not None else StreamLayer(window=window, sinks=sinks).held(k, v)
    # Queries go in blocks: each block sees its own keys and the window − 1 before its first, w + c − 1 in all.
    block = min(tokens, window)
    blocks = -(-tokens // block)
    spare = blocks * block - tokens
    past = window - 1
    keys = F.pad(torch.cat([held.keys[:, held.keys.shape[1] - past :], k], 1), (0, 0, 0, 0, 0, spare))
    values = F.pad(torch.cat([held.values[:, held.values.shape[1] - past :], v], 1), (0, 0, 0, 0, 0, spare))
    # Copied once with whole heads in one piece: products of strided pieces would copy them number by number.
    keys = keys.unfold(1, past + block, block).permute(0, 2, 1, 4, 3).contiguous()  # [B, H, blocks, w + c − 1, d]
    values = values.unfold(1, past + block, block).permute(0, 2, 1, 4, 3).contiguous()
    queries = F.pad(q, (0, 0, 0, 0, 0, spare)).view(batch, blocks, block, groups, heads // groups, size)
    queries = queries.permute(0, 3, 1, 4, 2, 5)  # [B, H, blocks, G, c, d]
    shape = queries.shape[:-1]
    queries = queries.flatten(3, 4)
    scores = (queries @ keys.transpose(-1, -2)).to(wide) * scale
    scores = scores.view(*shape, -1).masked_fill(~_in_sight(held.count, block, blocks, window), float("-inf"))
    near = scores.shape[-1]
    first = _first_tokens(held, k, sinks)
    if sinks:
        position = held.count[:, None] + torch.arange(tokens, device=q.device)
        capped = position.clamp(max=window + sinks - 1) - position  # how far to turn a query back, ≤ 0
        far = F.pad(_turn(q, *_angles(capped, inverse_frequencies, wide)), (0, 0, 0, 0, 0, spare))
        far = far.view(batch, blocks, block, groups, heads // groups, size).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
        to_first = (far @ first.keys.permute(0, 2, 3, 1)[:, :, None]).to(wide) * scale
        outside = torch.arange(sinks, device=q.device) <= F.pad(position, (0, spare))[..., None] - window
        outside = outside.view(batch, 1, blocks, 1, block, sinks)
        to_first = to_first.view(*shape, sinks).masked_fill(~outside, float("-inf"))
        scores = torch.cat([scores, to_first], -1)
    weights = scores.softmax(-1).to(v.dtype).flatten(3, 4)
    out = weights[..., :near] @ values
    if sinks:
        out = out + weights[..., near:] @ first.values.transpose(1, 2)[:, :, None]
    out = out.view(*shape, size).permute(0, 2, 4, 1, 3, 5).reshape(batch, blocks * block, heads, size)
    if stream is not None:
        stream.keep(k, v, first, lengths)
    return out[:, :tokens]


@dataclass(frozen=True)
class Next:
    """What all layers share that read one further token of each row, after `count` [B] of them; see `next_token`."""

    cos: Float[Tensor, "b 1 1 d"]
    sin: Float[Tensor, "b 1 1 d"]
    """How far the keys of the first tokens are turned."""
    first: Tensor | None
    """bool [B, sinks, 1, 1]: which of the first tokens the new one is; None if it is none in any row."""
    sight: Tensor
    """bool [B, 1, 1, sinks + window]: which keys the new token sees."""


def next_token(
    count: Int64[Tensor, " b"], *, window: int, sinks: int, inverse_frequencies: Tensor, dtype: torch.dtype
) -> Next:
    """What `attend_one` needs of a token that follows `count` others; `dtype` is that of keys."""
    held = torch.arange(window, device=count.device) >= window - 1 - count[:, None]
    index = torch.arange(sinks, device=count.device)
    outside = index <= count[:, None] - window
    further = count - count.clamp(max=window + sinks - 1)
    first = index == count[:, None]
    return Next(
        *_angles(further[:, None], inverse_frequencies, torch.promote_types(dtype, torch.float32)),
        first=first[..., None, None] if bool(first.any()) else None,
        sight=torch.cat([outside, held], 1)[:, None, None],
    )


def attend_one(
    q: Float[Tensor, "b 1 hq d"],
    k: Float[Tensor, "b 1 h d"],
    v: Float[Tensor, "b 1 h d"],
    *,
    after: Next,
    scale: float,
    stream: StreamLayer,
) -> Float[Tensor, "b 1 hq d"]:
    """`attend` for one token of each row, which follows those in `stream`."""
    held = stream.held(k, v)
    keys, values = torch.cat([held.keys[:, 1:], k], 1), torch.cat([held.values[:, 1:], v], 1)
    first_keys, first_values = held.first_keys, held.first_values
    if after.first is not None:
        first_keys = torch.where(after.first, k, first_keys)
        first_values = torch.where(after.first, v, first_values)
    seen = torch.cat([_turn(first_keys, after.cos, after.sin), keys], 1).transpose(1, 2)
    told = torch.cat([first_values, values], 1).transpose(1, 2)
    queries = q.reshape(len(q), k.shape[2], -1, q.shape[-1])  # the query heads of a key head, as if they were tokens
    out = F.scaled_dot_product_attention(queries, seen, told, attn_mask=after.sight, scale=scale)
    stream.keys, stream.values, stream.count = keys, values, held.count + 1
    stream.first = first_keys, first_values
    return out.reshape(q.shape)


def _in_sight(count: Int64[Tensor, " b"], block: int, blocks: int, window: int) -> Tensor:
    """bool [B, 1, blocks, 1, c, w + c − 1]: whether key j of a block is one of the `window` last of query i, and real.

    Key j of block n is token n·c + j − (w − 1) of this piece; before the piece there are `count` tokens.
    """
    i = torch.arange(block, device=count.device)[:, None]
    j = torch.arange(window - 1 + block, device=count.device)
    near = (j >= i) & (j < i + window)
    start = torch.arange(blocks, device=count.device)[:, None] * block
    real = start + j - (window - 1) >= -count[:, None, None]  # [B, blocks, keys]
    return near & real[:, None, :, None, None]


@dataclass(frozen=True)
class _First:
    keys: Tensor
    values: Tensor


def _first_tokens(held: Held, k: Tensor, sinks: int) -> _First:
    """The first tokens of each row, from what is held and from the new ones; rows without any hold zeros."""
    if not sinks:
        return _First(held.first_keys, held.first_values)
    index = torch.arange(sinks, device=k.device) - held.count[:, None]  # which new token is the row's i-th
    fresh = (index >= 0) & (index < k.shape[1])
    at = index.clamp(0, max(0, k.shape[1] - 1))[..., None, None].expand(-1, -1, *k.shape[2:])
    fresh = fresh[..., None, None]
    return _First(
        torch.where(fresh, k.gather(1, at), held.first_keys),
        torch.where(fresh, held.new_values.gather(1, at), held.first_values),
    )


def _angles(by: Int64[Tensor, "b t"], inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of a turn by so many positions, [B, T, 1, d] each."""
    angle = by[..., None].to(dtype) * inverse_frequencies.to(dtype)
    angle = torch.cat([angle, angle], -1)[:, :, None]
    return angle.cos(), angle.sin()


def _turn(x: Float[Tensor, "b t h d"], cos: Tensor, sin: Tensor) -> Tensor:
    """x rotated further, in the halves convention of the Llama family; computed in float32 or wider."""
    wide = x.to(cos.dtype)
    left, right = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)
