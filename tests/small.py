"""Federations small enough for tests: one of plain numbers without torch, one of drawn images that trains in a second,
one of drawn text, and one of a drawn language model over bytes.

The images are ten blurred patterns with noise, in the four files of Fashion-MNIST, so that a command line can use them.
"""

import atexit
import gzip
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from torch import nn

from nestling.codec.form import Limits
from nestling.codec.message import decode, encode, peek, state_digest
from nestling.config.load import parse_config
from nestling.config.schema import CodecConfig, RunConfig
from nestling.core.types import Failure, Progress
from nestling.core.vectors import Layout, Vector
from nestling.federation.agreement import EVERYONE, Agreement

# Plain numbers: a client moves half way from the state it is sent towards a vector of its own.

LAYOUT = Layout.of([("a", (2, 3)), ("b", (5,))])
START = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)


def agree(*, limits: Limits | None = None, run: str = "r", **codec: object) -> Agreement:
    """An agreement over `LAYOUT`."""
    return Agreement(LAYOUT, CodecConfig(**codec), limits or Limits(max_examples=100), {"base": "b", "run": run})


def received(agreed: Agreement, message: bytes) -> Vector:
    """What a client decodes from a broadcast."""
    limits, codecs, number = agreed.limits, [agreed.codec.down], peek(message).round
    return decode(
        message, direction="downlink", layout=agreed.layout, context=agreed.context(), round=number, client=EVERYONE,
        codecs=codecs, limits=limits,
    )[1]  # fmt: skip


def answer(
    agreed: Agreement, message: bytes, client: int, difference: Vector, *, examples: int = 10, **changes: object
) -> bytes:
    """The reply of a client whose training changes the state by `difference`; `changes` go to `encode`."""
    start, is_difference = received(agreed, message), agreed.codec.send == "delta"
    fields = {
        "direction": "uplink",
        "codec": agreed.codec.up,
        "is_difference": is_difference,
        "round": peek(message).round,
        "context": agreed.context(state_digest(start)),
        "client": client,
        "num_examples": examples,
    }
    return encode(agreed.layout, difference if is_difference else start + difference, **{**fields, **changes})


def target(client: int) -> Vector:
    """Where a client wants the state to be."""
    return np.random.default_rng(client).normal(size=LAYOUT.size).astype(np.float32)


def honest(agreed: Agreement, examples: Callable[[int], int] = lambda client: 10 + client) -> Callable:
    """Answers of all well-behaved clients."""

    def handle(client: int, message: bytes) -> bytes:
        half = (target(client) - received(agreed, message)) * np.float32(0.5)
        return answer(agreed, message, client, half, examples=examples(client))

    return handle


class Answers:
    """An engine made of a function; counts its exchanges and remembers whom it was given."""

    def __init__(self, answers: Callable[[Mapping[int, bytes]], dict[int, bytes | Failure]]) -> None:
        self.answers, self.asked = answers, []

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        self.asked.append(list(messages))
        return self.answers(messages)


FIELDS = {"version": (4, "B"), "codec": (5, "B"), "flags": (6, "<H"), "total_len": (8, "<I"), "round": (12, "<I")}
FIELDS |= {"context": (16, "16s"), "client": (32, "<Q"), "num_examples": (44, "<I"), "magic": (0, "4s")}


def forge(message: bytes, *, body: bytes | None = None, **fields: object) -> bytes:
    """A message with other fields or another body, and the digest that belongs to them: damage that is no accident."""
    head, body = bytearray(message[:48]), message[64:] if body is None else body
    for name, value in fields.items():
        struct.pack_into(FIELDS[name][1], head, FIELDS[name][0], value)
    return bytes(head) + hashlib.sha256(bytes(head) + body).digest()[:16] + body


# Drawn images: a real run, from data to report.


