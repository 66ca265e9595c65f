"""Language models: whole, frozen and quiet from wherever they come, or an error that says what to do."""

import importlib
import json
import logging
import pickle
import re
import shutil
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestling.core.errors import ConfigError, ContextError, StorageError, WireError
from nestling.models import assets, language
from nestling.models.backbones import base_hash, hash_of_state
from nestling.models.language import _converted, _quiet, empty_language_model, language_shape, load_language_model

transformers = pytest.importorskip("transformers")
REAL = assets.find("smollm2-135m")  # now, in the user's cache: every test has another one
TEXT = "Ein Küken, 日本 & tabs\t."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn model of two layers over bytes, as `save_pretrained` leaves it."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model, tokenizer = tiny()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny() -> tuple:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={"<end>": 0} | {c: i for i, c in enumerate(letters, 1)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>", pad_token="<end>")
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokenizer


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The same folder, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_gives_the_model_that_was_saved_frozen_and_its_tokenizer(saved: Path) -> None:
    model, tokenizer = load_language_model(str(saved), dtype="float32")
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    assert model(ids).logits.shape == (1, len(TEXT.encode()), 257)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_all_weights_have_the_type_asked_for(dtype: str, saved: Path) -> None:
    model, _ = load_language_model(str(saved), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    again, _ = load_language_model(str(saved), dtype=dtype)
    assert base_hash(model) == base_hash(again)


def test_bfloat16_is_the_usual_type_and_rounds_what_was_saved(saved: Path) -> None:
    model, _ = load_language_model(str(saved))
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name


@pytest.mark.parametrize("dtype", ["int8", "float64", "", "torch.float32"])
def test_another_type_is_refused_before_anything_is_loaded(dtype: str) -> None:
    with pytest.raises(ConfigError, match="Give bfloat16"):
        load_language_model("no/where", dtype=dtype)


@pytest.mark.parametrize("load", [load_language_model, language_shape])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./no/such/folder", "neither a folder"),
        ("/no/such", "neither a folder"),
        ("smollm2-136m", "Give smollm2-135m"),
        ("", "neither a folder"),
        ("x" * 5000, "neither a folder"),
        ("no.gguf", "there is no such file"),
        ("no.json", "neither a folder"),
    ],
)
def test_what_is_no_model_is_said(load, source: str, words: str) -> None:
    with pytest.raises(ContextError, match=words):
        load(source)


def test_a_folder_without_settings_weights_or_tokenizer_is_refused(copy: Path) -> None:
    for file in ("tokenizer.json", "model.safetensors", "config.json"):
        (copy / file).rename(copy / "aside")
        with pytest.raises(ContextError) as caught:
            load_language_model(str(copy))
        assert str(caught.value).startswith(str(copy))
        assert "\n" not in str(caught.value)
        (copy / "aside").rename(copy / file)
    load_language_model(str(copy))


def test_a_model_that_lacks_a_tensor_is_refused_not_drawn(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ContextError, match=r"no weights for 1 tensors of the model, such as model\.layers\.1\.mlp"):
        load_language_model(str(copy))


def test_tensors_of_another_shape_are_refused(copy: Path) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"intermediate_size": 128}))
    with pytest.raises(ContextError, match="could not be loaded"):
        load_language_model(str(copy))


def test_damaged_weights_are_exit_5(copy: Path) -> None:
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(WireError, match="weights cannot be read") as caught:
        load_language_model(str(copy))
    assert caught.value.code == "damaged"


