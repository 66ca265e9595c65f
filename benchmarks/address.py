"""Which key heads of a frozen model tell what a fact is about: candidates for `adapter.address`, before any training.

    python benchmarks/address.py [--model smollm2-135m] [--templates mk passkey phrase] [--items 24] [--json]

For every key head of every layer: the address of the question (tokens up to the end of the prompt) is compared with the
addresses of the four values of the same text (tokens before each), two tokens to an address, as before training.

right    share of items in which the asked value's address is the nearest, chance 25 %
margin   how much nearer, cosine, than the nearest other, on average
alike    cosine of two values' addresses, on average: a delta rule overwrites what lies near
kept     share of items in which a delta rule that is given the four values one after another returns the asked one

Keys are of unit length and less their mean over random tokens, where `adapter.address` lets centres begin. Then the
same for products of two of the best heads, of different layers.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cells import origin
from torch import Tensor

from nestling.adapters.address import AddressHead, first_centres
from nestling.adapters.rules import head_sizes
from nestling.models.language import load_language_model
from nestling.models.window import use_window
from nestling.tasks.needle import TEMPLATES, Item
from nestling.tasks.recall import NeedleTask
from nestling.tasks.text import load_text, split_text

RESULTS = Path(__file__).parent / "results" / "address.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--templates", nargs="+", default=["mk", "passkey", "phrase"], choices=list(TEMPLATES))
    parser.add_argument("--items", type=int, default=24, help="of each template")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--show", type=int, default=8, help="how many heads to print")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args()
    model, tokenizer = load_language_model(options.model, dtype="float32")
    tokens = np.array(tokenizer(load_text("python-docs"), add_special_tokens=False, verbose=False)["input_ids"])
    train, held_out = split_text(tokens)
    task = NeedleTask(
        lambda text: tokenizer.encode(text, add_special_tokens=False), train, held_out,
        templates=options.templates, length=options.length, train_items=options.items, test_items=1,
    )  # fmt: skip
    use_window(model, window=options.window, sinks=4)
    items = [task.item(client, i, seed=0) for client in task.clients() for i in range(options.items)]
    asked, written = addresses(model, items)
    layers, groups = asked.shape[1:3]
    singles = [(AddressHead(layer, head),) for layer in range(layers) for head in range(groups)]
    rows = sorted((judged(items, asked, written, heads) for heads in singles), key=best_first)
    print(table(rows[: options.show]))
    best = [row["heads"] for row in rows[: options.show]]
    pairs = [(*a, *b) for a, b in combinations(best, 2) if a[0].layer != b[0].layer]
    products = sorted((judged(items, asked, written, heads) for heads in pairs), key=best_first)
    print(table(products[: options.show]))
    if options.json:
        about = {"items": len(items), **{k: v for k, v in vars(options).items() if k not in ("json", "show")}}
        saved = [{**row, "heads": name_of(row["heads"])} for row in (*rows, *products)]
        report = {"origin": origin("python benchmarks/address.py --json"), "about": about, "heads": saved}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def judged(items: list[Item], asked: Tensor, written: Tensor, heads: tuple[AddressHead, ...]) -> dict[str, Any]:
    """What addresses made of these heads are worth."""
    q = product([asked[:, head.layer, head.head] for head in heads])
    k = product([written[:, :, head.layer, head.head] for head in heads])
    near, rows = torch.einsum("id,icd->ic", q, k), torch.arange(len(items))
    right = torch.tensor([item.right for item in items])
    wanted = near[rows, right]
    others = near.clone()
    others[rows, right] = -torch.inf
    alike = torch.einsum("icd,ied->ice", k, k)
    returned = torch.stack([recalled(k[i], q[i], order=order_of(item)) for i, item in enumerate(items)])
    return {
        "heads": heads,
        "right": float((wanted > others.amax(1)).double().mean()),
        "margin": float((wanted - others.amax(1)).mean()),
        "alike": float((alike.sum((1, 2)) - alike.shape[1]).mean() / (alike.shape[1] * (alike.shape[1] - 1))),
        "kept": float((returned.argmax(1) == right).double().mean()),
    }


def product(factors: list[Tensor]) -> Tensor:
    made = torch.ones_like(factors[0])
    for factor in factors:
        made = made * F.normalize(factor, dim=-1)
    return F.normalize(made, dim=-1)


def recalled(k: Tensor, q: Tensor, *, order: list[int]) -> Tensor:
    """How much of each value a delta rule returns that has written them, each a direction of its own, in this order."""
    memory = torch.zeros(k.shape[1], len(k))
    for c in order:
        value = F.one_hot(torch.tensor(c), len(k)).float()
        memory = memory + torch.outer(k[c], value - memory.T @ k[c])
    return memory.T @ q


def order_of(item: Item) -> list[int]:
    """The candidates as they come in the text."""
    return sorted(range(len(item.candidates)), key=lambda c: start(item.prompt, item.candidates[c]))


def best_first(row: dict[str, Any]) -> tuple[float, float]:
    return -row["right"], -row["margin"]


def name_of(heads: tuple[AddressHead, ...]) -> str:
    return ",".join(f"{head.layer}.{head.head}" for head in heads)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| address | right % ↑ | margin ↑ | alike ↓ | kept % ↑ |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        numbers = f"{100 * row['right']:.0f} | {row['margin']:.2f} | {row['alike']:.2f} | {100 * row['kept']:.0f}"
        lines.append(f"| {name_of(row['heads'])} | {numbers} |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def addresses(model: Any, items: list[Item]) -> tuple[Tensor, Tensor]:
    """Of the question, [items, layers, heads, d], and of the four values, [items, 4, layers, heads, d]."""
    _, _, groups, size = head_sizes(model.config)
    kept: list[Tensor] = []
    hooks = [
        (getattr(layer.self_attn, "k_norm", None) or layer.self_attn.k_proj).register_forward_hook(
            lambda module, args, output: kept.append(output[0].reshape(-1, groups, size))
        )
        for layer in model.base_model.layers
    ]
    shape = model.config
    every = [tuple(AddressHead(layer, head) for layer in range(shape.num_hidden_layers)) for head in range(groups)]
    centre = torch.stack([first_centres(model, heads, 0) for heads in every], 1)  # [layers, heads, d]
    asked, written = [], []
    for item in items:
        kept.clear()
        model(torch.tensor([item.prompt + item.answer]), use_cache=False, logits_to_keep=1)
        keys = F.normalize(torch.stack(kept).float(), dim=-1) - centre[:, None]  # [layers, T, heads, d]
        differ = next(i for i in range(len(item.answer)) if len({c[i] for c in item.candidates}) > 1)
        ends = [len(item.prompt) - 1 + differ, *(start(item.prompt, c) + differ - 1 for c in item.candidates)]
        made = torch.stack([keys[:, end] + keys[:, end - 1] for end in ends])
        asked.append(made[0])
        written.append(made[1:])
    for hook in hooks:
        hook.remove()
    return torch.stack(asked), torch.stack(written)


def start(prompt: list[int], value: list[int]) -> int:
    """Where a value stands in the prompt."""
    return next(i for i in range(len(prompt)) if prompt[i : i + len(value)] == value)


if __name__ == "__main__":
    main()
