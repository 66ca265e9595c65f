"""Full fine-tuning as an adapter: what is trained, and that nothing of the base is lost."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import nestling
from nestling import FullConfig, LatentConfig
from nestling.core.errors import ConfigError


def make(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def test_the_vector_is_the_parameters_in_model_order() -> None:
    model = make()
    adapter = nestling.attach(model, FullConfig())
    assert adapter.layout.names == tuple(name for name, _ in model.named_parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert np.array_equal(adapter.vector(), flat.numpy())
    model[3].bias.data += 1
    assert np.array_equal(adapter.vector()[-2:], flat.numpy()[-2:] + 1)


def test_patterns_choose_and_the_rest_is_frozen() -> None:
    model = make()
    model[0].weight.requires_grad_(False)
    adapter = nestling.attach(model, FullConfig(targets=("0.*", "3.*"), exclude=("*.bias",)))
    assert adapter.layout.names == ("0.weight", "3.weight")
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.weight", "3.weight"]
    adapter.detach()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_detach_restores_what_float32_cannot_hold(dtype: torch.dtype) -> None:
    model = make().to(dtype)
    model[0].weight.data += 1e-12 if dtype == torch.float64 else 0
    before = copy.deepcopy(model.state_dict())
    adapter = nestling.attach(model, FullConfig())
    adapter.load_vector(adapter.vector() * 1.5)
    assert not torch.equal(model[0].weight, before["0.weight"])
    adapter.detach()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_integer_parameter_is_refused_by_name_unless_excluded() -> None:
    model = make()
    model[0].register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    with pytest.raises(ConfigError, match=r"0\.table: is stored as torch\.int64"):
        nestling.attach(model, FullConfig())
    assert nestling.attach(model, FullConfig(exclude=("*.table",))).layout.size == sum(
        p.numel() for p in model.parameters() if p.is_floating_point()
    )


def test_running_statistics_are_not_taken_while_attached() -> None:
    model = make().train()
    before = copy.deepcopy(model.state_dict())
    adapter = nestling.attach(model, FullConfig())
    optimiser = torch.optim.SGD(adapter.trainable(), lr=0.1)
    model(torch.randn(5, 3) + 3).square().sum().backward()
    optimiser.step()
    assert torch.equal(model[1].running_mean, before["1.running_mean"])
    assert int(model[1].num_batches_tracked) == 0
    assert not torch.equal(model[1].weight, before["1.weight"])


def test_parameters_replaced_by_loading_are_the_ones_that_count() -> None:
    model, other = make(), make(seed=1)
    adapter = nestling.attach(model, FullConfig())
    model.load_state_dict(other.state_dict(), assign=True)
    assert np.array_equal(adapter.vector(), torch.cat([p.detach().reshape(-1) for p in other.parameters()]).numpy())
    adapter.load_vector(np.zeros(adapter.layout.size, np.float32))
    assert not any(p.any() for p in model.parameters())


@pytest.mark.parametrize("first", [FullConfig(targets=("3.weight",)), LatentConfig(dim=2, targets=("3",))])
@pytest.mark.parametrize("second", [FullConfig(targets=("0.weight",)), LatentConfig(dim=2, targets=("0",))])
def test_one_model_carries_one_adapter(first, second) -> None:
    model = make()
    adapter = nestling.attach(model, first)
    state = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ConfigError, match=r"^(3|model): carries an adapter already.*detach"):
        nestling.attach(nn.Sequential(model)[0], second)
    assert [p.requires_grad for p in model.parameters()] == state
    adapter.detach()
    nestling.attach(model, second).detach()


def test_a_deep_copy_is_an_ordinary_model_with_what_was_learnt() -> None:
    model = make().eval()
    x = torch.ones(1, 3)
    adapter = nestling.attach(model, FullConfig())
    adapter.load_vector(adapter.vector() + 1)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    second = nestling.attach(twin, LatentConfig(dim=2))
    assert torch.equal(twin(x), model(x))
    second.detach()
    adapter.detach()
    assert not torch.equal(twin(x), model(x))


def test_what_was_trained_can_be_kept_and_a_detached_adapter_writes_no_more() -> None:
    model = nn.Linear(2, 2)
    adapter = nestling.attach(model, FullConfig())
    trained = adapter.vector() + 1
    adapter.load_vector(trained)
    adapter.detach(merge=True)
    assert np.array_equal(model.weight.detach().numpy().reshape(-1), trained[:4])
    with pytest.raises(ConfigError, match="was taken off"):
        adapter.load_vector(trained)
    with torch.no_grad():
        model.weight.zero_()
    adapter.detach()
    assert not model.weight.any()
