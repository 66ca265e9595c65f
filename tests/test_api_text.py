"""A run on text from settings to report: it learns, says what chance is, and can be resumed and planned."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import articles, text_config, text_toml

import nestling
from nestling.api import resume, run
from nestling.build import pretrain_base
from nestling.cli.main import main
from nestling.config.schema import FullConfig, GptConfig, LocalConfig, LoraConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.counts import plan
from nestling.models.backbones import base_hash
from nestling.runs.recorder import read_result


def test_a_run_learns_and_tells_what_its_accuracy_means(tmp_path, capsys) -> None:
    letters = tmp_path / "letters"  # another text than the clients', so that there is something to learn
    letters.mkdir()
    lines = [f" \n = Letter {a} = \n \n" + f" one letter of them is {a} , a letter . \n" * 20 for a in "abcdefghijkl"]
    for part in ("train", "valid", "test"):
        (letters / f"wiki.{part}.raw").write_text("".join(lines), "utf-8")
    path = tmp_path / "text.toml"
    path.write_text(text_toml(tmp_path / "runs").replace("train_items = 20", "train_items = 0"))
    base = tmp_path / "base.safetensors"
    of_base = ["--base.path", str(letters), "--base.epochs", "4"]
    assert main(["pretrain", str(path), "--out", str(base), "--json", *of_base]) == 0
    provenance = json.loads(capsys.readouterr().out)["provenance"]
    assert provenance["base"]["kind"] == "tinygpt"
    learning = ["--adapter.dim", "64", "--local.lr", "0.1", "--local.epochs", "2"]
    assert main(["run", str(path), "--json", "--base.weights", str(base), *of_base, *learning]) == 0
    found = json.loads(capsys.readouterr().out)
    result = read_result(Path(found["run_dir"]))
    assert result.task == "WikiText-2, next byte"
    assert (result.classes, result.alpha, result.evaluated_on) == (256, None, "test")
    assert result.test_items % 16 == 0
    assert result.chance is not None and result.perplexity is not None and result.perplexity_base is not None  # noqa: PT018
    assert result.chance > 5 / 256  # of the commonest byte, not of any
    assert result.accuracy_base is not None
    assert result.accuracy > result.accuracy_base + 0.1
    assert result.perplexity < result.perplexity_base / 3
    assert result.averaging_error is not None
    assert result.averaging_error < 1e-5
    assert result.payload_bytes_up == 4 * 4 * 64
    assert result.accuracy_local_only is not None
    report = (Path(result.run_dir) / "report.html").read_text("utf-8")
    assert f"chance is {100 * result.chance:.3g} %" in report
    assert "erplexity of a byte" in report


@pytest.mark.parametrize("adapter", [FullConfig(), LoraConfig(rank=2, targets=("qkv", "up"))], ids=["full", "lora"])
@pytest.mark.filterwarnings("ignore::nestling.adapters.base.InexactAverages")
def test_other_adapters_and_partitions_run_and_are_planned(adapter, tmp_path) -> None:
    if isinstance(adapter, LoraConfig):
        pytest.importorskip("peft")
    config = text_config(tmp_path, rounds=1, adapter=adapter, local=LocalConfig(batch_size=8, lr=1e-3))
    config = replace(config, task=replace(config.task, partition="articles", test_items=4))
    result = run(config)
    assert result.test_items == 4 * 16
    report = (Path(result.run_dir) / "report.html").read_text("utf-8")
    assert "no article with two clients" in report
    assert "equal shares" not in report
    planned = plan(config)
    assert planned.payload_bytes_up == result.payload_bytes_up
    assert planned.model_parameters == result.model_parameters
    assert planned.total_wire_bytes == result.bytes_up + result.bytes_down


def test_a_run_is_resumed_to_the_same_state_whatever_the_workers(tmp_path) -> None:
    whole = run(text_config(tmp_path))
    half = text_config(tmp_path)

    def stop(progress: nestling.core.types.Progress) -> None:
        if progress.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(replace(half, name="half", machine=replace(half.machine, workers=1)), progress=stop)
    [folder] = tmp_path.glob("half--*")
    assert resume(folder).state_digest == whole.state_digest


def test_the_base_is_the_texts_and_the_seeds(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    config = text_config(tmp_path)
    found, text = pretrain_base(config)
    assert json.loads(text)["held_out_accuracy"] > 0.3
    again, _ = pretrain_base(config)
    assert base_hash(found) == base_hash(again)
    with pytest.raises(ContextError, match=r"nestling fetch shakespeare"):
        pretrain_base(replace(config, base=replace(config.base, pretrain_on="shakespeare")))
    with pytest.raises(ConfigError, match="nothing to train"):
        pretrain_base(replace(config, base=replace(config.base, pretrain_on="none")))


def test_random_bytes_make_no_base(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    letters = np.random.default_rng(0).integers(97, 117, 3 * 2000).astype(np.uint8).reshape(3, -1)
    for name, row in zip(("train", "valid", "test"), letters, strict=True):
        (tmp_path / f"wiki.{name}.raw").write_bytes(bytes(row))
    config = text_config(tmp_path)
    base = GptConfig(width=32, layers=1, context=16, pretrain_on="wikitext2", path=str(tmp_path), epochs=1)
    with pytest.raises(ContextError, match=r"base: pre-training ended at .*chance is 5\.\d%"):
        pretrain_base(replace(config, base=base))


def test_the_fixture_is_in_the_published_form() -> None:
    assert sorted(path.name for path in articles().iterdir()) == [f"wiki.{n}.raw" for n in ("test", "train", "valid")]
