"""From settings to a needle federation: what is planned is what is built, and the text and the model are read once."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from small import language, needle_config, smollm2_sizes, tiny_llama

import nestling.build_language
from nestling.adapters.full import FullAdapter
from nestling.build import build, resolve
from nestling.build_language import tokenizer_digest
from nestling.cli.main import main
from nestling.config.load import load_config
from nestling.config.schema import FullConfig, LanguageConfig, LoraConfig, MemoryConfig, RunConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.counts import plan
from nestling.models import assets
from nestling.models.language import load_language_model

ADAPTERS = [
    MemoryConfig(layers="all", rank=2, window=32),
    MemoryConfig(layers="1", rank=2, window=0, dim=3, gate="channel", forget=True),
    MemoryConfig(layers="all", rank=2, share="gates"),
    LoraConfig(rank=2, window=32),
    LoraConfig(rank=2, ffa=True, dim=6),
    FullConfig(targets=("*q_proj*",)),
    MemoryConfig(layers="1", rank=2, window=32, address="0.1", mix="add"),
]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.kind)
def test_what_is_planned_is_what_is_built_and_travels(adapter, tmp_path: Path) -> None:
    settings = needle_config(tmp_path, adapter=adapter)
    planned, parts = plan(settings), build(settings)
    assert planned.layout == [(name, list(shape)) for name, shape in parts.agreement.layout]
    assert planned.trainable_parameters == parts.server.state.size
    assert planned.model_parameters == sum(p.numel() for p in parts.base.parameters())
    worker = parts.workers[0]
    assert planned.adapted_parameters == sum(tensor.numel() for tensor in worker.adapter.weights().values())
    trained = sum(p.numel() for p in worker.adapter.trainable())
    assert trained == planned.trainable_parameters + planned.local_parameters
    assert (planned.local_parameters > 0) == (worker.fresh is not None)
    message = parts.server.broadcast(1)
    [reply] = parts.engine.exchange({1: message}).values()
    assert isinstance(reply, bytes), reply
    assert (len(message), len(reply)) == (planned.wire_bytes_down, planned.wire_bytes_up)


def test_a_plan_needs_the_settings_of_a_model_and_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((language() / "config.json").read_text())
    settings = needle_config(tmp_path)
    wanted = plan(settings)
    for place in (tmp_path, tmp_path / "config.json"):
        assert plan(dataclasses.replace(settings, base=LanguageConfig(model=str(place), dtype="float32"))) == wanted
    with pytest.raises(ContextError):
        build(dataclasses.replace(settings, base=LanguageConfig(model=str(tmp_path))))


def test_a_plan_says_what_a_stream_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = needle_config(tmp_path)
    heads, size, layers, kept = 2, 8, 2, 32 + 4
    wanted = {"window": layers * kept * 2 * heads * size * 4, "memory": layers * heads * size * size * 4}
    assert plan(settings).stream_bytes == wanted
    half = dataclasses.replace(settings, base=dataclasses.replace(settings.base, dtype="bfloat16"))
    assert plan(half).stream_bytes == wanted | {"window": wanted["window"] // 2}
    flags = ["needle-smollm2", "--base.model", str(language()), "--adapter.layers", "all", "--adapter.address", "own"]
    assert main(["plan", *flags]) == 2
    assert "adapter.bind: has no addresses to bind" in capsys.readouterr().err
    flags.append("--adapter.no-bind")
    assert main(["plan", *flags, "--adapter.share", "gates"]) == 0
    shown = capsys.readouterr().out
    for words in ("numbers of a memory's rules", "that stay with a client", f"{wanted['memory']:,} B"):
        assert words in shown
    assert main(["plan", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stream_bytes"]["memory"] == wanted["memory"]


def test_layers_that_the_model_lacks_are_said_by_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(needle_config(tmp_path, adapter=MemoryConfig(layers="17-23")))
    assert caught.value.where == "adapter.layers"


def test_a_plan_counts_the_rules_of_an_address(tmp_path: Path) -> None:
    adapter = MemoryConfig(layers="20-29", rank=16, window=64, sinks=4, address="18.2", mix="add")
    settings = needle_config(tmp_path, base=LanguageConfig(model=smollm2_sizes(tmp_path)), adapter=adapter)
    planned = plan(settings)
    assert planned.layout[:2] == [("address.centre", [1, 64]), ("address.taps", [1, 4])]
    assert not any(".q." in name or ".k." in name for name, _ in planned.layout)
    layer = 16 * 576 + 192 * 16 + 3 * 577 + 9  # corrections of values, write strengths, gates
    assert planned.trainable_parameters == planned.adapted_parameters == 64 + 4 + 10 * layer
    assert planned.stream_bytes["memory"] == 10 * 3 * 64 * 64 * 4 + 4 * 64 * 4
    two = plan(dataclasses.replace(settings, adapter=dataclasses.replace(adapter, address="17.1,18.2", bind=True)))
    assert two.layout[:2] == [("address.centre", [2, 64]), ("address.taps", [2, 4])]
    assert two.stream_bytes["memory"] == 10 * 3 * 64 * 64 * 4 + 4 * 3 * 64 * 4  # two keys and signs of four tokens
    for address in ("30.0", "18.3", "21.0", "18.1,18.2"):
        with pytest.raises(ConfigError) as caught:
            plan(dataclasses.replace(settings, adapter=dataclasses.replace(adapter, address=address)))
        assert caught.value.where == "adapter.address"


def test_an_address_is_given_as_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It looks like a number, and is none."""
    flags = ["--base.model", smollm2_sizes(tmp_path), "--adapter.address", "16.2", "--adapter.mix", "add", "--json"]
    assert main(["plan", "needle-smollm2", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["layout"][0] == ["address.centre", [1, 64]]


@pytest.mark.parametrize(("address", "first"), [("own", 2), ("2.0", 2), ("1.1", 1), ("0.0", 0)])
def test_what_is_remembered_ends_below_the_layer_of_the_addresses(address: str, first: int, tmp_path: Path) -> None:
    settings = needle_config(tmp_path, adapter=MemoryConfig(layers="2", rank=2, window=8, address=address))
    assert nestling.build_language._prefix(settings, tiny_llama()).first == first


@pytest.mark.parametrize("name", ["needle-smollm2", "needle-smollm2-short"])
def test_the_presets_fit_the_model_they_name(name: str, tmp_path: Path) -> None:
    settings = load_config(name)
    assert settings.method == "fednl"
    planned = plan(dataclasses.replace(settings, base=LanguageConfig(model=smollm2_sizes(tmp_path))))
    assert planned.model_parameters == 134_515_008
    assert planned.payload_bytes_up == 224_992
    assert planned.stream_bytes == {"window": 1_566_720, "memory": 199_680}


@pytest.mark.parametrize("adapter", ADAPTERS[:1] + ADAPTERS[3:], ids=lambda a: a.kind)
def test_workers_share_the_frozen_model(adapter, tmp_path: Path) -> None:
    settings = needle_config(tmp_path, adapter=adapter)
    machine = dataclasses.replace(settings.machine, workers=3)
    parts = build(dataclasses.replace(settings, machine=machine))
    assert len(parts.workers) == 3
    frozen = {p.data_ptr() for p in parts.base.parameters()}
    for worker in parts.workers:
        own = {p.data_ptr() for p in worker.model.parameters()} - frozen
        if isinstance(worker.adapter, FullAdapter):
            assert len(own) == len(frozen)
        elif isinstance(adapter, LoraConfig) and (adapter.ffa or adapter.dim):  # factors that are made, not trained
            assert len(own) == 2 * len(worker.adapter.weights())
        else:
            assert len(own) <= len(worker.adapter.trainable())


def test_the_text_is_made_tokens_once_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = nestling.build_language.split_text, []

    def split(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen.append(len(ids))
        return real(ids)

    monkeypatch.setattr(nestling.build_language, "split_text", split)
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 600)
    settings = needle_config(tmp_path)
    task = dataclasses.replace(settings.task, text="file", path=str(text))
    parts = build(dataclasses.replace(settings, task=task))
    assert seen == [600 * 44]
    assert b"makes Jack a dull" in _bytes(parts.task.held_out(0)[0].prompt)
    assert b"makes Jack a dull" in _bytes(parts.task.item(0, 0, seed=0).prompt)
    few, all_of_them = parts.recalls.round_task.held_out(1), parts.task.held_out(1)
    assert (few, len(few), len(all_of_them)) == (all_of_them[:2], 2, 5)


def _bytes(ids: list[int]) -> bytes:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(language()).decode(ids).encode()


def test_shakespeare_that_is_not_here_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "find", lambda name: None)
    settings = needle_config(tmp_path)
    task = dataclasses.replace(settings.task, text="shakespeare")
    with pytest.raises(ContextError, match="nestling fetch shakespeare"):
        build(dataclasses.replace(settings, task=task))
    text = tmp_path / "shakespeare.txt"
    text.write_text("To be, or not to be, that is the question. " * 600)
    monkeypatch.setattr(assets, "find", lambda name: text)
    assert b"that is the quest" in _bytes(build(dataclasses.replace(settings, task=task)).task.held_out(0)[0].prompt)


@pytest.mark.parametrize(("change", "where"), [({"length": 60}, "task.length"), ({"events": 61}, "task.events")])
def test_items_that_cannot_be_made_name_their_setting(change: dict, where: str, tmp_path: Path) -> None:
    settings = needle_config(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(dataclasses.replace(settings, task=dataclasses.replace(settings.task, **change)))
    assert caught.value.where == where


@pytest.mark.parametrize("adapter", ADAPTERS[:4], ids=lambda a: a.kind)
def test_an_open_seed_is_the_runs(adapter, tmp_path: Path) -> None:
    settings: RunConfig = needle_config(tmp_path, adapter=adapter, seed=9)
    assert resolve(settings).adapter.seed == 9


def test_a_hub_name_alone_loads_no_torch_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *a, **k: pytest.fail("loads weights"))
    assert plan(needle_config(tmp_path)).rounds == 2


def test_images_need_no_transformers(tmp_path: Path) -> None:
    """In a process of its own, where the package cannot be imported."""
    script = "import sys; sys.modules['transformers'] = sys.modules['peft'] = None\n"
    script += "import nestling.api, nestling.cli.main\n"
    script += "raise SystemExit(nestling.cli.main.main(['plan', 'flite-digits', '--json']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = script.replace("flite-digits", "needle-smollm2")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 3
    assert 'pip install "nestling[llm]"' in done.stderr


def test_a_plan_refuses_what_a_run_would(tmp_path: Path) -> None:
    sizes = json.loads(Path(smollm2_sizes(tmp_path)).read_text())
    config = needle_config(tmp_path, base=LanguageConfig(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 40}))
    for adapter in (MemoryConfig(window=37), LoraConfig(window=37)):
        with pytest.raises(ConfigError, match="more than the model's 40"):
            plan(dataclasses.replace(config, adapter=adapter))
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "gemma2"}))
    with pytest.raises(ConfigError, match="Llama family"):
        plan(dataclasses.replace(config, adapter=MemoryConfig()))
    plan(dataclasses.replace(config, adapter=LoraConfig()))  # without a window it fits any model


