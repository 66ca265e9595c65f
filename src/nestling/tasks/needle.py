"""Needle-in-a-haystack items: a stretch of real text with a few facts in it, then a question about one of them.

Seven templates, each a different kind of fact; the three wrong candidates are the other values of the same haystack, so
that only a model which has tied the value to its key answers better than one time in four.

    prompt = text[:c₁] event₁ text[c₁:c₂] event₂ … text[cₙ:] question        c_i = ⌊depth_i · |text|⌋
    |prompt| + |answer| = length, exactly

The question ends with the words that stand before the value in its event, so that a frozen model of 10⁸ parameters can
answer by copying: what is measured is whether the memory holds the fact, not whether the model follows instructions.
Key, colon, value in this order is the wording that such a model copies best.

Source: the seven templates, depths 0.10 … 0.70 and four choices of FedNL (arXiv 2605.16350); it does not publish its
wording, and its "MK" and "MV" are read here as several keys, and as a value asked by its rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream

FIRST_DEPTH, LAST_DEPTH = 0.1, 0.7
"""Where the first and the last event lie, as shares of the text around them; the others are spread evenly between."""
FEWEST_EVENTS = 4
"""One asked, and three that are wrong candidates."""
TEXT_PER_EVENT = 10
"""Tokens of text for each event, at least: with fewer, events would touch."""
MODULUS = 8
"""A counter is asked for modulo this."""


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """Adams Allen Anderson Baker Barnes Bell Bennett Brooks Burns Butler Campbell Carter Clark Cohen Collins Cooper
Davis Edwards Ellis Evans Fisher Foster Garcia Gibson Gordon Graham Greene Hamilton Harris Henderson Howard Hughes
Jackson Jenkins Johnson Kelly Lewis Lopez Martin Mason Miller Mitchell Moore Morgan Morris Murphy Murray Nelson Owens
Palmer Parker Perry Phillips Porter Powell Reed Roberts Robinson Rogers Ross"""
)
KEYS = _words(
    """apple banana basket bean berry bread bucket butter cake candle candy carpet carrot chair cheese cherry chicken
chocolate coffee corn cotton cream cup desk drum flour garlic grape guitar hat honey jar juice kettle knife ladder lemon
lime meat milk mushroom olive onion orange peach pear pencil pepper piano pillow potato pumpkin rice salt soap soup
spoon sugar tea tomato"""
)
DEVICES = _words(
    """antenna battery beacon boiler brake camera charger clock compressor computer cooler crane detector display
drill engine fan filter freezer furnace generator hammer heater keyboard laser lens lift lock loom microphone microscope
mixer monitor motor oven phone pipe pointer press printer probe projector pump radar radio receiver refrigerator robot
router scale scanner screen sensor server speaker switch telescope thermometer timer turbine"""
)
MISSIONS = _words(
    """Alpha Arrow Atlas Aurora Canyon Castle Comet Copper Coral Crystal Delta Desert Diamond Dragon Eagle Falcon
Forest Galaxy Garden Glacier Harbor Horizon Hunter Iron Island Jupiter Lion Maple Mercury Meteor Mirror Nebula Neptune
Ocean Omega Orion Pearl Phoenix Pioneer Polar Rainbow Raven River Ruby Saturn Shadow Silver Storm Summit Thunder Tiger
Titan Valley Venus Victory Voyager Winter Wolf Mars Apollo"""
)
CODEWORDS = _words(
    """anchor angel autumn bamboo barrel blanket bridge butterfly cabin canal carbon cedar circle cloud cottage
