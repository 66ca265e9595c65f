"""Questions with four options in five subject areas: MMLU, its development questions, and definitions of WordNet.

    MMLU        the published columns: question, subject, choices (four texts), answer (0 … 3); by subject
    WordNet     definition → which of four nouns it is of; wrong ones from the same lexicographer file, and not in it

MMLU's areas are those of FedNL (arXiv 2605.16350), which name 54 of the 57 subjects. The other three are placed here,
all in humanities: econometrics beside the other economics, prehistory beside history, professional accounting beside
management. (Its Math/CS client has 915 + 183 questions, which are the 1,098 test questions of the eight subjects named
there, so econometrics is not among them; and so its questions are those of the test split, as they are here.)

Sources: MMLU, Hendrycks et al. (arXiv 2009.03300; MIT). WordNet, Princeton University (its own, permissive licence).
Nothing here downloads but the hub set, through the package datasets; files are data, and nothing in them is run.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import isdir, isfile  # unlike Path's, False for a name too long for the system
from pathlib import Path
from typing import Any

from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.seeds import Stream

SEED = 0
"""Of the options of WordNet's questions: every run asks the same ones."""
HUB = ("cais/mmlu", "all")
SPLIT = "test"
LETTERS = "ABCD"
COLUMNS = ("question", "subject", "choices", "answer")
LARGEST_FILE = 1 << 30
DRAWN = 16
"""Nouns drawn for a definition, of which the first three that can stand beside the right one do."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MMLU_DOMAINS: Mapping[str, tuple[str, ...]] = {
    "law-ethics": _names(
        """professional_law moral_scenarios moral_disputes logical_fallacies formal_logic international_law
        jurisprudence business_ethics"""
    ),
    "humanities": _names(
        """miscellaneous high_school_european_history high_school_us_history high_school_world_history prehistory
        high_school_government_and_politics high_school_macroeconomics high_school_microeconomics econometrics
        high_school_geography sociology philosophy world_religions management marketing professional_accounting
        public_relations security_studies us_foreign_policy global_facts"""
    ),
    "stem": _names(
        """elementary_mathematics high_school_biology college_biology high_school_chemistry college_chemistry
        conceptual_physics high_school_physics college_physics astronomy anatomy electrical_engineering"""
    ),
    "math-cs": _names(
        """high_school_mathematics high_school_statistics machine_learning college_mathematics
        high_school_computer_science college_computer_science computer_security abstract_algebra"""
    ),
    "medical-psychology": _names(
        """professional_psychology high_school_psychology virology nutrition professional_medicine clinical_knowledge
        human_aging college_medicine human_sexuality medical_genetics"""
    ),
}
"""The subjects of each client, all 57 of them."""
WORDNET_DOMAINS: Mapping[str, tuple[int, ...]] = {
    "life": (5, 20),  # animal, plant
    "medicine": (8, 26),  # body, state
    "physical": (19, 22, 23, 25, 27),  # phenomenon, process, quantity, shape, substance
    "law-economy": (10, 14, 21),  # communication, group, possession
    "people-places": (15, 18),  # location, person
}
"""The lexicographer files of nouns of each client."""


@dataclass(frozen=True)
class Question:
    """A question, its four options, which of them is right, 0 … 3, and its subject."""

    text: str
    options: tuple[str, ...]
    answer: int
    subject: str


@dataclass(frozen=True)
class Questions:
    """What people call a set, its questions by subject area, each once, and whether it is too small to train on."""

    title: str
    domains: Mapping[str, list[Question]]
    scarce: bool = False


def load_questions(data: str, path: str = "") -> Questions:
    """The questions of a set, by subject area.

    Args:
        data: wordnet, mmlu or mmlu-dev.
        path: wordnet: the file data.noun or its folder; mmlu-dev: the file that 'nestling fetch' brings; mmlu: a folder
            with the published files (test-*.parquet or test*.jsonl, also in a folder `all` inside it), or one such
            file; empty: the hub.

    Raises `ConfigError` (exit 2) for another set, `ContextError` (exit 3) if there are no questions there or a package
    is missing, `WireError` (exit 5) if a file does not follow its format.
    """
    if data == "wordnet":
        return _wordnet(Path(path))
    if data == "mmlu":
        rows = _files(Path(path)) if path else _hub()
        return Questions("MMLU", _by_subject(_checked(rows, where=path or HUB[0]), where=path or HUB[0]))
    if data == "mmlu-dev":
        return Questions("MMLU dev", _by_subject(_prompts(Path(path)), where=path), scarce=True)
    raise ConfigError(f"{data!r} is no set of questions", where="task.data", remedy="Use wordnet, mmlu or mmlu-dev.")


# MMLU, in the published columns.


def _hub() -> Iterable[Mapping[str, Any]]:
    try:
        from datasets import load_dataset  # needs the extra hub
    except ImportError as error:
        raise ContextError(
            f"{HUB[0]} is read through the package datasets, which is not installed",
            where="task.data",
            remedy="pip install 'nestling[hub]', or set task.path to a folder with its files.",
        ) from error
    try:
        rows: Any = load_dataset(*HUB, split=SPLIT)
    except Exception as error:  # the library raises many kinds: offline, gone, no such split
        raise ContextError(
            f"could not be loaded ({type(error).__name__}: {error})",
            where=HUB[0],
            remedy="Check the network, or set task.path to a folder with its files.",
        ) from error
    return rows


def _files(path: Path) -> Iterable[Mapping[str, Any]]:
    """The rows of the test split in a folder, file after file in order of name."""
    folder = path / "all" if isdir(path / "all") else path
    files = [path] if isfile(path) else []
    if isdir(folder):
        files = sorted(f for end in ("parquet", "jsonl") for f in folder.glob(f"{SPLIT}*.{end}"))
    if not files:
        raise ContextError(
            f"holds no {SPLIT}-*.parquet and no {SPLIT}*.jsonl",
            where=str(path),
            remedy="Give the folder of a copy of cais/mmlu, or one of its files.",
        )
    rows: list[Mapping[str, Any]] = []
    for file in files:
        rows += _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
    return rows


def _parquet(file: Path) -> list[Mapping[str, Any]]:
    try:
        import pyarrow  # comes with datasets
        import pyarrow.parquet
    except ImportError as error:
        raise ContextError(
            "a parquet file is read through the package pyarrow, which is not installed",
            where=str(file),
            remedy="pip install 'nestling[hub]', or give the same columns as *.jsonl.",
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(file).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise WireError("damaged", f"cannot be read ({error})", where=str(file)) from error
    rows: list[Mapping[str, Any]] = table.to_pylist()
    return rows


def _jsonl(file: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise WireError("damaged", f"line {number} is no JSON ({error})", where=str(file)) from error
            if not isinstance(row, dict):
                raise WireError("question", f"line {number} is no object of {', '.join(COLUMNS)}", where=str(file))
            rows.append(row)
    return rows


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise WireError("too_large", f"has more than {LARGEST_FILE:,} bytes", where=str(file))
        return file.read_text("utf-8")
    except OSError as error:
        raise ContextError(f"cannot be read ({error.strerror})", where=str(file), remedy="See task.path.") from error
    except UnicodeDecodeError as error:
        raise WireError("damaged", "is no UTF-8 text", where=str(file)) from error


def _checked(rows: Iterable[Mapping[str, Any]], *, where: str) -> list[Question]:
    """The questions of rows in the published columns; `WireError` for the first that is none."""
    found = []
    for number, row in enumerate(rows):
        if missing := [column for column in COLUMNS if column not in row]:
            raise WireError("question", f"row {number} lacks {', '.join(missing)}", where=where)
        text, subject, options, answer = (row[column] for column in COLUMNS)
        if not isinstance(text, str) or not isinstance(subject, str):
            raise WireError("question", f"row {number} has a question or a subject that is no text", where=where)
        if not isinstance(options, list) or len(options) != 4 or not all(isinstance(o, str) for o in options):
            raise WireError("question", f"row {number} has choices other than four texts", where=where)
        if type(answer) is not int or not 0 <= answer < 4:
            raise WireError("question", f"row {number} has answer {answer!r:.20}, not 0 to 3", where=where)
        found.append(Question(text.strip(), tuple(option.strip() for option in options), answer, subject))
    return found


def _by_subject(found: list[Question], *, where: str) -> dict[str, list[Question]]:
    """Each area's questions, every question once, so that none is trained on and tested."""
    area = {subject: domain for domain, subjects in MMLU_DOMAINS.items() for subject in subjects}
    domains: dict[str, dict[tuple, Question]] = {domain: {} for domain in MMLU_DOMAINS}
    for question in found:
        if question.subject not in area:
            raise WireError("question", f"has the subject {question.subject!r:.60}, none of MMLU's", where=where)
        domains[area[question.subject]].setdefault((question.text, question.options), question)
    return _all_there({domain: list(own.values()) for domain, own in domains.items()}, where=where)