def test_the_gates_of_llama_are_those_the_paper_counts(tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": True}))
    adapter = MemoryConfig(layers="all", gate="channel", low_rank="frozen", window=0)
    config = needle_config(tmp_path, base=LanguageConfig(model=str(tmp_path)), adapter=adapter)
    counted = plan(config)
    assert sum(shape[0] for name, shape in counted.layout if name.endswith("gate")) == 32_768
    assert counted.model_parameters == 1_235_814_400


def test_a_rank_that_fits_no_message_is_refused_before_its_factors_are_drawn(tmp_path: Path) -> None:
    config = needle_config(tmp_path, adapter=LoraConfig(rank=4_000_000_000))
    for count in (plan, build):
        with pytest.raises(ConfigError, match="do not fit a message"):
            count(config)


def test_cat_020_another_tokenizer_is_another_context(tmp_path: Path) -> None:
    """Equal weights, but two letters have changed places: what one side learns is of no use to the other."""
    shutil.copytree(language(), tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    settings = needle_config(tmp_path)
    here = build(settings)
    base = dataclasses.replace(settings.base, model=str(tmp_path / "other"))
    there = build(dataclasses.replace(settings, base=base))
    assert here.base_hash == there.base_hash
    assert {k: v for k, v in here.agreement.spec.items() if there.agreement.spec[k] != v}.keys() == {"tokenizer"}
    message = here.server.broadcast(1)
    with pytest.raises(WireError) as caught:
        there.workers[0].handle(0, message)
    assert caught.value.code == "context"
    _, refused = here.server.judge(1, {0: there.workers[0].handle(0, there.server.broadcast(1))})
    assert refused[0].code == "context"
    assert here.workers[0].handle(0, message)


def test_cat_020_what_changes_no_token_changes_no_digest(tmp_path: Path) -> None:
    def loaded(place: Path) -> Any:
        return load_language_model(str(place), dtype="float32")[1]

    tokenizer = loaded(language())
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)  # which the tokenizer remembers
    assert tokenizer_digest(tokenizer) == digest
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(language() / "config.json", tmp_path)
    shutil.copy(language() / "model.safetensors", tmp_path)
    assert tokenizer_digest(loaded(tmp_path)) == digest
    tokenizer.add_tokens(["abc"])
    assert tokenizer_digest(tokenizer) != digest


def test_cat_020_a_tokenizer_in_python_counts_by_its_vocabulary_and_what_it_makes_of_text() -> None:
    class Slow:
        def __init__(self, *words: str, lower: bool = False) -> None:
            self.words, self.lower = words, lower

        def get_vocab(self) -> dict[str, int]:
            return {word: number for number, word in enumerate(self.words)}

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [self.words.index(x) for x in (text.lower() if self.lower else text) if x in self.words]

    assert tokenizer_digest(Slow("a", "b")) == tokenizer_digest(Slow("a", "b"))
    assert len({tokenizer_digest(slow) for slow in (Slow("a", "b"), Slow("b", "a"), Slow("a"))}) == 3
    assert tokenizer_digest(Slow("a", "b", lower=True)) != tokenizer_digest(Slow("a", "b"))