class Marking:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_cat_071_093_pickled_weights_are_refused_unread(name: str, copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    with (copy / name).open("wb") as file:
        pickle.dump(Marking(tmp_path / "mark"), file)
    with pytest.raises(ContextError, match=rf"pickle \({name}\).*Save it again as safetensors") as caught:
        load_language_model(str(copy))
    assert caught.value.exit_code == 3
    assert not (tmp_path / "mark").exists()
    pickle.loads((copy / name).read_bytes())  # the mark would have been made
    assert (tmp_path / "mark").exists()


def test_cat_071_an_index_that_leads_to_a_pickle_or_is_damaged_is_refused(copy: Path, tmp_path: Path) -> None:
    index, names = copy / "model.safetensors.index.json", load_file(copy / "model.safetensors")
    with (copy / "more.bin").open("wb") as file:
        pickle.dump(Marking(tmp_path / "mark"), file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "more.bin")}))
    with pytest.raises(ContextError, match=r"pickle \(more\.bin\)"):
        load_language_model(str(copy))
    assert not (tmp_path / "mark").exists()
    for text in ("", "[]", "{}", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(WireError, match=r"index\.json: cannot be read"):
            load_language_model(str(copy))


def test_pickled_weights_beside_plain_ones_are_passed_over(copy: Path, tmp_path: Path) -> None:
    with (copy / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Marking(tmp_path / "mark"), file)
    load_language_model(str(copy))
    assert not (tmp_path / "mark").exists()


OWN = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


@pytest.mark.parametrize("load", [load_language_model, language_shape])
@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ({"auto_map": OWN}, "auto_map"),
        ({"auto_map": OWN, "model_type": "own"}, "auto_map"),
        ({"text_config": {"auto_map": OWN}}, "text_config.auto_map"),
        ({"attn_implementation": "evil/repo"}, "attn_implementation"),
        ({"_attn_implementation": "evil/repo@main:kernel"}, "_attn_implementation"),
        ({"attn_implementation": {"": "sdpa", "text_config": "evil/repo"}}, "attn_implementation"),
        ({"_attn_implementation_internal": "sdpa"}, "_attn_implementation_internal"),
        ({"_experts_implementation": "evil/repo"}, "_experts_implementation"),
        ({"keypoint_detector_config": {"trust_remote_code": True}}, "keypoint_detector_config.trust_remote_code"),
        ({"parts": [{"trust_remote_code": "yes"}]}, "parts.trust_remote_code"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cat_093_settings_that_name_code_are_refused_and_it_is_not_run(
    load, entry: dict, path: str, copy: Path, tmp_path: Path
) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | entry))
    (copy / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    with pytest.raises(ContextError, match=rf"names code to run \({re.escape(path)} in config\.json\)") as caught:
        load(str(copy))
    assert caught.value.exit_code == 3
    assert not (tmp_path / "mark").exists()
    assert "own" not in sys.modules


def test_cat_093_a_tokenizer_that_brings_code_is_refused(copy: Path, tmp_path: Path) -> None:
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | own))
    (copy / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    with pytest.raises(ContextError, match=r"auto_map in tokenizer_config\.json"):
        load_language_model(str(copy))
    assert not (tmp_path / "mark").exists()


def test_cat_093_a_file_of_peft_does_not_lead_to_another_model(copy: Path) -> None:
    other = {"peft_type": "LORA", "base_model_name_or_path": "evil/repo"}
    (copy / "adapter_config.json").write_text(json.dumps(other))
    with pytest.raises(ContextError, match="an adapter of another library"):
        load_language_model(str(copy))


def test_cat_093_settings_without_code_are_no_offence(copy: Path) -> None:
    settings = json.loads((copy / "config.json").read_text())
    plain = {"attn_implementation": "eager", "auto_map": {}, "trust_remote_code": False}
    (copy / "config.json").write_text(json.dumps(settings | plain))
    load_language_model(str(copy))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cat_070_weights_that_are_not_finite_are_exit_5(dtype: str, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WireError, match=r"model\.norm\.weight holds NaN") as caught:
        load_language_model(str(copy), dtype=dtype)
    assert caught.value.exit_code == 5


def test_cat_019_shards_and_metadata_do_not_change_the_base_hash(saved: Path, tmp_path: Path) -> None:
    model, tokenizer = load_language_model(str(saved), dtype="float32")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    tokenizer.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    shutil.copytree(saved, tmp_path / "other")
    tensors = dict(reversed(load_file(saved / "model.safetensors").items()))
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"z": "1", "format": "pt", "a": "2"})
    hashes = {base_hash(load_language_model(str(place), dtype="float32")[0]) for place in tmp_path.iterdir()
              if place.name in ("shards", "other")}  # fmt: skip
    assert hashes == {base_hash(model)}


