"""`nestling generate`: a text of any length streams through a language model, and text comes back token by token.

The text is read in chunks that are cut at a space between two words, where tokenizers cut too; so a file of any size is
read in constant memory, in the tokens that it has as a whole.
"""

import codecs
import dataclasses
import io
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import tyro

from nestling.cli.places import Place, place_of
from nestling.config.checks import at_least, is_count, is_seed, is_text
from nestling.core.errors import ConfigError
from nestling.runs.files import printable

if TYPE_CHECKING:
    from nestling.inference.stream import Session

BYTES = 1 << 16
"""Read at a time, and fed once so many characters have come."""
_GAP, _SPACE = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])"), re.compile(r"\s+")


@dataclasses.dataclass(frozen=True)
class Generate:
    """Stream text through a language model, with the adapter of RUN on it, and write what it generates."""

    run: tyro.conf.Positional[str] = ""
    """A run's folder, or an adapter's; empty: the model alone."""
    model: str = ""
    """smollm2-135m, a folder, a .gguf file, or a name on the hub; empty: the run's, or smollm2-135m."""
    prompt: str = ""
    """The text to go on from; after that of --stdin, if both are given."""
    stdin: bool = False
    """Read the standard input first, of any length."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0: always the likeliest token."""
    seed: int = 0
    """Of the draws, at a temperature above 0."""
    window: int = 0
    """Tokens that attention sees, where no adapter brings a window; 0: all, and memory grows with the text."""
    dtype: str = ""
    """bfloat16 or float32, of the weights; empty: the run's, or bfloat16."""
    device: str = "cpu"
    """cpu, or a CUDA device such as cuda:0."""
    stats: bool = False
    """End with one line on the standard error: tokens, tokens per second, bytes that the stream held."""


def generate(args: Sequence[str]) -> int:
    """`nestling generate [RUN]`: writes the generated text, and nothing else, to the standard output."""
    command = tyro.cli(tyro.conf.FlagCreatePairsOff[Generate], args=list(args), prog="nestling generate")
    _check(command)
    place = place_of(command.run, model=command.model, dtype=command.dtype)
    from nestling.inference.stream import Session  # torch is imported here, after the settings have been read

    model, tokenizer = _load(command, place)
    with Session(model, tokenizer) as session:
        began = time.perf_counter()
        for chunk in _chunks(cast(io.BufferedIOBase, sys.stdin.buffer)) if command.stdin else ():
            session.feed(chunk)
        pieces = session.stream(
            command.prompt,
            max_new_tokens=command.max_new_tokens,
            temperature=command.temperature,
            seed=command.seed,
        )
        read, done = session.tokens, time.perf_counter()
        for piece in pieces:
            _write(piece)
        _write("\n")
        if command.stats:
            print(_stats(session, read, done - began, time.perf_counter() - done), file=sys.stderr)
    return 0


def _check(command: Generate) -> None:
    """Before minutes of reading."""
    if not command.stdin and not command.prompt:
        raise ConfigError("no text was given", where="generate", remedy="Give --prompt TEXT, or --stdin.")
    if command.stdin and sys.stdin is None:
        raise ConfigError("is closed", where="the standard input", remedy="Give --prompt TEXT.")
    is_count("--max-new-tokens", command.max_new_tokens, 0)
    is_count("--window", command.window, 0)
    at_least("--temperature", command.temperature, 0)
    is_seed("--seed", command.seed)
    is_text("--model", command.model)


def _load(command: Generate, place: Place) -> tuple[Any, Any]:
    from nestling.adapters.store import from_pretrained
    from nestling.build import check_device
    from nestling.models.language import load_language_model
    from nestling.models.window import reader_of, use_window

    check_device(command.device)
    model, tokenizer = load_language_model(place.model, dtype=place.dtype, device=command.device)
    if place.adapter is not None:
        from_pretrained(model, place.adapter)
    if command.window and reader_of(model) is not None:
        raise ConfigError("the adapter brings its own window", where="--window", remedy="Leave it out.")
    if command.window:
        use_window(model, window=command.window)
    return model, tokenizer


def _chunks(source: io.BufferedIOBase) -> Iterator[str]:
    """The text in parts of about `BYTES` characters. Raises `ConfigError` if it is not UTF-8."""
    decoder, text, at = codecs.getincrementaldecoder("utf-8-sig")(), "", 0
    while True:
        data = source.read(BYTES)
        try:
            text += decoder.decode(data, final=not data)
            is_text = True
        except UnicodeDecodeError:  # not chained: it holds what it could not decode
            is_text = False
        if not is_text:
            raise ConfigError(
                f"is not UTF-8 before byte {at + len(data):,}",
                where="the standard input",
                remedy="Convert it first.",
            )
        at += len(data)
        if not data:
            break
        if len(text) >= BYTES:
            cut = _last_gap(text)
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def _last_gap(text: str) -> int:
    """Where to cut: before the last single space between two letters, else before the last other gap, else at the end.

    >>> _last_gap("one two, three\\n\\n4"), _last_gap("1\\n2 3"), _last_gap("日本")
    (3, 3, 2)
    """
    # Only the tail is searched: a text without such a gap would cost a pass over all of it.
    tail = max(0, len(text) - 4096)
    for pattern in (_GAP, _SPACE):
        if gaps := [found.start() for found in pattern.finditer(text, tail) if found.start()]:
            return gaps[-1]
    return len(text)


def _write(piece: str) -> None:
    # On a terminal a model could otherwise move the cursor or set the title.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by the caller
    print(printable(piece, keep="\n\t\u200c\u200d") if is_terminal else piece, end="", flush=True)


def _stats(session: "Session", read: int, reading: float, generating: float) -> str:
    generated = session.tokens - read
    return (
        f"read={read} generated={generated} read_tokens_per_second={read / max(reading, 1e-9):.1f} "
        f"generated_tokens_per_second={generated / max(generating, 1e-9):.1f} stream_bytes={session.nbytes}"
    )
