"""The latent adapter against its dense definition, and against everything a model can do while it is on."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_close
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import nestling
from nestling import LatentConfig
from nestling.adapters.base import averaging_error
from nestling.adapters.latent import LatentAdapter, latent_counts, root_mean_square
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.seeds import Stream, key, words
from nestling.models.resnet import make_resnet


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=1000 * seed + i) + (parameter.ndim == 1))
    return model


class Tied(nn.Module):
    """Embedding and output layer share one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embed(tokens))))


class ReadsFromAbove(nn.Module):
    """Uses its grandchild's weight without calling it, as fused attention blocks and tied heads often do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embed": nn.Embedding(11, 6), "middle": nn.Linear(6, 6)})

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.linear(self.parts["embed"](tokens), self.parts["middle"].weight).tanh()
        return h @ self.parts["embed"].weight.T


class SharedNorm(nn.Module):
    """Two norms with one scale, and a weight held by a module of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.mirror = nn.Module()
        self.mirror.register_parameter("matrix", self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.linear(self.first(x)) @ self.mirror.matrix)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Encodes(nn.Module):
    """With a padding mask an encoder in `eval()` turns to nested tensors and fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=True
        )
        self.register_buffer("mask", torch.tensor([[False, False, True], [False, False, False]]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=self.mask).masked_fill(self.mask[..., None], 0)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5))


TOKENS = torch.tensor([[1, 2, 10], [0, 4, 4]])
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolutions": (convolutions, normal(3, 2, 5, 5, seed=5)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 3), nn.Tanh()), normal(2, 3, 7, seed=5)),
    "tied": (Tied, TOKENS),
    "reads from above": (ReadsFromAbove, TOKENS),
    "shared norm": (SharedNorm, normal(2, 6, seed=5)),
    "attention": (Attends, normal(2, 3, 8, seed=5)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        normal(2, 3, 8, seed=5),
    ),
    "encoder": (Encodes, normal(2, 3, 8, seed=5)),
    "a bare layer": (lambda: nn.Linear(3, 2), normal(2, 3, seed=5)),
}


def adapted(model: nn.Module, config: LatentConfig, *, seed: int = 3, size: float = 0.3) -> LatentAdapter:
    """An adapter with random latents."""
    adapter = nestling.attach(model, config)
    assert isinstance(adapter, LatentAdapter)
    adapter.load_vector(size * normal(adapter.layout.size, seed=seed))
    return adapter


def dense_map(base: Tensor, name: str, *, seed: int, dim: int, rank: int) -> Tensor:
    """s/√r · U Vᵀ in float64, from the words of the streams: float64[numel, dim]."""
    n, r = base.numel(), rank or dim
    W = -(-r // 32)
    drawn = words(key(seed, "signs-u", name), 0, n * W).reshape(n, W).astype(np.int64)
    U = np.array([[2 * (int(row[j // 32]) >> (j % 32) & 1) - 1 for j in range(r)] for row in drawn], np.float64)
    V = np.eye(dim)
    if r < dim:
        V = Stream(seed, "signs-v", name).signs(dim * r).reshape(dim, r).astype(np.float64) / math.sqrt(dim)
    s = float(np.float32(math.sqrt(float(base.detach().double().square().mean()))))
    return torch.from_numpy(s / math.sqrt(r) * U @ V.T)


@pytest.mark.parametrize(("dim", "rank"), [(64, 0), (64, 64), (40, 33), (16, 4), (1, 0)])
@pytest.mark.parametrize(
    "layer", [nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3, groups=1), nn.Linear(5, 7), nn.Embedding(9, 4)]
)
def test_weights_are_the_dense_definition(layer: nn.Module, dim: int, rank: int) -> None:
    model = fill(nn.Sequential(layer))
    adapter = adapted(model, LatentConfig(seed=11, dim=dim, rank=rank))
    dim = min(dim, layer.weight.numel())  # a tensor gets no more latents than it has numbers
    M = dense_map(layer.weight, "0.weight", seed=11, dim=dim, rank=min(rank, dim))
    expected = layer.weight.double() + (M @ adapter.z.double()).view(layer.weight.shape)
    assert_close(adapter.weights()["0.weight"].detach(), expected.detach())
    assert not torch.equal(adapter.weights()["0.weight"], layer.weight)
    adapter.detach()


@pytest.mark.parametrize(("dim", "rank"), [(33, 0), (12, 5)])
@pytest.mark.parametrize("name", ["convolutions", "tied", "reads from above", "encoder layer"])
def test_gradients_equal_the_dense_definitions(name: str, dim: int, rank: int) -> None:
    """In float64, so that only the map's own float32 is left."""
    make, x = MODELS[name]
    x = x.double() if x.is_floating_point() else x
    model = fill(make()).double()
    reference = copy.deepcopy(model)
    adapter = adapted(model, LatentConfig(seed=11, dim=dim, rank=rank))
    model(x).square().sum().backward()

    z = adapter.z.detach().double().requires_grad_()
    weights = {}
    for part, (target, _) in zip(z.split(dim), adapter.layout, strict=True):
        base = reference.get_parameter(target)
        weights[target] = base + (dense_map(base, target, seed=11, dim=dim, rank=rank) @ part).view(base.shape)
    functional_call(reference, weights, x).square().sum().backward()
    assert z.grad is not None
    assert z.grad.abs().min() > 0
    assert_close(adapter.z.grad, z.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_pass_is_a_functional_call_with_the_adapted_weights(name: str, train: bool, grad: bool) -> None:
    make, x = MODELS[name]
    model = fill(make()).train(train)
    reference = copy.deepcopy(model)
    before = reference(x)
    adapter = adapted(model, LatentConfig(seed=1, dim=5, train_norms="norm" in name))
    with torch.set_grad_enabled(grad):
        got = model(x)
        wanted = functional_call(reference, adapter.weights(), x)
        assert_close(got.detach(), wanted.detach())
        assert got.requires_grad == grad
    assert not torch.allclose(got, before, atol=1e-3)
    # All of them take part: each weight alone changes the output.
    for target in adapter.layout.names:
        alone = {target: adapter.weights()[target]}
        assert not torch.allclose(functional_call(reference, alone, x), before, atol=1e-5)


def test_a_functional_call_on_an_adapted_model_uses_the_tensors_it_is_given() -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5)
    base_output = model(x)
    adapter = adapted(model, LatentConfig(dim=4))
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert torch.equal(functional_call(model, base, x), base_output)
    assert torch.equal(functional_call(model, adapter.weights(), x), model(x))


