"""Windowed attention as a function: shorter numbers against float64, and one token at a time against a whole piece."""

import pytest
import torch
from tolerance import assert_close
from torch import Tensor

from nestling.models.attend import attend, attend_one, next_token
from nestling.models.streams import StreamLayer

INVERSE = 10.0 ** -torch.arange(4)
SHORT = [torch.float32, torch.bfloat16, torch.float16]


def drawn(tokens: int, dtype: torch.dtype = torch.float64, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q of six heads, k and v of two."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, heads, 8, generator=draw, dtype=torch.float64) for heads in (6, 2, 2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, stream: StreamLayer, *, scale: float) -> Tensor:
    """All tokens through `attend_one`, as they follow those in `stream`."""
    shape = {"window": stream.window, "sinks": stream.sinks, "inverse_frequencies": INVERSE, "dtype": k.dtype}
    out = []
    for i in range(q.shape[1]):
        after = next_token(torch.zeros(len(q), dtype=torch.int64) if stream.count is None else stream.count, **shape)
        new = (x[:, i : i + 1] for x in (q, k, v))
        out.append(attend_one(*new, after=after, scale=scale, stream=stream))
    return torch.cat(out, 1)


@pytest.mark.parametrize("dtype", SHORT)
def test_shorter_numbers_stay_near_the_definition(dtype: torch.dtype) -> None:
    q, k, v = drawn(30, dtype)
    how = {"window": 5, "sinks": 2, "scale": 0.35, "inverse_frequencies": INVERSE}
    got = attend(q, k, v, **how)
    assert got.dtype == dtype
    assert_close(got, attend(q.double(), k.double(), v.double(), **how))


@pytest.mark.parametrize("dtype", SHORT)
def test_they_do_one_token_at_a_time_too(dtype: torch.dtype) -> None:
    q, k, v = drawn(30, dtype)
    got = one_by_one(q, k, v, StreamLayer(window=5, sinks=2), scale=0.35)
    assert got.dtype == dtype
    how = {"window": 5, "sinks": 2, "scale": 0.35, "inverse_frequencies": INVERSE}
    assert_close(got, attend(q.double(), k.double(), v.double(), **how))


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 2), (3, 0), (3, 2), (3, 5), (20, 2), (40, 20)])
def test_one_token_at_a_time_is_a_whole_piece(window: int, sinks: int) -> None:
    """Outputs, and all that a stream holds after each token; from its beginning on."""
    q, k, v = drawn(30)
    how = {"window": window, "sinks": sinks, "scale": 0.35, "inverse_frequencies": INVERSE}
    single, stream = StreamLayer(window=window, sinks=sinks), StreamLayer(window=window, sinks=sinks)
    for i in range(30):
        piece = tuple(x[:, i : i + 1] for x in (q, k, v))
        expected = attend(*piece, **how, stream=stream)
        assert_close(one_by_one(*piece, single, scale=0.35), expected)
        assert single.tensors().keys() == stream.tensors().keys()
        for name, tensor in stream.tensors().items():
            assert torch.equal(single.tensors()[name], tensor), name
    assert_close(expected, attend(q, k, v, **how)[:, -1:])


def test_rows_that_have_read_different_numbers_of_tokens() -> None:
    q, k, v = drawn(12, rows=4)
    how = {"window": 3, "sinks": 2, "scale": 0.35, "inverse_frequencies": INVERSE}
    lengths = torch.tensor([1, 2, 5, 9])
    whole, single = (StreamLayer(window=3, sinks=2) for _ in range(2))
    for stream in (whole, single):
        attend(q[:, :9], k[:, :9], v[:, :9], **how, stream=stream, lengths=lengths)
    rest = (q[:, 9:], k[:, 9:], v[:, 9:])
    assert_close(one_by_one(*rest, single, scale=0.35), attend(*rest, **how, stream=whole))
    for name, tensor in whole.tensors().items():
        assert torch.equal(single.tensors()[name], tensor), name


def test_gradients_of_one_token_are_those_of_a_piece() -> None:
    q, k, v = drawn(8)
    how = {"window": 3, "sinks": 2, "scale": 0.35, "inverse_frequencies": INVERSE}
    grads = []
    for alone in (False, True):
        stream = StreamLayer(window=3, sinks=2)
        attend(q[:, :7], k[:, :7], v[:, :7], **how, stream=stream)
        last = [x[:, 7:].clone().requires_grad_() for x in (q, k, v)]
        out = one_by_one(*last, stream, scale=0.35) if alone else attend(*last, **how, stream=stream)
        grads.append(torch.autograd.grad(out.square().sum(), last))
    for one, piece in zip(*grads, strict=True):
        assert_close(one, piece)
