"""Every preset can be copied, read, planned, and says what each of its settings does."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
from small import sizes_of

from nestling.cli.main import main
from nestling.config.load import dump_config, load_config, parse_config, preset_names, preset_text
from nestling.config.schema import LanguageConfig
from nestling.counts import plan


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_can_be_read_and_planned(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config.name == name
    assert parse_config(dump_config(config)) == config
    if isinstance(config.base, LanguageConfig):  # whose weights need not be here: its sizes will do
        pytest.importorskip("transformers")
        config = dataclasses.replace(config, base=LanguageConfig(model=sizes_of(config.base.model, tmp_path)))
    planned = plan(config)
    assert planned.trainable_parameters == sum(_size(shape) for _, shape in planned.layout)
    assert planned.trainable_parameters <= planned.adapted_parameters <= planned.model_parameters
    assert planned.wire_bytes_up == planned.payload_bytes_up + 64


def _size(shape: list[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_holds_every_setting_of_its_kind(name: str) -> None:
    """A reader sees all there is to set, so a new setting cannot be forgotten here."""
    table, config = tomllib.loads(preset_text(name)), load_config(name)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        assert field.name in table
        if dataclasses.is_dataclass(value):
            # The maps' own seed is left open: none stands for the run's, and TOML has no word for it.
            wanted = {f.name for f in dataclasses.fields(value)} - ({"seed"} if field.name == "adapter" else set())
            assert set(table[field.name]) == wanted


@pytest.mark.parametrize("name", preset_names())
def test_new_copies_a_preset_with_its_comments(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert main(["new", name, str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert path.read_text("utf-8") == preset_text(name)
    assert load_config(path) == load_config(name)
    assert len(re.findall(r"#.*\w", path.read_text("utf-8"))) >= 20


STAGES = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}


def convolutions(model: str) -> list[tuple[int, int]]:
    """(weights, channels out) of each convolution of the paper's networks on colour images: a 3×3 stem of 64 channels,
    pairs of 3×3, and a 1×1 where a stage changes the channels."""
    found, wide = [(3 * 64 * 9, 64)], 64
    for stage, blocks in enumerate(STAGES[model]):
        out = 64 << stage
        found += [(wide * out, out)] * (stage > 0)
        found += [(9 * wide * out, out), *[(9 * out * out, out)] * (2 * blocks - 1)]
        wide = out
    return found


FLITE = [
    ("flite-cifar10-resnet18", "resnet18", 10, 1280),
    ("flite-cifar100-resnet18", "resnet18", 100, 1280),
    ("flite-tiny-imagenet-resnet34", "resnet34", 200, 2304),
]


@pytest.mark.parametrize("partition", ["dirichlet", "iid"])
@pytest.mark.parametrize(("name", "model", "classes", "latents"), FLITE)
def test_the_papers_benchmarks_send_the_papers_bytes(name, model, classes, latents, partition) -> None:
    config = load_config(name)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, partition=partition))
    sizes = [size for size, _ in convolutions(model)]
    assert (len(sizes), sum(sizes)) == {"resnet18": (20, 11_159_232), "resnet34": (36, 21_259_968)}[model]
    assert latents == 64 * len(sizes)
    assert (config.base.model, config.base.width, config.base.head) == (model, 64, "orthonormal")
    assert (config.task.clients, config.server.clients_per_round) == (8, 0)
    planned = plan(config)
    assert planned.trainable_parameters == latents
    assert planned.payload_bytes_up == planned.payload_bytes_down == 4 * latents
    assert (planned.adapted_parameters, planned.full_payload_bytes) == (sum(sizes), 4 * sum(sizes))
    norms = sum(2 * out for _, out in convolutions(model))  # a scale and a shift for each channel
    assert planned.model_parameters == sum(sizes) + 512 * classes + norms
    assert planned.payload_factor == {1280: 8718, 2304: 9227}[latents] == round(sum(sizes) / latents)
    assert planned.total_wire_bytes == config.rounds * 8 * 2 * (4 * latents + 64)
    for bits, payload in ((8, latents + 8), (4, latents // 2 + 8)):
        few = dataclasses.replace(config, codec=dataclasses.replace(config.codec, bits=bits))
        assert plan(few).payload_bytes_up == payload
    assert {1280: (1288, 648), 2304: (2312, 1160)}[latents] == (latents + 8, latents // 2 + 8)


@pytest.mark.parametrize("name", [name for name, *_ in FLITE])
def test_the_papers_benchmarks_say_what_is_the_papers_and_what_is_ours(name) -> None:
    head = preset_text(name).split("name =")[0]
    for words in (
        "Of the paper",
        'partition = "iid"',
        "Dirichlet shares with alpha = 0.1",
        "are ours",
        "BENCHMARKS.md",
    ):
        assert words in head.replace("\n# ", " ")
    assert (load_config(name).task.partition, load_config(name).task.alpha) == ("dirichlet", 0.1)


def test_flite_and_fedavg_on_digits_differ_in_method_alone() -> None:
    flite, fedavg = load_config("flite-digits"), load_config("fedavg-digits")
    assert (flite.method, fedavg.method) == ("flite", "fedavg")
    for part in ("seed", "rounds", "task", "base", "server", "codec", "machine"):
        assert getattr(flite, part) == getattr(fedavg, part)


def test_the_short_needle_run_differs_from_the_long_one_in_size_alone() -> None:
    long, short = load_config("needle-smollm2"), load_config("needle-smollm2-short")
    task = dataclasses.replace(
        short.task, templates=long.task.templates, train_items=long.task.train_items, test_items=long.task.test_items
    )
    machine = dataclasses.replace(short.machine, references=long.machine.references)
    assert dataclasses.replace(short, name=long.name, rounds=long.rounds, task=task, machine=machine) == long
    assert short.task.clients * short.task.train_items * short.rounds <= 600  # under a second each on a core
