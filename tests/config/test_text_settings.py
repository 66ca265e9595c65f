"""The settings of text: bad ones are refused where they are made, and so are those that do not go together."""

import pytest

from nestling.config.load import dump_config, load_config, parse_config
from nestling.config.schema import GptConfig, RunConfig, TaskConfig, TextConfig
from nestling.core.errors import ConfigError

TEXT = 'task.kind = "text"\nbase.kind = "tinygpt"\n'


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ('task.data = "milton"', "task.data"), ("task.clients = 0", "task.clients"),
        ('task.partition = "dirichlet"', "task.partition"), ("task.length = 0", "task.length"),
        ("task.length = 129", "task.length"), ("task.train_items = -1", "task.train_items"),
        ("task.test_items = -1", "task.test_items"), ('task.evaluate_on = "train"', "task.evaluate_on"),
        ('task.path = "https://x"', "task.path"), ("task.alpha = 0.1", "task.alpha"),
        ("base.width = 48", "base.width"), ("base.width = 8", "base.width"), ("base.layers = 0", "base.layers"),
        ("base.context = 0", "base.context"), ('base.pretrain_on = "digits8"', "base.pretrain_on"),
        ("base.epochs = -1", "base.epochs"), ("base.lr = 0.0", "base.lr"), ("base.seed = -1", "base.seed"),
        ('base.weights = "a://b"', "base.weights"), ('base.model = "resnet8"', "base.model"),
        ('adapter.kind = "memory"', "adapter.kind"), ('adapter = {kind = "lora", window = 8}', "adapter.window"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused_by_name(change: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(TEXT + change)
    assert caught.value.where == where


def test_text_goes_with_the_small_gpt_and_with_nothing_else() -> None:
    for task, base in ((TextConfig(), None), (TaskConfig(), GptConfig())):
        with pytest.raises(ConfigError, match=r"base\.kind") as caught:
            RunConfig(**{"task": task, **({"base": base} if base else {})})
        assert ("tinygpt" if base is None else "resnet") in caught.value.remedy
    config = RunConfig(task=TextConfig(length=64), base=GptConfig(context=64))
    assert parse_config(dump_config(config)) == config


def test_the_stand_in_differs_from_the_papers_text_in_size_and_text_alone() -> None:
    small, large = load_config("flite-shakespeare-tinygpt"), load_config("flite-wikitext2-tinygpt")
    assert small.adapter == large.adapter
    for part in ("server", "codec", "privacy", "seed", "machine"):
        assert getattr(small, part) == getattr(large, part)
    assert small.task.clients == large.task.clients == 8
    assert small.base.pretrain_on != small.task.data
    assert large.base.pretrain_on != large.task.data
