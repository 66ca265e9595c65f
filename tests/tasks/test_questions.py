"""Where questions come from: each published format is read as it is, and what does not follow it is said, by row."""

import json
from pathlib import Path

import pytest
from small import nouns

from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.tasks import questions
from nestling.tasks.questions import MMLU_DOMAINS, WORDNET_DOMAINS, Question, load_questions

SUBJECTS = [subject for subjects in MMLU_DOMAINS.values() for subject in subjects]


def row(number: int = 0, **changes) -> dict:
    made = {
        "question": f"What is {number}? ",
        "subject": SUBJECTS[number % len(SUBJECTS)],
        "choices": ["a", "b ", "c", f"{number}"],
        "answer": number % 4,
    }
    return {key: value for key, value in (made | changes).items() if value is not None}


def jsonl(folder: Path, rows: list, name: str = "test.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


# MMLU.


def test_the_five_areas_hold_each_of_the_57_subjects_once() -> None:
    assert len(SUBJECTS) == len(set(SUBJECTS)) == 57
    sizes = {"law-ethics": 8, "humanities": 20, "stem": 11, "math-cs": 8, "medical-psychology": 10}
    assert {domain: len(subjects) for domain, subjects in MMLU_DOMAINS.items()} == sizes


@pytest.mark.parametrize("inside", ["", "all"])
def test_a_folder_is_read_in_order_of_name_and_only_the_test_split(inside: str, tmp_path: Path) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    jsonl(folder, [row(i) for i in range(30, 60)], "test-00001-of-00002.jsonl")
    jsonl(folder, [row(i) for i in range(30)], "test-00000-of-00002.jsonl")
    jsonl(folder, [row(i, question=f"train {i}") for i in range(99)], "validation.jsonl")
    found = load_questions("mmlu", str(tmp_path))
    assert (found.title, found.scarce, list(found.domains)) == ("MMLU", False, list(MMLU_DOMAINS))
    assert sum(map(len, found.domains.values())) == 60
    assert found.domains["law-ethics"][0] == Question("What is 0?", ("a", "b", "c", "0"), 0, SUBJECTS[0])
    for domain, own in found.domains.items():
        assert all(question.subject in MMLU_DOMAINS[domain] for question in own)


def test_a_parquet_file_is_read_as_the_hub_has_it(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [row(i) for i in range(57)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test-00000-of-00001.parquet")
    found = load_questions("mmlu", str(tmp_path))
    jsonl(tmp_path, rows, "elsewhere.jsonl")
    assert found == load_questions("mmlu", str(tmp_path / "elsewhere.jsonl"))
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(WireError, match="cannot be read"):
        load_questions("mmlu", str(tmp_path))


def test_a_parquet_file_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "test-0.parquet").touch()
    with pytest.raises(ContextError, match=r"pip install 'nestling\[hub\]'"):
        load_questions("mmlu", str(tmp_path))


def test_a_question_that_comes_twice_is_there_once(tmp_path: Path) -> None:
    rows = [row(i) for i in range(57)]
    found = load_questions("mmlu", str(jsonl(tmp_path, [*rows, *rows, row(0, choices=["w", "x", "y", "z"])])))
    assert sum(map(len, found.domains.values())) == 58


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"choices": None}, "row 57 lacks choices"),
        ({"subject": None, "answer": None}, "row 57 lacks subject, answer"),
        ({"choices": ["a", "b", "c"]}, "other than four texts"),
        ({"choices": ["a", "b", "c", 4]}, "other than four texts"),
        ({"choices": "abcd"}, "other than four texts"),
        *(({"answer": answer}, "not 0 to 3") for answer in (7, -1, "A", 1.0, True)),
        ({"question": 3}, "is no text"),
        ({"subject": "astrology"}, "none of MMLU's"),
    ],
)
def test_a_row_that_is_no_question_is_said_by_its_number(changes: dict, words: str, tmp_path: Path) -> None:
    rows = [*(row(i) for i in range(57)), row(57, **changes)]
    with pytest.raises(WireError, match=words) as caught:
        load_questions("mmlu", str(jsonl(tmp_path, rows)))
    assert caught.value.code == "question"
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff\xfe", b"3"])
def test_a_file_that_is_damaged_is_a_wire_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(content)
    with pytest.raises(WireError):
        load_questions("mmlu", str(tmp_path))


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "LARGEST_FILE", 10)
    with pytest.raises(WireError, match="more than 10 bytes"):
        load_questions("mmlu", str(jsonl(tmp_path, [row()])))


def test_what_holds_no_questions_is_a_context_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / ("x" * 300)):
        with pytest.raises(ContextError, match="holds no test"):
            load_questions("mmlu", str(path))
    (tmp_path / "test.jsonl").touch()
    with pytest.raises(ContextError, match="holds no question of law-ethics, humanities"):
        load_questions("mmlu", str(tmp_path))
    with pytest.raises(ContextError, match="holds no question of humanities, stem"):
        load_questions("mmlu", str(jsonl(tmp_path, [row()])))


def test_the_hub_is_asked_through_datasets_and_what_it_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    asked = []

    def load_dataset(*args: str, **options: str) -> list:
        asked.append((args, options))
        if len(asked) == 2:
            raise ConnectionError("Couldn't reach 'cais/mmlu' on the Hub")
        return [row(i) for i in range(57)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert sum(map(len, load_questions("mmlu").domains.values())) == 57
    assert asked == [(("cais/mmlu", "all"), {"split": "test"})]
    with pytest.raises(ContextError, match="Couldn't reach"):
        load_questions("mmlu")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ContextError, match=r"pip install 'nestling\[hub\]', or set task\.path"):
        load_questions("mmlu")