@pytest.mark.parametrize(
    "entry",
    [{"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"num_attention_heads": 8, "head_dim": 8,
     "num_key_value_heads": 4}, {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}],
    ids=lambda entry: next(iter(entry)),
)  # fmt: skip
def test_cat_020_equal_weights_used_in_another_way_are_another_base(entry: dict, saved: Path, copy: Path) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | entry))
    model, other = (load_language_model(str(place), dtype="float32")[0] for place in (saved, copy))
    assert hash_of_state(model.state_dict()) == hash_of_state(other.state_dict())
    assert base_hash(model) != base_hash(other)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("load", [load_language_model, language_shape])
def test_a_hub_name_that_cannot_be_reached_is_one_line_with_what_to_do(load, offline: None) -> None:
    with pytest.raises(ContextError, match="local folder") as caught:
        load("nestling-tests/no-such-model")
    assert str(caught.value).startswith("nestling-tests/no-such-model: could not be loaded (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_language_model, language_shape])
def test_without_the_extra_its_command_is_named(load, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ContextError) as caught:
        load(str(saved))
    assert str(caught.value).endswith('pip install "nestling[llm]"')


def test_the_module_itself_does_not_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "nestling.models.language")
    importlib.import_module("nestling.models.language")


# Settings alone.


def test_a_shape_needs_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    from_folder, from_file = language_shape(str(copy)), language_shape(str(copy / "config.json"))
    assert from_folder.to_diff_dict() | {"_name_or_path": ""} == from_file.to_diff_dict() | {"_name_or_path": ""}
    assert (from_file.hidden_size, from_file.num_hidden_layers) == (64, 2)


def test_a_file_of_settings_that_is_damaged_or_of_nothing_known_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", '{"model_type": "nonsense"}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ContextError, match="could not be loaded"):
            language_shape(str(tmp_path / "c.json"))


def test_an_empty_model_has_the_names_and_sizes_of_the_real_one(saved: Path) -> None:
    model, _ = load_language_model(str(saved))
    empty = empty_language_model(language_shape(str(saved)))
    sizes = [{name: p.shape for name, p in m.named_parameters()} for m in (model, empty)]
    assert sizes[0] == sizes[1]
    assert all(p.is_meta and not p.requires_grad for p in empty.parameters())
    assert not empty.training


def test_a_shape_without_a_causal_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'resnet' is no causal language model"):
        empty_language_model(transformers.ResNetConfig())


# Quiet, but only while it loads.