def _all_there(domains: dict[str, list[Question]], *, where: str) -> dict[str, list[Question]]:
    if empty := [domain for domain, own in domains.items() if not own]:
        raise ContextError(
            f"holds no question of {', '.join(empty)}", where=where, remedy="Give the whole set, all subjects of it."
        )
    return domains


# MMLU's development questions, as prompts with worked answers.

_WORKED = re.compile(
    r"(?P<text>.*)\(A\)(.*?)\(B\)(.*?)\(C\)(.*?)\(D\)(?P<d>.*?)\n"
    r"A: .*The answer is \((?P<answer>[A-D])\)\.?\s*",
    re.DOTALL,
)


def _prompts(file: Path) -> list[Question]:
    """The questions in a JSON object of {subject: "…\\n\\nQ: text\\n(A) … (D) …\\nA: …The answer is (X)."}; those with
    other than four options are left out."""
    try:
        prompts = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise WireError("damaged", f"is no JSON ({error})", where=str(file)) from error
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise WireError("damaged", "is no object of prompts by subject", where=str(file))
    found = []
    for subject, prompt in prompts.items():
        for part in re.split(r"(?:^|\n\n)Q: ", prompt)[1:]:
            worked = _WORKED.fullmatch(part)
            if worked and "(E)" not in worked["d"]:
                options = tuple(worked[i].strip() for i in range(2, 6))
                found.append(Question(worked["text"].strip(), options, LETTERS.index(worked["answer"]), subject))
    return found


