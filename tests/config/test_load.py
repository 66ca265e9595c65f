"""TOML in and out: strict, with the near miss named, whatever the file's encoding or depth."""

import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.config.load import dump_config, load_config, near, parse_config, parse_table, preset_names, preset_text
from nestling.config.schema import (
    BaseConfig,
    CodecConfig,
    FullConfig,
    LatentConfig,
    LocalConfig,
    LoraConfig,
    MachineConfig,
    MappingConfig,
    PrivacyConfig,
    RunConfig,
    ServerConfig,
    TaskConfig,
)
from nestling.core.errors import ConfigError


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, where="my.toml")
    return caught.value


@pytest.mark.parametrize(
    ("line", "place", "hint"),
    [
        ("round = 3", "round", "'rounds'"),
        ("Rounds = 3", "Rounds", "'rounds'"),
        ("codec.bit = 8", "codec.bit", "'bits'"),
        ("[adapters]\ndim = 3", "adapters", "'adapter'"),
        ("[adapter]\ndimension = 3", "adapter.dimension", "'dim'"),
        ('[adapter]\nkind = "full"\ndim = 3', "adapter.dim", "targets"),
        ('adapter.kind = "latents"', "adapter.kind", "'latent'"),
        ('task.data = "cifar-10"', "task.data", "'cifar10'"),
        ("[local]\nlearning_rate = 1e-3", "local.learning_rate", "Known: epochs, batch_size"),
    ],
)
def test_cat_076_a_misspelt_setting_is_named_with_its_near_miss(line: str, place: str, hint: str) -> None:
    error = refused(line)
    assert error.where == place
    assert hint in error.remedy


def test_cat_076_a_duplicate_key_or_broken_syntax_names_file_and_line() -> None:
    for text, line in (
        ("rounds = 1\nrounds = 2\n", "line 2"),
        ("rounds = \n", "line 1"),
        ("[task]\n[task]\n", "line 2"),
    ):
        error = refused(text)
        assert error.where == "my.toml"
        assert line in str(error)
        assert error.remedy


@pytest.mark.parametrize(
    "text",
    [
        "rounds = " + "[" * 10_000 + "]" * 10_000,
        "rounds = " + "{a=" * 10_000 + "1" + "}" * 10_000,
        "rounds" + ".a" * 10_000 + " = 1",
        "[" + "a." * 10_000 + "a]",
        "rounds = [" + "[],[" * 90 + "]" * 91,
        "codec.bits" + ".a" * 3_000 + " = 1",
        "adapter.kind" + ".a" * 3_000 + " = 1",
        "adapter.targets" + ".a" * 3_000 + " = 1",
        "rounds = " + "9" * 5_000,
        "rounds = 0x" + "f" * 5_000,
        "local.lr = " + "9" * 5_000 + ".0",
        "local.lr = 1e999",
        "\x00",
        "rounds = 1\x7f",
    ],
    ids=lambda text: text[:16] + f"…{len(text)}",
)
def test_cat_076_deep_or_endless_values_are_one_error(text: str) -> None:
    assert refused(text).exit_code == 2


