"""Making a base: learnt or refused, cached, made again when damaged, the same bytes twice."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestling.config.schema import BaseConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.models.backbones import base_bytes, base_hash, provenance_of
from nestling.models.pretrain import RECIPE, _scaled, augmented, cache_folder, make_base, pretrain, trained_base
from nestling.models.resnet import ResNet, make_resnet

CONFIG = BaseConfig(width=8, epochs=24, lr=1e-2, augment=False)


class Blobs:
    """Images whose class is where the light is; counts how often it is asked."""

    def __init__(self, classes: int = 4, items: int = 240) -> None:
        self.classes, self.items, self.asked = classes, items, 0

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        self.asked += 1
        generator = np.random.default_rng(0)
        y = np.arange(self.items) % self.classes
        x = generator.integers(0, 60, (self.items, 1, 8, 8))
        for item, label in enumerate(y):
            x[item, 0, 4 * (label // 2 % 2) :, 4 * (label % 2) :][:4, :4] += 150 - 100 * (label // 4)
        return x.astype(np.uint8), y


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(data: Blobs, config: BaseConfig = CONFIG, classes: int = 4) -> ResNet:
    return make_base(config, channels=1, classes=classes, data=data)


def files(cache: Path) -> list[Path]:
    return sorted((cache / "bases").iterdir()) if cache.exists() else []


def drawn(classes: int = 4, seed: int = 0) -> ResNet:
    return make_resnet("resnet8", width=8, channels=1, classes=classes, seed=seed)


def test_training_learns_and_says_how_well() -> None:
    model, (x, y) = drawn(), Blobs()()
    accuracy = pretrain(model, x, y, CONFIG)
    assert accuracy > 0.9
    with torch.no_grad():
        guesses = model(_scaled(x)).argmax(1)
    assert float((guesses == torch.from_numpy(y)).double().mean()) > 0.9
    assert not model.training
    assert torch.equal(model.head.weight, drawn().head.weight)


def test_a_base_is_made_once_and_then_comes_from_the_cache(cache) -> None:
    data = Blobs()
    first = made(data)
    assert data.asked == 1
    [file] = files(cache)
    assert file.read_bytes() == base_bytes(first, provenance_of(file))
    assert base_hash(first) != base_hash(drawn())
    second = made(data)
    assert data.asked == 1
    assert base_hash(second) == base_hash(first)
    assert [p.requires_grad for p in second.parameters()] == [p.requires_grad for p in first.parameters()]


def test_the_same_recipe_gives_the_same_bytes_whatever_the_threads_and_generators(cache, monkeypatch) -> None:
    config = replace(CONFIG, augment=True)
    hashes = []
    for number in range(2):
        monkeypatch.setenv("NESTLING_CACHE", str(cache / str(number)))
        torch.manual_seed(number)
        state, threads = torch.get_rng_state(), torch.get_num_threads()
        torch.set_num_threads(1 + number)
        hashes.append(base_hash(made(Blobs(classes=2, items=120), config, 2)))
        assert torch.get_num_threads() == 1 + number
        torch.set_num_threads(threads)
        assert torch.equal(torch.get_rng_state(), state)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("damage", ["one byte", "short", "empty", "another model", "a link to nowhere"])
def test_a_damaged_cache_file_is_made_again(cache, damage) -> None:
    data = Blobs()
    first = made(data)
    [file] = files(cache)
    good = file.read_bytes()
    if damage == "one byte":
        middle = len(good) // 2
        file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    elif damage == "short":
        file.write_bytes(good[:-5])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "another model":
        file.write_bytes(base_bytes(drawn(classes=5)))
    else:
        file.unlink()
        file.symlink_to(cache / "nowhere")
    again = made(data)
    assert data.asked == 2
    assert base_hash(again) == base_hash(first)
    assert file.read_bytes() == good
    assert files(cache) == [file]


def test_every_setting_that_matters_has_its_own_file(cache) -> None:
    data = Blobs(classes=2, items=120)
    configs = [
        CONFIG,
        replace(CONFIG, epochs=25),
        replace(CONFIG, lr=8e-3),
        replace(CONFIG, seed=1),
        replace(CONFIG, augment=True),
        replace(CONFIG, pretrain_on="fashion"),
    ]
    hashes = {base_hash(made(data, config, 2)) for config in configs}
    assert data.asked == len(files(cache)) == len(configs)
    assert len(hashes) == len(configs) - 1  # the name of the data alone does not change these numbers
    made(data, configs[0], 3)
    assert len(files(cache)) == len(configs) + 1


def test_a_training_that_collapses_is_refused_and_never_cached(cache) -> None:
    config = BaseConfig(width=8, epochs=1, lr=1e6, augment=False)
    threads = torch.get_num_threads()
    with pytest.raises(ContextError, match=r"base: pre-training ended at .*chance is 25.0%.*Lower base\.lr") as caught:
        made(Blobs(), config)
    assert caught.value.exit_code == 3
    assert files(cache) == []
    assert torch.get_num_threads() == threads


def test_two_classes_are_judged_by_a_bar_that_can_be_reached() -> None:
    """Twice chance would be 100 %."""
    x, y = Blobs(classes=2)()
    y[::12] = 1 - y[::12]  # a twelfth of the labels are wrong
    assert 0.75 < pretrain(drawn(classes=2), x, y, CONFIG) < 1
    labels = np.random.default_rng(1).integers(0, 2, len(y))  # nothing to learn
    with pytest.raises(ContextError, match=r"chance is 50\.0%"):
        pretrain(drawn(classes=2), x, labels, CONFIG)


def test_features_from_another_label_space_keep_the_tasks_own_classifier() -> None:
    data = Blobs(classes=8)
    model = made(data, classes=3)
    assert model.head.weight.shape == (3, 32)
    assert torch.equal(model.head.weight, drawn(classes=3).head.weight)
    assert not torch.equal(model.stem.conv.weight, drawn(classes=3).stem.conv.weight)
    again = made(data, classes=3)
    assert data.asked == 1
    assert base_hash(again) == base_hash(model)
    assert not model.head.weight.requires_grad


def test_fewer_labels_than_classes_are_fine() -> None:
    assert made(Blobs(classes=2), classes=5).head.weight.shape == (5, 32)


def test_too_few_items_are_refused_before_any_training(cache) -> None:
    with pytest.raises(ConfigError, match="has 9 items"):
        made(Blobs(items=9))


@pytest.mark.parametrize("config", [BaseConfig(width=8, pretrain_on="none"), BaseConfig(width=8, epochs=0)])
def test_an_untrained_base_is_the_seeds_and_needs_no_data(cache, config) -> None:
    data = Blobs()
    assert base_hash(made(data, config)) == base_hash(drawn())
    assert data.asked == 0
    assert files(cache) == []


def test_given_weights_are_used_or_refused_and_never_replaced(cache, tmp_path) -> None:
    data, path = Blobs(), tmp_path / "base.safetensors"
    path.write_bytes(base_bytes(drawn(seed=9)))
    config = BaseConfig(width=8, weights=str(path))
    assert base_hash(made(data, config)) == base_hash(drawn(seed=9))
    with pytest.raises(ContextError):
        made(data, config, classes=5)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WireError):
        made(data, config)
    path.unlink()
    with pytest.raises(ContextError, match="no such file"):
        made(data, config)
    assert data.asked == 0
    assert files(cache) == []


def test_where_the_cache_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NESTLING_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.setenv("NESTLING_CACHE", "")
    assert cache_folder() == Path("/b/nestling")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "nestling"


def test_a_cache_that_cannot_be_written_costs_a_warning_and_not_the_run(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"not kept for the next run.*cannot be written"):
        base = made(Blobs(classes=2, items=120), CONFIG, 2)
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    assert base_hash(base) == base_hash(made(Blobs(classes=2, items=120), CONFIG, 2))


def test_data_from_another_place_makes_another_base(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path))
    for source in ("", "/here", "/there", "/here"):
        data = Blobs(classes=2, items=120)
        make_base(CONFIG, channels=1, classes=2, data=data, source=source)
    assert len(list((tmp_path / "bases").iterdir())) == 3


def test_a_base_says_where_it_comes_from(cache) -> None:
    config, data = replace(CONFIG, path="/home/ann/images"), Blobs(classes=8)
    model, first = trained_base(config, channels=1, classes=3, data=data, source="/home/ann/images")
    said = json.loads(first)
    assert said["base"]["epochs"] == CONFIG.epochs
    assert (said["items"], said["classes"], said["trained_classes"], said["channels"]) == (240, 3, 8, 1)
    assert said["torch"] == torch.__version__
    assert 0.3 < said["held_out_accuracy"] <= 1
    assert "/home" not in first
    again, second = trained_base(config, channels=1, classes=3, data=data, source="/home/ann/images")
    assert (second, base_hash(again), data.asked) == (first, base_hash(model), 1)
    x, y = Blobs(classes=8)()
    x[0, 0, 0, 0] += 1
    _, other = trained_base(config, channels=1, classes=3, data=lambda: (x, y), source="/elsewhere")
    assert json.loads(other)["data_sha256"] != said["data_sha256"]


def test_a_base_from_before_there_was_a_provenance_is_still_used(cache) -> None:
    data = Blobs()
    first = made(data)
    [file] = files(cache)
    file.write_bytes(base_bytes(first))
    model, text = trained_base(CONFIG, channels=1, classes=4, data=data)
    assert (data.asked, base_hash(model)) == (1, base_hash(first))
    assert json.loads(text)["base"]["lr"] == CONFIG.lr
    assert "held_out_accuracy" not in json.loads(text)


def test_the_name_of_a_recipe_stays_what_it_was(cache) -> None:
    """Settings that came later do not make everybody's bases anew."""
    made(Blobs(classes=2, items=120), CONFIG, 2)
    old = {name: value for name, value in asdict(CONFIG).items() if name != "path"}
    recipe = json.dumps([RECIPE, old, "", 1, 2, torch.__version__], sort_keys=True)
    assert [file.stem for file in files(cache)] == [hashlib.sha256(recipe.encode()).hexdigest()[:32]]


def test_large_sets_tell_of_every_epoch(monkeypatch) -> None:
    told: list[str] = []
    made_of = Blobs(classes=2, items=11_200)
    x, y = made_of()
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    pretrain(narrow, x, y, replace(CONFIG, epochs=2), note=told.append)
    assert told == ["training the base, epoch 1 of 2", "training the base, epoch 2 of 2"]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_augmented_images_stay_in_range_and_differ(generator) -> None:
    images = torch.rand(6, 3, 12, 12, generator=generator)
    got = augmented(images, generator)
    assert got.shape == images.shape
    assert float(got.min()) >= 0
    assert float(got.max()) <= 1
    assert not torch.allclose(got, images, atol=0.1)
    assert not torch.equal(got, augmented(images, generator))
    again: Tensor = augmented(images, torch.Generator().manual_seed(5))
    assert torch.equal(again, augmented(images, torch.Generator().manual_seed(5)))
    background = _scaled(np.zeros((2, 1, 9, 9), np.uint8))
    assert torch.equal(augmented(background, generator), background)
