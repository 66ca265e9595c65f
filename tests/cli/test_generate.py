"""`nestling generate`: generated text alone on the standard output, whatever comes in and however much of it."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import tiny_llama

import nestling
from nestling.cli import generate as verb
from nestling.cli.main import main
from nestling.config.load import dump_config, load_config
from nestling.config.schema import LanguageConfig, LoraConfig, MemoryConfig, NeedleConfig, RunConfig
from nestling.core.errors import ConfigError
from nestling.inference.stream import Session
from nestling.models.language import load_language_model

transformers = pytest.importorskip("transformers")
ADAPTERS = {"memory": MemoryConfig(window=8, layers="all"), "lora": LoraConfig(window=8)}
COUNT = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn model over bytes, as `save_pretrained` leaves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("base")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={"<end>": 0} | {c: i for i, c in enumerate(letters, 1)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>").save_pretrained(folder)
    tiny_llama(vocab_size=257).save_pretrained(folder)
    return folder


def adapted(base: Path, kind: str, *, dtype: str = "bfloat16") -> tuple:
    model, tokenizer = load_language_model(str(base), dtype=dtype)
    adapter = nestling.attach(model, ADAPTERS[kind])
    generator = torch.Generator().manual_seed(1)
    adapter.load_vector(adapter.vector() + 0.3 * torch.randn(adapter.layout.size, generator=generator).numpy())
    return model, tokenizer, adapter


@pytest.fixture(scope="module", params=list(ADAPTERS))
def run(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as far as this command reads it."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    folder.mkdir()
    model = LanguageConfig(model=str(base), dtype="float32")
    config = RunConfig(task=NeedleConfig(), base=model, adapter=ADAPTERS[request.param])
    (folder / "config.toml").write_text(dump_config(config))
    adapted(base, request.param, dtype="float32")[2].save_pretrained(folder / "adapter")
    return folder


def expected(model: object, tokenizer: object, *texts: str) -> str:
    session = Session(model, tokenizer)
    for text in texts[:-1]:
        session.feed(text)
    return "".join(session.stream(texts[-1], max_new_tokens=12)) + "\n"


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


def test_a_prompt_goes_on_through_the_model_alone(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(base), "--prompt", "Küken", *COUNT]) == 0
    text, said = capsys.readouterr()
    assert said == ""
    assert text == expected(*load_language_model(str(base)), "Küken")
    assert len(text) > 5


def test_the_adapter_of_a_run_is_on_its_model(run: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = "memory" if "memory" in (run / "adapter" / "adapter.json").read_text() else "lora"
    model, tokenizer, _ = adapted(base, kind, dtype="float32")
    text = expected(model, tokenizer, "x" * 40)
    for place in (run, run / "adapter"):
        assert main(["generate", str(place), "--prompt", "x" * 40, *COUNT]) == 0
        assert capsys.readouterr() == (text, "")
    assert main(["generate", "--model", str(base), "--dtype", "float32", "--prompt", "x" * 40, *COUNT]) == 0
    assert capsys.readouterr().out != text


def test_an_adapter_somewhere_else_needs_the_model_named(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shutil.copytree(run / "adapter", tmp_path / "mine")
    named = ["generate", str(place), "--model", str(base), "--prompt", "x", *COUNT]
    assert main([*named, "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", str(run), "--prompt", "x", *COUNT]) == 0
    assert capsys.readouterr().out == text
    assert main(named) == 3  # in bfloat16 it is another base
    assert "was trained on base" in capsys.readouterr().err


def test_the_standard_input_streams_and_the_prompt_follows(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "日本 and more words. " * 30
    model, tokenizer = load_language_model(str(base))
    monkeypatch.setattr(verb, "BYTES", 100)
    piped(monkeypatch, text.encode())
    assert main(["generate", "--model", str(base), "--stdin", "--prompt", "Why?", *COUNT]) == 0
    parts = list(verb._chunks(io.BytesIO(text.encode())))
    assert len(parts) > 3
    assert capsys.readouterr().out == expected(model, tokenizer, *parts, "Why?")


def test_stats_are_one_line_on_the_standard_error(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = set()
    for length in (50, 500):
        piped(monkeypatch, b"a" * length)
        assert main(["generate", "--model", str(base), "--stdin", "--window", "8", "--stats", *COUNT]) == 0
        words = dict(word.split("=") for word in capsys.readouterr().err.split())
        assert list(words) == [
            "read", "generated", "read_tokens_per_second", "generated_tokens_per_second", "stream_bytes",
        ]  # fmt: skip
        assert int(words["read"]) == length
        assert 0 < int(words["generated"]) <= 12
        held.add(int(words["stream_bytes"]))
    assert len(held) == 1
    assert held.pop() > 0


def test_the_seed_decides_what_is_drawn(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        words = ["generate", "--model", str(base), "--prompt", "x", "--temperature", "2", "--seed", seed]
        assert main([*words, "--max-new-tokens", "40"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


# How the text is cut.


@given(text=st.text("ab \n.1日é", max_size=400), size=st.integers(1, 64))
@settings(max_examples=100)
def test_chunks_add_up_to_the_text(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "BYTES", size)
        assert "".join(verb._chunks(io.BytesIO(text.encode()))) == text


def test_chunks_are_cut_between_words_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.BufferedIOBase):
        """Ten million bytes, never together."""

        left, largest = 10_000_000, 0

        def read(self, size: int = -1) -> bytes:
            self.largest = max(self.largest, size)
            data = (b"some words " * (size // 11 + 1))[: min(size, self.left)]
            self.left -= len(data)
            return data

    source, total = Endless(), 0
    for chunk in verb._chunks(source):
        assert len(chunk) <= 2 * verb.BYTES
        total += len(chunk)
        assert chunk.startswith(" ") or total == len(chunk)
    assert total == 10_000_000
    assert source.largest == verb.BYTES


def test_a_byte_order_mark_is_no_text() -> None:
    assert list(verb._chunks(io.BytesIO(b"\xef\xbb\xbfabc"))) == ["abc"]


@pytest.mark.parametrize("data", [b"secret \xff\xfe", b"cut off \xe6\x97"])
def test_input_that_is_no_utf8_is_exit_2_unrepeated(
    data: bytes, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        list(verb._chunks(io.BytesIO(data)))
    assert caught.value.__context__ is None
    piped(monkeypatch, data)
    assert main(["generate", "--model", str(base), "--stdin"]) == 2
    assert capsys.readouterr().err.startswith("nestling: the standard input: is not UTF-8 before byte ")


def test_on_a_terminal_control_characters_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for place, shown in ((Terminal(), "a\\x1b[2J\n日"), (io.StringIO(), "a\x1b[2J\n日")):
        monkeypatch.setattr(sys, "stdout", place)
        verb._write("a\x1b[2J\n日")
        assert place.getvalue() == shown


# What cannot be.


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "no text was given"),
        (["no/run", "--prompt", "x"], 2, "no/run: is neither a run's folder nor an adapter's"),
        (["x" * 5000, "--prompt", "x"], 2, "neither a run's folder"),
        (["--prompt", "x", "--model", "no/where/at/all"], 3, "is no model"),
        (["--prompt", "x", "--max-new-tokens", "-1"], 2, "--max-new-tokens"),
        (["--prompt", "x", "--temperature", "nan"], 2, "--temperature"),
        (["--prompt", "x", "--seed", "-1"], 2, "--seed"),
        (["--prompt", "x", "--window", "-1"], 2, "--window"),
        (["--prompt", "x", "--model", "BASE", "--dtype", "int3"], 2, "dtype"),
        (["--prompt", "x", "--model", "BASE", "--device", "moon"], 2, "moon"),
        (["--stdin", "--model", "BASE"], 2, "has read nothing yet"),
    ],
)
def test_what_cannot_be_is_one_line_and_its_code(
    words: list[str], code: int, said: str, base: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    piped(monkeypatch, b"")
    assert main(["generate", *(str(base) if word == "BASE" else word for word in words)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_closed_standard_input_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--stdin"]) == 2
    assert "the standard input: is closed" in capsys.readouterr().err


def test_a_run_over_images_has_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(dump_config(load_config("flite-digits")))
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "was a run over images" in capsys.readouterr().err


def test_a_run_without_its_adapter_is_exit_3(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "config.toml", tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 3
    assert "adapter.json: is missing" in capsys.readouterr().err


def test_another_base_than_the_run_had_is_exit_3(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    model, _ = load_language_model(str(base), dtype="float32")
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(other)
    assert main(["generate", str(run), "--model", str(other), "--prompt", "x"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "was trained on base" in err


def test_a_damaged_adapter_is_exit_5(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(run, tmp_path / "copied")
    file = copied / "adapter" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    assert main(["generate", str(copied), "--prompt", "x"]) == 5
    assert capsys.readouterr().out == ""


def test_a_second_window_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--window", "4", "--prompt", "x"]) == 2
    assert "--window: the adapter brings its own window" in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_error(base: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "nestling", "generate", "--model", str(base), "--prompt", "x", "--stats"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_bad_settings_need_no_torch() -> None:
    program = """
import sys
from nestling.cli.main import main
codes = [main(["generate", *words]) for words in (["--help"], [], ["nowhere", "--prompt", "x"])]
print(codes, sorted({"torch", "numba", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] []", done.stdout + done.stderr
