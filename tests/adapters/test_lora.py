"""LoRA: that PEFT's layers compute the definition, that the seed decides the start, and that it leaves no trace."""

import copy
import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import tiny_mamba
from tolerance import assert_close
from torch import Tensor, nn
from torch.func import functional_call

import nestling
from nestling.adapters.base import averaging_error
from nestling.adapters.lora import LoraAdapter, first_factor, lora_layout
from nestling.adapters.lora_targets import lora_targets
from nestling.config.schema import FullConfig, LoraConfig
from nestling.core.errors import ConfigError, ContextError, SeedError, WireError
from nestling.core.seeds import key as stream_key
from nestling.core.seeds import words as stream_words
from nestling.models.backbones import base_hash

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = LoraConfig(seed=7, rank=4, alpha=8.0)


def shape(**changes: object) -> "transformers.LlamaConfig":
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5}
    return transformers.LlamaConfig(
        **{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, **changes}
    )


def llama(dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return transformers.LlamaForCausalLM(shape(**changes)).to(dtype).eval()


class One(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(24, 10, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def random_state(adapter: LoraAdapter, seed: int = 0) -> np.ndarray:
    drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(seed))
    return adapter.vector() + 0.1 * drawn.numpy()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def objects(model: nn.Module) -> list[tuple]:
    """Everything by which a module is what it is: itself, its type, its attributes, the objects it holds."""
    return [
        (name, id(m), type(m), m.training, sorted(m.__dict__), [(k, id(p)) for k, p in m._parameters.items()])
        for name, m in model.named_modules()
    ]


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in model.state_dict().items()}


# What it computes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_the_forward_pass_is_the_definition(dtype: torch.dtype, bias: bool) -> None:
    model = One(bias=bias).to(dtype)
    adapter = nestling.attach(model, LoraConfig(seed=1, rank=3, alpha=7.0, targets=("proj",)))
    adapter.load_vector(random_state(adapter))
    first, second = (p.detach().double() for p in adapter.trainable())
    assert [p.dtype for p in adapter.trainable()] == [torch.float32] * 2
    x = torch.randn(5, 2, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    base = {name: p.detach().double() for name, p in model.proj.base_layer.named_parameters()}
    wanted = F.linear(x.double(), base["weight"], base.get("bias")) + 7 / 3 * (x.double() @ first.T @ second.T)
    got = model(x).detach()
    assert got.dtype == dtype
    assert_close(got, wanted, dtype if dtype == torch.bfloat16 else torch.float32)  # the factors are float32
    weight = adapter.weights()["proj.weight"].detach()
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(weight, base["weight"] + 7 / 3 * second @ first, torch.float32)


def test_gradients_are_those_of_the_adapted_weight() -> None:
    model = One()
    adapter = nestling.attach(model, LoraConfig(rank=3, alpha=6.0, targets=("proj",)))
    adapter.load_vector(random_state(adapter))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    direction = torch.randn(5, 10, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad((model(x) * direction).sum(), adapter.trainable())
    outside = F.linear(x, adapter.weights()["proj.weight"], model.proj.base_layer.bias)
    through_weights = torch.autograd.grad((outside * direction).sum(), adapter.trainable())
    first, second = (p.detach().double() for p in adapter.trainable())
    change = 2 * direction.double().T @ x.double()  # of the loss by B A
    for one, other, wanted in zip(got, through_weights, (second.T @ change, change @ first.T), strict=True):
        assert_close(one, wanted)
        assert_close(other, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_agrees_with_peft_used_by_itself(dtype: torch.dtype) -> None:
    model, other = llama(dtype), llama(dtype)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], layers_to_transform=[3, 4])
    theirs = peft.get_peft_model(other, settings).eval()
    adapter = nestling.attach(model, dataclasses.replace(CONFIG, layers="upper:0.4"))
    own = {name: p for name, p in theirs.named_parameters() if "lora_" in name}
    assert [n.removeprefix("base_model.model.").replace(".default", "") for n in own] == list(adapter.layout.names)
    start = logits(theirs)
    assert torch.equal(logits(model), start)
    adapter.load_vector(random_state(adapter))
    for mine, parameter in zip(adapter.trainable(), own.values(), strict=True):
        assert mine.dtype == parameter.dtype == torch.float32
        parameter.data.copy_(mine.detach())
    assert torch.equal(logits(model), logits(theirs))
    assert not torch.equal(logits(model), start)


class Convolves(nn.Module):
    """A convolution with everything that its factors must follow: stride, padding, a kernel that is not square."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=(1, 0))
        self.point = nn.Conv2d(6, 5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(torch.tanh(self.conv(x)))


def convolves(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Convolves().to(dtype)


PICTURES = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(2))


def defined_factor(name: str, part: np.ndarray, start: np.ndarray, *, seed: int) -> Tensor:
    """F_start + 1/√columns · U z / √dim in float64, from the words of the factor's stream."""
    rows, columns, dim = start.size, start.size // start.shape[0], part.size
    drawn = stream_words(stream_key(seed, "signs-u", f"lora/{name}"), 0, rows * -(-dim // 32)).reshape(rows, -1)
    signs = [[2 * (int(row[j // 32]) >> (j % 32) & 1) - 1 for j in range(dim)] for row in drawn]
    change = np.array(signs, np.float64) @ part.astype(np.float64) / np.sqrt(dim * columns)
    return torch.from_numpy(start.astype(np.float64) + change.reshape(start.shape))


@pytest.mark.parametrize("ffa", [False, True])
@pytest.mark.parametrize("dim", [0, 5, 40])
def test_adapted_convolutions_are_the_definition_with_its_gradients(ffa: bool, dim: int) -> None:
    """W + (alpha / rank) · B A, as matrices [out, in · height · width], put into the bare network in float64."""
    config = LoraConfig(seed=3, rank=4, alpha=6.0, targets=("*",), ffa=ffa, dim=dim)
    reference, model = convolves(torch.float64), convolves()
    adapter = nestling.attach(model, config)
    starts = {}
    for name, (rank, width, out, kernel) in {"conv": (4, 18, 6, (3, 2)), "point": (4, 6, 5, (1, 1))}.items():
        first = first_factor(3, name, rank, width).reshape(rank, -1, *kernel)
        second = np.zeros((out, rank, 1, 1), np.float32)
        starts |= {f"{name}.lora_A.weight": first, f"{name}.lora_B.weight": second}
    adapter.load_vector(random_state(adapter))
    parts = adapter.layout.unpack(adapter.vector())
    assert list(parts) == [name for name in starts if not ffa or "lora_B" in name]
    factors = {name: torch.from_numpy(parts.get(name, start)).double() for name, start in starts.items()}
    if dim:
        made = {n: defined_factor(n, parts[n], start, seed=3) for n, start in starts.items() if n in parts}
        factors = {name: made.get(name, torch.from_numpy(start).double()) for name, start in starts.items()}
    factors = {name: factor.requires_grad_(name in parts) for name, factor in factors.items()}
    weights = {}
    for name in ("conv", "point"):
        base = reference.get_parameter(f"{name}.weight")
        product = factors[f"{name}.lora_B.weight"].flatten(1) @ factors[f"{name}.lora_A.weight"].flatten(1)
        weights[f"{name}.weight"] = base + 1.5 * product.view(base.shape)
        assert_close(adapter.weights()[f"{name}.weight"].detach(), weights[f"{name}.weight"].detach())
    wanted, got = functional_call(reference, weights, PICTURES.double()), model(PICTURES)
    assert_close(got.detach(), wanted.detach())
    wanted.square().sum().backward()
    got.square().sum().backward()
    if not dim:
        for parameter, name in zip(adapter.trainable(), parts, strict=True):
            assert_close(parameter.grad, factors[name].grad, torch.float32)
        return
    assert [p.shape for p in adapter.trainable()] == [(adapter.layout.size,)]
    for name, part in parts.items():  # the map is affine: its transpose, column by column
        unit = np.eye(part.size, dtype=np.float32)
        zero = np.zeros_like(starts[name])
        columns = torch.stack([defined_factor(name, row, zero, seed=3) for row in unit])
        along = (columns * factors[name].grad).flatten(1).sum(1)
        assert_close(adapter.z.grad[adapter.layout.slice(name)], along, torch.float32)


def test_convolutions_are_taken_off_and_merged_and_come_back_from_a_file(tmp_path) -> None:
    for changes in ({}, {"ffa": True}, {"dim": 6}, {"ffa": True, "dim": 6}):
        model = convolves()
        before, state = objects(model), bits(model)
        adapter = nestling.attach(model, LoraConfig(seed=3, rank=2, targets=("conv", "point"), **changes))
        adapter.load_vector(random_state(adapter))
        adapted = {name: weight.detach() for name, weight in adapter.weights().items()}
        expected = model(PICTURES).detach()
        adapter.save_pretrained(tmp_path)
        fresh = convolves()
        again = nestling.from_pretrained(fresh, tmp_path)
        assert torch.equal(fresh(PICTURES), expected)
        again.detach()
        assert bits(fresh) == state
        adapter.detach(merge=True)
        assert objects(model) == before
        assert all(torch.equal(model.get_parameter(name), weight) for name, weight in adapted.items())
        assert_close(model(PICTURES).detach(), expected.double())


def test_other_maps_are_noticed_when_an_adapter_is_loaded(tmp_path) -> None:
    nestling.attach(convolves(), LoraConfig(seed=3, rank=2, targets=("conv",), dim=4)).save_pretrained(tmp_path)
    about = json.loads((tmp_path / "adapter.json").read_text())
    about["config"]["seed"] = 4
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    model = convolves()
    before = objects(model)
    with pytest.raises(SeedError):
        nestling.from_pretrained(model, tmp_path)
    assert objects(model) == before


def test_the_first_factor_frozen_halves_the_vector_and_makes_averages_exact() -> None:
    both = nestling.attach(llama(), CONFIG)
    model = llama()
    adapter = nestling.attach(model, dataclasses.replace(CONFIG, ffa=True, targets=("q_proj",)))
    square = [size for name, size in zip(both.layout.names, both.layout.sizes, strict=True) if "q_proj" in name]
    assert 2 * adapter.layout.size == sum(square)  # q_proj is as wide as it is high
    assert all(".lora_B." in name for name in adapter.layout.names)
    assert adapter.averages_exactly
    states = [random_state(adapter, seed) for seed in range(3)]
    assert averaging_error(adapter, states, [1, 2, 3]) < 1e-6
    frozen = {name: p.clone() for name, p in model.named_parameters() if "lora_A" in name}
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(TOKENS).logits.square().sum().backward()
    optimiser.step()
    assert len(frozen) == 5
    assert all(torch.equal(model.get_parameter(name), before) for name, before in frozen.items())
    assert all(
        np.array_equal(before.numpy(), first_factor(7, name.removesuffix(".lora_A.default.weight"), 4, 16))
        for name, before in ((name, p.detach()) for name, p in frozen.items())
    )


def test_patterns_match_whole_names_and_their_ends() -> None:
    model = Mixed()
    for pattern, expected in (
        ("q", ["left.0.q", "left.1.q", "right.0.q"]),
        ("left.*.q", ["left.0.q", "left.1.q"]),
        ("[kp]*", ["left.0.k", "left.1.k", "plain"]),
        ("*ai*", ["plain"]),
    ):
        assert list(lora_targets(LoraConfig(targets=(pattern,)), model)) == expected


def test_averages_of_the_factors_are_not_averages_of_models() -> None:
    adapter = nestling.attach(llama(), CONFIG)
    assert not adapter.averages_exactly
    states = [random_state(adapter, seed) for seed in range(3)]
    assert averaging_error(adapter, states, [1, 2, 3]) > 1e-3
    assert averaging_error(adapter, states[:1] * 3, [1, 2, 3]) < 1e-6
    same_first = [np.concatenate([s.reshape(-1) for s in parts]) for parts in _with_a_of(adapter, states)]
    assert averaging_error(adapter, same_first, [1, 2, 3]) < 1e-6  # with one A for all, the map is linear in B


def _with_a_of(adapter: LoraAdapter, states: list[np.ndarray]) -> list[list[np.ndarray]]:
    first = adapter.layout.unpack(states[0])
    return [
        [first[n] if ".lora_A." in n else part for n, part in adapter.layout.unpack(state).items()] for state in states
    ]


# Where it begins.


def test_the_seed_alone_decides_the_start_and_torch_is_not_asked() -> None:
    starts = []
    for torch_seed, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        model = llama(dtype)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(torch_seed)
            before = torch.get_rng_state()
            adapter = nestling.attach(model, CONFIG)
            assert torch.equal(torch.get_rng_state(), before)
        starts.append(adapter.vector())
    assert np.array_equal(starts[0], starts[1])
    parts = adapter.layout.unpack(starts[0])
    for name, part in parts.items():
        if ".lora_B." in name:
            assert not part.any()
        else:
            width = part.shape[1]
            assert np.array_equal(part, first_factor(7, name.removesuffix(".lora_A.weight"), 4, width))
            assert np.abs(part).max() <= 1 / np.sqrt(width)
    others = [nestling.attach(llama(), dataclasses.replace(CONFIG, seed=seed)).vector() for seed in (None, 0, 8)]
    assert np.array_equal(others[0], others[1])
    assert not np.array_equal(others[1], others[2])


def test_the_first_factor_is_uniform_and_its_bits_are_known() -> None:
    drawn = first_factor(3, "x", 64, 256)
    assert drawn.dtype == np.float32
    assert drawn[0, :3].view(np.uint32).tolist() == FIRST_BITS
    scaled = drawn * 16
    assert abs(scaled.mean()) < 0.02
    assert abs(scaled.var() - 1 / 3) < 0.01
    assert 0.99 < scaled.max() <= 1
    assert -1 <= scaled.min() < -0.99
    assert not np.array_equal(drawn, first_factor(3, "y", 64, 256))


FIRST_BITS = [3179037340, 1015062180, 3142785447]


# What is chosen.


def test_layers_and_targets_choose_and_the_rest_is_frozen() -> None:
    model = llama()
    adapter = nestling.attach(model, LoraConfig(rank=2, targets=("down_proj", "self_attn.k_proj"), layers="1,3-4"))
    names = [f"model.layers.{i}.{part}" for i in (1, 3, 4) for part in ("self_attn.k_proj", "mlp.down_proj")]
    assert adapter.layout.names == tuple(f"{name}.lora_{ab}.weight" for name in names for ab in "AB")
    assert adapter.layout.shapes == ((2, 16), (8, 2), (2, 24), (16, 2)) * 3
    assert list(adapter.weights()) == [f"{name}.weight" for name in names]
    own = [id(p) for p in adapter.trainable()]
    assert [id(p) for p in model.parameters() if p.requires_grad] == own
    assert adapter.gates() == []


@pytest.mark.parametrize("layers", ["all", "upper:0.4", "0", "1-3"])
def test_the_layout_is_known_without_weights_and_without_peft(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, layers=layers, targets=("o_proj", "q_proj"))
    adapter = nestling.attach(llama(), config)
    monkeypatch.setitem(sys.modules, "peft", None)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shape())
    before = objects(model)
    assert lora_layout(config, model) == adapter.layout
    assert objects(model) == before
    huge = dataclasses.replace(config, rank=2**31)
    assert lora_layout(huge, model).size == adapter.layout.size // 4 * 2**31


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}) for _ in range(2))
        self.right = nn.ModuleList([nn.ModuleDict({"q": nn.Linear(4, 4)})])
        self.left[1]["deep"] = nn.ModuleList([nn.ModuleDict({"e": nn.Linear(4, 4)}) for _ in range(3)])
        self.attention = nn.MultiheadAttention(4, 1)
        self.encoder = nn.TransformerEncoderLayer(4, 1, 4)
        self.twice = self.once = nn.Linear(4, 4)
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.counts = nn.Linear(4, 4)
        self.counts.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
        self.plain = nn.Linear(4, 4)
        self.grouped, self.dilated = nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2)
        self.reflected = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"targets": ("qq",)}, "adapter.targets", "'qq' matches the end of no Linear or Conv2d module's name. Nearest"),
        ({"targets": ("q", "left")}, "adapter.targets", "'left' matches the end of no Linear"),
        ({"targets": ("lain",)}, "adapter.targets", "Nearest: 'plain'"),
        ({"targets": ("",)}, "adapter.targets", "'' matches the end of no Linear"),
        ({"targets": ()}, "adapter.targets", "names no module"),
        ({"targets": ("q",), "layers": "0"}, "adapter.layers", "do not lie in one list of layers"),
        ({"targets": ("plain",), "layers": "0"}, "adapter.layers", "plain lies in no list of layers"),
        ({"targets": ("k",), "layers": "2"}, "adapter.layers", "names layer 2"),
        ({"targets": ("k", "e"), "layers": "0"}, "adapter.targets", "'e' is in none of the layers '0'"),
        ({"targets": ("out_proj",)}, "attention.out_proj", "is read by MultiheadAttention without a call"),
        ({"targets": ("linear1",)}, "encoder.linear1", "is read by TransformerEncoderLayer without a call"),
        ({"targets": ("head",)}, "head", "shares its weight with embed"),
        ({"targets": ("twice",)}, "twice", "shares its weight with once"),
        ({"targets": ("normed",)}, "normed", "has no plain weight"),
        ({"targets": ("counts",)}, "counts", "is stored as torch.int8"),
        ({"targets": ("grouped",)}, "grouped", "has groups, dilation or a padding"),
        ({"targets": ("dilated",)}, "dilated", "has groups, dilation or a padding"),
        ({"targets": ("reflected",)}, "reflected", "has groups, dilation or a padding"),
        ({"targets": ("plain",), "rank": 5, "dim": 2}, "adapter.rank", "5 is more than 4"),
        ({"targets": ("plain",), "window": 8}, "model", "has no attention layers"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(settings: dict, where: str, message: str) -> None:
    model = Mixed()
    model.plain.bias.requires_grad_(False)
    before, state, flags = objects(model), bits(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        nestling.attach(model, LoraConfig(**settings))
    assert caught.value.where == where
    assert message in str(caught.value)
    assert caught.value.remedy
    assert objects(model) == before
    assert bits(model) == state
    assert [p.requires_grad for p in model.parameters()] == flags
    nestling.attach(model, LoraConfig(targets=("e", "k"), layers="1")).detach()
    assert objects(model) == before


@pytest.mark.parametrize("name", ["x_proj", "dt_proj", "out_proj"])
def test_of_mamba_what_is_read_without_a_call_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is read by MambaMixer without a call"):
        nestling.attach(tiny_mamba(), LoraConfig(targets=("in_proj", name)))


def test_mixers_of_other_names_are_known_and_what_lies_beside_them_is_not() -> None:
    from transformers import BambaConfig, BambaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "mamba_n_heads": 2, "mamba_d_head": 16}
    bamba = BambaForCausalLM(BambaConfig(**sizes, **heads, mamba_n_groups=1, mamba_d_state=4))
    with pytest.raises(ConfigError, match="is read by BambaMixer without a call"):
        nestling.attach(bamba, LoraConfig(targets=("mamba.out_proj",)))
    nestling.attach(tiny_mamba(tie_word_embeddings=False), LoraConfig(targets=("lm_head",)))


def test_on_mamba_the_forward_pass_is_the_definition() -> None:
    model, ids = tiny_mamba(), torch.arange(12).view(2, 6)
    adapter = nestling.attach(model, LoraConfig(rank=2, targets=("in_proj",), layers="1"))
    adapter.load_vector(0.3 * torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1)))
    adapted, weights = model(ids, use_cache=False).logits, adapter.weights()
    assert list(weights) == ["backbone.layers.1.mixer.in_proj.weight"]
    adapter.detach()
    assert not torch.allclose(adapted, model(ids, use_cache=False).logits, atol=1e-3)
    assert_close(adapted, functional_call(model, weights, (ids,), {"use_cache": False}).logits)


def test_layers_are_those_of_the_outermost_list() -> None:
    assert list(lora_targets(LoraConfig(targets=("e", "k"), layers="upper:0.5"), Mixed())) == [
        "left.1.k", *(f"left.1.deep.{i}.e" for i in range(3))
    ]  # fmt: skip


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before, flags = objects(model), [p.requires_grad for p in model.parameters()]
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ContextError, match=r"needs the package peft.*nestling\[llm\]"):
        nestling.attach(model, CONFIG)
    assert objects(model) == before
    assert [p.requires_grad for p in model.parameters()] == flags


