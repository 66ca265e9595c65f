"""What every adapter promises. A new adapter adds one line to `CASES`."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small import tiny_llama
from torch import Tensor, nn

import nestling
from nestling.adapters.base import Adapter, averaging_error
from nestling.config.schema import AdapterConfig, FullConfig, LatentConfig, LoraConfig, MappingConfig, MemoryConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.models.resnet import make_resnet
from nestling.models.tinygpt import make_tinygpt


class Words(nn.Module):
    """Tied embedding and output, attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(self.embed(tokens)).mean(1))


class Projections(nn.Module):
    """Layers whose modules have names as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(8, 6, bias=False), "v_proj": nn.Linear(6, 8)}) for _ in range(3)
        )
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["v_proj"](torch.tanh(layer["q_proj"](x)))
        return self.out(x.mean(1))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return make()


def images() -> nn.Module:
    return make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)


def images_by_peft() -> nn.Module:
    pytest.importorskip("peft")
    return images()


def words() -> nn.Module:
    return seeded(Words)


def projections() -> nn.Module:
    pytest.importorskip("peft")
    return seeded(Projections)


class NextWord(nn.Module):
    """A language model that answers with one of ten words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def base_model(self) -> nn.Module:
        return self.model.base_model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits[:, -1, :10]


class LastToken(nn.Module):
    """A small GPT over ten tokens that answers at the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_tinygpt(vocabulary=10, width=32, layers=1, context=6, seed=0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[:, -1]


def gpt_by_peft() -> nn.Module:
    pytest.importorskip("peft")
    return LastToken()


def language() -> nn.Module:
    pytest.importorskip("transformers")
    return NextWord(tiny_llama())


def with_statistics() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 100, 10))
    )


IMAGES = torch.randn(16, 1, 12, 12, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 10, (16, 5), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(16) % 10


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    config: AdapterConfig
    x: Tensor
    size: int
    lr: float = 1e-2


CASES = {
    "latent": Case(images, LatentConfig(seed=7, dim=8, targets=("*conv*",)), IMAGES, 9 * 8),
    "latent rank": Case(images, LatentConfig(seed=7, dim=12, rank=5, exclude=("head",)), IMAGES, 9 * 12),
    "latent budget": Case(images, LatentConfig(seed=7, budget=100, targets=("*conv*",)), IMAGES, 100),
    "latent norms": Case(with_statistics, LatentConfig(seed=7, dim=8, train_norms=True), IMAGES, 2 * 8 + 2 * 6),
    "latent words": Case(words, LatentConfig(seed=7, dim=8), TOKENS, 5 * 8),
    "latent gpt": Case(LastToken, LatentConfig(seed=7, dim=8, targets=("*blocks.*",)), TOKENS, 4 * 8),
    "full gpt": Case(LastToken, FullConfig(targets=("*blocks.*",)), TOKENS, 12 * 32 * 32 + 4 * 32),
    "lora gpt": Case(
        gpt_by_peft, LoraConfig(seed=7, rank=2, targets=("qkv", "down")), TOKENS, 2 * (32 + 96 + 128 + 32)
    ),
    "lora": Case(projections, LoraConfig(seed=7, rank=2), TOKENS, 3 * 2 * 2 * (8 + 6)),
    "lora upper": Case(
        projections, LoraConfig(seed=7, rank=3, layers="upper:0.5", targets=("q_proj",)), TOKENS, 2 * 3 * (8 + 6)
    ),
    "lora ffa": Case(projections, LoraConfig(seed=7, rank=2, ffa=True), TOKENS, 3 * 2 * (6 + 8)),
    "lora latent": Case(projections, LoraConfig(seed=7, rank=2, dim=5), TOKENS, 3 * 2 * 2 * 5),
    "lora ffa latent": Case(projections, LoraConfig(seed=7, rank=2, ffa=True, dim=5), TOKENS, 3 * 2 * 5),
    "lora images": Case(images_by_peft, LoraConfig(seed=7, rank=2, targets=("*conv*", "head")), IMAGES, 2 * (993 + 42)),
    "lora images ffa": Case(images_by_peft, LoraConfig(seed=7, rank=2, targets=("*conv*",), ffa=True), IMAGES, 2 * 168),
    "lora images latent": Case(
        images_by_peft, LoraConfig(seed=7, rank=2, targets=("conv[12]",), layers="1-2", dim=8), IMAGES, 4 * 2 * 8
    ),
    "mapping": Case(images, MappingConfig(seed=7, dim=40, targets=("*conv*",)), IMAGES, 40),
    "mapping words": Case(words, MappingConfig(seed=7, dim=7, exclude=("block.linear2",)), TOKENS, 7),
    "mapping squashed": Case(images, MappingConfig(seed=7, dim=40, targets=("*conv*",), squash=True), IMAGES, 40),
    "mapping modulated": Case(images, MappingConfig(seed=7, dim=40, targets=("*conv*",), modulation=0.5), IMAGES, 40),
    "memory": Case(language, MemoryConfig(seed=7, rank=2, layers="1-2", window=0), TOKENS, 2 * (2 * 224 + 98 + 6)),
    "memory latent": Case(
        language, MemoryConfig(seed=7, rank=2, layers="2", window=0, forget=True, dim=4), TOKENS, 8 * 4 + 2 + 2
    ),
    "full": Case(images, FullConfig(targets=("*conv*",)), IMAGES, 19_144),
    "full words": Case(words, FullConfig(), TOKENS, 80 + 600),
    "full statistics": Case(with_statistics, FullConfig(exclude=("4.*",)), IMAGES, 54 + 6 + 6 + 6),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def attach(case: Case) -> tuple[nn.Module, Adapter]:
    model = case.make()
    return model, nestling.attach(model, case.config)


def random_state(adapter: Adapter, seed: int, *, size: float = 0.1) -> np.ndarray:
    """Near the state at the beginning, which is where states of a run are."""
    drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(seed))
    return adapter.vector() + np.float32(size) * drawn.numpy()


def weights_of(name: str, adapter: Adapter) -> list[str]:
    """What a tensor of the vector changes: LoRA has two tensors for each weight, a mapping one for all of them."""
    if isinstance(adapter.config, MappingConfig):
        return list(adapter.weights())
    return [re.sub(r"lora_[AB]\.weight$", "weight", name)]


class Computes:
    """An adapter, whose `weights()` are those that its model multiplies with: of a memory, B A and tanh(gate)."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def __getattr__(self, name: str) -> object:
        return getattr(self.adapter, name)

    def weights(self) -> dict[str, Tensor]:
        made = self.adapter.weights()
        if not isinstance(self.adapter.config, MemoryConfig):
            return made
        products = {n.removesuffix(".A"): made[n[:-1] + "B"] @ made[n] for n in made if n.endswith(".A")}
        return products | {name: tensor.tanh() for name, tensor in made.items() if name.endswith(".gate")}


