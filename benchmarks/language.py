"""How fast a frozen SmolLM2-135M reads, trains and generates: as it is, with a window, and with FedNL's memory.

    python benchmarks/language.py [--layers 20-23] [--window 64] [--repeats 5] [--threads 2] [--json] [--markdown]

The memory is as the preset needle-smollm2 has it, addresses and all; layers, rank, window and number format may differ.

Contract first: a memory with closed gates and no window, and PEFT's LoRA before training, give the plain model's logits
bit for bit; in float32 a remembered lower part (`models/prefix.py`) gives what a whole pass gives, and so does the last
token alone after the others, each to `LIMIT` of the largest logit. If one fails, no time is printed and the exit code
is 1. Then, in one process, all taking their turn, the least wall time of each:

reading     a forward pass, logits of the last position only (the head is the same for all and would hide the rest);
training    forward and backward, loss on the last 8 positions, rank-8 LoRA on q and v of the same layers by PEFT with
            full attention. "remembered": layers below the adapter ran once before and their outputs are kept, which
            serves any adapter in the upper layers: hence LoRA has such a row, too;
generating  one token after a context, with transformers' own growing cache or with a stream's constant one.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from cells import origin, program
from streaming import held, table
from torch import Tensor, nn

from nestling.adapters.layers import layer_numbers
from nestling.adapters.rules import first_layer
from nestling.config.schema import MemoryConfig
from nestling.core.errors import NestlingError
from nestling.inference.cache import new_cache
from nestling.models.copies import working_copy
from nestling.models.language import load_language_model
from nestling.models.prefix import Prefix
from nestling.models.window import use_window
from nestling.tasks.text import continuing

LIMIT = 1e-4
LAST = 8
"""Positions at the end of an item whose tokens are learnt."""
PIECE = 512
RESULTS = Path(__file__).parent / "results" / "language.json"
Times = dict[str, tuple[float, float]]


def memory_config(options: argparse.Namespace, *, window: int) -> MemoryConfig:
    """The preset's memory with these options."""
    shipped = nestling.load_config("needle-smollm2").adapter
    return replace(shipped, layers=options.layers, rank=options.rank, window=window, sinks=options.sinks)


def memory_on(model: nn.Module, options: argparse.Namespace, *, window: int, is_open: bool) -> nestling.Adapter:
    """A memory on `model`: as it begins, or (`is_open`) with every rule moved, so that nothing is zero."""
    adapter = nestling.attach(model, memory_config(options, window=window))
    if is_open:
        gen = torch.Generator().manual_seed(1)
        adapter.load_vector(torch.from_numpy(adapter.vector()) + 0.05 * torch.randn(adapter.layout.size, generator=gen))
    return adapter


def lora_on(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """PEFT's own LoRA on the layers that carry the memory elsewhere."""
    numbers = layer_numbers(options.layers, model.config.num_hidden_layers)
    settings = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], layers_to_transform=numbers, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, settings)


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """int64[batch, length], at random."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(batch + length))


@torch.no_grad()
def check(plain: nn.Module, first: int, options: argparse.Namespace) -> dict[str, float]:
    """The largest error of each contract, relative to the largest logit; ends the program where one is broken."""
    ids = tokens(2, 2 * options.window + 7, plain.config.vocab_size)
    wanted = plain(ids, use_cache=False).logits
    closed, lora = working_copy(plain, share=True), working_copy(plain, share=True)
    memory_on(closed, options, window=0, is_open=False)
    same = {"closed gates": closed, "LoRA before training": lora_on(lora, options)}
    for name, model in same.items():
        if not torch.equal(model(input_ids=ids, use_cache=False).logits, wanted):
            sys.exit(f"{name}: not the plain model's logits bit for bit; not timed")
    exact = working_copy(plain, share=False).float()
    pairs = {"remembered, plain": (Prefix(first).logits(exact, ids, LAST), exact(ids, use_cache=False).logits)}
    memory_on(exact, options, window=options.window, is_open=True)
    whole, cache = exact(ids, use_cache=False).logits, new_cache(exact)
    exact(ids[:, :-1], **continuing(exact, cache))
    pairs["remembered, memory"] = (Prefix(first).logits(exact, ids, LAST), whole)
    pairs["token by token"] = (exact(ids[:, -1:], **continuing(exact, cache)).logits, whole)
    errors = {}
    for name, (got, all_of_them) in pairs.items():
        errors[name] = float((got - all_of_them[:, -got.shape[1] :]).abs().max() / all_of_them.abs().max())
        if not errors[name] <= LIMIT:  # not: NaN counts as a failure
            sys.exit(f"{name}: relative error {errors[name]:.1e} (limit {LIMIT:.0e}); not timed")
    return errors


def least(works: dict[str, Callable[[], object]], repeats: int) -> Times:
    """Wall and CPU seconds of a call, the least of `repeats` rounds in which all take their turn, after one more."""
    best = dict.fromkeys(works, (float("inf"), float("inf")))
    for repeat in range(repeats + 1):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            taken = time.perf_counter() - wall, time.process_time() - cpu
            if repeat:
                best[name] = min(best[name][0], taken[0]), min(best[name][1], taken[1])
    return best


def rows_of(times: Times, count: int) -> list[dict[str, Any]]:
    """Tokens a second and the ratio of wall times to the first row's."""
    base = next(iter(times.values()))[0]
    return [
        {"row": name, "tokens_per_second": count / wall, "wall_s": wall, "cpu_s": cpu, "time_ratio": wall / base}
        for name, (wall, cpu) in times.items()
    ]