# What stays: the base, in memory and on disk.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 4])
def test_detach_puts_the_original_modules_back(dtype: torch.dtype, window: int) -> None:
    model = llama(dtype, attention_bias=True)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
    flags = [p.requires_grad for p in model.parameters()]
    before, state, expected = objects(model), bits(model), logits(model)
    hashed = base_hash(model)
    adapter = nestling.attach(model, dataclasses.replace(CONFIG, window=window))
    assert adapter.base_hash == hashed == adapter.frozen.hash_now()
    assert torch.equal(logits(model), expected) == (window == 0)
    adapter.load_vector(random_state(adapter))
    model(TOKENS).logits.float().square().sum().backward()
    assert not torch.equal(logits(model), expected)
    assert adapter.frozen.hash_now() == hashed
    for _ in range(2):
        adapter.detach()
        assert objects(model) == before
        assert bits(model) == state
        assert [p.requires_grad for p in model.parameters()] == flags
        assert torch.equal(logits(model), expected)
    assert all(p.grad is None for p in model.parameters())


def test_a_changed_base_changes_the_hash() -> None:
    model = llama()
    adapter = nestling.attach(model, CONFIG)
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.base_layer.weight[0, 0] += 1
    assert adapter.frozen.hash_now() != adapter.base_hash


def test_merging_keeps_the_adapted_weights() -> None:
    model = llama()
    before = objects(model)
    adapter = nestling.attach(model, CONFIG)
    adapter.load_vector(random_state(adapter))
    adapted, expected = {n: w.detach() for n, w in adapter.weights().items()}, logits(model)
    adapter.detach(merge=True)
    assert objects(model) == before
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in adapted.items())
    assert_close(logits(model), expected.double(), torch.float32)
    merged = bits(model)
    adapter.detach()
    assert bits(model) == merged