def train(model: nn.Module, adapter: Adapter, case: Case, steps: int = 5) -> list[float]:
    model.train()
    optimiser = torch.optim.Adam(adapter.trainable(), lr=case.lr)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(case.x), LABELS)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def output(model: nn.Module, case: Case) -> Tensor:
    with torch.no_grad():
        return model(case.x)


def snapshot(model: nn.Module) -> dict[str, tuple[bytes, torch.dtype]]:
    return {
        name: (tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def test_layout_and_vector_agree(case: Case) -> None:
    _, adapter = attach(case)
    assert adapter.layout.size == case.size
    assert adapter.vector().shape == (case.size,)
    assert adapter.vector().dtype == np.float32
    assert sum(p.numel() for p in adapter.trainable()) == case.size
    assert set(adapter.weights()) == {w for name in adapter.layout.names for w in weights_of(name, adapter)}


def test_a_vector_comes_back_as_it_was_loaded(case: Case) -> None:
    model, adapter = attach(case)
    state = random_state(adapter, 0)
    adapter.load_vector(state)
    assert np.array_equal(adapter.vector(), state)
    first = output(model.eval(), case)
    state[:] = 0  # both directions copy
    adapter.vector()[:] = 0
    assert torch.equal(output(model, case), first)
    adapter.load_vector(torch.from_numpy(random_state(adapter, 1)))
    assert not torch.equal(output(model, case), first)


def test_every_number_of_the_vector_matters(case: Case) -> None:
    """Each changes some weight: nothing is sent for nothing."""
    _, adapter = attach(case)
    adapter.load_vector(random_state(adapter, 0))  # LoRA's A changes nothing while B is zero
    start, before = adapter.vector(), {name: w.detach().clone() for name, w in adapter.weights().items()}
    picks = {int(i) for i in np.linspace(0, case.size - 1, 25)}
    for i in picks:
        changed = start.copy()
        changed[i] += 1
        adapter.load_vector(changed)
        moved = [name for name, weight in adapter.weights().items() if not torch.equal(weight, before[name])]
        name = next(n for n in adapter.layout.names if i < adapter.layout.slice(n).stop)
        assert moved == weights_of(name, adapter)


def test_at_the_start_the_model_is_the_base(case: Case) -> None:
    model = case.make().requires_grad_(False)
    for mode in (True, False):
        model.train(mode and not any(b is not None for b in model.buffers()))
        with torch.no_grad():
            expected = model(case.x)
        adapter = nestling.attach(model, case.config)
        for _ in range(2):  # the second may come from a cache
            assert torch.equal(output(model, case), expected)
        adapter.load_vector(random_state(adapter, 0))
        assert not torch.equal(output(model, case), expected)
        adapter.detach()
        assert torch.equal(output(model, case), expected)


def test_training_lowers_the_loss_and_only_trainable_gets_gradients(case: Case) -> None:
    model, adapter = attach(case)
    before = snapshot(model)
    losses = train(model, adapter, case)
    assert losses[-1] < losses[0]
    own = {id(p) for p in adapter.trainable()}
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapter.trainable())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters() if id(p) not in own)
    trained = {name for name, p in model.named_parameters() if id(p) in own}
    changed = {name for name, value in snapshot(model).items() if before[name] != value}
    tied = {"out.weight"} if "embed.weight" in trained else set()
    assert changed == trained | tied


