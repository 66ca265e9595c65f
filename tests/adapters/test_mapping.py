"""The dense map against its definition, written out as a matrix in float64."""

import copy
import json

import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn
from torch.func import functional_call

import nestling
from nestling import MappingConfig
from nestling.adapters.base import averaging_error
from nestling.adapters.mapping import MappingAdapter
from nestling.core.errors import ConfigError, SeedError, WireError
from nestling.core.seeds import key, words


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 9, 5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


X = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(5))
FORMS = [{}, {"squash": True}, {"modulation": 0.7}, {"squash": True, "modulation": 0.7}]


def adapted(model: nn.Module, config: MappingConfig, *, size: float = 1.0) -> MappingAdapter:
    adapter = nestling.attach(model, config)
    assert isinstance(adapter, MappingAdapter)
    adapter.load_vector(size * torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(3)))
    return adapter


def signs(name: str, rows: int, *, seed: int, dim: int) -> np.ndarray:
    """U: float64[rows, dim], bit j of a row's words."""
    drawn = words(key(seed, "signs-u", f"mapping/{name}"), 0, rows * -(-dim // 32)).reshape(rows, -1)
    return np.array([[2 * (int(row[j // 32]) >> (j % 32) & 1) - 1 for j in range(dim)] for row in drawn], np.float64)


def defined(base: Tensor, name: str, z: Tensor, config: MappingConfig) -> Tensor:
    """θ_pre + s · σ(W (z + m z²)), W = U / √d, a matrix that is there as a whole."""
    scale = float(np.float32(np.sqrt(np.mean(base.detach().double().numpy() ** 2))))
    W = torch.from_numpy(signs(name, base.numel(), seed=config.seed or 0, dim=config.dim) / np.sqrt(config.dim))
    inside = W @ (z + config.modulation * z**2)
    return base.double() + scale * (torch.tanh(inside) if config.squash else inside).view(base.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [1, 31, 70])
def test_weights_and_gradients_are_the_dense_definitions(form: dict, dim: int) -> None:
    config = MappingConfig(seed=11, dim=dim, **form)
    model, reference = make(), make(torch.float64)
    adapter = adapted(model, config)
    z = adapter.z.detach().double().requires_grad_()
    weights = {name: defined(reference.get_parameter(name), name, z, config) for name in ("0.weight", "3.weight")}
    for name, weight in adapter.weights().items():
        assert_close(weight.detach(), weights[name].detach())
    wanted, got = functional_call(reference, weights, X.double()), model(X)
    assert_close(got.detach(), wanted.detach())
    wanted.square().sum().backward()
    got.square().sum().backward()
    assert z.grad.abs().min() > 0
    assert_close(adapter.z.grad, z.grad, torch.float32)


def test_the_columns_of_the_map_are_all_but_orthogonal() -> None:
    U = signs("x", 4096, seed=0, dim=64)
    products = U.T @ U / 4096 - np.eye(64)
    assert np.abs(products).max() < 6 / np.sqrt(4096)
    assert abs(products[~np.eye(64, dtype=bool)].std() * np.sqrt(4096) - 1) < 0.1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_the_plain_form_in_full_precision_averages_exactly(form: dict, dtype: torch.dtype) -> None:
    adapter = adapted(make(dtype), MappingConfig(seed=1, dim=12, **form))
    states = [np.random.default_rng(i).normal(size=12).astype(np.float32) for i in range(3)]
    error = averaging_error(adapter, states, [1, 2, 3])
    assert adapter.averages_exactly == (not form and dtype != torch.bfloat16)
    assert adapter.averages_exactly == (error < 1e-6)
    assert adapter.averages_exactly or error > 1e-4
    assert {w.dtype for w in adapter.weights().values()} == {dtype}


def test_a_squashed_change_stays_below_the_scale() -> None:
    model = make()
    adapter = adapted(model, MappingConfig(dim=9, squash=True), size=100)
    for name, weight in adapter.weights().items():
        base = model.get_parameter(name)
        change = (weight - base).abs().max() / base.square().mean().sqrt()
        assert 0.99 < change < 1.001


@pytest.mark.parametrize("form", FORMS)
def test_it_is_taken_off_and_merged_and_comes_back_from_a_file(form: dict, tmp_path) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    start = model(X).detach()
    adapter = adapted(model, MappingConfig(seed=5, dim=20, **form))
    expected, weights = model(X).detach(), {n: w.detach() for n, w in adapter.weights().items()}
    adapter.save_pretrained(tmp_path)
    fresh = make()
    again = nestling.from_pretrained(fresh, tmp_path)
    assert again.config == adapter.config
    assert torch.equal(fresh(X), expected)
    again.detach()
    assert torch.equal(fresh(X), start)
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())
    adapter.detach(merge=True)
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in weights.items())
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize(
    ("key", "value", "error"), [("seed", 6, SeedError), ("dim", 4, SeedError), ("dim", 10**8, WireError)]
)
def test_other_maps_and_huge_ones_are_refused(key: str, value: int, error: type[Exception], tmp_path) -> None:
    adapted(make(), MappingConfig(seed=5, dim=8)).save_pretrained(tmp_path)
    about = json.loads((tmp_path / "adapter.json").read_text())
    about["config"][key] = value
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    with pytest.raises(error):
        nestling.from_pretrained(make(), tmp_path)


def test_what_could_not_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="73 latents for 72 weights") as caught:
        nestling.attach(make(), MappingConfig(dim=73, targets=("0",)))
    assert caught.value.where == "adapter.dim"
    nestling.attach(make(), MappingConfig(dim=72, targets=("0",)))
    model = make()
    with torch.no_grad():
        model[3].weight.zero_()
    with pytest.raises(ConfigError, match="is all zeros") as caught:
        nestling.attach(model, MappingConfig(dim=4))
    assert caught.value.where == "3.weight"
    nestling.attach(model, MappingConfig(dim=4, exclude=("3",)))


def test_it_holds_no_map() -> None:
    model = nn.Sequential(nn.Linear(300, 300))
    adapter = adapted(model, MappingConfig(dim=640))
    held = [t for t in vars(adapter).values() if isinstance(t, Tensor)] + [m.v for m in adapter._maps]
    assert sum(t.numel() for t in held if t is not None) == 640
