"""The harness' scores are ours, item by item, whatever stands beside an item in its batch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import language, nouns, tiny_llama
from tolerance import assert_close

import nestling
from nestling.config.schema import LoraConfig, MemoryConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.tasks.choices import ChoicesTask, _read_plainly, answers, prompt_text
from nestling.tasks.questions import MMLU_DOMAINS, Question, load_questions

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval", reason="needs the extra nestling[eval]")

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from nestling.inference import harness  # noqa: E402
from nestling.inference.harness import InMemory, in_turns, load_tasks, score  # noqa: E402

ADAPTERS = {
    "none": None,
    "memory": MemoryConfig(window=24, layers="all", rank=2),
    "memory, added, no window": MemoryConfig(window=0, layers="1-2", rank=2, mix="add"),
    "lora": LoraConfig(window=24, rank=2),
}


@pytest.fixture(params=list(ADAPTERS))
def model(request: pytest.FixtureRequest) -> Any:
    return adapted(request.param)


def adapted(kind: str) -> Any:
    """A drawn model over bytes, with an adapter far from where it starts."""
    made = tiny_llama(vocab_size=261, max_position_embeddings=1024)
    if (config := ADAPTERS[kind]) is not None:
        adapter = nestling.attach(made, config)
        drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1))
        adapter.load_vector(adapter.vector() + 0.5 * drawn.numpy())
        gates = [weight for name, weight in adapter.weights().items() if name.endswith("gate")]
        assert kind == "lora" or (gates and all(bool(gate.abs().min() > 0.001) for gate in gates))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(language(letters=True))


@pytest.fixture(scope="module")
def task(tokenizer: Any) -> ChoicesTask:
    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return ChoicesTask(tokenize, load_questions("wordnet", str(nouns())), train_items=8, test_items=3)


@pytest.fixture(scope="module")
def questions(task: ChoicesTask) -> list[Question]:
    """Fifteen, and five more that are longer or shorter than all of those."""
    odd = [Question(f"{'?' * 9 * i}", (f"{i}", "b", "c", "d"), i % 4, "odd") for i in range(5)]
    return odd + in_turns([task.held_out(client) for client in task.clients()])


def ours(model: Any, task: ChoicesTask, questions: list[Question]) -> torch.Tensor:
    """log p of the four letters of each question, each read by itself."""
    with torch.no_grad():
        rows = [answers(model, task._collate([question]), _read_plainly) for question in questions]
    return torch.cat(rows).double().log_softmax(1)[:, task.letters]


def theirs(model: InMemory, tasks: harness.Tasks, name: str) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    with harness._quiet():
        samples = evaluator.evaluate(model, tasks.loaded, bootstrap_iters=0)["samples"][name]
    return torch.tensor([[r[0] for r in s["filtered_resps"]] for s in samples], dtype=torch.float32), samples


def test_log_likelihoods_are_ours_item_by_item(
    model: Any, tokenizer: Any, task: ChoicesTask, questions: list[Question]
) -> None:
    wanted = ours(model, task, questions)
    assert float(wanted.std(1).min()) > 0.01  # it has an opinion of each question
    tasks = load_tasks(["own"], own={"own": questions})
    for batch_size in (1, 7):
        got, samples = theirs(InMemory(model, tokenizer, batch_size=batch_size), tasks, "own")
        assert [s["arguments"][0][0] for s in samples] == [prompt_text(question) for question in questions]
        assert_close(got, wanted)


def test_the_score_is_that_of_our_own_evaluation(model: Any, tokenizer: Any, task: ChoicesTask) -> None:
    recalls = task.evaluate(model)
    own = {"own": in_turns([task.held_out(client) for client in task.clients()])}
    [found] = score(InMemory(model, tokenizer), load_tasks(["own"], own=own))
    assert (found.task, found.metric, found.chance) == ("own", "acc", 0.25)
    assert found.items == sum(r.items for r in recalls)
    assert found.value == pytest.approx(task.accuracy(recalls))
    in_order = [hit for turn in zip(*(r.choices for r in recalls), strict=True) for hit in turn]
    assert found.by_item == tuple(map(float, in_order))
    share = found.value * (1 - found.value) / (found.items - 1)
    assert found.error == pytest.approx(share**0.5)


def test_mmlu_as_the_harness_has_it_scores_as_ours(tokenizer: Any, tmp_path: Path) -> None:
    """The published columns in a parquet file, and the harness' own template but for the line that names a subject."""
    from datasets import Dataset

    rows = [
        {"question": f" Of {subject}?", "subject": subject, "choices": [f"{i} a", "b", "c", "d"], "answer": i % 4}
        for i, subject in enumerate(subject for subjects in MMLU_DOMAINS.values() for subject in subjects)
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Dataset.from_list(rows).to_parquet(tmp_path / "test.parquet")
    fields = "\n".join(f"{letter}. {{{{choices[{i}]}}}}" for i, letter in enumerate("ABCD")).replace("\n", r"\n")
    (tmp_path / "local.yaml").write_text(f"""\
task: mmlu_local
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: "{tmp_path}/test.parquet"}}, cache_dir: "{tmp_path}/cache"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question.strip()}}}}\\n{fields}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    model = adapted("memory")
    own = load_questions("mmlu", str(tmp_path / "test.jsonl"))
    every = {question.subject: question for questions in own.domains.values() for question in questions}
    tasks = load_tasks(["mmlu_local", "own"], own={"own": [every[row["subject"]] for row in rows]}, include=tmp_path)
    assert tasks.shown == ("mmlu_local", "own")
    held = InMemory(model, tokenizer)
    got, _ = theirs(held, tasks, "mmlu_local")
    wanted, _ = theirs(held, tasks, "own")
    assert got.shape == (57, 4)
    assert_close(got, wanted.double())
    a, b = score(held, tasks)
    assert dict(vars(a), task="") == dict(vars(b), task="")
    first = score(held, tasks, limit=5)
    assert [(s.items, s.by_item) for s in first] == [(5, a.by_item[:5]), (5, b.by_item[:5])]


def test_what_fills_a_batch_up_changes_nothing(model: Any, tokenizer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 261, (3, 60), generator=generator)
    lengths = [17, 33, 60]
    other = ids.clone()
    for row, length in enumerate(lengths):
        other[row, length:] = torch.randint(0, 261, (60 - length,), generator=generator)
    held = InMemory(model, tokenizer)
    one, two = held._model_call(ids), held._model_call(other)
    for row, length in enumerate(lengths):
        alone = held._model_call(ids[row : row + 1, :length])[0]
        assert_close(one[row, :length], alone.double())
        assert_close(two[row, :length], alone.double())
    assert not torch.equal(one[0, 17:], two[0, 17:])


def test_text_is_generated_as_by_itself(tokenizer: Any) -> None:
    """Here the harness fills up in front, with a mask; a stream keeps what was read."""
    held = InMemory(adapted("memory"), tokenizer, batch_size=3)
    prompts = ["x" * 40, "What comes after this, and this?", "a"]
    asked = [
        Instance("generate_until", {}, (text, {"until": ["\n\n"], "max_gen_toks": 12}), i)
        for i, text in enumerate(prompts)
    ]
    with harness._quiet():
        together = held.generate_until(asked)
        alone = [held.generate_until([each])[0] for each in asked]
    assert together == alone
    assert len(set(alone)) == 3
    from nestling.inference.stream import Session

    with Session(held.model, tokenizer) as session:
        assert "".join(session.stream(prompts[0], max_new_tokens=12)).strip() == alone[0].strip()


def test_requests_that_lose_their_front_are_counted(tokenizer: Any, questions: list[Question]) -> None:
    tasks = load_tasks(["own"], own={"own": questions})
    long = sum(len(prompt_text(question)) > 60 for question in questions)
    assert 0 < long < len(questions)
    held = InMemory(adapted("none"), tokenizer, max_length=60)
    score(held, tasks)
    assert held.cut == 4 * long  # a request for each letter


def test_the_callers_tokenizer_and_generators_stay_as_they_were(tokenizer: Any) -> None:
    bare = transformers.AutoTokenizer.from_pretrained(language(letters=True))
    bare.pad_token = None
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    held = InMemory(adapted("none"), bare)
    score(held, load_tasks(["own"], own={"own": [Question("?", ("1", "2", "3", "4"), 0, "s")]}))
    assert bare.pad_token is None
    assert held.tokenizer.pad_token is not None
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_task_whose_data_is_not_there_is_said_with_what_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)\nand more")

    monkeypatch.setattr("datasets.load_dataset", offline)
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: a/b\noutput_type: multiple_choice\ntest_split: test\n")
    with pytest.raises(
        ContextError, match=r"^far: could not be loaded \(ConnectionError: Couldn't reach 'a/b'"
    ) as caught:
        load_tasks(["far"], own={}, include=tmp_path)
    assert "nestling_ need none" in str(caught.value)
    assert "and more" not in str(caught.value)


def test_an_unknown_task_has_the_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        all_tasks, all_subtasks = ["mmlu", "mmlu_anatomy"], ["mmlu_anatomy"]

        def __init__(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(harness, "TaskManager", Known)
    with pytest.raises(ConfigError, match=r"'nestling_wordnut' is no task\. Did you mean 'nestling_wordnet'") as caught:
        load_tasks(["mmlu", "nestling_wordnut"], own={"nestling_wordnet": []})
    assert "the harness' 2." in str(caught.value)
    with pytest.raises(ConfigError, match="Did you mean 'mmlu_anatomy'"):
        load_tasks(["mmlu_anatomi"], own={})


def test_a_task_that_runs_what_a_model_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = harness.question_task("code", [Question("?", ("1", "2", "3", "4"), 0, "s")])
    made.UNSAFE_CODE = True
    monkeypatch.setattr(harness, "question_task", lambda name, questions: made)
    with pytest.raises(ConfigError, match="code: runs code that the model writes"):
        load_tasks(["code"], own={"code": []})


def test_groups_are_shown_in_place_of_their_tasks(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"q": f"{i}{'!' * i}", "a": i % 2} for i in range(5)]
    for name, count in (("one", 3), ("two", 5)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
        (tmp_path / f"{name}.yaml").write_text(f"""\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{tmp_path}/{name}.jsonl"}}, cache_dir: "{tmp_path}/cache"}}
test_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_choice: ["yes", "no"]
doc_to_target: a
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    (tmp_path / "both.yaml").write_text("""\
group: both
task: [one, two]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
""")
    own = harness.TaskManager(include_path=tmp_path, include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", lambda **_: own)  # the harness' own thousands take a while
    assert load_tasks(["both"], own={}, include=tmp_path).shown == ("both",)
    found = score(InMemory(adapted("none"), tokenizer), load_tasks(["both", "one", "two"], own={}, include=tmp_path))
    assert [(s.task, s.items, s.chance) for s in found] == [("both", 8, 0.5), ("one", 3, 0.5), ("two", 5, 0.5)]
    assert found[0].by_item == found[1].by_item + found[2].by_item
    assert found[0].value == pytest.approx((3 * found[1].value + 5 * found[2].value) / 8)