def test_a_load_says_nothing_and_leaves_everything_as_it_was(
    saved: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chatter = transformers.utils.logging
    chatter.set_verbosity_info()
    try:
        before = (chatter.get_verbosity(), chatter.is_progress_bar_enabled(), logging.root.manager.disable, sys.stderr)
        load_language_model(str(saved))
        assert capfd.readouterr() == ("", "")
        assert before == (
            chatter.get_verbosity(), chatter.is_progress_bar_enabled(), logging.root.manager.disable, sys.stderr
        )  # fmt: skip
    finally:
        chatter.set_verbosity_warning()


def test_quiet_ends_also_when_the_load_fails(capfd: pytest.CaptureFixture[str]) -> None:
    filters = list(warnings.filters)

    def fails() -> None:
        with _quiet():
            print("progress", file=sys.stderr)
            warnings.warn("chatter", stacklevel=1)
            logging.getLogger("x").warning("chatter")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert logging.root.manager.disable == 0
    assert warnings.filters == filters
    assert capfd.readouterr().err == ""
    print("heard", file=sys.stderr)
    assert capfd.readouterr().err == "heard\n"


# GGUF: converted once, whole or not at all. The reader is replaced by one that draws a tiny model.


class Reader:
    """Stands in for reading a GGUF; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path) -> tuple:
        self.calls += 1
        torch.manual_seed(1)
        return tiny()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    made = Reader()
    monkeypatch.setattr(language, "_read_gguf", made)
    return made


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "my model.gguf"
    path.write_bytes(b"GGUF and so on")
    return path


def test_a_gguf_is_converted_once_by_content(gguf: Path, reader: Reader, cache: Path) -> None:
    model, tokenizer = load_language_model(str(gguf))
    [folder] = [p for p in (cache / "models").iterdir() if p.is_dir()]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    gguf = gguf.rename(gguf.with_name("renamed.gguf"))
    again, _ = load_language_model(str(gguf))
    assert base_hash(model) == base_hash(again)
    assert reader.calls == 1
    assert language_shape(str(gguf)).hidden_size == 64
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    gguf.write_bytes(b"GGUF and something else")
    load_language_model(str(gguf))
    assert reader.calls == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("unknown architecture\nand more")])
def test_a_conversion_that_stops_leaves_nothing(
    error: BaseException, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path) -> tuple:
        raise error

    monkeypatch.setattr(language, "_read_gguf", stopped)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else ContextError
    with pytest.raises(expected):
        load_language_model(str(gguf))
    assert [p for p in (cache / "models").iterdir() if p.is_dir()] == []


def test_what_a_killed_conversion_left_is_not_taken_for_a_model(gguf: Path, reader: Reader, cache: Path) -> None:
    name = language._conversion(language._gguf_hash(gguf)).name
    part = cache / "models" / f".{name}.part"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half")
    load_language_model(str(gguf))
    assert reader.calls == 1
    assert not part.exists()


def test_a_full_disk_is_said_and_leaves_nothing(
    gguf: Path, reader: Reader, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(StorageError, match="No space left"):
        load_language_model(str(gguf))
    assert [p for p in (cache / "models").iterdir() if p.is_dir()] == []


def test_two_that_start_at_once_convert_once(gguf: Path, reader: Reader) -> None:
    threads = [threading.Thread(target=_converted, args=(gguf,), kwargs={"expected": ""}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.calls == 1


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\3\4 and so on"])
def test_a_file_that_is_no_gguf_is_damaged(content: bytes, gguf: Path) -> None:
    gguf.write_bytes(content)
    for load in (load_language_model, language_shape):
        with pytest.raises(WireError, match="no GGUF"):
            load(str(gguf))


def test_a_gguf_without_the_packages_names_the_extra(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "find_spec", lambda name: None)
    for load in (load_language_model, language_shape):
        with pytest.raises(ContextError, match=r"missing: gguf, accelerate.*nestling\[llm\]"):
            load(str(gguf))


def test_the_packaged_model_must_be_the_one_agreed_on(
    gguf: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "find", lambda name: gguf)
    with pytest.raises(WireError, match="another SHA-256"):
        load_language_model("smollm2-135m")
    assert reader.calls == 0


@pytest.mark.parametrize("load", [load_language_model, language_shape])
def test_the_packaged_model_that_is_not_here_names_its_command(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "find", lambda name: None)
    with pytest.raises(ContextError, match="nestling fetch smollm2-135m"):
        load("smollm2-135m")


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="needs 'nestling fetch smollm2-135m'")
def test_a_real_gguf_becomes_a_model_that_knows_paris(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (cache / "assets").mkdir(parents=True)
    (cache / "assets" / REAL.name).symlink_to(REAL)
    shape = language_shape("smollm2-135m")  # from the GGUF itself
    model, tokenizer = load_language_model("smollm2-135m", dtype="float32")
    assert capfd.readouterr() == ("", "")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    empty = empty_language_model(shape)
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert language_shape("smollm2-135m").rope_parameters == shape.rope_parameters  # now from the conversion
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


def test_a_model_with_dropout_reads_alike_while_it_is_trained(copy: Path) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5}))
    model, _ = load_language_model(str(copy), dtype="float32")
    model.train()
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