def test_tied_weights_change_together_and_are_sent_once() -> None:
    model = fill(Tied())
    before = model.embed(TOKENS)
    adapter = adapted(model, LatentConfig(dim=4))
    assert adapter.layout.names == ("embed.weight", "middle.weight")
    weight = adapter.weights()["embed.weight"]
    assert torch.equal(model.embed(TOKENS), weight[TOKENS])
    assert not torch.equal(model.embed(TOKENS), before)
    assert torch.equal(model.out(normal(1, 6)), normal(1, 6) @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["convolutions", "tied", "attention"])
def test_zero_latents_give_the_base_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    make, x = MODELS[name]
    x = x.to(dtype) if x.is_floating_point() else x
    model = fill(make()).to(dtype).requires_grad_(False)
    if dtype == torch.float64:
        for parameter in model.parameters():
            parameter.data.add_(1e-10)  # digits that float32 has not
    with torch.set_grad_enabled(name != "attention"):  # which chooses its kernel by who wants gradients
        expected = model(x)
        adapter = nestling.attach(model, LatentConfig(dim=4, train_norms=name == "convolutions"))
        assert torch.equal(model(x), expected)
    for target, weight in adapter.weights().items():
        assert weight.dtype == dtype
        assert torch.equal(weight, model.get_parameter(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("after", [True, False])
def test_other_precisions_before_and_after_attach(dtype: torch.dtype, after: bool) -> None:
    model = fill(convolutions())
    x = normal(3, 2, 5, 5, seed=5)
    if not after:
        model.to(dtype)
    adapter = adapted(model, LatentConfig(dim=4, train_norms=True))
    if after:
        with torch.no_grad():
            model(x)  # fills the cache in the precision that is about to go
        model.to(dtype)
    assert adapter.z.dtype == torch.float32
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            output = model(x.to(dtype))
        assert output.dtype == dtype
    output.float().square().sum().backward()
    assert torch.isfinite(adapter.z.grad).all()
    assert adapter.z.grad.abs().max() > 0
    base = model[0].weight.detach()
    M = dense_map(fill(convolutions())[0].weight, "0.weight", seed=0, dim=4, rank=0)
    assert_close(
        adapter.weights()["0.weight"].detach(),
        base.double() + (M @ adapter.z[:4].detach().double()).view(base.shape),
        torch.float32 if dtype == torch.float64 else dtype,
    )


@pytest.mark.parametrize("how", ["optimiser", "data", "in place", "load_vector"])
def test_without_gradients_new_latents_are_used_at_once(how: str) -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    adapter = adapted(model, LatentConfig(dim=4))
    with torch.no_grad():
        first = model(x)
        assert torch.equal(model(x), first)
    if how == "optimiser":
        optimiser = torch.optim.SGD(adapter.trainable(), lr=0.1)
        model(x).sum().backward()
        optimiser.step()
    elif how == "data":
        adapter.z.data[-1] += 1
    elif how == "in place":
        with torch.no_grad():
            adapter.z[0].add_(1)
    else:
        adapter.load_vector(adapter.vector() + 1)
    with torch.no_grad():
        got = model(x)
        adapter._made.clear()
        assert torch.equal(got, model(x))
    assert not torch.equal(got, first)


def double_data(weight: nn.Parameter, model: nn.Module) -> None:
    weight.data = 2 * weight.data


def double_in_place(weight: nn.Parameter, model: nn.Module) -> None:
    with torch.no_grad():
        weight.mul_(2)


def load(weight: nn.Parameter, model: nn.Module, *, assign: bool = False) -> None:
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def load_assigned(weight: nn.Parameter, model: nn.Module) -> None:
    load(weight, model, assign=True)


@pytest.mark.parametrize("change", [double_data, double_in_place, load, load_assigned])
@pytest.mark.parametrize("grad", [True, False])
def test_a_changed_base_is_used_at_once(change: Callable[[nn.Parameter, nn.Module], None], grad: bool) -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    adapter = adapted(model, LatentConfig(dim=4))
    old = model[0].weight.detach().clone()
    delta = adapter.weights()["0.weight"] - old
    with torch.set_grad_enabled(grad):
        first = model(x)
        change(model[0].weight, model)
        assert not torch.equal(model[0].weight, old)
        second = model(x)
        assert not torch.allclose(first, second)
        reference = fill(convolutions())
        reference.load_state_dict(model.state_dict())
        assert torch.equal(second, functional_call(reference, adapter.weights(), x))
        torch.testing.assert_close(adapter.weights()["0.weight"], model[0].weight + delta)


def test_one_number_written_into_a_large_base_is_noticed() -> None:
    model, x = fill(nn.Sequential(nn.Linear(100, 100))), normal(1, 100)
    adapter = adapted(model, LatentConfig(dim=4))
    with torch.no_grad():
        first = model(x)
        for position in (0, 5_001, 9_999):
            model[0].weight.view(-1)[position] += 1
            assert not torch.equal(model(x), first)
            first = model(x)
    adapter.detach()


def test_a_base_of_another_shape_is_an_error_and_not_a_guess() -> None:
    model = fill(convolutions())
    adapted(model, LatentConfig(dim=4))
    model[0].weight = nn.Parameter(normal(4, 2, 2, 2))
    with pytest.raises(ConfigError, match="made for another model"):
        model(normal(3, 2, 5, 5))


def test_gradient_modes_may_alternate_and_nest() -> None:
    model, x = fill(ReadsFromAbove()), TOKENS
    adapter = adapted(model, LatentConfig(dim=4))
    expected = model(x).detach()
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        with torch.enable_grad():
            output = model(x)
    output.sum().backward()
    assert adapter.z.grad is not None

    outer = nn.Sequential(model)  # a pass without gradients that opens one with gradients inside
    adapter.detach()
    adapter = adapted(outer, LatentConfig(dim=4))
    expected = outer(x).detach()

    class WithGradients(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = outer
            self.output: Tensor | None = None

        def forward(self, tokens: Tensor) -> Tensor:
            with torch.enable_grad():
                self.output = self.inner(tokens)
            return self.inner(tokens)

    both = WithGradients()
    adapter.detach()
    adapter = adapted(both, LatentConfig(dim=4))
    with torch.no_grad():
        plain = both(x)
    assert not plain.requires_grad
    assert both.output is not None
    assert torch.equal(both.output, plain)
    both.output.sum().backward()
    assert adapter.z.grad.abs().max() > 0


def test_after_an_inner_pass_with_gradients_the_outer_one_still_reads_adapted_weights() -> None:
    class ReadsAfterwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.inner: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                self.inner = self.linear(x)
            return F.linear(x, self.linear.weight, self.linear.bias)

    model, x = fill(ReadsAfterwards()), normal(2, 6)
    adapted(model, LatentConfig(dim=4))
    with torch.no_grad():
        outer = model(x)
    assert model.inner is not None
    assert model.inner.requires_grad
    assert torch.equal(outer, model.inner)


def test_state_dict_holds_the_base_only_and_the_parameters_stay_themselves() -> None:
    model = fill(convolutions())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = adapted(model, LatentConfig(dim=4))
    model(normal(3, 2, 5, 5)).sum().backward()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(not isinstance(value, Tensor) for value in model[0].__dict__.values())
    assert not any(p is adapter.z for p in model.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("used", ["fresh", "cached", "trained"])
def test_a_deep_copy_is_independent(used: str) -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    adapter = adapted(model, LatentConfig(dim=4))
    if used == "cached":
        with torch.no_grad():
            model(x)
    elif used == "trained":
        model(x).sum().backward()
    expected = model(x).detach()
    twin, twin_adapter = copy.deepcopy((model, adapter))
    assert torch.equal(twin(x), expected)
    adapter.load_vector(np.zeros(adapter.layout.size, np.float32))
    assert torch.equal(twin(x), expected)
    twin_adapter.load_vector(2 * twin_adapter.vector())
    assert not torch.equal(twin(x), expected)
    twin_adapter.detach()
    assert torch.equal(twin(x), model(x))  # both at z = 0
    adapter.load_vector(normal(adapter.layout.size))
    assert not torch.equal(twin(x), model(x))
    assert not twin[0]._forward_pre_hooks
    assert model[0]._forward_pre_hooks


def test_a_copy_of_an_adapted_model_is_adapted_and_refuses_a_second_adapter() -> None:
    model = fill(convolutions())
    adapted(model, LatentConfig(dim=4))
    with pytest.raises(ConfigError, match="already"):
        nestling.attach(copy.deepcopy(model), LatentConfig(dim=4))


class Breaks(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.linear, self.inner, self.error = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), error
        self.broken = True
        self.inner.register_forward_hook(self.interrupt)

    def interrupt(self, *_: object) -> None:
        if self.broken:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


def shadows(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if {"weight", "bias"} & set(m.__dict__)]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("grad", [True, False])
def test_an_exception_in_a_forward_pass_changes_nothing(error: BaseException, grad: bool) -> None:
    model, x = fill(Breaks(error)), normal(2, 3)
    model.broken = False
    base = model(x).detach()
    adapter = adapted(model, LatentConfig(dim=4))
    model.broken = True
    with torch.set_grad_enabled(grad):
        with pytest.raises(type(error)):
            model(x)
        if isinstance(error, Exception):  # after Ctrl-C torch runs no hooks: the next pass tidies up
            assert shadows(model) == []
        adapter.z.data.mul_(2)
        with torch.no_grad():
            adapter.z.add_(1)
        model.broken = False
        weight = adapter.weights()["inner.0.weight"]
        assert torch.equal(model.inner(x), F.linear(x, weight, model.inner[0].bias))
        got = model(x)
        assert shadows(model) == []
        reference = fill(Breaks(error))
        reference.broken = False
        assert torch.equal(got, functional_call(reference, adapter.weights(), x))
    if grad:
        got.sum().backward()
        assert adapter.z.grad is not None
    model.broken = True
    with pytest.raises(type(error)):
        model(x)
    adapter.detach()
    model.broken = False
    assert shadows(model) == []
    assert torch.equal(model(x), base)


@pytest.mark.parametrize("reads_from_above", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reads_from_above: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.on = on
            make = ReadsFromAbove if reads_from_above else Tied
            self.first, self.second = make(), nn.Sequential(nn.Linear(11, 11), nn.GELU(), nn.Linear(11, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            if not self.on:
                return self.second(self.first(tokens))
            h = checkpoint(self.first, tokens, use_reentrant=False)
            return checkpoint(self.second, h, use_reentrant=False)

    gradients = []
    for on in (False, True):
        model = fill(Checkpointed(on))
        adapter = adapted(model, LatentConfig(dim=4))
        model(TOKENS).square().sum().backward()
        gradients.append(adapter.z.grad)
        assert shadows(model) == []
        assert adapter._made == {}
    assert torch.equal(*gradients)


def test_autocast_trains_in_half_precision() -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    adapter = adapted(model, LatentConfig(dim=4))
    model(x).square().sum().backward()
    exact, adapter.z.grad = adapter.z.grad, None
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
    assert adapter.z.grad.dtype == torch.float32
    torch.testing.assert_close(adapter.z.grad, exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def test_channels_last_weights() -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    expected = adapted(model, LatentConfig(dim=4)).weights()["0.weight"]
    other = fill(convolutions()).to(memory_format=torch.channels_last)
    adapter = adapted(other, LatentConfig(dim=4))
    assert torch.equal(adapter.weights()["0.weight"], expected)
    torch.testing.assert_close(other(x), model(x))


def test_norms_can_be_trained_too() -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    adapter = nestling.attach(model, LatentConfig(dim=4, train_norms=True))
    assert adapter.layout.names == ("0.weight", "4.weight", "1.weight", "1.bias")
    assert adapter.layout.size == 4 + 4 + 4 + 4
    change = np.arange(16, dtype=np.float32)
    adapter.load_vector(change)
    assert torch.equal(adapter.weights()["1.weight"], model[1].weight + torch.from_numpy(change[8:12]))
    assert torch.equal(adapter.weights()["1.bias"], model[1].bias + torch.from_numpy(change[12:]))
    model(x).square().sum().backward()
    assert (adapter.z.grad != 0).all()


def test_running_statistics_belong_to_the_frozen_base() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    x = normal(8, 3) + 5
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model.eval()(x)
    model.train()
    adapter = adapted(model, LatentConfig(dim=4), size=0)
    assert torch.equal(model(x), expected)
    assert model[1].training
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    adapter.detach()
    assert not torch.equal(model(x), expected)
    assert int(model[1].num_batches_tracked) == 1


def test_detach_restores_buffers_that_the_model_itself_writes(tmp_path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.seen * self.linear(x)

    model = fill(Counts())
    adapter = adapted(model, LatentConfig(dim=4))
    model(normal(2, 3))
    with pytest.raises(ContextError, match="frozen base has changed"):
        adapter.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    adapter.detach()
    assert float(model.seen) == 0


def test_merging_keeps_the_adapted_weights() -> None:
    model, x = fill(Tied()), TOKENS
    adapter = adapted(model, LatentConfig(dim=4))
    expected = model(x).detach()
    adapter.detach(merge=True)
    assert torch.equal(model(x), expected)
    assert model.out.weight is model.embed.weight
    assert model.middle.weight.requires_grad


def test_the_seed_alone_decides_the_maps() -> None:
    outputs = {}
    for seed in (0, 1, 1, 2**64 - 1):
        model = fill(convolutions())
        adapter = adapted(model, LatentConfig(seed=seed, dim=4))
        outputs.setdefault(seed, []).append((adapter.weights()["0.weight"].detach(), adapter.spec["maps"]))
    (first, first_maps), (again, again_maps) = outputs[1]
    assert torch.equal(first, again)
    assert first_maps == again_maps
    assert len({maps for [(_, maps), *_] in outputs.values()}) == 3
    assert not torch.equal(outputs[0][0][0], first)


def test_global_generators_are_left_alone() -> None:
    model = fill(convolutions())
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    adapted(model, LatentConfig(dim=4, rank=2))
    model(normal(3, 2, 5, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_everything_that_matters_is_in_the_spec() -> None:
    base = LatentConfig(seed=1, dim=8)
    configs = [
        base,
        replace(base, seed=2),
        replace(base, dim=9),
        replace(base, dim=16, rank=8),
        replace(base, budget=16),
        replace(base, targets=("0",)),
        replace(base, exclude=("4",)),
        replace(base, train_norms=True),
    ]
    specs = []
    for config in configs:
        adapter = nestling.attach(fill(convolutions()), config)
        specs.append(adapter.spec)
    other = fill(convolutions(), seed=1)  # other weights have other scales, hence other maps
    specs.append(nestling.attach(other, base).spec)
    assert all(a != b for i, a in enumerate(specs) for b in specs[:i])
    assert nestling.attach(fill(convolutions()), base).spec == specs[0]


def test_a_weight_of_zeros_or_nan_is_refused_and_the_model_left_alone() -> None:
    for value in (0.0, float("nan"), float("inf")):
        model = fill(convolutions())
        model[4].weight.data.fill_(value)
        with pytest.raises(ConfigError, match=r"4\.weight"):
            nestling.attach(model, LatentConfig(dim=4))
        assert all(p.requires_grad for p in model.parameters())
        assert not any(m._forward_pre_hooks for m in model.modules())


def test_vectors_of_any_kind_are_taken_and_bad_ones_refused() -> None:
    model = fill(convolutions())
    adapter = adapted(model, LatentConfig(dim=4))
    good = np.linspace(-1, 1, 8).astype(np.float32)
    read_only = good.copy()
    read_only.setflags(write=False)
    kinds = [good.astype(np.float64), good.astype(">f4"), read_only, torch.from_numpy(good).double(), good[::-1][::-1]]
    for vector in kinds:
        adapter.load_vector(np.zeros(8, np.float32))
        adapter.load_vector(vector)
        assert np.array_equal(adapter.vector(), good)
    adapter.load_vector(torch.from_numpy(good).bfloat16().requires_grad_())
    assert np.array_equal(adapter.vector(), torch.from_numpy(good).bfloat16().float().numpy())
    kept = adapter.vector()
    for bad in (good[:7], np.zeros(9), np.zeros((2, 4)), np.array(1.0)):
        with pytest.raises(ContextError, match="shape"):
            adapter.load_vector(bad)
    for value in (np.nan, np.inf, -np.inf, 1e300):
        with pytest.raises(WireError, match="finite"):
            adapter.load_vector(np.array([value] * 8))
    assert np.array_equal(adapter.vector(), kept)
    copied = adapter.vector()
    copied[:] = 7
    assert np.array_equal(adapter.vector(), kept)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), st.integers(0, 5000))
def test_a_budget_is_spent_exactly_and_larger_tensors_never_get_less(sizes: list[int], spare: int) -> None:
    config = LatentConfig(budget=len(sizes) + spare)
    counts = latent_counts(sizes, config)
    assert sum(counts) == config.budget
    assert min(counts) >= 1
    ordered = sorted(zip(sizes, counts, strict=True))
    assert all(small[1] <= large[1] + 1 for small, large in pairwise(ordered))


def test_a_budget_below_one_latent_each_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.budget"):
        nestling.attach(fill(convolutions()), LatentConfig(budget=1))


@given(st.integers(0, 2**32), st.sampled_from([(1,), (3, 5), (0,)]))
def test_root_mean_square(seed: int, shape: tuple[int, ...]) -> None:
    tensor = normal(*shape, seed=seed)
    expected = float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
    assert root_mean_square(tensor) == float(np.float32(expected))


def test_averages_are_exact_on_the_papers_network() -> None:
    model = make_resnet("resnet18", width=64, channels=3, classes=10, seed=0)
    adapter = nestling.attach(model, LatentConfig(seed=0, targets=("*conv*",)))
    states = [normal(adapter.layout.size, seed=i).numpy() for i in range(3)]
    assert averaging_error(adapter, states, [5, 1, 30]) <= 1e-6


def test_an_embeddings_padding_row_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(5, 6, padding_idx=2))
    adapter = adapted(model, LatentConfig(dim=4))
    weight = adapter.weights()["0.weight"]
    changed = (weight != model[0].weight).any(1)
    assert changed.tolist() == [True, True, False, True, True]
    assert torch.equal(model(torch.arange(5)), weight)


def test_a_compiled_model_is_adapted() -> None:
    model, x = fill(convolutions()), normal(3, 2, 5, 5, seed=5)
    adapter = adapted(model, LatentConfig(dim=4))
    compiled = torch.compile(model, backend="eager")
    assert_close(compiled(x).detach(), model(x).detach())
    compiled(x).sum().backward()
    assert adapter.z.grad is not None
    assert adapter.z.grad.abs().min() > 0


def test_taking_it_off_twice_does_nothing_more() -> None:
    model = fill(convolutions())
    adapter = adapted(model, LatentConfig(dim=4))
    adapter.detach()
    model[0].weight.requires_grad_(False)
    adapter.detach()
    assert not model[0].weight.requires_grad


def test_half_precision_does_not_claim_exact_averages() -> None:
    assert not adapted(fill(convolutions()).bfloat16(), LatentConfig(dim=4)).averages_exactly
    assert adapted(fill(convolutions()), LatentConfig(dim=4)).averages_exactly


def test_a_tensor_gets_no_more_latents_than_it_has_numbers() -> None:
    adapter = adapted(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 40)), LatentConfig(dim=64, rank=8))
    assert adapter.layout.shapes == ((6,), (64,))


def test_queries_keys_and_values_of_joint_attention_are_adapted() -> None:
    model = fill(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)))
    adapter = adapted(model, LatentConfig(dim=4, targets=("*self_attn",)))
    assert adapter.layout.names == ("0.self_attn.in_proj_weight",)
    x = normal(2, 3, 8, seed=5)
    for mode in (model.train, model.eval):
        mode()
        assert torch.allclose(model(x), functional_call(fill(copy.deepcopy(model)), adapter.weights(), x), atol=1e-6)
    base = adapter.vector() * 0
    before = model(x)
    adapter.load_vector(base)
    assert not torch.allclose(before, model(x))
