"""What a long stream costs and loses on SmolLM2-135M: full attention, a window, LoRA with it, and FedNL's memory.

    python benchmarks/streaming.py [--memory RUN] [--lora RUN] [--parts losses memory] [--json] [--markdown]

First each row must lose the same on a short stream in pieces as in one pass (`LIMIT` nats a token, in float32);
otherwise nothing else is measured and the exit code is 1. Then

losses   next-token loss on held-out text, the mean of each 1,024 positions, and by how much it differs from the first;
memory   in a fresh process for each row: the bytes behind the cache's tensors, and the peak resident memory since the
         model was loaded and its adapter put on. Text that is too short for this is read again from its start.

Rows with a window are called flat only if neither grows by more than 2 % from 1,024 tokens to --longest, else the exit
code is 1 after all has been written. The row "window" is also FedNL with its memory switched off.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from nestling.core.errors import ContextError, NestlingError
from nestling.inference.cache import new_cache
from nestling.models import assets
from nestling.models.language import language_shape, load_language_model
from nestling.models.streams import StreamCache
from nestling.models.window import reader_of, use_window
from nestling.tasks.text import by_bins, continuing, load_text, perplexity, relative_to_first, split_text, token_losses

ROWS = {"full": "full attention", "window": "window", "lora": "LoRA, window", "memory": "FedNL"}
BIN = 1024
LIMIT = 1e-3
"""Nats by which a token's loss may differ between pieces and one pass."""
FLAT = 0.02
RESULTS = Path(__file__).parent / "results" / "streaming.json"


def load(kind: str, options: argparse.Namespace) -> nn.Module:
    """The model of a row."""
    model, _ = load_language_model(options.model, dtype=options.dtype)
    if kind in ("lora", "memory"):
        adapter = nestling.from_pretrained(model, folder(getattr(options, kind)))
        if adapter.config.kind != kind:
            sys.exit(f"--{kind}: the adapter is of kind {adapter.config.kind}")
    if kind in ("window", "lora") and reader_of(model) is None:
        use_window(model, window=options.window, sinks=options.sinks)
    reader = reader_of(model)
    if kind != "full" and (reader.window, reader.sinks) != (options.window, options.sinks):
        sys.exit(f"{ROWS[kind]} has window {reader.window} and {reader.sinks} first tokens, other rows have others")
    return model


def folder(path: Path) -> Path:
    """An adapter's folder; `path` is it, or the run's that holds it."""
    return path if (path / "adapter.json").exists() else path / "adapter"


def held_out(options: argparse.Namespace) -> np.ndarray:
    """The last fifth of the text's tokens, int64."""
    _, tokenizer = load_language_model(options.model, dtype=options.dtype)
    if options.text == "shakespeare" and assets.find("shakespeare") is None:
        raise ContextError("is not on this machine", where="shakespeare", remedy="nestling fetch shakespeare")
    path = str(assets.find("shakespeare")) if options.text == "shakespeare" else options.text
    text = load_text("python-docs") if options.text == "python-docs" else load_text("file", path)
    return split_text(np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))[1]