def reading(models: dict[str, nn.Module], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A forward pass of each model."""
    ids = tokens(*options.read, models["plain"].config.vocab_size)

    def work(model: nn.Module) -> Callable[[], object]:
        return lambda: model(ids, use_cache=False, logits_to_keep=1)

    with torch.no_grad():
        return rows_of(least({name: work(model) for name, model in models.items()}, options.repeats), ids.numel())


def training(
    memory: nn.Module, adapter: nestling.Adapter, lora: nn.Module, first: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Forward and backward of each way to train."""
    ids = tokens(*options.train, memory.config.vocab_size)
    inner = lora.get_base_model()  # the causal language model itself, PEFT's layers inside
    factors = [p for p in lora.parameters() if p.requires_grad]
    lowest = layer_numbers(options.layers, memory.config.num_hidden_layers)[0]  # LoRA listens to no layer below it

    def step(read: Callable[[Tensor, int], Tensor], trained: list[nn.Parameter]) -> Callable[[], None]:
        def run() -> None:
            for parameter in trained:
                parameter.grad = None
            logits = read(ids, LAST + 1)[:, :-1]
            F.cross_entropy(logits.flatten(0, 1).float(), ids[:, -LAST:].flatten()).backward()

        return run

    def whole(model: nn.Module) -> Callable[[Tensor, int], Tensor]:
        return lambda x, keep: model(input_ids=x, use_cache=False, logits_to_keep=keep).logits

    def remembered(model: nn.Module, first: int) -> Callable[[Tensor, int], Tensor]:
        prefix = Prefix(first)
        return lambda x, keep: prefix.logits(model, x, keep)

    works = {
        "LoRA, PEFT": step(whole(lora), factors),
        "memory": step(whole(memory), adapter.trainable()),
        "LoRA, PEFT, remembered": step(remembered(inner, lowest), factors),
        "memory, remembered": step(remembered(memory, first), adapter.trainable()),
    }
    rows = rows_of(least(works, options.repeats), ids.numel())
    for name, trained in (("LoRA", factors), ("memory", adapter.trainable())):
        if any(p.grad is None for p in trained):
            sys.exit(f"{name}: a parameter has no gradient; its time means nothing")
    return rows


@torch.no_grad()
def generating(plain: nn.Module, memory: nn.Module, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One token of each model after growing contexts."""
    models, rows, read = {"plain": plain, "memory": memory}, [], 0
    caches = {name: new_cache(model) for name, model in models.items()}
    ids = tokens(1, max(options.contexts), plain.config.vocab_size)

    def work(name: str) -> Callable[[], object]:
        model, cache = models[name], caches[name]
        return lambda: model(ids[:, :1], logits_to_keep=1, **continuing(model, cache))

    for context in sorted(options.contexts):
        for name, model in models.items():
            for piece in ids[:, read:context].split(PIECE, 1):
                model(piece, logits_to_keep=1, **continuing(model, caches[name]))
        read, row = context, {"context": context}
        row |= {f"{name}_bytes": held(cache) for name, cache in caches.items()}
        times = least({name: work(name) for name in models}, options.repeats)
        caches["plain"].crop(-options.repeats - 1)  # the memory's stays what it is, in size
        for name, (wall, cpu) in times.items():
            row |= {f"{name}_wall_s": wall, f"{name}_cpu_s": cpu, f"{name}_tokens_per_second": 1 / wall}
        rows.append(row | {"time_ratio": times["memory"][0] / times["plain"][0]})
    return rows


def crossover(rows: list[dict[str, Any]]) -> tuple[float | None, str]:
    """From which context on the memory is faster up to the longest, between contexts on a straight line."""
    gaps = [(row["context"], row["plain_wall_s"] - row["memory_wall_s"]) for row in rows]
    if gaps[-1][1] < 0:
        return None, f"window + memory is not faster at {gaps[-1][0]:,} tokens"
    for (low, before), (high, after) in reversed(list(pairwise(gaps))):
        if before < 0:
            where = low + (high - low) * -before / (after - before)
            return where, f"window + memory is faster from about {where:,.0f} tokens on (between {low:,} and {high:,})"
    return float(gaps[0][0]), f"window + memory is faster at every context from {gaps[0][0]:,} on"


def show(report: dict[str, Any], options: argparse.Namespace) -> None:
    """The three tables."""
    for title, shape in (("reading", options.read), ("training", options.train)):
        lines = [
            [r["row"], f"{r['tokens_per_second']:,.0f}", f"{r['wall_s']:.3f}", f"{r['cpu_s']:.3f}",
             f"{r['time_ratio']:.2f}x"]
            for r in report[title]
        ]  # fmt: skip
        head = [f"{title} {shape[0]} x {shape[1]}", "tokens/s", "wall s", "CPU s", "time"]
        print(table(head, lines, markdown=options.markdown) + "\n")
    lines = [
        [f"{r['context']:,}", f"{r['plain_tokens_per_second']:.1f}", f"{r['memory_tokens_per_second']:.1f}",
         f"{r['time_ratio']:.2f}x", f"{r['plain_bytes']:,}", f"{r['memory_bytes']:,}"]
        for r in report["generating"]
    ]  # fmt: skip
    head = ["generating after", "plain, tokens/s", "window + memory", "time", "plain, bytes", "window + memory"]
    print(table(head, lines, markdown=options.markdown) + f"\n\n{report['crossover_text']}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=int, nargs=2, default=[4, 512], help="batch and tokens of a forward pass")
    parser.add_argument("--train", type=int, nargs=2, default=[4, 256], help="batch and tokens of a training step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--layers", default="20-23", help="which carry the memory, or LoRA")
    parser.add_argument("--rank", type=int, default=16, help="of the memory's corrections; LoRA has 8")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write this file ({RESULTS.name})")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():  # now, not after half an hour
        parser.error(f"--json: {options.json.parent} is no folder")
    if options.window < 1 or options.repeats < 1 or options.train[1] <= LAST or min(options.contexts) < 1:
        parser.error(
            f"a window, repeats and contexts are 1 or more, and items to train on have more than {LAST} tokens"
        )
    return options


def main() -> None:
    """Check, measure, print."""
    options = parse()
    torch.set_num_threads(options.threads)
    plain, _ = load_language_model(options.model, dtype=options.dtype)
    first = first_layer(memory_config(options, window=options.window), plain.config)
    report: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    known = {name: value for name, value in vars(options).items() if name != "json"}
    known["model"] = Path(options.model).name  # no machine's paths
    report |= origin(" ".join(["python benchmarks/language.py", *sys.argv[1:]])) | {"program": program()}
    report |= {"peft": peft.__version__, "load": os.getloadavg()[0], "options": known}
    report |= {"errors": check(plain, first, options), "limit": LIMIT}
    window, memory, lora = (working_copy(plain, share=True) for _ in range(3))  # the same weights, read by all
    use_window(window, window=options.window, sinks=options.sinks)
    adapter, lora = memory_on(memory, options, window=options.window, is_open=True), lora_on(lora, options)
    print(
        f"{known['model']}, {options.dtype}, layers {options.layers}, window {options.window} and {options.sinks} "
        f"first tokens, {options.threads} thread(s), load average {report['load']:.1f}; contracts hold, "
        f"bit for bit before training, else within {max(report['errors'].values()):.0e}\n"
    )
    report["reading"] = reading({"plain": plain, "window": window, "window + memory": memory}, options)
    report["training"] = training(memory, adapter, lora, first, options)
    report["generating"] = generating(plain, memory, options)
    report["crossover"], report["crossover_text"] = crossover(report["generating"])
    if options.json:
        options.json.write_text(json.dumps(report, allow_nan=False) + "\n", "utf-8")
    show(report, options)


if __name__ == "__main__":
    try:
        main()
    except NestlingError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