# WordNet.


def _wordnet(path: Path) -> Questions:
    file = path / "data.noun" if isdir(path) else path
    if not isfile(file):
        raise ContextError(
            "WordNet's data.noun is not there",
            where=str(file),
            remedy="nestling fetch wordnet, apt-get install wordnet-base, or set task.path to its folder.",
        )
    text = _text(file)
    version = re.search(r"WordNet (\d+\.\d+) Copyright", text[:4096])
    nouns = _nouns(text, where=str(file))
    domains = {
        domain: [question for number in files for question in _asked(number, nouns.get(number, []))]
        for domain, files in WORDNET_DOMAINS.items()
    }
    return Questions(f"WordNet {version[1]}" if version else "WordNet", _all_there(domains, where=str(file)))


def _nouns(text: str, *, where: str) -> dict[int, list[tuple[str, str]]]:
    """(noun, definition) by lexicographer file: the first noun of each entry, in lower case, of one word, taken once,
    and not part of its own definition."""
    found: dict[int, list[tuple[str, str]]] = {}
    taken: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("  "):  # the licence, in front
            continue
        fields, bar, gloss = line.partition(" | ")
        head = fields.split()
        if not bar or len(head) < 6 or not re.fullmatch(r"\d{8} \d\d n [0-9a-f]{2}", " ".join(head[:4])):
            raise WireError("question", f"line {number} is no entry of data.noun", where=where)
        noun, definition = head[4], re.split(r';?\s*"', gloss)[0].strip(" ;")  # an example in quotes follows
        if not re.fullmatch(r"[a-z]{3,}", noun) or noun in taken or len(definition) < 10:
            continue
        if noun not in definition.lower():
            taken.add(noun)
            found.setdefault(int(head[1]), []).append((noun, definition))
    return found


def _asked(file: int, nouns: list[tuple[str, str]]) -> list[Question]:
    """A question for each noun of a file beside which three others can stand: no word of its definition, which would
    often be of a wider kind and so look right."""
    drawn = Stream(SEED, "wordnet-options", str(file)).integers(DRAWN * len(nouns), max(1, len(nouns))).tolist()
    places = Stream(SEED, "wordnet-places", str(file)).integers(len(nouns), 4).tolist()
    found = []
    for index, (noun, definition) in enumerate(nouns):
        others = dict.fromkeys(nouns[i][0] for i in drawn[DRAWN * index : DRAWN * (index + 1)] if i != index)
        options = [other for other in others if other not in definition.lower()][:3]
        if len(options) == 3:
            options.insert(places[index], noun)
            text = f"Which word is defined as: {definition}?"
            found.append(Question(text, tuple(options), places[index], f"file {file:02}"))
    return found
