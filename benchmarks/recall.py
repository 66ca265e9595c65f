"""Recall of facts by length of the text, also beyond what was trained on, and by the depth of the fact.

    python benchmarks/recall.py --memory RUN [--lengths 256 512 1024] [--templates mk passkey] [--items 50] [--json]

Rows: full attention (the frozen model with all tokens in sight: the ceiling, whose cache grows with it), the window
alone (the frozen model, which is the trained one with its memory off), and the trained memory. Every row answers the
same held-out questions. Refuses to compare unless closed gates give the very logits of the window alone.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestling.adapters.memory import MemoryAdapter
from nestling.inference.cache import new_cache
from nestling.models.language import load_language_model
from nestling.tasks.needle import TEMPLATES
from nestling.tasks.recall import NeedleTask, Recall, paired_difference
from nestling.tasks.text import load_text, split_text

RESULTS = Path(__file__).parent / "results" / "recall.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=Path, required=True, help="folder of a run, or of its adapter")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="as the run's base.dtype")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--templates", nargs="+", default=["mk", "passkey"], choices=list(TEMPLATES))
    parser.add_argument("--items", type=int, default=50, help="of each template and length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    model, tokenizer = load_language_model(options.model, dtype=options.dtype)
    tokens = np.array(tokenizer(load_text("python-docs"), add_special_tokens=False, verbose=False)["input_ids"])
    filler, held_out = split_text(tokens)
    task = NeedleTask(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        filler,
        held_out,
        templates=options.templates,
        length=min(options.lengths),
        train_items=1,
        test_items=options.items,
    )
    rows: dict[str, dict[int, list[Recall]]] = {"full attention": read(task, model, options.lengths)}
    folder = options.memory / "adapter" if (options.memory / "adapter").is_dir() else options.memory
    adapter: Any = nestling.from_pretrained(model, folder)
    if not isinstance(adapter, MemoryAdapter):
        sys.exit(f"--memory: {folder} holds no memory")
    check(model, adapter)
    rows["window alone"] = read(task, model, options.lengths, adapter.switch(memory=False))
    rows["memory"] = read(task, model, options.lengths)

    print("| tokens | read by | exact % | of four % | loss |\n|---:|---|---:|---:|---:|")
    for length, name, recalls in each(rows):
        items = sum(r.items for r in recalls)
        exact, chosen = (100 * sum(getattr(r, key) for r in recalls) / items for key in ("exact", "chosen"))
        loss = sum(r.loss * r.items for r in recalls) / items
        print(f"| {length:,} | {name} | {exact:.1f} | {chosen:.1f} | {loss:.2f} |")
    print("\n| tokens | memory − window alone: exact, points | of four, points |\n|---:|---:|---:|")
    for length in options.lengths:
        print(f"| {length:,} | {gain(rows, length, 'hits')} | {gain(rows, length, 'choices')} |")
    names = list(rows)
    print("\n| kind of fact, tokens | " + " | ".join(f"{name}: exact %, of four %" for name in names) + " |")
    print("|---|" + "---:|" * len(names))
    for length in options.lengths:
        for kind, template in enumerate(options.templates):
            kinds = [rows[name][length][kind] for name in names]
            cells = (f"{100 * r.exact / r.items:.0f}, {100 * r.chosen / r.items:.0f}" for r in kinds)
            print(f"| {template}, {length:,} | " + " | ".join(cells) + " |")
    print("\n| depth | " + " | ".join(f"{length:,} tokens" for length in options.lengths) + " |")
    print("|---:|" + "---:|" * len(options.lengths))
    for depth in sorted({depth for r in rows["memory"][options.lengths[0]] for depth in r.by_depth}):
        cells = (by_depth(rows["memory"][length], depth) for length in options.lengths)
        print(f"| {depth} | " + " | ".join(cells) + " |")
    if options.json:
        saved = {
            name: {n: [asdict(r) for r in got] for n, got in by_length.items()} for name, by_length in rows.items()
        }
        about = {key: value for key, value in vars(options).items() if key not in ("memory", "json")}
        RESULTS.write_text(json.dumps({"about": about, "rules": adapter.spec, "rows": saved}, indent=1) + "\n")


def check(model: Any, adapter: MemoryAdapter) -> None:
    """Rules before training, whose gates are closed, must read as the window alone does."""
    ids, trained = torch.arange(300)[None], adapter.vector()
    arrays = adapter.layout.unpack(trained.copy())
    for name, array in arrays.items():
        if name.endswith(".gate"):
            array[:] = 0
    with torch.no_grad(), adapter.switch(memory=False):
        alone = model(ids, use_cache=False).logits
    adapter.load_vector(adapter.layout.pack(arrays))
    with torch.no_grad():
        closed = model(ids, use_cache=False).logits
    adapter.load_vector(trained)
    if not torch.equal(alone, closed):
        sys.exit("the model with closed gates does not read as the window alone: nothing is compared")


def read(task: NeedleTask, model: Any, lengths: list[int], switched: Any = None) -> dict[int, list[Recall]]:
    """Each length's recalls."""
    with switched or nullcontext():
        return {length: task.evaluate(model, new_cache=new_cache, length=length) for length in lengths}


def each(rows: dict[str, dict[int, list[Recall]]]) -> Iterator[tuple[int, str, list[Recall]]]:
    for length in rows["memory"]:
        for name, by_length in rows.items():
            yield length, name, by_length[length]


def gain(rows: dict[str, dict[int, list[Recall]]], length: int, key: str) -> str:
    """What the memory adds, with the 95 % interval over the same items."""
    on, off = ([hit for r in rows[name][length] for hit in getattr(r, key)] for name in ("memory", "window alone"))
    mean, low, high = (100 * x for x in paired_difference(on, off))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def by_depth(recalls: list[Recall], depth: float) -> str:
    """Exact answers with the memory, of all items whose fact lies there."""
    right, items = (sum(r.by_depth.get(depth, (0, 0))[i] for r in recalls) for i in (0, 1))
    return f"{right} of {items}"


if __name__ == "__main__":
    main()
