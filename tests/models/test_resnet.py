"""The papers' networks: their sizes, their classifier, and that a seed is all that decides them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nestling.core.errors import ConfigError, SeedError
from nestling.models.resnet import LOGIT_SCALE, make_resnet, orthonormal_rows, random_rows


@pytest.mark.parametrize(
    ("name", "width", "channels", "convs", "weights"),
    [("resnet8", 16, 1, 9, 76_432), ("resnet18", 64, 3, 20, 11_159_232), ("resnet34", 64, 3, 36, 21_259_968)],
)
def test_sizes(name: str, width: int, channels: int, convs: int, weights: int) -> None:
    with torch.device("meta"):
        model = make_resnet(name, width=width, channels=channels, classes=10, seed=0)
    found = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(found) == convs
    assert sum(m.weight.numel() for m in found) == weights
    assert all(m.bias is None for m in found)
    named = [n for n, _ in model.named_modules() if "conv" in n]  # the presets' pattern finds them all
    assert len(named) == convs


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (1, 9)])
def test_logits_of_any_image(channels: int, side: int) -> None:
    model = make_resnet("resnet8", width=8, channels=channels, classes=7, seed=0)
    logits = model(torch.randn(2, channels, side, side))
    assert logits.shape == (2, 7)
    # Unit features against unit rows: no logit is beyond the scale, together they have at most its length.
    assert float(logits.detach().norm(dim=1).max()) <= LOGIT_SCALE * (1 + 1e-5)
    assert torch.isfinite(model(torch.zeros(1, channels, side, side))).all()


@pytest.mark.parametrize(("rows", "columns"), [(10, 64), (100, 512), (32, 32), (1, 1)])
def test_rows_of_the_classifier_are_orthonormal(rows: int, columns: int) -> None:
    H = orthonormal_rows(3, rows, columns)
    assert H.dtype == np.float32
    assert np.abs(H.astype(np.float64) @ H.T - np.eye(rows)).max() < 1e-6


@given(st.integers(0, 2**64 - 1), st.integers(1, 4))
def test_even_signs_that_repeat_give_orthonormal_rows(seed: int, side: int) -> None:
    """Small square sign matrices are often singular."""
    H = orthonormal_rows(seed, side, side).astype(np.float64)
    assert np.abs(H @ H.T - np.eye(side)).max() < 1e-6


def test_more_classes_begin_with_the_same_rows() -> None:
    assert np.abs(orthonormal_rows(0, 20, 64)[:10] - orthonormal_rows(0, 10, 64)).max() < 1e-6
    assert np.abs(orthonormal_rows(0, 10, 64) - orthonormal_rows(1, 10, 64)).max() > 0.01


def test_the_head_is_the_seeds_and_frozen() -> None:
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=5)
    assert np.array_equal(model.head.weight.detach().numpy(), orthonormal_rows(5, 10, 32))
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]
    assert model.head.bias is None
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert model.head.weight.grad is None


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_a_seed_gives_the_same_weights_and_leaves_the_global_generator(seed: int) -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    first = make_resnet("resnet8", width=8, channels=1, classes=10, seed=seed).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    again = make_resnet("resnet8", width=8, channels=1, classes=10, seed=seed).state_dict()
    other = make_resnet("resnet8", width=8, channels=1, classes=10, seed=7).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base\.model.*resnet8, resnet18, resnet34"):
        make_resnet("resnet9", width=8, channels=1, classes=10, seed=0)
    with pytest.raises(ConfigError, match=r"base\.width: 33 classes"):
        make_resnet("resnet8", width=8, channels=1, classes=33, seed=0)
    for seed in (-1, 2**64):
        with pytest.raises(SeedError):
            make_resnet("resnet8", width=8, channels=1, classes=10, seed=seed)


def test_shortcuts_are_where_the_shape_changes_and_add_up() -> None:
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)
    blocks = [stage[0] for stage in model.stages]
    assert [isinstance(block.shortcut, nn.Identity) for block in blocks] == [True, False, False]
    block = blocks[0]
    with torch.no_grad():
        block.norm2.weight.zero_()
        block.norm2.bias.zero_()
        x = torch.randn(2, 8, 5, 5)
        assert torch.equal(block(x), torch.relu(x))
        assert [tuple(b(torch.randn(1, c, 8, 8)).shape) for b, c in zip(blocks, (8, 8, 16), strict=True)] == [
            (1, 8, 8, 8), (1, 16, 4, 4), (1, 32, 4, 4),
        ]  # fmt: skip


def test_a_random_head_has_rows_of_unit_length_that_are_not_orthogonal() -> None:
    H = random_rows(5, 10, 32).astype(np.float64)
    assert np.allclose(np.linalg.norm(H, axis=1), 1)
    assert np.abs(H @ H.T - np.eye(10)).max() > 0.1
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=5, head="random")
    assert np.array_equal(model.head.weight.detach().numpy(), random_rows(5, 10, 32))
    assert not model.head.weight.requires_grad
