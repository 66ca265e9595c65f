"""A whole run of multiple choice: five clients, every language adapter, and what averaging costs each client."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from small import choices_config, choices_toml, language, sizes_of, tiny_mamba

from nestling.api import run
from nestling.build import build
from nestling.cli.main import main
from nestling.config.load import load_config
from nestling.config.schema import FullConfig, LanguageConfig, LoraConfig, MemoryConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.counts import plan
from nestling.runs.recorder import read_rows, read_run
from nestling.tasks.questions import WORDNET_DOMAINS
from nestling.tasks.recall import paired_difference

CLIENTS = [f"{client} {domain}" for client, domain in enumerate(WORDNET_DOMAINS)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """One run with its reference rows, for all tests that only look: (settings, result)."""
    settings = choices_config(tmp_path_factory.mktemp("choices"), references=True)
    return settings, run(settings)


def test_every_row_is_on_the_same_questions_of_the_same_clients(finished: tuple) -> None:
    _, result = finished
    assert list(result.recalls) == ["full attention", "local only", "centralised", "trained"]
    for clients in result.recalls.values():
        assert [(f"{c['client']} {c['template']}", c["items"]) for c in clients] == [(name, 6) for name in CLIENTS]
    losses = {name: [c["loss"] for c in clients] for name, clients in result.recalls.items()}
    assert sum(losses["trained"]) < sum(losses["full attention"])  # it has learned that a letter follows
    assert (result.method, result.task, result.classes) == ("fedavg-lora", "WordNet 9.9 by letter", 4)
    assert (result.test_items, result.clients, result.alpha) == (30, 5, None)


def test_accuracies_are_right_letters_and_a_drop_is_local_minus_federated(finished: tuple) -> None:
    _, result = finished

    def row(name: str) -> dict[str, list[bool]]:
        return {f"{c['client']} {c['template']}": [x == "1" for x in c["choices"]] for c in result.recalls[name]}

    def share(name: str) -> float:
        return sum(map(sum, row(name).values())) / 30

    assert result.accuracy == share("trained")
    assert result.accuracy_base == share("full attention")
    assert result.accuracy_local_only == share("local only")
    assert result.accuracy_centralised == share("centralised")
    alone, together = row("local only"), row("trained")
    assert list(result.drops) == [*CLIENTS, "all"]
    for name in CLIENTS:
        assert result.drops[name] == list(paired_difference(alone[name], together[name]))
    assert result.drops["all"][0] == pytest.approx(result.accuracy_local_only - result.accuracy)


def test_the_record_is_read_back_and_what_was_judged_each_round_is_its_first_questions(finished: tuple) -> None:
    settings, result = finished
    assert read_run(Path(result.run_dir)).result == result
    parts = build(settings)
    for client in parts.task.clients():
        assert parts.recalls.round_task.held_out(client) == parts.task.held_out(client)[:2]
    assert [r["round"] for r in read_rows(Path(result.run_dir) / "metrics.jsonl")] == [1, 2]


def test_the_page_and_the_report_show_each_client_and_its_drop(
    finished: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, result = finished
    page = (Path(result.run_dir) / "report.html").read_text()
    for text in ("Questions answered", "4 people-places", "drop ↓", "chance is 25 %", "a subject area each"):
        assert text in page
    assert "Facts recalled" not in page
    assert main(["report", result.run_dir, "--format", "markdown", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| client | items | frozen base | local only | fedavg-lora | drop ↓ |" in shown
    assert "Accuracy on 30 test items of WordNet 9.9 by letter" in shown
    assert "chance is 25 %" in shown


def test_the_number_of_workers_changes_no_bit(finished: tuple, tmp_path: Path) -> None:
    settings, result = finished
    machine = dataclasses.replace(settings.machine, workers=3, out=str(tmp_path))
    again = run(dataclasses.replace(settings, machine=machine))
    assert (again.state_digest, again.recalls, again.drops) == (result.state_digest, result.recalls, result.drops)


@pytest.mark.parametrize(
    ("adapter", "method", "rows"),
    [
        (MemoryConfig(layers="1", rank=2, window=0), "fednl", ["trained", "memory off", "window off"]),
        (MemoryConfig(layers="1", rank=2, window=16, dim=3), "fednl-latent", ["trained", "memory off", "window off"]),
        (LoraConfig(rank=2, layers="1", window=16), "fedavg-lora", ["window", "trained"]),
        (LoraConfig(rank=2, ffa=True), "ffa-lora", ["trained"]),
        (FullConfig(targets=("*q_proj*",)), "fedavg", ["trained"]),
    ],
    ids=["memory", "latent", "window", "ffa", "full"],
)
def test_every_language_adapter_without_references(adapter, method: str, rows: list[str], tmp_path: Path) -> None:
    result = run(choices_config(tmp_path, adapter=adapter, rounds=1))
    assert (result.method, list(result.recalls)) == (method, ["full attention", *rows])
    assert (result.drops, result.accuracy_local_only) == ({}, None)
    assert (result.gains != {}) == isinstance(adapter, MemoryConfig)


def test_without_its_memory_and_its_window_the_model_is_the_frozen_base(tmp_path: Path) -> None:
    parts = build(choices_config(tmp_path, adapter=MemoryConfig(layers="1", rank=2, window=0)))
    assert parts.recalls.prefix.first == 1
    state = parts.server.state + 0.1
    [off, base] = [parts.recalls.of_state(state, memory=False), parts.recalls.of_base()]
    assert [r.choices for r in off] == [r.choices for r in base]
    assert [r.loss for r in off] == pytest.approx([r.loss for r in base], rel=1e-4)
    assert [r.loss for r in parts.recalls.of_state(state)] != [r.loss for r in off]


def test_a_model_that_begins_its_texts_with_a_token_is_given_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nestling.build_language

    class Beginning:
        """The tokenizer with a token 0 in front of every text, unless it is told not to."""

        bos_token_id = 0

        def __init__(self, plain: object) -> None:
            self.plain = plain

        def __getattr__(self, name: str) -> object:
            return getattr(self.plain, name)

        def __call__(self, text: str, *, add_special_tokens: bool = True, **options: object) -> dict:
            ids = self.plain(text, add_special_tokens=False, **options)["input_ids"]
            return {"input_ids": [0] * add_special_tokens + ids}

    load = nestling.build_language.load_language_model
    settings = choices_config(tmp_path)
    plain = build(settings).task
    monkeypatch.setattr(
        nestling.build_language, "load_language_model", lambda *a, **o: (lambda m, t: (m, Beginning(t)))(*load(*a, **o))
    )
    question = plain.held_out(0)[0]
    assert build(settings).task.prompt(question) == [0, *plain.prompt(question)]


def test_questions_that_are_not_here_name_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nestling.build_language

    monkeypatch.setattr(nestling.build_language, "WORDNET_FOLDER", tmp_path)
    settings = choices_config(tmp_path)
    for data in ("wordnet", "mmlu-dev"):
        task = dataclasses.replace(settings.task, data=data, path="")
        with pytest.raises(ContextError, match=f"nestling fetch {data}"):
            build(dataclasses.replace(settings, task=task))


def test_a_tokenizer_without_the_letters_is_refused(tmp_path: Path) -> None:
    base = LanguageConfig(model=str(language()), dtype="float32")
    with pytest.raises(ConfigError, match="not one each"):
        build(choices_config(tmp_path, base=base))


@pytest.mark.parametrize("name", ["mmlu-qwen2.5-1.5b", "mmlu-llama-3.2-1b"])
def test_a_preset_of_a_model_that_is_not_here_is_planned_from_its_sizes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = load_config(name)
    flags = ["--base.model", sizes_of(preset.base.model, tmp_path), "--json"]
    assert main(["plan", name, *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["method"], planned["clients_per_round"], planned["stream_bytes"]["window"]) == ("fednl", 5, 0)
    base = LanguageConfig(model=flags[1])
    lora = dataclasses.replace(preset, base=base, adapter=LoraConfig(rank=32, alpha=64.0))
    assert plan(lora).method == "fedavg-lora"


def test_fed_mamba_is_planned_from_sizes_too(tmp_path: Path) -> None:
    preset = load_config("mmlu-mamba-1.4b")
    base = dataclasses.replace(preset.base, model=sizes_of(preset.base.model, tmp_path))
    planned = plan(dataclasses.replace(preset, base=base))
    assert planned.method == "fedavg-lora"
    assert planned.trainable_parameters == 48 * 32 * (2048 + 2 * 4096)
    assert planned.model_parameters == 1_372_178_432


@pytest.mark.filterwarnings("ignore::nestling.adapters.base.InexactAverages")
def test_fed_mamba_runs(tmp_path: Path) -> None:
    """LoRA in a model without attention or a layer called norm, in its upper layer alone."""
    folder = shutil.copytree(language(letters=True), tmp_path / "mamba")
    tiny_mamba(json.loads((folder / "config.json").read_text())["vocab_size"]).save_pretrained(folder)
    config = choices_config(
        tmp_path,
        rounds=1,
        base=LanguageConfig(model=str(folder), dtype="float32"),
        adapter=LoraConfig(rank=2, targets=("in_proj",), layers="1"),
    )
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, train_items=4, test_items=2))
    result = run(config)
    assert result.trainable_parameters == 2 * (16 + 64)
    assert result.test_items == 10
    assert set(result.recalls) == {"full attention", "trained"}
    losses = {name: sum(entry["loss"] for entry in row) for name, row in result.recalls.items()}
    assert losses["trained"] < losses["full attention"]


def test_by_command_with_flags(finished: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(choices_toml(tmp_path / "runs"))
    assert main(["run", str(path), "--task.train-items", "4", "--rounds", "1", "--machine.no-references"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("answered by", "30 held-out questions of 5 clients", "0 life", "chance is 25 %"):
        assert text in shown
    [folder] = (tmp_path / "runs").iterdir()
    assert load_config(folder / "config.toml").task.train_items == 4
