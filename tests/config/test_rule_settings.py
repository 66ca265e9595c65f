"""Settings of local and server rules: what is refused, and the field's name of each combination."""

import pytest

from nestling.config.schema import (
    FullConfig,
    LanguageConfig,
    LatentConfig,
    LocalConfig,
    LoraConfig,
    MappingConfig,
    MemoryConfig,
    NeedleConfig,
    RunConfig,
    ServerConfig,
)
from nestling.core.errors import ConfigError

PROX, SSI, ALA = (LocalConfig(rule=rule) for rule in ("prox", "ssi", "ala"))
NESTEROV, ADAM, YOGI = (ServerConfig(rule=rule) for rule in ("nesterov", "adam", "yogi"))


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"adapter": FullConfig()}, "fedavg"),
        ({"adapter": FullConfig(), "local": PROX}, "fedprox"),
        ({"adapter": FullConfig(), "local": SSI}, "fedssi"),
        ({"adapter": FullConfig(), "local": ALA}, "fedala"),
        ({"adapter": FullConfig(), "server": NESTEROV}, "diloco"),
        ({"adapter": FullConfig(), "server": ADAM}, "fedadam"),
        ({"adapter": FullConfig(), "local": PROX, "server": YOGI}, "fedprox+fedyogi"),
        ({"adapter": FullConfig(), "server": ServerConfig(aggregate="rfa")}, "rfa"),
        ({"adapter": LatentConfig(), "server": ServerConfig(aggregate="krum", weighting="uniform")}, "flite+krum"),
        ({"adapter": LatentConfig()}, "flite"),
        ({"adapter": LatentConfig(), "server": NESTEROV}, "flite+diloco"),
        ({"adapter": LatentConfig(), "local": ALA, "server": ADAM}, "flite+fedala+fedadam"),
        ({"adapter": MappingConfig()}, "mapping"),
        ({"adapter": MappingConfig(), "local": PROX}, "mapping+fedprox"),
    ],
)
def test_images(changes: dict, method: str) -> None:
    assert RunConfig(**changes).method == method


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"adapter": LoraConfig()}, "fedavg-lora"),
        ({"adapter": LoraConfig(), "local": PROX}, "fedprox-lora"),
        ({"adapter": LoraConfig(), "local": SSI, "server": NESTEROV}, "fedssi+diloco-lora"),
        ({"adapter": LoraConfig(ffa=True)}, "ffa-lora"),
        ({"adapter": LoraConfig(ffa=True), "server": YOGI}, "ffa-lora+fedyogi"),
        ({"adapter": LoraConfig(dim=4)}, "fedavg-lora-latent"),
        ({"adapter": MemoryConfig()}, "fednl"),
        ({"adapter": MemoryConfig(dim=4), "local": PROX}, "fednl-latent+fedprox"),
    ],
)
def test_language(changes: dict, method: str) -> None:
    assert RunConfig(task=NeedleConfig(), base=LanguageConfig(), **changes).method == method


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mu", -1.0), ("mu", float("nan")), ("ssi_strength", -0.1), ("ssi_lambda", 0.0),
        ("ssi_lambda", 1.5), ("ala_layers", -1), ("ala_share", 0.0), ("ala_share", 1.01),
        ("ala_rate", float("inf")),
    ],
)  # fmt: skip
def test_bad_settings_of_a_local_rule(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalConfig(**{name: value})
    assert caught.value.where == f"local.{name}"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1), ("lr", float("nan")), ("momentum", 1.0), ("momentum", -0.1), ("beta1", 1.0),
        ("beta2", 1.0), ("beta2", float("nan")), ("tau", 0.0),
    ],
)  # fmt: skip
def test_bad_settings_of_a_server_rule(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**{name: value})
    assert caught.value.where == f"server.{name}"
    assert caught.value.remedy


@pytest.mark.parametrize(("rule", "wanted"), [("nesterov", 0.7), ("adam", 0.01), ("yogi", 0.01)])
def test_each_server_rule_has_a_learning_rate_of_its_own(rule: str, wanted: float) -> None:
    assert ServerConfig(rule=rule).rate == wanted
    assert ServerConfig(rule=rule, lr=0.3).rate == 0.3