def check(kind: str, ids: np.ndarray, options: argparse.Namespace) -> float:
    """The largest difference of a token's loss between pieces and one pass; ends the program above `LIMIT`."""
    model = load(kind, options).float()
    short = torch.from_numpy(ids[: 2 * options.piece + options.piece // 4 + 1])[None]
    whole, parts = (token_losses(model, short, piece=p, new_cache=new_cache) for p in (short.shape[1], options.piece))
    error = float((whole - parts).abs().max())
    if not error <= LIMIT:  # not: NaN counts as a failure
        sys.exit(f"{ROWS[kind]}: pieces differ from one pass by {error:.1e} nats (limit {LIMIT:.0e}); not measured")
    return error


def losses(kind: str, ids: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """The row's losses by bins over all streams."""
    count, tokens = options.streams, options.tokens
    streams = torch.from_numpy(ids[: count * (tokens + 1)].reshape(count, tokens + 1))
    model, start = load(kind, options), time.perf_counter()
    taken = token_losses(model, streams, piece=options.piece, new_cache=new_cache)
    bins = by_bins(taken, BIN)
    rows = {"row": kind, "bins": bins, "relative": relative_to_first(bins), "perplexity": perplexity(taken)}
    return rows | {"seconds": time.perf_counter() - start}


def memory(kind: str, ids: np.ndarray, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process of its own holds after 1,024, 2,048, … tokens."""
    longest = min(options.longest, options.full_longest) if kind == "full" else options.longest
    given = np.resize(ids, longest).astype(np.int64)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", kind]
    done = subprocess.run(command, input=given.tobytes(), stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{ROWS[kind]}: its process ended with {done.returncode}")
    rows = json.loads(done.stdout)
    for row in rows:
        for what in ("cache", "peak"):
            row[f"{what}_growth"] = row[f"{what}_bytes"] / rows[0][f"{what}_bytes"] - 1
    return rows


@torch.no_grad()
def child(kind: str, options: argparse.Namespace) -> None:
    """Read the standard input's tokens (int64) in pieces; write the rows to the standard output."""
    given = torch.from_numpy(np.frombuffer(sys.stdin.buffer.read(), np.int64).copy())
    model, rows = load(kind, options), []
    cache = new_cache(model)
    forget_peak()
    for start in range(0, len(given), options.piece):
        model(given[None, start : start + options.piece], logits_to_keep=1, **continuing(model, cache))
        read = start + options.piece
        if read >= BIN and read & (read - 1) == 0:
            rows.append({"row": kind, "tokens": read, "cache_bytes": held(cache), "peak_bytes": high_water()})
    print(json.dumps(rows))


def held(cache: Any) -> int:
    """Bytes of the storage behind a cache's tensors; a view counts as all that it keeps alive."""
    tensors: list[Tensor] = []
    for layer in cache.layers:
        tensors += layer.tensors().values() if isinstance(cache, StreamCache) else (layer.keys, layer.values)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def forget_peak() -> None:
    """The peak counts from now on: that of loading a model would hide what reading adds."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def high_water() -> int:
    """Peak resident bytes of this process."""
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])


def verdict(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the rows with a window are flat, and the sentence that says so."""
    ours = [row for row in rows if row["row"] != "full" and row["tokens"] > BIN]
    if not ours:
        return False, "nothing says whether it is flat: read more than 1,024 tokens"
    worst = max(ours, key=lambda row: max(row["cache_growth"], row["peak_growth"]))
    growth, most = max(worst["cache_growth"], worst["peak_growth"]), max(row["tokens"] for row in ours)
    if not growth <= FLAT:
        return False, f"not flat: {ROWS[worst['row']]} grows by {growth:.1%} up to {worst['tokens']:,} tokens"
    return True, f"flat: rows with a window grow by at most {growth:.1%} from 1,024 to {most:,} tokens"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """Lines of columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for cells in (head, *rows):
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        lines.append(f"| {' | '.join(padded)} |" if markdown else "  ".join(padded))
    if markdown:
        lines.insert(1, "|" + "|".join(f"{'-' * (w + 1)}{':' if i else '-'}" for i, w in enumerate(widths)) + "|")
    return "\n".join(lines)


def losses_table(rows: list[dict[str, Any]], context: int, *, markdown: bool) -> str:
    """A line for each bin, a column for each row, and what to know about them."""
    lines = []
    for i in range(len(rows[0]["bins"])):
        cells = [f"{row['bins'][i]:.3f} ({row['relative'][i]:+.1%})" if i else f"{row['bins'][0]:.3f}" for row in rows]
        lines.append([f"{i + 1}K", *cells])
    lines.append(["perplexity", *(f"{row['perplexity']:.2f}" for row in rows)])
    text = table(["up to", *(ROWS[row["row"]] for row in rows)], lines, markdown=markdown)
    if rows[0]["row"] == "full" and len(rows[0]["bins"]) * BIN > context:
        text += f"\n\nFull attention beyond {context:,} tokens is out of the model's range: it has no more positions."
    return text + "\n\nBins differ in their text, too; it is the same for every row."


def memory_table(rows: list[dict[str, Any]], *, markdown: bool) -> str:
    """A line for each row and length."""
    head = ["row", "tokens", "cache bytes", "against 1K", "peak bytes", "against 1K"]
    lines = []
    for row in rows:
        cache, peak = (
            (f"{row[f'{what}_bytes']:,}", f"{100 * row[f'{what}_growth']:+,.1f} %") for what in ("cache", "peak")
        )
        lines.append([ROWS[row["row"]], f"{row['tokens']:,}", *cache, *peak])
    return table(head, lines, markdown=markdown)


def parse() -> argparse.Namespace:
    """The command line; without --window, that of the memory's run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=Path, metavar="RUN", help="folder of FedNL's adapter, or of its run")
    parser.add_argument("--lora", type=Path, metavar="RUN", help="folder of a LoRA adapter, or of its run")
    parser.add_argument("--parts", nargs="+", choices=["losses", "memory"], default=["losses", "memory"])
    parser.add_argument("--text", default="shakespeare", help="shakespeare, python-docs, or a file or folder")
    parser.add_argument("--tokens", type=int, default=16384, help="of each stream whose losses are taken")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--piece", type=int, default=512, help="tokens of a forward pass; a divisor of 1,024")
    parser.add_argument("--longest", type=int, default=65536, help="tokens read for the memory")
    parser.add_argument("--full-longest", type=int, default=16384, help="the same, for full attention")
    parser.add_argument("--window", type=int, help="of all rows but the first; else the adapter's, or 64")
    parser.add_argument("--sinks", type=int, help="likewise; else the adapter's, or 4")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--child", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():  # now, not after half an hour
        parser.error(f"--json: {options.json.parent} is no folder")
    if options.piece < 1 or BIN % options.piece or min(options.tokens, options.longest, options.full_longest) < BIN:
        parser.error("--piece must divide 1,024, and streams must have at least so many tokens")
    options.about = {}
    for kind in ("lora", "memory"):
        if path := getattr(options, kind):
            if not (folder(path) / "adapter.json").exists():
                parser.error(f"--{kind}: {path} holds no adapter")
            options.about[kind] = json.loads((folder(path) / "adapter.json").read_text("utf-8"))
    found = options.about.get("memory", {}).get("config", {"window": 64, "sinks": 4})
    options.window = found["window"] if options.window is None else options.window
    options.sinks = found["sinks"] if options.sinks is None else options.sinks
    if options.window < 1:
        parser.error("without a window nothing is constant: give --window, or a memory trained with one")
    return options


def save(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the results so far, if asked to."""
    if options.json:
        options.json.write_text(json.dumps(report, allow_nan=False) + "\n", "utf-8")


def main() -> None:
    """Check, measure, write, print."""
    options = parse()
    torch.set_num_threads(options.threads)
    if options.child:
        child(options.child, options)
        return
    kinds = [kind for kind in ROWS if kind in ("full", "window") or getattr(options, kind)]
    ids, context = held_out(options), language_shape(options.model).max_position_embeddings
    if "losses" in options.parts and len(ids) < options.streams * (options.tokens + 1):
        sys.exit(f"{options.text} has {len(ids):,} held-out tokens; give fewer --streams or --tokens, or another text")
    hidden = ("about", "child", "json", "memory", "lora")
    plain = {name: value for name, value in vars(options).items() if name not in hidden}
    plain |= {name: Path(plain[name]).name for name in ("model", "text")}  # no machine's paths
    report: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    report |= {"load": os.getloadavg()[0], "options": plain, "context": context, "limit": LIMIT}
    report["adapters"] = {kind: {k: about[k] for k in ("config", "vector")} for kind, about in options.about.items()}
    report["errors"] = {kind: check(kind, ids, options) for kind in kinds}
    print(
        f"{plain['model']}, {options.dtype}, pieces of {options.piece}, window {options.window} and {options.sinks} "
        f"first tokens, {options.threads} thread(s), load average {report['load']:.1f}; "
        f"pieces against one pass: {max(report['errors'].values()):.0e} nats at most\n"
    )
    if "losses" in options.parts:
        report["losses"] = [losses(kind, ids, options) for kind in kinds]
        save(report, options)  # what took long is kept if the rest fails
        print(f"{losses_table(report['losses'], context, markdown=options.markdown)}\n", flush=True)
    if "memory" in options.parts:
        report["memory"] = [row for kind in kinds for row in memory(kind, ids, options)]
        flat, sentence = verdict(report["memory"])
        report |= {"flat": flat, "verdict": sentence}
        print(f"{memory_table(report['memory'], markdown=options.markdown)}\n", flush=True)
        save(report, options)
        if not flat:
            sys.exit(sentence)
        print(sentence)


if __name__ == "__main__":
    try:
        main()
    except NestlingError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