def test_another_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="'arc' is no set of questions"):
        load_questions("arc")


# MMLU's development questions.

PROMPT = (
    "The following are multiple choice questions (with answers) about x.\n\n"
    "Q: Is (A) a letter?\nSay so.\n(A) yes (B) no, nor is (B (C) it is (D) none\n"
    "A: Let's think step by step. (A) is.\n\nAnd so on. The answer is (A).\n\n"
    "Q: Five?\n(A) 1 (B) 2 (C) 3 (D) 4 (E) 5\nA: Think. The answer is (E).\n\n"
    "Q: Seven?\n(A) 5 (B) 6 (C) 7 (D) 8\nA: Think. The answer is (C).\n\n"
)


def prompts(folder: Path, made: object) -> str:
    (folder / "prompts.json").write_text(made if isinstance(made, str) else json.dumps(made))
    return str(folder / "prompts.json")


def test_worked_prompts_give_their_questions_with_four_options(tmp_path: Path) -> None:
    found = load_questions("mmlu-dev", prompts(tmp_path, dict.fromkeys(SUBJECTS, PROMPT)))
    assert (found.title, found.scarce) == ("MMLU dev", True)
    assert [len(own) for own in found.domains.values()] == [2] * 5  # the same question in every subject counts once
    assert found.domains["law-ethics"] == [
        Question("Is (A) a letter?\nSay so.", ("yes", "no, nor is (B", "it is", "none"), 0, SUBJECTS[0]),
        Question("Seven?", ("5", "6", "7", "8"), 2, SUBJECTS[0]),
    ]


@pytest.mark.parametrize("made", ["", "{", "[" * 100_000, [], {"astronomy": 3}, {"astrology": PROMPT}])
def test_prompts_that_are_none_are_a_wire_error(made: object, tmp_path: Path) -> None:
    with pytest.raises(WireError):
        load_questions("mmlu-dev", prompts(tmp_path, made))


def test_prompts_without_questions_are_a_context_error(tmp_path: Path) -> None:
    for made in ({}, dict.fromkeys(SUBJECTS, "nothing")):
        with pytest.raises(ContextError, match="holds no question of law-ethics"):
            load_questions("mmlu-dev", prompts(tmp_path, made))


# WordNet.


def entry(noun: str, gloss: str, file: int = 5) -> str:
    return f"00001740 {file:02} n 01 {noun} 0 001 @ 00001740 n 0000 | {gloss}  "


def test_definitions_are_asked_about_with_three_nouns_of_the_same_file() -> None:
    found = load_questions("wordnet", str(nouns()))
    assert (found.title, found.scarce, list(found.domains)) == ("WordNet 9.9", False, list(WORDNET_DOMAINS))
    assert load_questions("wordnet", str(nouns() / "data.noun")) == found
    for domain, own in found.domains.items():
        assert len(own) == 30 * len(WORDNET_DOMAINS[domain])
        for question in own:
            assert len(set(question.options)) == 4
            right = question.options[question.answer]
            assert {option[:3] for option in question.options} == {right[:3]}  # of one file
            assert "example" not in question.text
    answers = [question.answer for own in found.domains.values() for question in own]
    assert all(answers.count(place) > len(answers) / 6 for place in range(4))
    rights = [question.options[question.answer] for own in found.domains.values() for question in own]
    assert len(set(rights)) == len(rights)


def test_nouns_that_give_themselves_away_or_are_none_are_left_out() -> None:
    lines = [
        "  1 the licence",
        entry("badger", 'sturdy burrowing animal; of the family Mustelidae; "a badger bit"'),
        entry("dog", "any dog-like animal of a pack"),
        entry("Rex", "a name that kings have had"),
        entry("wild_dog", "an animal that lives wild"),
        entry("ox", "a large animal for the plough"),
        entry("badger", "a second sense of the same noun"),
        entry("mole", "short"),
        "",
    ]
    assert questions._nouns("\n".join(lines), where="x") == {
        5: [("badger", "sturdy burrowing animal; of the family Mustelidae")]
    }


def test_a_word_of_the_definition_is_no_wrong_option() -> None:
    own = [("animal", "a living organism of some kind"), *((f"n{c}x", "an animal with fur") for c in "abcdef")]
    found = questions._asked(5, own)
    assert len(found) > 3
    assert all("animal" not in q.options for q in found if "an animal" in q.text)


@pytest.mark.parametrize(
    "line", ["nonsense", "00001740 05 v 01 run 0 000 | to move fast on foot", entry("a", "b").replace(" | ", " ")]
)
def test_a_line_that_is_no_entry_is_said_by_its_number(line: str, tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(f"  licence\n{line}\n")
    with pytest.raises(WireError, match="line 2 is no entry"):
        load_questions("wordnet", str(tmp_path))


def test_wordnet_that_is_not_there_or_is_empty_is_a_context_error(tmp_path: Path) -> None:
    with pytest.raises(ContextError, match="nestling fetch wordnet"):
        load_questions("wordnet", str(tmp_path))
    (tmp_path / "data.noun").touch()
    with pytest.raises(ContextError, match="holds no question of life"):
        load_questions("wordnet", str(tmp_path))
    (tmp_path / "data.noun").write_bytes(b"\xff")
    with pytest.raises(WireError, match="no UTF-8"):
        load_questions("wordnet", str(tmp_path))
