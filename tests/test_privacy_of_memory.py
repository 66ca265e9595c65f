"""What a stream holds and what clients train on is searched for in every byte that comes out: none of it does.

Streams are filled with numbers that are known (exact in every floating-point type), and the text around the facts is
full of one word that nobody else writes; then everything is run that writes, sends, prints or fails.
"""

import base64
import binascii
import contextlib
import io
import json
import logging
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from small import language, needle_toml
from torch import Tensor

pytest.importorskip("transformers")

import nestling
from nestling.cli.main import main
from nestling.config.load import load_config
from nestling.core.errors import ContextError
from nestling.engines.inprocess import InProcessEngine
from nestling.inference import generate, stream
from nestling.inference.stream import Session
from nestling.models import window
from nestling.models.language import load_language_model

CANARY = torch.tensor([0.71875, -1.3125, 0.40625, 1.6875, -0.84375, 0.59375, -1.0625, 1.9375])
WORD, PROMPT = "Quokkazyx7731", "Wombatqvj9042"

# A search for numbers in any order of bytes and for text in any spelling.


def numbers() -> dict[str, list[bytes]]:
    """What four of the numbers in a row look like, from whichever of them on."""
    found: dict[str, list[bytes]] = {}
    for turn in range(len(CANARY)):
        row = CANARY.roll(-turn).repeat(2)
        raw = {str(t).removeprefix("torch."): bytes_of(row.to(t)) for t in (torch.float32, torch.float64)}
        raw |= {str(t).removeprefix("torch."): bytes_of(row.to(t)) for t in (torch.float16, torch.bfloat16)}
        raw["big-endian"] = row.numpy().astype(">f4").tobytes()
        raw["int8"] = (row * (127 / CANARY.abs().max())).round().to(torch.int8).numpy().tobytes()
        for name, data in raw.items():
            part = data[: 8 if name == "int8" else len(data) // 4]
            found.setdefault(name, []).append(part)
            found.setdefault(f"{name} in hex", []).append(binascii.hexlify(part))
            found.setdefault(f"{name} in base64", []).extend(base64_of(data))
    return found


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def base64_of(data: bytes) -> list[bytes]:
    """The inner part of its base64, wherever in a group of three the data begins."""
    return [base64.b64encode(bytes(shift) + data)[4:-4] for shift in range(3)]


def as_text() -> re.Pattern[bytes]:
    """Four in a row as decimals, of whatever length and however they are separated."""
    cut = [rf"{'-' if x < 0 else ''}{int(abs(x))}\.{int(abs(x) * 100) % 100:02d}\d*" for x in CANARY.tolist()]
    rows = [(cut * 2)[turn : turn + 4] for turn in range(len(cut))]
    return re.compile("|".join(r"[,;\s\[\]()]+".join(row) for row in rows).encode())


NUMBERS, DECIMALS = numbers(), as_text()


def words() -> dict[str, re.Pattern[bytes]]:
    """What the two words look like: as text, and as the ids that the model reads."""
    _, tokenizer = load_language_model(str(language()))
    found: dict[str, list[bytes]] = {}
    for word in (WORD, PROMPT):
        data, ids = word.encode(), tokenizer(word, add_special_tokens=False)["input_ids"]
        plain = {"text": [data, data[::-1]], "utf-16": [word.encode("utf-16-le")], "hex": [binascii.hexlify(data)]}
        plain |= {"base64": base64_of(data), "ids": [np.array(ids, t).tobytes() for t in ("<i8", "<i4", "<i2")]}
        for name, ways in plain.items():
            found.setdefault(name, []).extend(map(re.escape, ways))
        found.setdefault("ids in text", []).append(rb"[,;\s\[\]()]+".join(str(n).encode() for n in ids))
    return {name: re.compile(b"|".join(ways), re.DOTALL) for name, ways in found.items()}


@pytest.fixture(scope="module")
def spellings() -> dict[str, re.Pattern[bytes]]:
    return words()


def seen(data: bytes, spellings: dict[str, re.Pattern[bytes]]) -> set[str]:
    return {name for name, ways in spellings.items() if ways.search(data)}


def seen_numbers(data: bytes) -> set[str]:
    found = {name for name, ways in NUMBERS.items() if any(way in data for way in ways)}
    return found | ({"decimals"} if DECIMALS.search(data) else set())


# The search finds what is there: without this, all else here would pass for nothing.

FILLED = CANARY.repeat(40)[3:].clone()
LEAKS = {
    "torch.save": lambda: saved(FILLED),
    "torch.save of halves": lambda: saved(FILLED.half()),
    "raw float32": lambda: b"xyz" + bytes_of(FILLED),
    "raw float64": lambda: bytes_of(FILLED.double()),
    "raw bfloat16": lambda: b"x" + bytes_of(FILLED.bfloat16()),
    "raw int8": lambda: bytes_of((FILLED * 127 / FILLED.abs().max()).round().to(torch.int8)),
    "big-endian": lambda: FILLED.numpy().astype(">f4").tobytes(),
    "repr": lambda: repr(FILLED[:20]).encode(),
    "repr of an array": lambda: repr(FILLED[:20].numpy()).encode(),
    "JSON": lambda: json.dumps({"memory": FILLED[:9].tolist()}).encode(),
    "hex": lambda: bytes_of(FILLED).hex().encode(),
    "base64": lambda: base64.b64encode(b"head" + bytes_of(FILLED.half())),
}


def saved(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("way", LEAKS)
def test_cat_084_the_search_finds_numbers_that_do_leak(way: str, tmp_path: Path) -> None:
    (tmp_path / "leak").write_bytes(b"before" + LEAKS[way]() + b"after")
    assert [set() if path.name != "leak" else seen_numbers(path.read_bytes()) for path in tmp_path.iterdir()] != [set()]


def test_cat_088_the_search_finds_words_that_do_leak(spellings: dict[str, re.Pattern[bytes]]) -> None:
    _, tokenizer = load_language_model(str(language()))
    ids = tokenizer(f"a {WORD} b", add_special_tokens=False)["input_ids"]
    leaks = [
        f"a {WORD} b".encode(), json.dumps(ids).encode(), np.array(ids).tobytes(), repr(torch.tensor(ids)).encode(),
        base64.b64encode(b"ab" + WORD.encode()), WORD.encode().hex().encode(),
    ]  # fmt: skip
    assert [leak for leak in leaks if not seen(leak, spellings)] == []
    assert not seen(b"a few other words, " * 100, spellings)


# Everything that comes out.


@dataclass
class Out:
    """Where a run and all that follows it leaves bytes: a folder, messages, what was printed, logged or raised."""

    folder: Path
    messages: list[bytes] = field(default_factory=list)
    printed: io.StringIO = field(default_factory=io.StringIO)
    raised: list[str] = field(default_factory=list)
    filled: int = 0
    """Forward passes after which a stream was filled."""

    def everything(self) -> dict[str, bytes]:
        files = {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        messages = {f"message {number}": data for number, data in enumerate(self.messages)}
        said = {"printed": self.printed.getvalue().encode(), "raised": "\n".join(self.raised).encode()}
        return files | messages | said


def fill(layer: object) -> None:
    """Put the numbers in place of all that a layer holds of its stream."""
    for name in ("keys", "values", "memory", "before"):
        if (tensor := getattr(layer, name)) is not None:
            setattr(layer, name, filled(tensor))
    if layer.first is not None:
        layer.first = filled(layer.first[0]), filled(layer.first[1])


def filled(tensor: Tensor) -> Tensor:
    return CANARY.repeat(tensor.numel() // len(CANARY) + 1)[: tensor.numel()].to(tensor).reshape(tensor.shape)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Out:
    """A needle run, its report, generation from it, errors we foresee and one we do not; streams are always filled."""
    out, inputs = Out(tmp_path_factory.mktemp("out")), tmp_path_factory.mktemp("in")
    (inputs / "text.txt").write_text(f"The {WORD} sat by the river and said {WORD} to the other one. " * 300)
    text = f'[task]\ntext = "file"\npath = "{inputs}/text.txt"\n'
    (inputs / "needle.toml").write_text(needle_toml(out.folder / "runs").replace("[task]\n", text))
    exchange, end = InProcessEngine.exchange, window._End.__call__

    def listening(engine: InProcessEngine, messages: dict) -> dict:
        replies = exchange(engine, messages)
        out.messages += [m for m in (*messages.values(), *replies.values()) if isinstance(m, bytes)]
        return replies

    def filling(self: window._End, body: object, args: object, output: object) -> None:
        read = self.reader.stream
        end(self, body, args, output)
        if read is not None and output is not None:
            out.filled += 1
            for layer in read.layers:
                fill(layer)

    log = logging.FileHandler(out.folder / "debug.log")
    root, level = logging.getLogger(), logging.getLogger().level
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out.printed):
        patch.setattr(InProcessEngine, "exchange", listening)
        patch.setattr(window._End, "__call__", filling)
        root.addHandler(log)
        root.setLevel(logging.DEBUG)
        try:
            with contextlib.redirect_stderr(out.printed):
                commands(out, inputs / "needle.toml", patch)
        finally:
            root.removeHandler(log)
            root.setLevel(level)
            log.close()
    return out


def commands(out: Out, settings: Path, patch: pytest.MonkeyPatch) -> None:
    assert main(["run", str(settings), "--machine.no-references"]) == 0
    (run,) = (out.folder / "runs").iterdir()
    assert main(["report", str(run)]) == 0
    going_on = ["generate", str(run), "--prompt", PROMPT, "--max-new-tokens", "3", "--stats"]
    assert main(going_on) == 0

    model, tokenizer = load_language_model(str(language()), dtype="float32")
    adapter = nestling.from_pretrained(model, run / "adapter")
    with Session(model, tokenizer) as session:
        session.feed(PROMPT)
        adapter.save_pretrained(out.folder / "again")  # while the stream is held
        print(session, session._cache, session._cache.layers, flush=True)
        out.raised.append(failing(model, session))

    def broken(self: generate.Sampler, logits: Tensor) -> int:
        raise RuntimeError("a bug of ours")

    with patch.context() as within:
        within.setattr(stream.Sampler, "choose", broken)
        try:
            main(going_on)
        except RuntimeError:
            out.raised.append(traceback.format_exc())


def failing(model: torch.nn.Module, session: Session) -> str:
    """What is raised where a forward pass fails with the very numbers of the stream in the error."""

    def fail(module: object, args: object) -> None:
        raise RuntimeError(f"cannot use {session._cache.layers[0].memory} of {PROMPT}")

    handle = model.base_model.layers[1].register_forward_pre_hook(fail)
    try:
        session.feed("more")
    except ContextError:
        return traceback.format_exc()
    finally:
        handle.remove()
    raise AssertionError("it did not fail")


def test_everything_was_run_with_its_streams_filled(out: Out) -> None:
    names = {Path(name).name for name in out.everything()}
    assert {"result.json", "log.txt", "report.html", "bytes.jsonl", "config.toml", "last-up.msg"} <= names
    assert {"adapter.safetensors", "adapter.json", "accuracy_against_bytes.svg", "debug.log", "printed"} <= names
    assert len(out.messages) == 12  # two rounds, three clients, both ways
    assert out.filled > 20
    assert [("a bug of ours" in text, "the session was reset" in text) for text in out.raised] == [
        (False, True), (True, False)
    ]  # fmt: skip
    config = load_config(next(out.folder.glob("runs/*/config.toml")))
    assert config.task.text == "file"


def test_cat_084_nothing_that_a_stream_holds_comes_out(out: Out) -> None:
    assert {name: found for name, data in out.everything().items() if (found := seen_numbers(data))} == {}


def test_cat_088_no_word_of_the_training_text_or_a_prompt_comes_out(
    out: Out, spellings: dict[str, re.Pattern[bytes]]
) -> None:
    assert {name: found for name, data in out.everything().items() if (found := seen(data, spellings))} == {}


def test_a_stream_that_is_filled_is_what_a_session_holds() -> None:
    """The planting itself: were it on a copy that nothing reads, the search would be for nothing."""
    model, tokenizer = load_language_model(str(language()), dtype="float32")
    nestling.attach(model, nestling.MemoryConfig(window=8, layers="all", rank=2))
    with Session(model, tokenizer) as session:
        session.feed("abc")
        before = session._forward(session._ids("d"))
        for layer in session._cache.layers:
            fill(layer)
        held = b"".join(bytes_of(t) for t in session._held() if t.is_floating_point())
        assert seen_numbers(held) == {"float32"}
        assert not torch.equal(before, session._forward(session._ids("d")))
