"""What a client sends in a round of FedNL, for the published shapes of models whose weights are not at hand.

    python benchmarks/message_bytes.py [--json]

Each shape is written as the `config.json` that the model is published with (only what decides sizes), and counted by
`nestling.plan`, which reads no weights. Numbers and bytes are exact: they are what `len(message)` would be.
"""

import nestling  # first: it sets how idle OpenMP threads wait  # isort: skip

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from nestling.config.schema import CodecConfig, LanguageConfig, MemoryConfig, RunConfig
from nestling.counts import Plan

SHAPES = {
    "SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49_152),
    "Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 8192, 128_256),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936),
}
"""Model type, hidden size, layers, query heads, key/value heads, inner size, vocabulary; embeddings are tied."""
EVERYWHERE = MemoryConfig(layers="all", rank=16)
KINDS = {
    "rules": (EVERYWHERE, 32),
    "gates, per channel": (replace(EVERYWHERE, share="gates", gate="channel"), 16),
    "gates, per head": (replace(EVERYWHERE, share="gates"), 16),
    "latent over rules, 32 a tensor": (replace(EVERYWHERE, dim=32), 4),
}
"""Memories in every layer, low-rank parts of rank 16; and the bits of a number on its way up."""
KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    rows = [count(model, kind) for model in SHAPES for kind in KINDS]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("| model | what is sent | numbers | of them gates | bits | payload up | a stream's memory |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['model']} | {row['kind']} | {row['numbers']:,} | {row['gates']:,} | {row['bits']} | "
            f"{row['payload_bytes_up']:,} B | {row['memory_bytes']:,} B |"
        )


def planned(config: RunConfig, model: str) -> Plan:
    """What the run would be with a model of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(json.dumps(shape(model)))
        return nestling.plan(replace(config, base=LanguageConfig(model=str(config_file))))


def count(model: str, kind: str) -> dict[str, object]:
    """One row."""
    adapter, bits = KINDS[kind]
    config = replace(nestling.load_config("needle-smollm2"), adapter=adapter, codec=CodecConfig(bits=bits))  # type: ignore[arg-type]
    plan = planned(config, model)
    gates = 0 if adapter.dim else sum(size[0] for name, size in plan.layout if name.endswith(".gate"))
    return {
        "model": model,
        "kind": kind,
        "numbers": plan.trainable_parameters,
        "gates": gates,
        "bits": bits,
        "payload_bytes_up": plan.payload_bytes_up,
        "memory_bytes": plan.stream_bytes["memory"],
        "window_bytes": plan.stream_bytes["window"],
        "model_parameters": plan.model_parameters,
    }


def shape(model: str) -> dict[str, object]:
    """The content of a model's config.json."""
    *sizes, inner, vocabulary = SHAPES[model]
    return dict(zip(KEYS, sizes, strict=True)) | {
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }


if __name__ == "__main__":
    main()