def test_what_is_saved_comes_back_on_the_same_base_only(tmp_path) -> None:
    model = llama(torch.bfloat16)
    adapter = nestling.attach(model, dataclasses.replace(CONFIG, layers="upper:0.4", window=6, sinks=2))
    adapter.load_vector(random_state(adapter))
    expected = logits(model)
    adapter.save_pretrained(tmp_path)
    fresh = llama(torch.bfloat16)
    again = nestling.from_pretrained(fresh, tmp_path)
    assert isinstance(again, LoraAdapter)
    assert again.config == adapter.config
    assert np.array_equal(again.vector(), adapter.vector())
    assert torch.equal(logits(fresh), expected)
    assert again.spec == adapter.spec
    other = llama(torch.bfloat16)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    for wrong in (other, llama()):
        before = objects(wrong)
        with pytest.raises(ContextError, match="was trained on base"):
            nestling.from_pretrained(wrong, tmp_path)
        assert objects(wrong) == before


@pytest.mark.parametrize("changes", [{"rank": 2**32 - 1}, {"rank": 5}, {"layers": "all"}, {"targets": ["down_proj"]}])
def test_settings_of_a_file_cannot_ask_for_more_than_it_holds(tmp_path, changes: dict) -> None:
    config = dataclasses.replace(CONFIG, layers="upper:0.4")
    nestling.attach(llama(), config).save_pretrained(tmp_path)
    about = json.loads((tmp_path / "adapter.json").read_text())
    about["config"] |= changes
    about["spec"] |= changes
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    model = llama()
    before = objects(model)
    with pytest.raises(WireError):
        nestling.from_pretrained(model, tmp_path)
    assert objects(model) == before


