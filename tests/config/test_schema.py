"""Settings are refused where they are made: in a file, on the command line (tests/cli) and in Python."""

import subprocess
import sys

import pytest

from nestling.config.load import parse_config
from nestling.config.schema import CodecConfig, FullConfig, LatentConfig, MachineConfig, RunConfig, TaskConfig
from nestling.core.errors import ConfigError

HUGE = "1" + "0" * 400

# One line of TOML per setting that must be refused, and the key that the error must name.
REFUSED = [
    *[(f"rounds = {v}", "rounds") for v in ("0", "-1", "1e9", "true", '"3"', "1.5", "4294967296", HUGE)],
    *[(f"local.lr = {v}", "local.lr") for v in ("nan", "inf", "-inf", '"1e-3"', "-1", "0.0", "true", HUGE)],
    *[(f"base.lr = {v}", "base.lr") for v in ("nan", "0", "-1e-3")],
    *[(f"local.momentum = {v}", "local.momentum") for v in ("nan", "1.0", "-0.1", "inf")],
    *[(f"local.weight_decay = {v}", "local.weight_decay") for v in ("nan", "-1e-9", "inf")],
    *[(f"task.alpha = {v}", "task.alpha") for v in ("nan", "0", "-0.1", "inf")],
    *[(f"server.max_abs = {v}", "server.max_abs") for v in ("nan", "inf", "0", "-5", "0.5")],
    *[(f"task.clients = {v}", "task.clients") for v in ("0", "-3", "2.0", "true")],
    *[(f"adapter.dim = {v}", "adapter.dim") for v in ("0", "-1", "64.0", "false")],
    *[(f"adapter.rank = {v}", "adapter.rank") for v in ("-1", "65")],
    *[(f"base.width = {v}", "base.width") for v in ("0", "4", "12", "80000000000")],
    *[(f"codec.bits = {v}", "codec.bits") for v in ("0", "7", "8.0", '"8"', "true", "[8]")],
    *[(f"codec.down_bits = {v}", "codec.down_bits") for v in ("3", "64", "1", "true")],
    ("codec.bits = 1", "codec.bits"),
    *[(f'codec = {{kind = "rotated", bits = {v}}}', "codec.bits") for v in ("32", "16", "8")],
    *[(f'codec = {{kind = "{kind}", bits = 4}}', "codec.bits") for kind in ("topk", "randomk", "powersgd")],
    ('codec = {down_kind = "rotated", down_bits = 8}', "codec.down_bits"),
    ('codec.down_kind = "rotated"', "codec.down_bits"),
    ('codec.kind = "rotated"', "codec.bits"),
    ('codec.kind = "sign"', "codec.kind"),
    ('codec.down_kind = "topk"', "codec.down_kind"),
    *[(f"codec.share = {v}", "codec.share") for v in ("0", "-0.1", "1.5", "nan", "inf", "0.1234567", "true")],
    *[(f"codec.rank = {v}", "codec.rank") for v in ("0", "1025", "2.0", "true")],
    ('codec.rounding = "up"', "codec.rounding"),
    ('codec.rounding = "stochastic"', "codec.rounding"),
    ('codec = {rounding = "stochastic", bits = 16}', "codec.rounding"),
    ('codec = {rounding = "stochastic", kind = "rotated", bits = 4}', "codec.rounding"),
    ('codec = {rounding = "stochastic", kind = "topk"}', "codec.rounding"),
    *[(f'codec = {{kind = "{kind}", send = "state"}}', "codec.send") for kind in ("topk", "randomk", "powersgd")],
    ('codec = {feedback = true, send = "state"}', "codec.feedback"),
    ("codec.feedback = 1", "codec.feedback"),
    *[(f"server.{k} = {v}", f"server.{k}") for k in ("min_replies", "patience") for v in ("0", "-1", "1.0")],
    *[(f"{table}.epochs = -1", f"{table}.epochs") for table in ("local", "base")],
    ("local.epochs = 0", "local.epochs"),
    ("local.batch_size = 0", "local.batch_size"),
    ("machine.workers = -1", "machine.workers"),
    ("machine.references = 1", "machine.references"),
    ("server.clients_per_round = 9", "server.clients_per_round"),
    ("server.min_replies = 9", "server.min_replies"),
    ("server = {clients_per_round = 2, min_replies = 3}", "server.min_replies"),
    *[(f"server.deadline = {value}", "server.deadline") for value in ("-1.0", "nan", "inf", "1.1e7")],
    ('server = {deadline = 9.0, weighting = "uniform"}\nprivacy.noise = 1.0', "server.deadline"),
    ("server.stragglers = -1", "server.stragglers"),
    ("server.stragglers = 8", "server.stragglers"),
    ("server = {clients_per_round = 4, min_replies = 3, stragglers = 2}", "server.stragglers"),
    ('server = {stragglers = 1, weighting = "uniform"}\nprivacy.noise = 1.0', "server.stragglers"),
    *[(f"server.outlier = {value}", "server.outlier") for value in ("0.5", "-1.0", "nan", "inf")],
    *[(f"server.hostile_share = {value}", "server.hostile_share") for value in ("0.5", "-0.1", "nan")],
    *[(f"privacy.{k} = {v}", f"privacy.{k}") for k in ("noise", "quantile") for v in ("-0.1", "nan", "inf")],
    *[(f"privacy.{k} = {v}", f"privacy.{k}") for k in ("clip", "delta") for v in ("0", "-1.0", "nan", "inf")],
    *[(f"privacy.noise = {value}", "privacy.noise") for value in ("1e-6", "2e6")],
    *[(f"privacy.clip = {value}", "privacy.clip") for value in ("1e-19", "1e19")],
    *[(f"privacy.{k} = 1.0", f"privacy.{k}") for k in ("quantile", "delta")],
    ("privacy.noise = 1.0", "server.weighting"),
    ('privacy.noise = 1.0\nserver = {weighting = "uniform", aggregate = "median"}', "server.aggregate"),
    ('privacy.noise = 1.0\nserver.weighting = "uniform"\ncodec.send = "state"', "codec.send"),
    ('privacy.sampling = "secret"', "privacy.sampling"),
    ('privacy.sampling = "poisson"\nserver.clients_per_round = 2', "privacy.sampling"),
    *[
        (f'privacy = {{noise = 1.0, sampling = "poisson"}}\nserver = {{weighting = "uniform", {rest}}}', key)
        for rest, key in (
            ("clients_per_round = 0", "server.clients_per_round"),
            ("clients_per_round = 8", "server.clients_per_round"),
            ("clients_per_round = 4, min_replies = 2", "server.min_replies"),
        )
    ],
    ('server = {aggregate = "bulyan", weighting = "uniform"}', "server.aggregate"),
    *[(f'server.aggregate = "{rule}"', "server.aggregate") for rule in ("median", "trimmed", "krum", "clipping")],
    ('task.data = "mnist"', "task.data"),
    ('task.partition = "Dirichlet"', "task.partition"),
    ('task.evaluate_on = "train"', "task.evaluate_on"),
    *[(f'task = {{data = "cifar10", augment = {v}}}', "task.augment") for v in ('"crop"', "true", '""')],
    ('task.augment = "crop-flip"', "task.augment"),  # of digits, which have no mirror images
    ('task.data = "tiny_imagenet"', "task.data"),
    ('base.pretrain_on = "digits"', "base.pretrain_on"),
    ('base.path = "https://host/data"', "base.path"),
    ('base.model = "resnet50"', "base.model"),
    ('base.pretrain_on = ""', "base.pretrain_on"),
    ('local.optimizer = "adam"', "local.optimizer"),
    ('local.decay = "cosine"', "local.decay"),
    ("base.augment = 1", "base.augment"),
    *[(f"adapter.budget = {v}", "adapter.budget") for v in ("-1", "1.0", "true")],
    ("adapter = {budget = 99, rank = 2}", "adapter.budget"),
    ('server.weighting = "sqrt"', "server.weighting"),
    ('codec.scale = "row"', "codec.scale"),
    ('codec.send = "sate"', "codec.send"),
    ('adapter.targets = "*"', "adapter.targets"),
    ("adapter.targets = [1]", "adapter.targets"),
    ('adapter.targets = ["a\\u0000"]', "adapter.targets"),
    ('adapter = {kind = "full", exclude = ["\\u0000"]}', "adapter.exclude"),
    ('adapter.kind = "memory"', "adapter.kind"),
    ('adapter = {kind = "lora", window = 8}', "adapter.window"),
    ('adapter = {kind = "lora", sinks = 0}', "adapter.sinks"),
    ('adapter = {kind = "lora", dim = -1}', "adapter.dim"),
    ('adapter = {kind = "lora", ffa = 1}', "adapter.ffa"),
    ('adapter = {kind = "mapping", dim = 0}', "adapter.dim"),
    ('adapter = {kind = "mapping", modulation = -0.1}', "adapter.modulation"),
    ('adapter = {kind = "mapping", modulation = inf}', "adapter.modulation"),
    ('adapter = {kind = "mapping", squash = "tanh"}', "adapter.squash"),
    ('adapter = {kind = "mapping", seed = -1}', "adapter.seed"),
    ("adapter.kind = []", "adapter.kind"),
    ("adapter.kind = 1", "adapter.kind"),
    ('adapter = "latent"', "adapter"),
    ("adapter = 3", "adapter"),
    ("task = []", "task"),
    ('machine.out = "a\\u0000b"', "machine.out"),
    *[(f'name = "{v}"', "name") for v in ("", "a b", "a/b", "..", "-x", ".x", "x" * 65, "a\\nb", "a\\u202eb")],
    ("name = 5", "name"),
]


