"""`nestling eval`: the adapted model and its base on the same items, and what is said where that cannot be."""

import dataclasses
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from small import choices_config, language, nouns, toml

import nestling
from nestling.build_language import load_language
from nestling.cli.main import main
from nestling.config.load import dump_config
from nestling.config.schema import ChoicesConfig, MemoryConfig, RunConfig
from nestling.tasks.choices import ChoicesTask

pytest.importorskip("transformers")
needs_extra = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra nestling[eval]")
WORDNET = ["--tasks", "nestling_wordnet"]


def settings(folder: Path) -> RunConfig:
    return choices_config(folder, adapter=MemoryConfig(layers="all", rank=2, window=24))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as far as this command reads it; its memory is far from where it started."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    folder.mkdir()
    config = settings(folder)
    (folder / "config.toml").write_text(dump_config(config))
    model = load_language(config, note=lambda text: None)[0]
    adapter = nestling.attach(model, config.adapter)
    drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1))
    adapter.load_vector(adapter.vector() + 0.5 * drawn.numpy())
    adapter.save_pretrained(folder / "adapter")
    return folder


def of_the_run(run: Path, *, adapted: bool) -> float:
    """The accuracy that the run itself would print."""
    model, task = load_language(settings(run), note=lambda text: None)[:2]
    assert isinstance(task, ChoicesTask)
    if adapted:
        nestling.from_pretrained(model, run / "adapter")
    return task.accuracy(task.evaluate(model))


@needs_extra
def test_a_run_is_scored_on_what_it_holds_out_and_its_base_beside_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scores.json"
    assert main(["eval", str(run), *WORDNET, "--memory-off", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    for words in ("nestling_wordnet", "acc", "memory", "memory off", "frozen base", "0.250", "paired over items"):
        assert words in " ".join(out.split())
    assert [line.partition(", ")[2] for line in err.splitlines()] == ["memory", "memory off", "frozen base"]
    found = json.loads(file.read_text())
    rows = {name: scores[0] for name, scores in found["rows"].items()}
    assert list(rows) == ["memory", "memory off", "frozen base"]
    assert {row["items"] for row in rows.values()} == {30}
    assert rows["memory"]["value"] == pytest.approx(of_the_run(run, adapted=True))
    assert rows["frozen base"]["value"] == pytest.approx(of_the_run(run, adapted=False))
    assert len({tuple(row["by_item"]) for row in rows.values()}) > 1  # the adapter is on in one row, and off in another
    assert found["notes"] == []


@needs_extra
def test_an_adapter_alone_and_a_model_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestling.build_language.WORDNET_FOLDER", nouns())
    assert main(["eval", str(language(letters=True)), *WORDNET, "--dtype", "float32", "--limit", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == "nestling: scoring, frozen base\n"
    assert "difference" not in out
    (tmp_path / "adapter.json").write_text((run / "adapter" / "adapter.json").read_text())
    (tmp_path / "adapter.safetensors").write_bytes((run / "adapter" / "adapter.safetensors").read_bytes())
    assert main(["eval", str(tmp_path), *WORDNET]) == 3  # no settings beside it say of which base it is
    capsys.readouterr()
    assert (
        main(
            [
                "eval",
                str(tmp_path),
                *WORDNET,
                "--model",
                str(language(letters=True)),
                "--dtype",
                "float32",
                "--limit",
                "4",
            ]
        )
        == 0
    )
    assert "it may have been trained on some of these" in " ".join(capsys.readouterr().out.split())


@needs_extra
def test_there_must_be_a_memory_to_turn_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestling.build_language.WORDNET_FOLDER", nouns())
    assert main(["eval", str(language(letters=True)), *WORDNET, "--memory-off"]) == 2
    assert "--memory-off: there is no memory to turn off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{runs}/no such run"], "is not there. See 'nestling ls'"),
        (["{runs}"], "is neither a run's folder nor an adapter's"),
        (["{run}", "--limit", "-1"], "--limit: -1 is not allowed"),
        (["{run}", "--batch-size", "0"], "--batch-size: 0 is not allowed"),
        (["{run}", "--num-fewshot", "-1"], "--num-fewshot: -1 is not allowed"),
        (["{run}", "--include", "{runs}/none"], "is not a folder"),
        (["{run}", "--json", "{runs}/none/x.json"], "cannot be written"),
        (["{run}", "--json", "{runs}"], "cannot be written"),
        (["https://host/model"], "RUN: is an address"),
        (["smollm2-135m", "--model", "smollm2-135m"], "--model: RUN is a model by itself"),
    ],
)
def test_what_cannot_be_used_is_exit_2_before_anything_is_read(
    words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nestling.models.language", None)
    given = [word.format(run=run, runs=run.parent) for word in words]
    assert main(["eval", *given, *WORDNET]) == 2
    assert said in capsys.readouterr().err


def test_a_run_over_images_reads_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(toml(tmp_path))
    assert main(["eval", str(tmp_path), *WORDNET]) == 2
    assert "was a run over images" in capsys.readouterr().err


def test_without_the_harness_the_extra_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "nestling.inference.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(run), *WORDNET]) == 3
    assert capsys.readouterr().err.endswith("pip install 'nestling[eval]'\n")


def test_a_run_trained_on_mmlu_is_warned_of_the_harness_own(run: Path) -> None:
    from nestling.cli.eval import Eval, _notes
    from nestling.cli.places import Place

    trained = dataclasses.replace(settings(run), task=ChoicesConfig(data="mmlu"))
    place = Place(run / "adapter", "m", "float32", trained)
    assert "trained on questions of MMLU" in _notes(Eval("r", ("mmlu",)), place, 0)[0]
    assert _notes(Eval("r", ("nestling_mmlu", "hellaswag")), place, 0) == []
    assert _notes(Eval("r", ("hellaswag",)), place, 3) == [
        "3 requests were longer than the model reads at once and lost their front"
    ]