def test_a_trained_base_cannot_be_saved_as_an_adapter(tmp_path) -> None:
    model = llama()
    adapter = nestling.attach(model, CONFIG)
    with torch.no_grad():
        model.model.norm.weight += 1
    with pytest.raises(ContextError, match="has changed"):
        adapter.save_pretrained(tmp_path)


def test_a_copy_carries_its_adapter_too() -> None:
    model = llama()
    adapter = nestling.attach(model, CONFIG)
    twin = copy.deepcopy(model)
    with pytest.raises(ConfigError, match="carries an adapter already"):
        nestling.attach(twin, FullConfig())
    adapter.detach()
    nestling.attach(model, FullConfig()).detach()


@pytest.mark.parametrize("window", [0, 4])
def test_copies_that_share_the_base_train_apart(window: int) -> None:
    model = llama()
    adapter = nestling.attach(model, dataclasses.replace(CONFIG, window=window))
    own = {id(p) for p in adapter.trainable()}
    shared = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in own]
    twin, other = copy.deepcopy((model, adapter), {id(t): t for t in shared})
    assert {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()} == {
        id(t) for t in shared if isinstance(t, nn.Parameter)
    }
    before, state, hashed = logits(model), adapter.vector(), adapter.base_hash
    for which, (network, one) in enumerate(((model, adapter), (twin, other))):
        optimiser = torch.optim.SGD(one.trainable(), lr=0.5)
        for _ in range(2):
            optimiser.zero_grad()
            F.cross_entropy(
                network(TOKENS).logits[:, :-1].flatten(0, 1), (TOKENS[:, 1:] + which).flatten() % 32
            ).backward()
            optimiser.step()
    assert not np.array_equal(adapter.vector(), state)
    assert not np.array_equal(other.vector(), state)
    assert not np.array_equal(adapter.vector(), other.vector())
    assert adapter.frozen.hash_now() == other.frozen.hash_now() == hashed
    for network, one in ((model, adapter), (twin, other)):
        one.load_vector(state)
        assert torch.equal(logits(network), before)
    other.detach()
    assert not hasattr(twin.model.layers[0].self_attn.q_proj, "lora_A")
    assert torch.equal(logits(model), before)
    adapter.detach()
    assert torch.equal(logits(model), logits(twin))
