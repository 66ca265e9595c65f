"""Tables that are counted and not measured: what each run of the papers, and each published shape, would send."""

import nestling  # first: it sets how idle OpenMP threads wait

# isort: split
from dataclasses import replace

from message_bytes import count, planned
from saved import lines

from nestling.config.schema import LoraConfig, MemoryConfig
from nestling.counts import Plan
from nestling.report.tables import human_bytes


def bytes_of_shapes() -> str:
    """What FedNL sends for the shapes of published models."""
    rows = []
    for model in ("SmolLM2-135M", "Llama-3.2-1B", "Qwen2.5-1.5B"):
        for kind in ("rules", "gates, per channel", "latent over rules, 32 a tensor"):
            row = count(model, kind)
            numbers = (f"{row[key]:,}" for key in ("numbers", "gates", "bits"))
            rows.append((model, kind, *numbers, f"{row['payload_bytes_up']:,} B", f"{row['memory_bytes']:,} B"))
    return lines(("model", "what is sent", "numbers", "of them gates", "bits", "payload up", "a stream's memory"), rows)


FLITE = (
    ("CIFAR-100, ResNet-18", "flite-cifar100-resnet18"),
    ("CIFAR-10, ResNet-18", "flite-cifar10-resnet18"),
    ("Tiny ImageNet, ResNet-34", "flite-tiny-imagenet-resnet34"),
    ("WikiText-2, TinyGPT", "flite-wikitext2-tinygpt"),
    ("its stand-in, Shakespeare", "flite-shakespeare-tinygpt"),
)


def papers_flite() -> str:
    """The FLITE paper's runs: each command, and what its plan says."""
    rows = []
    for table, preset in FLITE:
        config = nestling.load_config(preset)
        plan = nestling.plan(config)
        up = [
            f"{nestling.plan(replace(config, codec=replace(config.codec, bits=bits))).payload_bytes_up:,}"
            for bits in (32, 8, 4)
        ]
        counted = (f"{plan.adapted_parameters:,}", f"{plan.payload_factor:,}", human_bytes(plan.total_wire_bytes))
        numbers = f"{plan.trainable_parameters:,}"
        rows.append((table, f"`nestling run {preset}`", numbers, *up, *counted, *held(plan)))
    head = ("paper's table", "command", "numbers sent", "bytes up, float32", "int8", "int4", "weights they adapt")
    return lines((*head, "times smaller", "whole run, float32", "steps", "memory"), rows)


def held(plan: Plan) -> tuple[str, str]:
    """Steps of all clients in the whole run, and what a client holds besides its activations."""
    steps = "as the text is long" if plan.steps is None else f"{plan.steps:,}"
    return steps, human_bytes(plan.weights_bytes + plan.training_bytes)


def papers_fednl() -> str:
    """The FedNL paper's runs: each command, and what its plan says."""
    rows = []
    for preset, model, flags in (
        ("mmlu-qwen2.5-1.5b", "Qwen2.5-1.5B", ""),
        ("mmlu-llama-3.2-1b", "Llama-3.2-1B", ""),
        ("needle-qwen2.5-1.5b", "Qwen2.5-1.5B", ""),
        ("needle-qwen2.5-1.5b", "Llama-3.2-1B", " --base.model meta-llama/Llama-3.2-1B"),
    ):
        config = nestling.load_config(preset)
        assert isinstance(config.adapter, MemoryConfig)
        rank, window = config.adapter.rank, config.adapter.window
        up = [
            f"{planned(replace(config, adapter=adapter), model).payload_bytes_up:,} B"
            for adapter in (
                config.adapter,
                replace(config.adapter, share="gates"),
                replace(config.adapter, dim=32),
                LoraConfig(rank=rank, alpha=2.0 * rank, window=window),
            )
        ]
        plan = planned(config, model)
        stream = f"{sum(plan.stream_bytes.values()):,} B" if window else "grows"
        whole = human_bytes(plan.total_wire_bytes)
        rows.append((f"`nestling run {preset}{flags}`", *up, whole, *held(plan), stream))
    head = ("command", "rules", "gates alone", "latents of rules", "FedAvg-LoRA", "whole run, rules")
    return lines((*head, "steps", "memory", "held by a stream"), rows)