@cache
def images() -> Path:
    """A folder like that of Fashion-MNIST with 240 training and 60 test images."""
    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    patterns = np.kron(rng.integers(0, 2, (10, 7, 7)), np.ones((4, 4))) * 160
    for part, count in (("train", 240), ("t10k", 60)):
        labels = np.arange(count) % 10
        pixels = np.clip(patterns[labels] + rng.normal(40, 40, (count, 28, 28)), 0, 255).astype(np.uint8)
        for kind, data, head in (("images-idx3", pixels, 16), ("labels-idx1", labels.astype(np.uint8), 8)):
            content = gzip.compress(bytes(head) + data.tobytes(), mtime=0)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    return folder


def toml(out: Path | str, *, name: str = "small", data: Path | None = None) -> str:
    """Settings of a run over three clients that takes about a second."""
    return f"""\
name = "{name}"
rounds = 2

[task]
data = "fashion"
path = "{data or images()}"
clients = 3
alpha = 1.0

[base]
width = 8
pretrain_on = "fashion"
epochs = 16
lr = 2e-2
augment = false

[adapter]
dim = 4
targets = ["*conv*"]

[local]
lr = 3e-2

[machine]
workers = 1
out = "{out}"
"""


def config(out: Path | str, *, references: bool = False, **changes: object) -> RunConfig:
    """The same settings, with `changes` to the top level."""
    made = parse_config(toml(out))
    machine = replace(made.machine, references=references)
    return replace(made, **{"machine": machine, **changes})


@cache
def finished(seed: int = 0) -> tuple:
    """One run with its reference rows, shared by all tests that only look: (settings, result, progress)."""
    from nestling.api import run

    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    steps: list[Progress] = []
    settings = config(folder / "runs", references=True, seed=seed)
    result = run(settings, progress=steps.append, command=["nestling", "run", "small.toml"])
    return settings, result, steps


# Drawn text: a real run of next-byte prediction in seconds.


@cache
def articles() -> Path:
    """A folder with WikiText's three files: articles about a number each, in sentences that a small network learns."""
    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for part, numbers in (("train", range(12)), ("valid", range(12, 14)), ("test", range(14, 16))):
        lines = []
        for number in numbers:
            lines += [" \n", f" = Number {number} = \n", " \n", f" the number {number} is a number . \n" * 20]
        (folder / f"wiki.{part}.raw").write_text("".join(lines), "utf-8")
    return folder


def text_toml(out: Path | str, *, data: Path | None = None) -> str:
    """Settings of a run over three clients that takes some seconds."""
    return f"""\
name = "text"
rounds = 2

[task]
kind = "text"
data = "wikitext2"
path = "{data or articles()}"
clients = 3
length = 16
train_items = 20

[base]
kind = "tinygpt"
width = 32
layers = 1
context = 16
pretrain_on = "wikitext2"
epochs = 6
lr = 1e-2

[adapter]
dim = 8
targets = ["blocks.*"]

[local]
batch_size = 8
lr = 3e-2

[machine]
workers = 2
out = "{out}"
"""


def text_config(out: Path | str, *, references: bool = False, **changes: object) -> RunConfig:
    """The same settings, with `changes` to the top level."""
    made = parse_config(text_toml(out))
    return replace(made, **{"machine": replace(made.machine, references=references), **changes})


def tiny_llama(family: str = "Llama", **changes: object) -> nn.Module:
    """A language model of 3 layers, 6 query heads on 2 key/value heads, and random weights large enough to matter.

    `family`: Llama, Qwen2 (biases) or Qwen3 (norms of queries and keys); `changes` go to its configuration.
    """
    import transformers

    sizes: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    settings = getattr(transformers, f"{family}Config")(**(sizes | changes))
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{family}ForCausalLM")(settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            norm = parameter.ndim == 1 and parameter.flatten()[0] == 1
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + float(norm))
    return model.eval()


def tiny_mamba(vocabulary: int = 64, **changes: object) -> nn.Module:
    """A causal language model of two layers without attention, with random weights; reads through any width."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "intermediate_size": 32, "time_step_rank": 4}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MambaForCausalLM(MambaConfig(vocab_size=vocabulary, **sizes, **ends, **changes)).eval()


# A drawn language model: a real needle run in seconds; it knows nothing, so only the path is tested.


@cache
def language(*, letters: bool = False) -> Path:
    """The folder of a model of two layers and its tokenizer, one token a byte; with `letters`, " A" to " D" are one
    token each."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {sign: i for i, sign in enumerate(signs, 1)}
    merges = [("Ġ", letter) for letter in "ABCD" if letters]  # byte-level pieces write a space so
    vocabulary |= {"".join(merge): len(vocabulary) + i for i, merge in enumerate(merges)}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