@pytest.mark.parametrize(("line", "key"), REFUSED, ids=[line[:40] for line, _ in REFUSED])
def test_cat_076_what_cannot_be_used_is_refused_by_its_key_with_a_remedy(line: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(line)
    error = caught.value
    assert error.where == key
    assert error.cause
    assert error.remedy
    assert error.exit_code == 2


SEED_KEYS = ("seed", "adapter.seed", "base.seed")


@pytest.mark.parametrize("key", SEED_KEYS)
@pytest.mark.parametrize("seed", ["-1", str(2**64), "1e3", '"0xff"', '"7"', "nan", "true", "1.0", HUGE])
def test_cat_021_a_seed_that_is_none_is_a_setting_that_cannot_be_used(key: str, seed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{key} = {seed}")
    assert (caught.value.where, caught.value.exit_code) == (key, 2)


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_cat_021_large_seeds_are_kept_exactly(seed: int) -> None:
    config = parse_config(f"seed = {seed}\nadapter.seed = {seed}\nbase.seed = {seed}")
    assert config.seed == config.base.seed == seed
    assert isinstance(config.adapter, LatentConfig)
    assert config.adapter.seed == seed


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("rounds = 1", ("rounds",), 1),
        ("local.lr = 1", ("local", "lr"), 1.0),
        ("local.momentum = 0", ("local", "momentum"), 0.0),
        ("base.epochs = 0", ("base", "epochs"), 0),
        ("adapter.rank = 64", ("adapter", "rank"), 64),
        ("task.clients = 1", ("task", "clients"), 1),
        ("server = {clients_per_round = 8, min_replies = 8}", ("server", "min_replies"), 8),
        ("server = {min_replies = 3, stragglers = 5}", ("server", "stragglers"), 5),
        ("server.deadline = 60", ("server", "deadline"), 60.0),
        ("server.max_abs = 1", ("server", "max_abs"), 1.0),
        ("server.outlier = 0", ("server", "outlier"), 0.0),
        ("server.outlier = 1", ("server", "outlier"), 1.0),
        ('server.aggregate = "rfa"', ("server", "aggregate"), "rfa"),
        ('server = {aggregate = "krum", weighting = "uniform"}', ("server", "aggregate"), "krum"),
        ('name = "日本-é_1.x"', ("name",), "日本-é_1.x"),
    ],
)
def test_the_edges_of_what_is_allowed_are_allowed(line: str, path: tuple[str, ...], value: object) -> None:
    found: object = parse_config(line)
    for part in path:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_python_is_refused_the_same_as_a_file() -> None:
    for make, key in (
        (lambda: RunConfig(rounds=0), "rounds"),
        (lambda: RunConfig(seed=-1), "seed"),
        (lambda: LatentConfig(seed=2**64), "adapter.seed"),
        (lambda: LatentConfig(dim=10**400), "adapter.dim"),
        (lambda: TaskConfig(alpha=float("nan")), "task.alpha"),
        (lambda: CodecConfig(kind="rotated", bits=True), "codec.bits"),
        (lambda: TaskConfig(path="\udcff"), "task.path"),
        (lambda: MachineConfig(out="\udcff"), "machine.out"),
        (lambda: LatentConfig(targets=("\udcff",)), "adapter.targets"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.where == key


def test_python_of_the_wrong_type_is_refused_too() -> None:
    # In a process of its own: the types that the test session checks would be refused before the settings see them.
    program = """
from nestling.config.schema import *
from nestling.core.errors import ConfigError
import numpy as np
for make, key in ((lambda: LatentConfig(dim=2.5), "adapter.dim"), (lambda: RunConfig(rounds=True), "rounds"),
                  (lambda: RunConfig(rounds=1e1), "rounds"), (lambda: CodecConfig(bits=5), "codec.bits"),
                  (lambda: LocalConfig(epochs="3"), "local.epochs"), (lambda: LatentConfig(seed=1.0), "adapter.seed"),
                  (lambda: TaskConfig(data="mnist"), "task.data"), (lambda: BaseConfig(model="vgg"), "base.model")):
    try:
        make()
    except ConfigError as error:
        assert error.where == key, (error.where, key)
    else:
        raise SystemExit(key)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "float32"),
        ({"bits": 16, "scale": "tensor"}, "float16"),
        ({"bits": 8}, "int8-message"),
        ({"bits": 4, "scale": "tensor"}, "int4-tensor"),
        ({"bits": 2, "scale": "tensor", "rounding": "stochastic"}, "int2-tensor"),
        ({"bits": 2}, "int2-message"),
        ({"kind": "rotated", "bits": 4}, "rotated4"),
        ({"kind": "rotated", "bits": 1, "scale": "tensor"}, "rotated1"),
        ({"kind": "topk"}, "topk@0.01"),
        ({"kind": "topk", "share": 1.0}, "topk@1"),
        ({"kind": "randomk", "share": 1e-6}, "randomk@1e-06"),
        ({"kind": "powersgd", "feedback": True}, "powersgd@2"),
        ({"kind": "powersgd", "rank": 7}, "powersgd@7"),
    ],
)
def test_a_codec_setting_names_a_codec_that_exists(settings: dict[str, object], name: str) -> None:
    from nestling.codec.codecs import named_codec

    assert named_codec(CodecConfig(**settings).up).name == name  # type: ignore[arg-type]
    if settings.get("kind", "plain") in ("plain", "rotated"):
        other = {"down_" + key if key in ("kind", "bits") else key: value for key, value in settings.items()}
        other.pop("rounding", None)
        assert named_codec(CodecConfig(**other).down).name == name  # type: ignore[arg-type]


def test_a_method_is_named_after_its_adapter() -> None:
    assert RunConfig().method == "flite"
    assert RunConfig(adapter=FullConfig()).method == "fedavg"