crown dawn elephant feather field flame fountain giant glass hedge horse jacket jungle kitten lantern leaf library
lightning magnet marble meadow monkey moon mountain oak orchid palace parade pigeon planet prince pyramid rabbit ribbon
rocket saddle salmon sparrow spider squirrel sunset temple tower tunnel turtle"""
)
MONTHS = _words("""January February March April May June July August September October November December""")


@dataclass(frozen=True)
class Item:
    """One question about one haystack, in tokens.

    Args:
        template: a name of `TEMPLATES`.
        prompt: the haystack and the question.
        answer: what should follow the prompt, the full stop included.
        candidates: four token lists in random order, one of them the answer.
        depth: where the asked event lies, 0 to 1 (counter: where its last change lies).
        client: whose item it is.
    """

    template: str
    prompt: list[int]
    answer: list[int]
    candidates: list[list[int]]
    depth: float
    client: int

    @property
    def right(self) -> int:
        """Which of the candidates is the answer."""
        return self.candidates.index(self.answer)


@dataclass(frozen=True)
class Events:
    """What a template makes: sentences in their order, a question, its answer, wrong answers, which is asked."""

    sentences: list[str]
    question: str
    answer: str
    distractors: list[str]
    asked: int


def passkey(stream: Stream, count: int) -> Events:
    """Officers, each with a number of seven digits.

    >>> passkey(Stream(0, "needle", "a"), 4).sentences[0]
    ' The passkey of officer Jackson: 8403655.'
    """
    names = _choose(stream, "names", NAMES, count)
    numbers = _distinct(stream, "values", count, 10**6, 10**7)
    stems = [f" The passkey of officer {name}:" for name in names]
    return _facts(stream, stems, [str(n) for n in numbers], [f"what is the passkey of officer {n}?" for n in names])


def uuid(stream: Stream, count: int) -> Events:
    """Devices, each with a code of three parts such as 4f7-9b2-6d1 (digits apart from letters: one token a sign)."""
    devices = _choose(stream, "names", DEVICES, count)
    codes = ["-".join(map(_three_signs, _digits(n, 600))) for n in _distinct(stream, "values", count, 0, 600**3)]
    stems = [f" The code of the {device}:" for device in devices]
    return _facts(stream, stems, codes, [f"what is the code of the {device}?" for device in devices])


def date(stream: Stream, count: int) -> Events:
    """Officers, each with a birthday in the twentieth century (days of two digits: dates of one length)."""
    names = _choose(stream, "names", NAMES, count)
    days = [_day(n) for n in _distinct(stream, "values", count, 0, 12 * 19 * 100)]
    stems = [f" The birthday of officer {name}:" for name in names]
    return _facts(stream, stems, days, [f"what is the birthday of officer {name}?" for name in names])


def phrase(stream: Stream, count: int) -> Events:
    """Missions, each with a codeword."""
    missions, words = _choose(stream, "names", MISSIONS, count), _choose(stream, "values", CODEWORDS, count)
    stems = [f" The codeword of mission {mission}:" for mission in missions]
    return _facts(stream, stems, words, [f"what is the codeword of mission {mission}?" for mission in missions])


def counter(stream: Stream, count: int) -> Events:
    """A counter with a base, then changes; asked for at the end, modulo 8. Wrong candidates are other residues.

    >>> counter(Stream(0, "needle", "a"), 4).sentences[:2]
    [' The counter starts at 12.', ' The counter goes up by 9.']
    """
    base = 1 + int(_sub(stream, "base").integers(1, 20)[0])
    steps = (1 + _sub(stream, "steps").integers(count - 1, 9)) * _sub(stream, "directions").signs(count - 1).astype(int)
    sentences = [f" The counter starts at {base}."]
    sentences += [f" The counter goes {'up' if step > 0 else 'down'} by {abs(step)}." for step in steps.tolist()]
    residue = (base + int(steps.sum())) % MODULUS
    others = (residue + 1 + _sub(stream, "others").permutation(MODULUS - 1)[:3]) % MODULUS
    question = f"\nQuestion: what is the counter at the end, modulo {MODULUS}?\nAnswer: The counter modulo {MODULUS}:"
    return Events(sentences, question, f" {residue}.", [f" {other}." for other in others.tolist()], count - 1)


def mk(stream: Stream, count: int) -> Events:
    """Several keys, each with a number of four digits."""
    keys = _choose(stream, "names", KEYS, count)
    numbers = _distinct(stream, "values", count, 10**3, 10**4)
    stems = [f" The code of {key}:" for key in keys]
    return _facts(stream, stems, [str(n) for n in numbers], [f"what is the code of {key}?" for key in keys])


def mv(stream: Stream, count: int) -> Events:
    """Codewords 1, 2, … in their order; one is asked for by its rank."""
    words = _choose(stream, "values", CODEWORDS, count)
    ranks = range(1, count + 1)
    return _facts(
        stream, [f" Codeword number {r}:" for r in ranks], words, [f"what is codeword number {r}?" for r in ranks]
    )


TEMPLATES: dict[str, Callable[[Stream, int], Events]] = {
    "passkey": passkey,
    "uuid": uuid,
    "date": date,
    "phrase": phrase,
    "counter": counter,
    "mk": mk,
    "mv": mv,
}
"""The seven kinds of fact by name, in the order of clients."""


def depths(template: str, events: int) -> list[float]:
    """Where the events lie, as shares of the text around them.

    >>> depths("mk", 4), depths("counter", 4)
    ([0.1, 0.3, 0.5, 0.7], [0.2, 0.4, 0.6, 0.8])
    """
    if template == "counter":
        return [round((i + 1) / (events + 1), 4) for i in range(events)]
    return [round(FIRST_DEPTH + (LAST_DEPTH - FIRST_DEPTH) * i / (events - 1), 4) for i in range(events)]


def make_item(
    template: str,
    filler: Sequence[int] | np.ndarray,
    tokenize: Callable[[str], list[int]],
    *,
    length: int,
    events: int,
    stream: Stream,
    client: int = 0,
) -> Item:
    """One item of exactly `length` tokens, prompt and answer together, decided by the stream alone.

    Args:
        template: a name of `TEMPLATES`.
        filler: tokens of real text; a random contiguous stretch of it becomes the haystack.
        tokenize: text to tokens, without tokens for beginning and end. Each sentence goes through it alone, so that its
            tokens do not depend on where it falls.
        length: tokens of prompt and answer.
        events: how many facts, 4 to 60.
        stream: of this item.
        client: whose item it is.

    Raises `ConfigError` for an unknown template, for too few or too many events, and where the length is too small for
    the events or the filler too short for the length.

    >>> item = make_item("mv", range(1000), lambda text: list(text.encode()), length=300, events=4,
    ...                  stream=Stream(0, "needle", "0/0"))
    >>> len(item.prompt) + len(item.answer), bytes(item.answer), bytes(item.prompt[-11:])
    (300, b' marble.', b'd number 4:')
    """
    if template not in TEMPLATES:
        raise ConfigError(f"{template!r} is no template", where="templates", remedy=f"Use {', '.join(TEMPLATES)}.")
    if not FEWEST_EVENTS <= events <= len(NAMES):
        raise ConfigError(f"is {events}", where="events", remedy=f"Give {FEWEST_EVENTS} to {len(NAMES)}.")
    made = TEMPLATES[template](stream, events)
    sentences = [tokenize(sentence) for sentence in made.sentences]
    question, answer = tokenize(made.question), tokenize(made.answer)
    room = length - sum(map(len, sentences)) - len(question) - len(answer)
    if room < TEXT_PER_EVENT * events:
        raise ConfigError(
            f"{length} tokens leave {room} for text around {events} events of {template}",
            where="length",
            remedy=f"Give {length - room + TEXT_PER_EVENT * events} or more, or fewer events.",
        )
    if len(filler) < room:
        raise ConfigError(
            f"a haystack of {length} tokens needs {room} tokens of text; there are {len(filler)}",
            where="length",
            remedy="Give a shorter length, or more text.",
        )
    first = int(_sub(stream, "text").integers(1, len(filler) - room + 1)[0])
    where = depths(template, events)
    cuts = [int(depth * room) for depth in where]
    prompt: list[int] = []
    for start, stop, sentence in zip([0, *cuts], [*cuts, room], [*sentences, question], strict=True):
        prompt += [int(token) for token in filler[first + start : first + stop]]
        prompt += sentence
    candidates = [answer, *map(tokenize, made.distractors)]
    order = _sub(stream, "order").permutation(len(candidates))
    return Item(template, prompt, answer, [candidates[i] for i in order], where[made.asked], client)


def _facts(stream: Stream, stems: list[str], values: list[str], questions: list[str]) -> Events:
    """Sentences "stem value.", one of which is asked about; its stem ends the question."""
    count = len(stems)
    asked, *others = _sub(stream, "asked").permutation(count).tolist()
    question = f"\nQuestion: {questions[asked]}\nAnswer:{stems[asked]}"
    endings = [f" {value}." for value in values]
    sentences = [stem + ending for stem, ending in zip(stems, endings, strict=True)]
    return Events(sentences, question, endings[asked], [endings[i] for i in others[:3]], asked)


def _sub(stream: Stream, what: str) -> Stream:
    """A stream of its own for each thing drawn."""
    return Stream(stream.seed, stream.purpose, f"{stream.name}/{what}")


def _choose(stream: Stream, what: str, words: list[str], count: int) -> list[str]:
    """`count` different words."""
    return [words[i] for i in _sub(stream, what).permutation(len(words))[:count]]


def _distinct(stream: Stream, what: str, count: int, low: int, high: int) -> list[int]:
    """`count` different integers in [low, high)."""
    drawn = count
    while len(found := dict.fromkeys(_sub(stream, what).integers(drawn, high - low).tolist())) < count:
        drawn *= 2  # more integers of a stream begin with the same ones
    return [low + n for n in list(found)[:count]]


def _digits(number: int, base: int) -> tuple[int, int, int]:
    """Three digits of a number in a base."""
    return number // base**2, number // base % base, number % base


def _three_signs(number: int) -> str:
    """Digit, letter, digit of a number below 600."""
    return f"{number // 60}{'abcdef'[number // 10 % 6]}{number % 10}"


def _day(number: int) -> str:
    """A date from March 10, 1900 on, of a number below 12 · 19 · 100."""
    return f"{MONTHS[number % 12]} {10 + number // 12 % 19}, {1900 + number // 228}"
