"""Needle items: their exact length, and that a slow reader of the plain text finds every answer."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream
from nestling.tasks.needle import (
    CODEWORDS,
    DEVICES,
    KEYS,
    MISSIONS,
    NAMES,
    TEMPLATES,
    Item,
    depths,
    make_item,
)

FILLER = np.frombuffer(b"~" * 9 + b"Lorem ipsum dolor sit amet, consectetur. " * 400, np.uint8).astype(np.int64)
EVENT = re.compile(r" (?:The (?:passkey|code|birthday|codeword) of|Codeword number) (.*?): (.*?)\.")
VALUE = {
    "passkey": r"[1-9]\d{6}",
    "uuid": r"\d[a-f]\d-\d[a-f]\d-\d[a-f]\d",
    "date": r"[A-Z][a-z]+ [12]\d, 19\d\d",
    "phrase": "[a-z]+",
    "counter": "[0-7]",
    "mk": r"[1-9]\d{3}",
    "mv": "[a-z]+",
}
templates = pytest.mark.parametrize("template", list(TEMPLATES))


def tokenize(text: str) -> list[int]:
    """Bytes as tokens."""
    return list(text.encode())


def plain(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def made(template: str, *, length: int = 900, events: int = 4, seed: int = 0, name: str = "0/0", **more) -> Item:
    stream = Stream(seed, "needle", name)
    return make_item(template, FILLER, tokenize, length=length, events=events, stream=stream, **more)


def answered(text: str) -> tuple[str, list[str]]:
    """A reader that knows the seven kinds of question and nothing else: the answer, and every value of the haystack."""
    haystack, question = text.split("\nQuestion: what is ")
    question, stem = question.split("?\nAnswer: ")
    if question == "the counter at the end, modulo 8":
        assert stem == "The counter modulo 8:"
        [base] = re.findall(r" The counter starts at (\d+)\.", haystack)
        steps = [int(n) if way == "up" else -int(n) for way, n in re.findall(r"goes (up|down) by (\d)\.", haystack)]
        return str((int(base) + sum(steps)) % 8), [str(n) for n in range(8)]
    facts = EVENT.findall(haystack)
    assert len({key for key, _ in facts}) == len(facts) == len({value for _, value in facts})
    [key] = [key for key, _ in facts if question.endswith(f" {key}")]
    assert stem == question[0].upper() + question[1:] + ":"
    return dict(facts)[key], [value for _, value in facts]


@templates
@given(length=st.integers(700, 3000), seed=st.integers(0, 2**64 - 1), events=st.integers(4, 7))
def test_a_slow_reader_finds_the_answer(template, length, seed, events) -> None:
    item = made(template, length=length, events=events, seed=seed)
    assert len(item.prompt) + len(item.answer) == length
    answer, values = answered(plain(item.prompt))
    assert plain(item.answer) == f" {answer}."
    assert re.fullmatch(VALUE[template], answer)
    assert len(item.candidates) == 4 == len({tuple(c) for c in item.candidates})
    assert {plain(c)[1:-1] for c in item.candidates} <= set(values)
    assert item.candidates[item.right] == item.answer


@templates
def test_the_answer_stands_once_in_the_haystack_at_its_depth(template) -> None:
    found = {}
    for seed in range(40):
        item = made(template, seed=seed)
        text = plain(item.prompt)
        haystack = text[: text.index("\nQuestion")]
        if template == "counter":
            at = haystack.rindex(" The counter")
        else:
            stem = text[text.rindex("Answer:") + len("Answer:") :]
            assert haystack.count(plain(item.answer)) == haystack.count(stem + plain(item.answer)) == 1
            at = haystack.index(stem)
        spans = [m.span() for m in re.finditer(r" (The (pass|code|birth|counter)|Codeword number).*?\.", haystack)]
        before = sum(stop - start for start, stop in spans if start < at)
        room = len(haystack) - sum(stop - start for start, stop in spans)
        assert at - before == int(item.depth * room)
        found[item.depth] = True
    assert sorted(found) == ([0.8] if template == "counter" else [0.1, 0.3, 0.5, 0.7])


@templates
def test_the_text_around_is_one_stretch_of_the_filler(template) -> None:
    starts = set()
    for seed in range(8):
        text = plain(made(template, seed=seed).prompt).split("\nQuestion")[0]
        for sentence in TEMPLATES[template](Stream(seed, "needle", "0/0"), 4).sentences:
            assert text.count(sentence) >= 1
            text = text.replace(sentence, "", 1)
        assert text in plain(FILLER.tolist())
        starts.add(text[:30])
    assert len(starts) > 4


@pytest.mark.parametrize("room", [0, 1, 5])
def test_every_stretch_of_a_short_text_can_be_chosen(room) -> None:
    events = TEMPLATES["mv"](Stream(0, "needle", "0/0"), 4)
    fixed = len(events.question + events.answer + "".join(events.sentences))
    text = range(1000, 1040 + room)
    first = set()
    for n in range(60):
        stream = Stream(0, "needle", f"0/{n}")
        now = TEMPLATES["mv"](stream, 4)
        length = len(now.question + now.answer + "".join(now.sentences)) + 40
        item = make_item("mv", text, tokenize, length=length, events=4, stream=stream)
        own = [token for token in item.prompt if token >= 1000]
        assert own == list(range(own[0], own[0] + 40))
        first.add(own[0])
    assert first == set(range(1000, 1001 + room))
    with pytest.raises(ConfigError, match=r"a haystack of \d+ tokens needs 41 tokens of text; there are 40"):
        make_item("mv", text[:40], tokenize, length=fixed + 41, events=4, stream=Stream(0, "needle", "0/0"))


@templates
def test_an_item_depends_on_its_stream_alone(template) -> None:
    assert made(template) == made(template)
    assert made(template, client=3).client == 3
    others = [made(template, seed=1), made(template, name="0/1"), made(template, name="1/0")]
    assert all(other.prompt != made(template).prompt for other in others)
    assert make_item(
        template, FILLER.tolist(), tokenize, length=900, events=4, stream=Stream(0, "needle", "0/0")
    ) == made(template)
    assert {type(token) for token in made(template).prompt} == {int}


@templates
def test_where_the_answer_stands_among_the_candidates_tells_nothing(template) -> None:
    items = [made(template, name=f"0/{n}") for n in range(200)]
    share = np.bincount([item.right for item in items], minlength=4) / len(items)
    assert share.min() > 0.15
    assert share.max() < 0.35


def test_the_counter_leaves_every_residue() -> None:
    answers = [plain(made("counter", name=f"0/{n}").answer) for n in range(200)]
    assert set(answers) == {f" {n}." for n in range(8)}


@templates
def test_the_smallest_length_is_the_one_the_error_names(template) -> None:
    with pytest.raises(ConfigError, match=r"length: 50 tokens leave -\d+ for text around 4 events") as error:
        made(template, length=50)
    smallest = int(re.search(r"Give (\d+) or more", str(error.value)).group(1))
    assert len(made(template, length=smallest).prompt) < smallest
    with pytest.raises(ConfigError, match="leave 39 "):
        made(template, length=smallest - 1)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="templates: 'niah' is no template"):
        made("niah")
    for events in (3, 61):
        with pytest.raises(ConfigError, match=f"events: is {events}"):
            made("mk", events=events)


@templates
def test_as_many_events_as_there_are_words(template) -> None:
    item = made(template, length=9000, events=60)
    assert answered(plain(item.prompt))[0] == plain(item.answer)[1:-1]
    assert depths(template, 60) == sorted(set(depths(template, 60)))


@pytest.mark.parametrize("words", [NAMES, KEYS, DEVICES, MISSIONS, CODEWORDS])
def test_word_lists_hold_sixty_different_words(words) -> None:
    assert len(words) == len(set(words)) == 60
    assert all(re.fullmatch("[A-Za-z]+", word) for word in words)
