"""The small GPT against its definition in float64, position by position; what it cannot see; what decides it."""

from math import erf, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_close
from torch import Tensor

import nestling
from nestling.config.schema import LatentConfig, LoraConfig
from nestling.core.errors import ConfigError, SeedError
from nestling.models.backbones import base_hash
from nestling.models.tinygpt import HEAD, TinyGPT, make_tinygpt


def made(*, width: int = 64, layers: int = 2, seed: int = 0) -> TinyGPT:
    return make_tinygpt(vocabulary=11, width=width, layers=layers, context=9, seed=seed)


def loud(model: TinyGPT) -> TinyGPT:
    """The same with weights so large that every part shows in the output."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator) + float(p.ndim == 1))
    return model


def definition(model: TinyGPT, tokens: list[int]) -> Tensor:
    """Logits of each position, from sums over the positions up to it, in float64."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        spread = ((x - x.mean()) ** 2).mean() + 1e-5
        return (x - x.mean()) / spread.sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = [w["tokens.weight"][token] + w["positions.weight"][place] for place, token in enumerate(tokens)]
    width = len(x[0])
    for b in range(len(model.blocks)):
        projected = [w[f"blocks.{b}.qkv.weight"] @ norm(row, f"blocks.{b}.norm1") for row in x]
        after = []
        for t, row in enumerate(x):
            mixed = []
            for head in range(width // HEAD):
                part = slice(head * HEAD, (head + 1) * HEAD)
                q = projected[t][:width][part]
                scores = torch.stack([q @ projected[s][width : 2 * width][part] / sqrt(HEAD) for s in range(t + 1)])
                shares = scores.exp() / scores.exp().sum()
                mixed.append(sum(shares[s] * projected[s][2 * width :][part] for s in range(t + 1)))
            row = row + w[f"blocks.{b}.out.weight"] @ torch.cat(mixed)
            up = w[f"blocks.{b}.up.weight"] @ norm(row, f"blocks.{b}.norm2")
            gelu = torch.tensor([u * (1 + erf(u / sqrt(2))) / 2 for u in up.tolist()], dtype=torch.float64)
            after.append(row + w[f"blocks.{b}.down.weight"] @ gelu)
        x = after
    return torch.stack([w["head.weight"] @ norm(row, "norm") for row in x])


@pytest.mark.parametrize("width", [32, 96])
def test_it_is_its_definition(width) -> None:
    model, tokens = loud(made(width=width)).double(), [3, 1, 4, 1, 5, 9, 2]
    with torch.no_grad():
        assert_close(model(torch.tensor([tokens, tokens[::-1]]))[0], definition(model, tokens))


@given(place=st.integers(0, 8), token=st.integers(0, 10))
def test_no_position_sees_a_later_token(place: int, token: int) -> None:
    model, tokens = loud(made(width=32, layers=1)), torch.arange(9)[None]
    changed = tokens.clone()
    changed[0, place] = token
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:place], after[:place])
    assert (token == place) == torch.equal(before[place], after[place])


def test_the_same_tokens_elsewhere_are_read_otherwise() -> None:
    logits = loud(made())(torch.tensor([[5, 5, 5]]))[0]
    assert not torch.allclose(logits[0], logits[1])


def test_the_seed_decides_the_weights_and_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    hashes = [base_hash(made(seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_fresh_one_knows_nothing() -> None:
    """Its loss is that of equal chances for all tokens."""
    tokens = torch.arange(9)[None]
    loss = torch.nn.functional.cross_entropy(made()(tokens)[0, :-1], tokens[0, 1:])
    assert abs(float(loss) - float(torch.tensor(11.0).log())) < 0.05


def test_what_it_cannot_be_or_read_is_refused() -> None:
    for width in (0, 31, 48):
        with pytest.raises(ConfigError, match=r"base\.width"):
            made(width=width)
    with pytest.raises(SeedError):
        made(seed=-1)
    with pytest.raises(ConfigError, match=r"base\.context: 10 tokens are more than the 9 positions"):
        made()(torch.zeros(1, 10, dtype=torch.long))


def test_the_patterns_of_the_presets_find_the_four_matrices_of_each_block() -> None:
    wanted = [f"blocks.{b}.{part}.weight" for b in range(2) for part in ("qkv", "out", "up", "down")]
    adapter = nestling.attach(made(), LatentConfig(dim=4, targets=("blocks.*",)))
    assert list(adapter.layout.names) == wanted
    adapter = nestling.attach(made(), LatentConfig(dim=4, targets=("*.up", "*.down"), exclude=("blocks.0.*",)))
    assert list(adapter.layout.names) == wanted[-2:]
    norms = nestling.attach(made(layers=1), LatentConfig(dim=4, targets=("blocks.*",), train_norms=True))
    assert norms.layout.size == 4 * 4 + 3 * 2 * 64
    pytest.importorskip("peft")
    adapter = nestling.attach(made(), LoraConfig(rank=2, targets=("qkv", "out"), layers="1"))
    assert adapter.layout.size == 2 * (64 + 192) + 2 * (64 + 64)
