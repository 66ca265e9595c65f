"""Settings of language runs: what does not fit is refused by name, and TOML and flags reach every kind of table."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.adapters.layers import layer_numbers
from nestling.config.load import ADAPTERS, dump_config, parse_config, parse_table
from nestling.config.schema import (
    TEMPLATES,
    AdapterConfig,
    BaseConfig,
    ChoicesConfig,
    FullConfig,
    LanguageConfig,
    LatentConfig,
    LocalConfig,
    LoraConfig,
    MappingConfig,
    MemoryConfig,
    NeedleConfig,
    RunConfig,
    TaskConfig,
)
from nestling.core.errors import ConfigError
from nestling.tasks import needle

NEEDLES = {"task": NeedleConfig(), "base": LanguageConfig(), "adapter": MemoryConfig()}


def test_the_templates_are_those_that_can_be_made() -> None:
    assert list(TEMPLATES) == list(needle.TEMPLATES)
    assert NeedleConfig().clients == 7
    assert NeedleConfig(templates=("mk", "mk")).clients == 2


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: MemoryConfig(rank=0), "adapter.rank"),
        (lambda: MemoryConfig(layers="some"), "adapter.layers"),
        (lambda: MemoryConfig(window=-1), "adapter.window"),
        (lambda: MemoryConfig(sinks=-1), "adapter.sinks"),
        (lambda: MemoryConfig(write_bias=float("nan")), "adapter.write_bias"),
        (lambda: MemoryConfig(dim=-1), "adapter.dim"),
        (lambda: MemoryConfig(seed=-1), "adapter.seed"),
        *((lambda t=t: MemoryConfig(address=t), "adapter.address") for t in ("", "18", "18.", "18.-1", "1.2.3", "١.٢")),
        *(
            (lambda t=t: MemoryConfig(address=t), "adapter.address")
            for t in ("18.2,", "18.2, 17.1", ",".join(["1.1"] * 9), " 18.2", "18.2\n", "Own", "1" * 10 + ".0")
        ),
        (lambda: MemoryConfig(bind=True), "adapter.bind"),
        (lambda: LoraConfig(rank=0), "adapter.rank"),
        (lambda: LoraConfig(alpha=0.0), "adapter.alpha"),
        (lambda: LoraConfig(layers=""), "adapter.layers"),
        (lambda: LanguageConfig(model="a\0"), "base.model"),
        (lambda: NeedleConfig(templates=()), "task.templates"),
        (lambda: NeedleConfig(templates=("mk", "poem")), "task.templates"),
        (lambda: NeedleConfig(train_items=0), "task.train_items"),
        (lambda: NeedleConfig(test_items=5, round_items=6), "task.round_items"),
        (lambda: NeedleConfig(events=3), "task.events"),
        (lambda: NeedleConfig(text="file"), "task.path"),
        (lambda: NeedleConfig(path="a.txt"), "task.path"),
        (lambda: ChoicesConfig(train_items=0), "task.train_items"),
        (lambda: ChoicesConfig(test_items=5), "task.round_items"),
        (lambda: ChoicesConfig(round_items=0), "task.round_items"),
        (lambda: ChoicesConfig(data="mmlu-dev", path="x"), "task.path"),
        (lambda: ChoicesConfig(path="a\0"), "task.path"),
        (lambda: LocalConfig(gate_lr=-1.0), "local.gate_lr"),
        (lambda: LocalConfig(clip=float("inf")), "local.clip"),
        (lambda: LocalConfig(warmup=-1), "local.warmup"),
    ],
)
def test_a_bad_value_is_refused_by_name(make, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == where
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("table", "kind", "setting"),
    [
        ("adapter", "memory", 'gate = "tensor"'),
        ("adapter", "memory", 'update = "add"'),
        ("adapter", "memory", 'mix = "sum"'),
        ("adapter", "memory", 'address = "first"'),
        ("adapter", "memory", "address = 18.2"),
        ("adapter", "memory", 'low_rank = "none"'),
        ("adapter", "memory", 'share = "all"'),
        ("adapter", "lora", 'targets = "q_proj"'),
        ("base", "language", 'dtype = "float16"'),
        ("task", "needle", 'templates = "mk"'),
        ("task", "needle", 'text = "novel"'),
        ("task", "choices", 'data = "arc"'),
    ],
)
def test_a_word_that_is_not_known_is_refused_by_name(table: str, kind: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f'[{table}]\nkind = "{kind}"\n{setting}')
    assert caught.value.where == f"{table}.{setting.split()[0]}"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"task": TaskConfig()}, "base.kind"),
        ({"base": BaseConfig()}, "base.kind"),
        ({"task": ChoicesConfig(), "base": BaseConfig()}, "base.kind"),
        ({"task": ChoicesConfig(), "adapter": LatentConfig()}, "adapter.kind"),
        ({"adapter": LatentConfig()}, "adapter.kind"),
        ({"task": TaskConfig(), "base": BaseConfig()}, "adapter.kind"),
        ({"adapter": MappingConfig()}, "adapter.kind"),
        ({"task": TaskConfig(), "base": BaseConfig(), "adapter": LoraConfig(window=8)}, "adapter.window"),
        ({"task": TaskConfig(), "base": BaseConfig(), "adapter": LoraConfig(sinks=1)}, "adapter.sinks"),
    ],
)
def test_task_base_and_adapter_must_fit_each_other(changes: dict, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**NEEDLES | changes)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("adapter", "method"),
    [
        (MemoryConfig(), "fednl"),
        (MemoryConfig(dim=4), "fednl-latent"),
        (MemoryConfig(mix="add", address="18.2"), "fednl"),
        (LoraConfig(), "fedavg-lora"),
        (LoraConfig(dim=4), "fedavg-lora-latent"),
        (LoraConfig(ffa=True), "ffa-lora"),
        (FullConfig(), "fedavg"),
    ],
)
def test_each_method_has_its_name_and_survives_toml(adapter: AdapterConfig, method: str) -> None:
    config = RunConfig(**NEEDLES | {"adapter": adapter}, seed=3)
    assert config.method == method
    assert parse_config(dump_config(config)) == config
    table = json.loads(json.dumps(dataclasses.asdict(adapter)))  # as a saved adapter keeps it
    assert parse_table(table) == adapter


def test_a_table_without_a_kind_is_of_the_usual_one() -> None:
    config = parse_config("[task]\nclients = 3\n[base]\nwidth = 8\n[adapter]\ndim = 4")
    assert (type(config.task), type(config.base), type(config.adapter)) == (TaskConfig, BaseConfig, LatentConfig)


@pytest.mark.parametrize("table", ["task", "base", "adapter"])
def test_an_unknown_kind_names_the_known_ones(table: str) -> None:
    adapters = "latent, full, memory, lora, mapping"
    known = {"task": "images, text, needle, choices", "base": "resnet, tinygpt, language", "adapter": adapters}[table]
    for kind in ('"nedle"', "3", "[]"):
        with pytest.raises(ConfigError) as caught:
            parse_config(f"[{table}]\nkind = {kind}")
        assert caught.value.where == f"{table}.kind"
        assert known in caught.value.remedy
    with pytest.raises(ConfigError):
        parse_config(f"{table} = 7")


def test_a_setting_of_another_kind_is_no_setting_of_this_one() -> None:
    for text in ('task = {kind = "needle", alpha = 0.1}', 'base = {kind = "language", width = 16}'):
        with pytest.raises(ConfigError, match="is not a setting"):
            parse_config(text)


def test_adapters_by_kind() -> None:
    kinds = ("latent", "full", "memory", "lora", "mapping")
    assert {kind: type(parse_table({"kind": kind})) for kind in kinds} == ADAPTERS


@contextlib.contextmanager
def suppress_known() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if not any(words in str(error) for words in ("counts down", "twice", "names layer", "share above 0")):
            raise


PARTS = st.from_regex(r"[0-9]{1,2}(-[0-9]{1,2})?", fullmatch=True)


@given(st.one_of(st.lists(PARTS, min_size=1).map(",".join), st.text("0123456789-,. uper:al"), st.just("all")))
def test_what_the_schema_allows_is_what_the_layers_understand(layers: str) -> None:
    """Apart from what depends on the model, or on the order of numbers."""
    try:
        MemoryConfig(layers=layers)
    except ConfigError:
        with pytest.raises(ConfigError):
            layer_numbers(layers, 10**6)
        return
    with suppress_known():
        assert layer_numbers(layers, 10**6)