@given(st.text(max_size=60) | st.text(alphabet="rounds=task.[]{}\"'\n 0123456789-e", max_size=60))
def test_cat_076_any_text_is_settings_or_one_error(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(parse_config(text), RunConfig)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_cat_075_windows_line_ends_and_byte_order_mark(tmp_path: Path, newline: str, mark: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes((mark + preset_text("flite-digits").replace("\n", newline)).encode())
    assert load_config(path) == load_config("flite-digits")


def test_cat_075_another_encoding_is_an_error_and_no_guess(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for data in ('name = "é"'.encode("latin-1"), "rounds = 1".encode("utf-16")):
        path.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.where == str(path)
        assert "UTF-8" in str(caught.value)


def test_cat_074_names_of_files_work_or_are_refused(tmp_path: Path) -> None:
    for name in (
        "a b.toml",
        "unicode-é-日本.toml",
        "x" * 200 + ".toml",
        "-dash.toml",
        "new\nline",
        os.fsdecode(b"\xff.toml"),
    ):
        path = tmp_path / name
        path.write_text("rounds = 4")
        assert load_config(path).rounds == 4
    for missing in ("x" * 5_000, "a\x00b", "", ".", "/", str(tmp_path)):
        with pytest.raises(ConfigError) as caught:
            load_config(missing)
        assert caught.value.exit_code == 2


def test_a_missing_file_names_presets_and_files_that_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hospital.toml").write_text("rounds = 1")
    with pytest.raises(ConfigError, match=r"Did you mean 'hospital\.toml'"):
        load_config("hospitel.toml")
    with pytest.raises(ConfigError, match="Did you mean 'flite-digits'"):
        load_config("flite-digit")
    with pytest.raises(ConfigError, match="Did you mean 'flite-digits'"):
        preset_text("flite_digits")
    with pytest.raises(ConfigError, match="Did you mean 'flite-digits'"):
        load_config("flite-digits.toml")  # a preset is not a file


def test_a_file_comes_before_a_preset_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flite-digits").write_text("rounds = 77")
    assert load_config("flite-digits").rounds == 77


def test_nothing_given_is_the_defaults() -> None:
    assert parse_config("") == RunConfig()
    assert parse_config("[adapter]") == RunConfig()
    assert parse_config('[adapter]\nkind = "full"').adapter == FullConfig()


def test_whole_numbers_become_floats_and_lists_become_tuples() -> None:
    config = parse_config('local.lr = 1\nadapter.targets = ["a", "b"]')
    assert type(config.local.lr) is float
    assert config.adapter.targets == ("a", "b")


def test_an_adapter_from_a_plain_table_is_as_strict() -> None:
    assert parse_table({"kind": "full", "targets": ["x"], "exclude": []}) == FullConfig(targets=("x",))
    assert parse_table({"kind": "latent", "seed": None, "dim": 3}) == LatentConfig(dim=3)
    bad = ({"kind": "latent", "dims": 3}, {"kind": "prefix"}, {"kind": "latent", "dim": "3"}, [], None, {"kind": {}}, 7)
    for table in bad:
        with pytest.raises(ConfigError):
            parse_table(table)


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_advice_lists_all_that_there_is(word: str, names: list[str]) -> None:
    assert near(word, names).endswith("Known: " + ", ".join(names) + ".")


# Any settings that can be made can be written down and read back.

seeds = st.integers(0, 2**64 - 1)
counts = st.integers(1, 2**32 - 1)
positive = st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False)
words = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
patterns = st.lists(words, max_size=3).map(tuple)
names = st.from_regex(r"[a-zA-Z0-9_é日][a-zA-Z0-9._é日-]{0,63}", fullmatch=True)
latents = st.integers(1, 10_000).flatmap(
    lambda dim: st.builds(
        LatentConfig, seed=st.none() | seeds, dim=st.just(dim), rank=st.integers(0, dim), targets=patterns,
        exclude=patterns, train_norms=st.booleans(),
    )
)  # fmt: skip
tasks = st.builds(
    TaskConfig, data=st.sampled_from(["fashion", "cifar10", "cifar100", "tiny-imagenet"]), path=words, clients=counts,
    partition=st.sampled_from(["dirichlet", "iid"]), alpha=st.floats(min_value=1e-300, max_value=1e4),
    evaluate_on=st.sampled_from(["test", "validation"]), augment=st.sampled_from(["none", "crop-flip"]),
)  # fmt: skip
bases = st.builds(
    BaseConfig, model=st.sampled_from(["resnet8", "resnet18", "resnet34"]),
    width=st.integers(1, 512).map(lambda n: 8 * n), weights=words, path=words, lr=positive, seed=seeds,
    pretrain_on=st.sampled_from(["digits8", "fashion", "cifar10", "cifar100", "tiny-imagenet", "none"]),
    augment=st.booleans(), epochs=st.integers(0, 2**32 - 1),
)  # fmt: skip
locals_ = st.builds(
    LocalConfig, epochs=counts, batch_size=counts, optimizer=st.sampled_from(["sgd", "adamw"]), lr=positive,
    momentum=st.floats(0, 1, exclude_max=True), weight_decay=st.floats(0, 1e300),
    decay=st.sampled_from(["linear", "none"]),
)  # fmt: skip
scales = st.sampled_from(["message", "tensor"])
codecs = st.builds(
    CodecConfig, bits=st.sampled_from([32, 16, 8, 4, 2]), down_bits=st.sampled_from([32, 16, 8, 4, 2]),
    scale=scales, send=st.sampled_from(["state", "delta"]),
) | st.builds(
    CodecConfig, bits=st.sampled_from([8, 4, 2]), scale=scales, rounding=st.just("stochastic"), feedback=st.booleans(),
) | st.builds(
    CodecConfig, kind=st.just("rotated"), bits=st.sampled_from([4, 2, 1]), down_kind=st.just("rotated"),
    down_bits=st.sampled_from([4, 2, 1]), scale=scales, feedback=st.booleans(),
) | st.builds(
    CodecConfig, kind=st.sampled_from(["topk", "randomk", "powersgd"]), rank=st.integers(1, 1024),
    share=st.integers(1, 999_999).map(lambda n: n / 1e6), feedback=st.booleans(), down_bits=st.sampled_from([16, 2]),
)  # fmt: skip
machines = st.builds(MachineConfig, out=words, workers=st.integers(0, 99), device=words, references=st.booleans())


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    task = draw(tasks)
    asked = draw(st.integers(0, task.clients))
    weighting, rules = draw(st.sampled_from([("examples", ["mean", "rfa"]), ("uniform", ["mean", "median", "krum"])]))
    server = ServerConfig(
        clients_per_round=asked,
        weighting=weighting,
        aggregate=draw(st.sampled_from(rules)),
        outlier=draw(st.just(0.0) | st.floats(1, 1e300)),
        hostile_share=draw(st.floats(0, 0.49)),
        min_replies=draw(st.integers(1, asked or task.clients)),
        patience=draw(counts),
        max_abs=draw(st.floats(1, 1e300)),
    )
    codec = draw(codecs)
    can_be_private = (server.weighting, server.aggregate, codec.send) == ("uniform", "mean", "delta")
    privacy = PrivacyConfig(
        draw(st.just(0.0) | st.floats(1e-5, 2.0**20)) if can_be_private else 0.0,
        draw(st.floats(2.0**-60, 2.0**60)),
        draw(st.floats(0, 0.99)),
        draw(st.floats(1e-300, 0.99)),
    )
    if privacy.noise and 0 < asked < task.clients and server.min_replies == 1:
        privacy = replace(privacy, sampling=draw(st.sampled_from(["fixed", "poisson"])))
    loras = st.builds(LoraConfig, rank=counts, targets=patterns, ffa=st.booleans(), dim=counts)
    mappings = st.builds(MappingConfig, dim=counts, modulation=st.floats(0, 1e300), squash=st.booleans())
    adapter = draw(latents | st.builds(FullConfig, targets=patterns, exclude=patterns) | loras | mappings)
    return RunConfig(
        draw(names),
        draw(seeds),
        draw(counts),
        task,
        draw(bases),
        adapter,
        draw(locals_),
        server,
        privacy,
        codec,
        draw(machines),
    )


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # of the type checks, which look at any one item
@given(configs())
def test_cat_076_every_setting_survives_being_written_and_read(config: RunConfig) -> None:
    again = parse_config(dump_config(config))
    assert again == config
    assert repr(asdict(again)) == repr(asdict(config))  # also −0.0 and the types


def test_all_presets_are_there() -> None:
    assert {"flite-digits", "fedavg-digits", "flite-cifar100-resnet18"} <= set(preset_names())
