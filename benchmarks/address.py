"""Which key heads of a frozen model tell what a fact is about: candidates for `adapter.address`, before any training.

    python benchmarks/address.py [--model smollm2-135m] [--templates mk passkey phrase] [--items 24] [--json]

For every key head of every layer: the address of the question (tokens up to the end of the prompt) is compared with the
addresses of the four values of the same text (tokens before each). right: the share of items in which the asked one is
the nearest, chance 25 %; margin: how much nearer, cosine, than the nearest other, on average. Keys are of unit length
and less their mean over the facts; two tokens make an address, as before training.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cells import origin
from torch import Tensor

from nestling.adapters.memory import head_sizes
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
    centre = written.mean((0, 1))
    asked, written = F.normalize(asked - centre, dim=-1), F.normalize(written - centre, dim=-1)
    nearness = torch.einsum("ilhd,iclhd->iclh", asked, written)
    right = torch.tensor([item.right for item in items])
    own = nearness[torch.arange(len(items)), right]
    nearness[torch.arange(len(items)), right] = -torch.inf
    other = nearness.amax(1)
    share, margin = (own > other).double().mean(0), (own - other).mean(0)
    heads = sorted(np.ndindex(*share.shape), key=lambda at: (-float(share[at]), -float(margin[at])))
    print("| head | right % ↑ | margin ↑ |\n|---|---:|---:|")
    for layer, head in heads[: options.show]:
        print(f"| {layer}.{head} | {100 * share[layer, head]:.0f} | {margin[layer, head]:.2f} |")
    if options.json:
        rows = [
            {"head": f"{layer}.{head}", "right": float(share[layer, head]), "margin": float(margin[layer, head])}
            for layer, head in heads
        ]
        about = {"items": len(items), **{k: v for k, v in vars(options).items() if k not in ("json", "show")}}
        report = {"origin": origin("python benchmarks/address.py --json"), "about": about, "heads": rows}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


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
    asked, written = [], []
    for item in items:
        kept.clear()
        model(torch.tensor([item.prompt + item.answer]), use_cache=False, logits_to_keep=1)
        keys = F.normalize(torch.stack(kept).float(), dim=-1)  # [layers, T, heads, d]
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