def test_detach_restores_the_model_bit_for_bit(case: Case) -> None:
    model = case.make()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
    flags = [p.requires_grad for p in model.parameters()]
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    objects, before = list(model.parameters()), snapshot(model)
    adapter = nestling.attach(model, case.config)
    train(model, adapter, case, steps=2)
    adapter.detach()
    assert snapshot(model) == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    for name, module in model.named_modules():
        assert set(module.__dict__) == set(attributes[name])
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._forward_hooks_always_called
    adapter.detach()  # twice does no harm
    assert snapshot(model) == before


@pytest.mark.parametrize("name", CASES)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), data=st.data())
def test_averages_are_exact_where_it_says_so(name: str, seeds: list[int], data: st.DataObject) -> None:
    if name not in ATTACHED:
        ATTACHED[name] = attach(CASES[name])[1]
    adapter = ATTACHED[name]
    weights = data.draw(st.lists(st.integers(1, 10**4), min_size=len(seeds), max_size=len(seeds)))
    error = averaging_error(Computes(adapter), [random_state(adapter, seed, size=1.0) for seed in seeds], weights)
    assert (adapter.averages_exactly or len(set(seeds)) == 1) == (error <= 1e-6)


ATTACHED: dict[str, Adapter] = {}


def test_saving_and_loading_a_trained_adapter_gives_identical_outputs(case: Case, tmp_path) -> None:
    model, adapter = attach(case)
    start = output(model.eval(), case)
    train(model, adapter, case)
    expected = output(model, case)
    assert not torch.equal(expected, start)
    adapter.save_pretrained(tmp_path / "new" / "folder")
    fresh = case.make().eval()
    again = nestling.from_pretrained(fresh, tmp_path / "new" / "folder")
    assert torch.equal(output(fresh, case), expected)
    assert again.spec == adapter.spec
    assert again.layout == adapter.layout
    assert again.base_hash == adapter.base_hash
    assert np.array_equal(again.vector(), adapter.vector())
    train(fresh, again, case, steps=1)  # and it can be trained further
    again.detach()
    assert torch.equal(output(fresh.eval(), case), start)


def test_a_wrong_vector_is_refused_and_changes_nothing(case: Case) -> None:
    model, adapter = attach(case)
    adapter.load_vector(random_state(adapter, 0))
    model.eval()
    state, before = adapter.vector(), output(model, case)
    for bad in (state[:-1], np.append(state, np.float32(0)), state[None], state[:0]):
        with pytest.raises(ContextError) as caught:
            adapter.load_vector(bad)
        assert caught.value.exit_code == 3
    for value in (np.nan, np.inf, -np.inf):
        bad = state.copy()
        bad[-1] = value
        for vector in (bad, torch.from_numpy(bad)):
            with pytest.raises(WireError) as wire:
                adapter.load_vector(vector)
            assert wire.value.code == "non_finite"
    assert np.array_equal(adapter.vector(), state)
    assert torch.equal(output(model, case), before)


def test_a_second_adapter_is_refused_until_the_first_is_off(case: Case) -> None:
    model, adapter = attach(case)
    adapter.load_vector(random_state(adapter, 0))
    model.eval()
    before = output(model, case)
    for config in (case.config, LatentConfig(dim=2), FullConfig()):
        with pytest.raises(ConfigError, match="carries an adapter already"):
            nestling.attach(model, config)
    assert torch.equal(output(model, case), before)
    adapter.detach()
    nestling.attach(model, case.config).detach()


def test_the_spec_is_json_and_the_same_for_all(case: Case) -> None:
    model, adapter = attach(case)
    spec = adapter.spec
    assert json.loads(json.dumps(spec)) == spec
    assert attach(case)[1].spec == spec
    train(model, adapter, case, steps=1)
    assert adapter.spec == spec


def test_a_model_and_its_adapter_can_be_copied_together(case: Case) -> None:
    model, adapter = attach(case)
    adapter.load_vector(random_state(adapter, 0))
    model.eval()
    expected = output(model, case)
    twin, other = copy.deepcopy((model, adapter))
    train(twin, other, case, steps=1)
    assert not torch.equal(output(twin, case), expected)
    assert torch.equal(output(model, case), expected)