SIZES = {  # layers, width, query and key/value heads, width of the feed-forward part, vocabulary
    "smollm2-135m": ("llama", 30, 576, 9, 3, 1536, 49152),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 8960, 151936),
    "meta-llama/Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 8192, 128256),
    "state-spaces/mamba-1.4b-hf": ("mamba", 48, 2048, 0, 0, 4096, 50280),
}


def sizes_of(model: str, folder: Path) -> str:
    """A config.json with the sizes of a model of a preset, to plan with."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    names += ("intermediate_size", "vocab_size")
    settings = dict(zip(names, SIZES[model], strict=True)) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder / "config.json")


def smollm2_sizes(folder: Path) -> str:
    """A config.json with the sizes of SmolLM2-135M."""
    return sizes_of("smollm2-135m", folder)


def needle_toml(out: Path | str, *, adapter: str = 'kind = "memory"\nlayers = "all"\nrank = 2\nwindow = 32') -> str:
    """Settings of a needle run over three clients that takes some seconds."""
    return f"""\
name = "needles"
rounds = 2

[task]
kind = "needle"
templates = ["mk", "passkey", "mv"]
length = 320
train_items = 4
test_items = 5
round_items = 2

[base]
kind = "language"
model = "{language()}"
dtype = "float32"

[adapter]
{adapter}

[local]
batch_size = 2
lr = 1e-2
gate_lr = 5e-2

[machine]
workers = 1
out = "{out}"
"""


def needle_config(out: Path | str, *, references: bool = False, **changes: object) -> RunConfig:
    """The same settings, with `changes` to the top level."""
    made = parse_config(needle_toml(out))
    return replace(made, **{"machine": replace(made.machine, references=references), **changes})


# Drawn nouns: a real run of multiple choice in seconds.


@cache
def nouns() -> Path:
    """A folder with a data.noun in WordNet's format: thirty nouns in each lexicographer file that is asked about."""
    from nestling.tasks.questions import WORDNET_DOMAINS

    folder = Path(mkdtemp(prefix="nestling-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lines = ["  1 This software and database is being provided to you, the LICENSEE, by  "]
    lines += ["  14 WordNet 9.9 Copyright 2011 by Princeton University.  All rights reserved.  "]
    for file in sorted(number for files in WORDNET_DOMAINS.values() for number in files):
        for i in range(30):
            noun = "qu" + chr(97 + file % 26) + chr(97 + i % 26) + chr(97 + i // 26) + "x"
            head = f"{100 * file + i:08} {file:02} n 01 {noun} 0 001 @ 00001740 n 0000"
            lines.append(f'{head} | thing {i} of file {file}; "an example of {noun}"  ')
    (folder / "data.noun").write_text("\n".join(lines) + "\n")
    return folder


def choices_toml(out: Path | str, *, adapter: str = 'kind = "lora"\nrank = 2\nlayers = "1"') -> str:
    """Settings of a run of multiple choice over five clients that takes some seconds."""
    return f"""\
name = "choices"
rounds = 2

[task]
kind = "choices"
data = "wordnet"
path = "{nouns()}"
train_items = 8
test_items = 6
round_items = 2

[base]
kind = "language"
model = "{language(letters=True)}"
dtype = "float32"

[adapter]
{adapter}

[local]
batch_size = 4
lr = 3e-2
gate_lr = 5e-2

[machine]
workers = 1
out = "{out}"
"""


def choices_config(out: Path | str, *, references: bool = False, **changes: object) -> RunConfig:
    """The same settings, with `changes` to the top level."""
    made = parse_config(choices_toml(out))
    return replace(made, **{"machine": replace(made.machine, references=references), **changes})
