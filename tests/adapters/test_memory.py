"""The memory adapter against its definition, token by token in float64; what it sends, keeps and refuses."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import attention_definition as definition
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import tiny_llama
from tolerance import assert_close
from torch import Tensor, nn

import nestling
from nestling.adapters.address import token_signs
from nestling.adapters.base import averaging_error
from nestling.adapters.memory import MemoryAdapter
from nestling.adapters.rules import memory_layout, rule_layouts, state_bytes
from nestling.config.schema import FullConfig, MemoryConfig
from nestling.core.errors import ConfigError, ContextError, PrivateStateError, SeedError, WireError
from nestling.core.seeds import Stream, words
from nestling.core.vectors import Layout
from nestling.inference.cache import new_cache
from nestling.models.copies import working_copy
from nestling.models.streams import StreamCache
from nestling.models.window import Seen, reader_of, use_window
from nestling.tasks.text import continuing

CONFIG = MemoryConfig(seed=7, rank=4, layers="all", window=3, sinks=2)
IDS = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(0))


def changed(**changes: object) -> MemoryConfig:
    return replace(CONFIG, **changes)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def move(adapter: MemoryAdapter, seed: int = 1, by: float = 0.3) -> None:
    """Away from the start, as training does; all of it, also what stays with the client."""
    adapter.load_vector(adapter.vector() + by * normal(adapter.layout.size, seed=seed).numpy())
    local = adapter.local_layout.size
    adapter.load_local_vector(adapter.local_vector() + by * normal(local, seed=seed + 100).numpy())


def attached(config: MemoryConfig = CONFIG, model: nn.Module | None = None) -> tuple[nn.Module, MemoryAdapter]:
    model = tiny_llama() if model is None else model
    adapter = nestling.attach(model, config)
    assert isinstance(adapter, MemoryAdapter)
    return model, adapter


def read(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def bits(model: nn.Module) -> dict[str, bytes]:
    return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() for n, t in model.state_dict().items()}


CASES = {
    "window 1": ("Llama", {"window": 1}),
    "window 3": ("Llama", {}),
    "window 7": ("Llama", {"window": 7}),
    "no window": ("Llama", {"window": 0}),
    "no sinks": ("Llama", {"sinks": 0}),
    "gate per channel": ("Llama", {"gate": "channel"}),
    "no gate": ("Llama", {"gate": "none"}),
    "additive": ("Llama", {"update": "additive"}),
    "forget": ("Llama", {"forget": True}),
    "additive forget": ("Llama", {"update": "additive", "forget": True, "window": 0}),
    "rank 1": ("Llama", {"rank": 1}),
    "rank 48": ("Llama", {"rank": 48, "layers": "1"}),
    "low-rank frozen": ("Llama", {"low_rank": "frozen"}),
    "gates shared": ("Llama", {"share": "gates"}),
    "one layer": ("Llama", {"layers": "1"}),
    "upper layers": ("Llama", {"layers": "upper:0.5"}),
    "latent": ("Llama", {"dim": 5, "forget": True}),
    "latent gates": ("Llama", {"dim": 5, "share": "gates"}),
    "Qwen2": ("Qwen2", {"forget": True}),
    "Qwen3": ("Qwen3", {"gate": "channel"}),
    "added": ("Llama", {"mix": "add", "gate": "channel"}),
    "added without a gate": ("Llama", {"mix": "add", "gate": "none"}),
    "address": ("Llama", {"address": "0.0", "mix": "add"}),
    "address blended": ("Llama", {"address": "0.1"}),
    "address below": ("Llama", {"address": "0.1", "layers": "2", "mix": "add"}),
    "address in between": ("Llama", {"address": "1.0", "layers": "1-2", "gate": "channel"}),
    "address, low-rank frozen": ("Llama", {"address": "0.1", "low_rank": "frozen", "mix": "add"}),
    "address, additive": ("Llama", {"address": "0.0", "update": "additive", "gate": "none"}),
    "address, forget": ("Llama", {"address": "0.1", "forget": True, "mix": "add"}),
    "address, gates shared": ("Llama", {"address": "0.1", "share": "gates"}),
    "address, no window": ("Llama", {"address": "0.0", "window": 0, "mix": "add"}),
    "bound": ("Llama", {"address": "0.1", "bind": True, "mix": "add"}),
    "bound, in between": ("Llama", {"address": "1.0", "bind": True, "layers": "1-2", "forget": True}),
    "bound, Qwen3": ("Qwen3", {"address": "0.1", "bind": True, "layers": "1-2", "mix": "add"}),
    "product": ("Llama", {"address": "0.1,1.0", "layers": "1-2", "mix": "add"}),
    "product, bound": ("Llama", {"address": "0.1,1.0,2.1", "bind": True, "layers": "2", "mix": "add"}),
    "address, latent": ("Llama", {"address": "0.1", "dim": 3, "mix": "add"}),
    "address, Qwen2": ("Qwen2", {"address": "0.0", "mix": "add"}),
    "address, Qwen3": ("Qwen3", {"address": "0.1", "layers": "1-2"}),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_as_defined(case: str) -> None:
    family, changes = CASES[case]
    config = changed(**changes)
    model, adapter = attached(config, definition.exact(tiny_llama(family)))
    move(adapter)
    start = adapter.weights()
    rules = {name: rule.detach().double().requires_grad_() for name, rule in start.items()}
    kind = {name: getattr(config, name) for name in ("window", "sinks", "gate", "mix", "update", "address")}
    shape = model.config
    signs = token_signs(config.seed, shape.vocab_size, shape.head_dim) if config.bind else None
    wanted = definition.logits(model, IDS[0].tolist(), rules=rules, signs=signs, **kind)
    got = model(IDS[:1]).logits[0]
    assert_close(got.detach(), wanted.detach())
    cotangent = normal(*wanted.shape).double()
    gradients = torch.autograd.grad((wanted * cotangent).sum(), list(rules.values()))
    (got * cotangent).sum().backward()
    if not config.dim:
        for name, wanted_gradient in zip(rules, gradients, strict=True):
            assert wanted_gradient.any(), name
            assert_close(adapter._parameters[name].grad, wanted_gradient)
        return
    named = dict(zip(rules, gradients, strict=True))
    pulled = sum((adapter.weights()[n].double() * named[n]).sum() for n in adapter.layout.names)
    for name, wanted_gradient in zip(
        adapter.layout.names,
        torch.autograd.grad(pulled, [adapter._parameters[n] for n in adapter.layout.names]),
        strict=True,
    ):
        assert_close(adapter._parameters[name].grad, wanted_gradient)
        assert wanted_gradient.all()


def test_rows_of_a_batch_are_read_apart() -> None:
    model, adapter = attached(model=definition.exact(tiny_llama()))
    move(adapter)
    both = read(model)
    for i in (0, 1):
        assert_close(both[i], read(model, IDS[i : i + 1])[0])


# At the start, and when it is off again.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_closed_gates_without_a_window_are_the_base_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    model = tiny_llama(family).to(dtype)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            return [
                model(IDS).logits,
                model(IDS, attention_mask=mask).logits[:, 4:],
                model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0),
            ]

    expected = outputs()
    added = {"mix": "add", "address": "0.1"}
    for changes in ({}, {"gate": "channel"}, {"mix": "add"}, added, added | {"gate": "channel", "layers": "1-2"}):
        _, adapter = attached(changed(window=0, **changes), model)
        for got, wanted in zip(outputs(), expected, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(model.train()(IDS).logits, expected[0])
        model.eval()
        move(adapter)
        assert not torch.equal(outputs()[0], expected[0])
        adapter.detach()
        assert all(torch.equal(got, wanted) for got, wanted in zip(outputs(), expected, strict=True))


def test_closed_gates_and_a_window_no_shorter_than_the_stream_are_the_base() -> None:
    model = tiny_llama()
    expected = read(model)
    for window in (11, 60):
        _, adapter = attached(changed(window=window), model)
        assert_close(read(model), expected)
        adapter.detach()
    _, adapter = attached(changed(window=4, sinks=0), model)
    assert not torch.allclose(read(model), expected, atol=1e-3)


def test_detaching_restores_everything_and_twice_does_no_harm() -> None:
    model = tiny_llama()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
    flags, before, settings = [p.requires_grad for p in model.parameters()], bits(model), model.config
    kept = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for config in (CONFIG, changed(window=0)):
        _, adapter = attached(config, model)
        assert not any(p.requires_grad for p in model.parameters())
        assert bits(model) == before  # its own names too
        move(adapter)
        model(IDS).logits.square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(ConfigError, match="cannot be merged"):
            adapter.detach(merge=True)
        for _ in range(2):
            adapter.detach()
            assert bits(model) == before
            assert [p.requires_grad for p in model.parameters()] == flags
            assert model.config is settings
            assert settings._attn_implementation == "sdpa"
            assert {name: dict(module.__dict__) for name, module in model.named_modules()} == kept
            assert reader_of(model) is None


@pytest.mark.parametrize(
    "config",
    [
        changed(layers="3"), changed(layers="2-9"), changed(rank=49),
        changed(address="3.0"), changed(address="0.2"), changed(address="1.0"), changed(address="0.0,0.1"),
        changed(address="0.0,1.0"),
    ],
)  # fmt: skip
def test_a_refused_configuration_leaves_the_model_alone(config: MemoryConfig) -> None:
    model = tiny_llama()
    kept = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(ConfigError, match="adapter"):
        nestling.attach(model, config)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == kept
    assert all(p.requires_grad for p in model.parameters())
    nestling.attach(model, CONFIG)


def test_other_models_and_second_adapters_are_refused() -> None:
    for other in (nn.Linear(2, 2), nn.TransformerEncoderLayer(8, 2, 16)):
        with pytest.raises(ConfigError, match="Llama family"):
            nestling.attach(other, CONFIG)
        assert all(p.requires_grad for p in other.parameters())
    model = tiny_llama()
    reader = use_window(model, window=3)
    with pytest.raises(ConfigError, match="already"):
        nestling.attach(model, CONFIG)
    assert all(p.requires_grad for p in model.parameters())
    reader.remove()
    nestling.attach(model, CONFIG)
    for config in (CONFIG, FullConfig()):
        with pytest.raises(ConfigError, match="carries an adapter already"):
            nestling.attach(model, config)


# What is sent, and what is not.


def test_the_paper_counts_its_gates() -> None:
    """Llama-3.2-1B, a gate per channel in each layer: 32,768 numbers."""
    from transformers import LlamaConfig

    shape = LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64
    )
    rules, local = rule_layouts(MemoryConfig(layers="all", gate="channel", share="gates", rank=16), shape)
    sizes = dict(zip(rules.names, rules.sizes, strict=True))
    assert sum(size for name, size in sizes.items() if name.endswith(".gate")) == 32_768
    assert rules.size - 32_768 == 16 * 8 * (2048 + 1)  # write strengths
    assert local.size == 16 * 16 * (3 * 2048 + 2048 + 2 * 512)
    heads, _ = rule_layouts(MemoryConfig(layers="all", low_rank="frozen"), shape)
    assert heads.size == 16 * (8 * 2049 + 32)


@pytest.mark.parametrize("changes", [changes for _, changes in CASES.values()], ids=str)
def test_layouts_are_known_without_weights(changes: dict) -> None:
    model, adapter = attached(changed(**changes))
    assert memory_layout(adapter.config, model.config) == (adapter.layout, adapter.local_layout)
    assert adapter.vector().shape == (adapter.layout.size,)
    assert adapter.local_vector().shape == (adapter.local_layout.size,)
    assert sum(p.numel() for p in adapter.trainable()) == adapter.layout.size + adapter.local_layout.size
    assert all(p.dtype == torch.float32 for p in adapter.trainable())
    every = set(adapter.layout.names) | set(adapter.local_layout.names)
    assert set(adapter.weights()) == every
    low = {name for name in every if name.rpartition(".")[2] in ("A", "B")}
    assert bool(low) == (adapter.config.low_rank == "trained")
    assert sum(p.numel() for p in adapter.gates()) == sum(adapter._parameters[n].numel() for n in every - low)
    assert (set(adapter.local_layout.names) == low) == (adapter.config.share == "gates" or not low)
    assert json.loads(json.dumps(adapter.spec)) == adapter.spec


def test_every_setting_is_in_the_spec() -> None:
    changes = [{"rank": 5}, {"layers": "1"}, {"gate": "channel"}, {"gate": "none"}, {"update": "additive"}, {"dim": 3}]
    changes += [{"forget": True}, {"window": 4}, {"sinks": 1}, {"low_rank": "frozen"}, {"share": "gates"}, {"seed": 8}]
    changes += [{"write_bias": -2.0}, {"mix": "add"}, {"address": "0.0"}, {"address": "0.1"}, {}]
    changes += [{"address": "0.1", "bind": True}, {"layers": "1", "address": "0.1,1.0"}]
    specs = [json.dumps(attached(changed(**each))[1].spec, sort_keys=True) for each in changes]
    assert len(set(specs)) == len(specs)
    assert attached(changed(layers="0-2"))[1].spec == attached()[1].spec  # the same layers, written otherwise
    assert attached(changed(address="00.01"))[1].spec == attached(changed(address="0.1"))[1].spec
    one, other = (attached(changed(layers="1", address=text))[1].spec for text in ("1.0,0.1", "0.1,1.0"))
    assert one == other
    mapped = [attached(changed(dim=3, seed=seed))[1].spec["maps"] for seed in (7, 8)]
    assert mapped[0] != mapped[1]


def test_the_rules_before_training() -> None:
    addressed = attached(changed(address="0.1"))[1].weights()
    assert addressed["address.taps"].tolist() == [[1, 1, 0, 0]]
    assert 0 < float(addressed["address.centre"].detach().norm()) < 1
    _, adapter = attached(changed(forget=True, write_bias=-2.0))
    rules = adapter.weights()
    for name, rule in rules.items():
        kind = name.split(".", 2)[2]
        if kind.endswith(".A"):
            signs = Stream(7, "memory", name).signs(rule.numel()).reshape(rule.shape)
            assert np.array_equal(rule.detach().numpy(), (signs / np.float32(np.sqrt(48))).astype(np.float32))
        else:
            value = {"write.bias": -2.0, "forget": 6.0}.get(kind, 0.0)
            assert torch.equal(rule, torch.full_like(rule, value))
    again, other, none, zero = (attached(changed(seed=s, forget=True))[1].vector() for s in (7, 8, None, 0))
    assert not np.array_equal(again, other)
    assert np.array_equal(none, zero)
    assert len({rules[n].detach().numpy().tobytes() for n in rules if n.endswith(".A")}) == 9


def test_a_vector_comes_back_and_wrong_ones_change_nothing() -> None:
    _, adapter = attached(changed(share="gates"))
    move(adapter)
    for get, load in ((adapter.vector, adapter.load_vector), (adapter.local_vector, adapter.load_local_vector)):
        state = get()
        for bad in (state[:-1], np.append(state, np.float32(0)), state[None]):
            with pytest.raises(ContextError):
                load(bad)
        for value in (np.nan, np.inf):
            broken = state.copy()
            broken[-1] = value
            with pytest.raises(WireError):
                load(broken)
        assert np.array_equal(get(), state)
        load(torch.from_numpy(2 * state))
        assert np.array_equal(get(), 2 * state)
    first, second = adapter.vector(), adapter.local_vector()
    adapter.load_vector(0 * first)
    assert np.array_equal(adapter.local_vector(), second)  # neither is the other


def test_the_bytes_of_a_stream_are_known_before_it_is_read() -> None:
    for changes in (
        {},
        {"window": 8, "sinks": 0},
        {"layers": "1"},
        {"address": "0.1"},
        {"layers": "2", "address": "1.0"},
        {"address": "0.1", "bind": True},
        {"layers": "2", "address": "0.1,2.0", "bind": True},
    ):
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            model, adapter = attached(changed(**changes), tiny_llama().to(dtype))
            with torch.no_grad():
                cache = new_cache(model)
                model(IDS, **continuing(model, cache))
            counted = state_bytes(adapter.config, model.config, bytes_per_number=size)
            assert cache.nbytes == 2 * sum(counted.values()) + 3 * 2 * 8  # two streams; a count of each in each layer
    assert state_bytes(changed(window=0), tiny_llama().config)["window"] == 0


# With latents.


def test_latents_change_the_rules_through_the_frozen_signs() -> None:
    _, adapter = attached(changed(dim=5, forget=True))
    plain = attached(changed(forget=True))[1].weights()
    assert adapter.averages_exactly is False
    assert all(torch.equal(rule, plain[name]) for name, rule in adapter.weights().items())  # z = 0
    assert adapter.layout == Layout.of([(name, (min(5, rule.numel()),)) for name, rule in plain.items()])
    move(adapter)
    z = adapter.layout.unpack(adapter.vector())
    for name, rule in adapter.weights().items():
        dim = len(z[name])
        map_ = next(m for m in adapter._maps if m.rows == rule.numel() and m.key == _key(name))
        packed = words(map_.key, 0, rule.numel()).astype(np.uint32)[:, None] >> np.arange(dim, dtype=np.uint32)
        signs = 2.0 * (packed & 1) - 1.0
        scale = 1 / np.sqrt(rule.shape[-1]) if name.endswith((".A", ".B", "write.weight")) else 1.0
        change = torch.from_numpy(signs @ z[name].astype(np.float64) * scale / np.sqrt(dim)).view(rule.shape)
        got = rule.detach().double() - plain[name].detach().double()
        assert (got - change).abs().max() <= 1e-6


def _key(name: str) -> object:
    from nestling.core.seeds import key

    return key(7, "signs-u", f"memory/{name}")


@pytest.mark.parametrize("dim", [0, 5])
def test_means_are_exact_in_the_rules_but_not_in_the_model(dim: int) -> None:
    model, adapter = attached(changed(dim=dim))
    states = []
    for seed in (1, 2):
        adapter.load_vector(np.zeros(adapter.layout.size, np.float32))
        move(adapter, seed, by=1.0)
        states.append((adapter.vector(), read(model)))
    assert averaging_error(adapter, [state for state, _ in states], [1, 1]) <= 1e-6
    adapter.load_vector((states[0][0] + states[1][0]) / 2)
    assert not torch.allclose(read(model), (states[0][1] + states[1][1]) / 2, atol=1e-2)
    assert not adapter.averages_exactly


# Switches, for the rows that a result is compared with.


@pytest.mark.parametrize("address", ["own", "0.1"])
def test_memory_off_is_the_window_alone(address: str) -> None:
    model, adapter = attached(changed(address=address))
    move(adapter)
    before = read(model)
    with adapter.switch(memory=False):
        off = read(model)
    assert torch.equal(read(model), before)
    adapter.detach()
    use_window(model, window=3, sinks=2)
    assert torch.equal(read(model), off)
    assert not torch.allclose(before, off, atol=1e-3)


@pytest.mark.parametrize("address", ["own", "0.1"])
def test_window_off_is_the_memory_alone_and_layers_without_one_keep_theirs(address: str) -> None:
    model, adapter = attached(changed(layers="0,2", address=address), definition.exact(tiny_llama()))
    move(adapter)
    rules = {name: rule.detach() for name, rule in adapter.weights().items()}
    with adapter.switch(window=False):
        got = read(model)
    how = {"window": 3, "sinks": 2, "address": address, "static": False}
    for i in (0, 1):
        assert_close(got[i], definition.logits(model, IDS[i].tolist(), rules=rules, **how))
    with torch.no_grad():
        cache, pieces = new_cache(model), []
        with adapter.switch(window=False):
            pieces = [model(piece, **continuing(model, cache)).logits for piece in IDS.split([4, 1, 6], 1)]
    assert_close(torch.cat(pieces, 1), got)


def test_a_switch_is_undone_by_an_error_and_cannot_turn_both_off() -> None:
    model, adapter = attached()
    move(adapter)
    before = read(model)
    for switch in ({"memory": False}, {"window": False}):
        with adapter.switch(**switch):
            assert not torch.equal(read(model), before)
        with pytest.raises(ZeroDivisionError), adapter.switch(**switch):
            _ = 1 / 0
        assert torch.equal(read(model), before)
    with pytest.raises(ConfigError), adapter.switch(memory=False, window=False):
        pass
    assert torch.equal(read(model), before)


# Short numbers.


def test_a_layer_mixes_bfloat16_as_near_to_float32_as_bfloat16_is() -> None:
    model, adapter = attached(changed(forget=True))
    move(adapter)
    memory = model.model.layers[1].self_attn.nestling.memory
    x, q, k, v, static = (
        normal(2, 20, *n, seed=i).bfloat16() for i, n in enumerate([(48,), (6, 8), (2, 8), (2, 8), (6, 8)])
    )
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        out = memory.mix(static.to(dtype), Seen(*(each.to(dtype) for each in (x, q, k, v))), None, None)
        assert out.dtype == dtype
        (out.float() * normal(*out.shape)).sum().backward()
        own = [p for name, p in adapter._parameters.items() if name.startswith("layers.1.")]
        assert all(p.grad.dtype == torch.float32 for p in own)
        results.append((out.detach(), torch.cat([p.grad.flatten() for p in own])))
        for p in own:
            p.grad = None
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], torch.bfloat16)


def test_a_bfloat16_model_keeps_its_dtype_and_its_distance_from_float32() -> None:
    """Its own layers are what it loses; the memory, kept in float32, does not double that."""
    model = tiny_llama()
    with torch.no_grad():  # numbers that bfloat16 holds exactly, so that arithmetic alone differs
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    short = copy.deepcopy(model).bfloat16()
    distance = [float((read(short).float() - read(model)).norm() / read(model).norm())]
    for one in (model, short):
        _, adapter = attached(changed(window=5), one)
        move(adapter, by=0.1)
        cache = new_cache(one)
        with torch.no_grad():
            assert one(IDS, **continuing(one, cache)).logits.dtype == next(one.parameters()).dtype
        assert all(layer.memory.dtype == torch.float32 for layer in cache.layers)
        one(IDS).logits.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in adapter.trainable())
    distance.append(float((read(short).float() - read(model)).norm() / read(model).norm()))
    assert distance[1] < 2 * distance[0] < 0.1


# Together with a federation.


def train(model: nn.Module, adapter: MemoryAdapter, steps: int = 4) -> list[float]:
    optimiser, losses = torch.optim.Adam(adapter.trainable(), lr=1e-2), []
    for _ in range(steps):
        logits = model.train()(IDS).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


@pytest.mark.parametrize("changes", [{}, {"dim": 5}, {"address": "0.1,1.0", "layers": "1-2", "bind": True}], ids=str)
def test_training_lowers_the_loss_and_every_rule_takes_part(changes: dict) -> None:
    model, adapter = attached(changed(forget=True, **changes))
    losses = train(model, adapter, steps=6)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapter.trainable())


@pytest.mark.parametrize("config", [CONFIG, changed(address="0.1", layers="1-2")], ids=["own", "address"])
def test_copies_train_apart_and_share_the_base(config: MemoryConfig) -> None:
    base = tiny_llama()
    models = [working_copy(base, share=True) for _ in range(2)]
    adapters = [nestling.attach(m, config) for m in models]
    for adapter in adapters:
        move(adapter)
    expected, state, before = read(models[1]), adapters[1].vector(), bits(base)
    train(models[0], adapters[0])
    assert torch.equal(read(models[1]), expected)
    assert np.array_equal(adapters[1].vector(), state)
    assert not np.array_equal(adapters[0].vector(), state)
    assert bits(base) == before
    shared = {id(t): t for t in models[1].parameters()}
    twin, other = copy.deepcopy((models[1], adapters[1]), shared)
    assert all(a is b for a, b in zip(twin.parameters(), models[1].parameters(), strict=True))
    assert torch.equal(read(twin), expected)
    train(twin, other)
    assert not torch.equal(read(twin), expected)
    assert torch.equal(read(models[1]), expected)
    with other.switch(memory=False):
        assert torch.equal(read(models[1]), expected)
    other.detach()
    assert torch.equal(read(models[1]), expected)
    assert torch.equal(read(twin), read(base))


# On disk.


@pytest.mark.parametrize(
    "changes",
    [{}, {"dim": 5}, {"window": 0, "gate": "channel"}, {"low_rank": "frozen"}, {"address": "0.1", "mix": "add"}],
    ids=str,
)
def test_a_saved_adapter_reads_on_as_it_did(changes: dict, tmp_path: Path) -> None:
    model, adapter = attached(changed(**changes))
    move(adapter)
    expected = read(model)
    adapter.save_pretrained(tmp_path)
    fresh = tiny_llama()
    again = nestling.from_pretrained(fresh, tmp_path)
    assert torch.equal(read(fresh), expected)
    assert (again.spec, again.layout, again.base_hash) == (adapter.spec, adapter.layout, adapter.base_hash)
    assert np.array_equal(again.vector(), adapter.vector())
    again.detach()
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(ContextError, match="trained on base"):
        nestling.from_pretrained(other, tmp_path)
    assert reader_of(other) is None


def test_parts_that_stay_with_a_client_are_not_saved(tmp_path: Path) -> None:
    _, adapter = attached(changed(share="gates"))
    with pytest.raises(ConfigError, match="stay with a client"):
        adapter.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    _, adapter = attached(changed(share="gates", low_rank="frozen"))  # nothing stays
    adapter.save_pretrained(tmp_path / "new")


def edit(folder: Path, **changes: object) -> None:
    about = json.loads((folder / "adapter.json").read_text())
    about["config"] |= changes
    (folder / "adapter.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": 40}, WireError), ({"dim": 2**32 - 1, "rank": 48}, WireError),
        ({"rank": 48, "share": "gates"}, WireError),
        ({"rank": 10**12}, ContextError), ({"rank": 10**12, "share": "gates"}, ContextError),
        ({"rank": 10**9, "dim": 1}, ContextError), ({"layers": "0-999999999"}, ContextError),
        ({"layers": "5"}, ContextError), ({"seed": 8}, WireError), ({"window": 2**32 - 1}, WireError),
        ({"address": "0.0"}, WireError), ({"mix": "add"}, WireError), ({"address": "9.0"}, ContextError),
        ({"sinks": 2**32 - 1}, WireError), ({"window": 62, "sinks": 3}, WireError),
    ],
    ids=str,
)  # fmt: skip
def test_a_file_cannot_ask_for_more_than_it_holds(
    changes: dict, error: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapter = attached()
    adapter.save_pretrained(tmp_path)
    adapter.detach()
    edit(tmp_path, **changes)
    with pytest.raises(error):
        nestling.from_pretrained(model, tmp_path)
    assert reader_of(model) is None
    assert torch.equal(read(model), read(tiny_llama()))


@pytest.mark.parametrize("setting", ["mix", "address"])
def test_a_file_from_before_a_setting_is_refused(setting: str, tmp_path: Path) -> None:
    model, adapter = attached()
    adapter.save_pretrained(tmp_path)
    adapter.detach()
    about = json.loads((tmp_path / "adapter.json").read_text())
    del about["spec"][setting], about["config"][setting]
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    with pytest.raises(WireError, match="contradict"):
        nestling.from_pretrained(model, tmp_path)
    assert reader_of(model) is None


def test_another_seed_of_the_latents_is_seen(tmp_path: Path) -> None:
    model, adapter = attached(changed(dim=5))
    adapter.save_pretrained(tmp_path)
    adapter.detach()
    edit(tmp_path, seed=8)
    with pytest.raises(SeedError):
        nestling.from_pretrained(model, tmp_path)
    assert reader_of(model) is None


def test_a_file_for_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    adapter = nestling.attach(model, nestling.LatentConfig(seed=7, dim=2))
    adapter.save_pretrained(tmp_path)
    adapter.detach()
    about = json.loads((tmp_path / "adapter.json").read_text())
    about["config"] = {"kind": "memory"}
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    with pytest.raises(ContextError, match="Llama family"):
        nestling.from_pretrained(model, tmp_path)


# What a stream holds is in nothing that leaves.


def planted(cache: StreamCache) -> list[bytes]:
    """Four numbers in a row of each tensor that the stream holds, as they would lie in a file."""
    secrets = []
    for layer in cache.layers:
        for name, tensor in layer.tensors().items():
            if name != "count":
                some = tensor.detach().flatten()[-4:]
                assert some.all()
                secrets += [some.to(d).view(torch.uint8).numpy().tobytes() for d in (torch.float32, torch.bfloat16)]
    return secrets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"dim": 5}, {"address": "0.1"}], ids=str)
def test_a_stream_is_in_no_file_vector_or_text(dtype: torch.dtype, changes: dict, tmp_path: Path) -> None:
    model, adapter = attached(changed(**changes), tiny_llama().to(dtype))
    move(adapter)
    quiet = _outward(adapter, tmp_path / "before")
    cache = new_cache(model)
    with torch.no_grad():
        model(IDS, **continuing(model, cache))
    secrets = planted(cache)
    assert len(secrets) == (3 * 5 + ("address" in changes)) * 2
    out = _outward(adapter, tmp_path / "after")
    assert out == quiet  # nothing that leaves has changed at all
    assert not any(secret in out for secret in secrets)
    message = nestling.core.vectors.Layout.pack(adapter.layout, adapter.layout.unpack(adapter.vector())).tobytes()
    assert not any(secret in message for secret in secrets)
    reachable = [value for value in vars(adapter).values() if isinstance(value, StreamCache)]
    assert not reachable
    for leave in (copy.deepcopy, copy.copy):
        with pytest.raises(PrivateStateError):
            leave(cache)


def _outward(adapter: MemoryAdapter, folder: Path) -> bytes:
    adapter.save_pretrained(folder)
    files = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    texts = f"{adapter!r} {adapter.spec} {adapter.config!r} {adapter.frozen!r}"
    state = b"".join(bits(adapter.frozen.model).values())
    return files + adapter.vector().tobytes() + adapter.local_vector().tobytes() + texts.encode() + state


@pytest.mark.parametrize("address", ["own", "0.1"])
def test_a_stream_reaches_no_tensor_of_the_adapter_or_the_model(address: str) -> None:
    import gc

    model, adapter = attached(changed(address=address))
    move(adapter)
    cache = new_cache(model)
    with torch.no_grad():
        model(IDS, **continuing(model, cache))
    storages = {t.untyped_storage().data_ptr() for layer in cache.layers for t in layer.tensors().values()}
    seen: set[int] = set()
    todo: list[object] = [adapter, model]
    while todo:  # everything that they refer to, however deep
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        assert not isinstance(one, StreamCache)
        if isinstance(one, Tensor):
            assert one.untyped_storage().data_ptr() not in storages
        elif isinstance(one, dict | list | tuple | set):
            todo += [*one.values(), *one] if isinstance(one, dict) else list(one)
        elif type(one).__module__.startswith(("nestling", "transformers", "torch.nn")):
            todo += list(gc.get_referents(one))


def test_window_dropout_reads_some_training_rows_with_the_memory_alone() -> None:
    """Every row is either that of plain training or that of the memory alone; evaluation never drops."""
    model, adapter = attached(changed(window_dropout=0.5))
    ids = torch.from_numpy(Stream(0, "test", "ids").integers(16 * 20, 90)).view(16, 20) + 3
    plain = read(model, ids)
    with adapter.switch(window=False):
        alone = read(model, ids)
    model.train()
    first, second = (model(ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(read(model, ids), plain)
    for trained in (first, second):
        is_plain = torch.isclose(trained, plain, atol=1e-5).flatten(1).all(1)
        is_alone = torch.isclose(trained, alone, atol=1e-5).flatten(1).all(1)
        assert (is_plain ^ is_alone).all()
        assert 2 <= int(is_alone.sum()) <= 14
    assert not torch.equal(first, second)
    adapter.load_vector(adapter.vector())  # a client's training begins: the same draws again
    assert torch.equal(model(ids, use_cache=False).logits, first)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_window_dropout_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="window_dropout"):
        MemoryConfig(window_dropout=share)


@pytest.mark.parametrize("address", ["own", "0.1"])
def test_a_copy_is_possible_after_a_pass_with_gradients(address: str) -> None:
    """The rules made of latents hang on their graph, which cannot be copied."""
    model, adapter = attached(changed(dim=3, address=address))
    move(adapter)
    model(IDS, use_cache=False).logits.sum().backward()
    other, _ = copy.deepcopy((model, adapter))
    assert torch.equal(read(other), read(model))


@pytest.mark.parametrize("then", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("address", ["own", "0.1"])
def test_a_stream_begun_in_inference_mode_goes_on_outside_it(then, address: str) -> None:
    model, adapter = attached(changed(layers="all", address=address))
    move(adapter)
    with torch.no_grad():
        whole = model(IDS).logits
    cache = new_cache(model)
    with torch.inference_mode():
        parts = [model(IDS[:, :5], **continuing(model, cache)).logits]
    with then():
        parts += [model(token, **continuing(model, cache)).logits for token in IDS[:, 5:].split(1, 1)]
    assert_close(torch.cat([part.clone() for part in parts], 1), whole)
