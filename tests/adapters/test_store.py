"""Adapters on disk: whatever a file holds, it loads as what was saved or is refused, and the model is untouched."""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import nestling
from nestling import FullConfig, LatentConfig, from_pretrained
from nestling.config.schema import AdapterConfig
from nestling.core.errors import ConfigError, ContextError, NestlingError, SeedError, StorageError, WireError

JSON, TENSORS = "adapter.json", "adapter.safetensors"


def base(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def saved(folder: Path, config: AdapterConfig) -> np.ndarray:
    adapter = nestling.attach(base(), config)
    drawn = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1))
    adapter.load_vector(drawn)
    adapter.save_pretrained(folder)
    return adapter.vector()


CONFIGS: dict[str, AdapterConfig] = {
    "latent": LatentConfig(seed=7, dim=3),
    "latent norms": LatentConfig(seed=7, dim=4, rank=2, targets=("0", "2"), exclude=("2",), train_norms=True),
    "full": FullConfig(targets=("0.*", "1.*")),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> AdapterConfig:
    return CONFIGS[request.param]


def refused(folder: Path, *codes: int) -> NestlingError:
    """The error of loading `folder`, which must have one of the exit codes and leave the model as it was."""
    model = base()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(NestlingError) as caught:
        from_pretrained(model, folder)
    assert caught.value.exit_code in codes, caught.value
    untouched(model, before)
    return caught.value


def untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    nestling.attach(model, LatentConfig(dim=1)).detach()


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    about = json.loads((folder / JSON).read_text())
    change(about)
    (folder / JSON).write_text(json.dumps(about))


def test_a_folder_holds_three_small_files_and_says_what_they_are(tmp_path, config) -> None:
    vector = saved(tmp_path / "a", config)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["README.md", JSON, TENSORS]
    about = json.loads((tmp_path / "a" / JSON).read_text())
    assert about["format"] == "nestling-adapter/v1"
    tensors = load_file(tmp_path / "a" / TENSORS)
    assert [[name, list(shape)] for name, shape in about["layout"]] == [
        [name, list(tensors[name].shape)] for name, _ in about["layout"]
    ]
    assert np.array_equal(np.concatenate([tensors[name].numpy().reshape(-1) for name, _ in about["layout"]]), vector)
    card = (tmp_path / "a" / "README.md").read_text()
    assert about["base_hash"] in card
    assert f"{vector.size:,} numbers" in card


def test_saving_again_replaces_and_gives_the_same_bytes(tmp_path, config) -> None:
    saved(tmp_path, config)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    adapter = from_pretrained(base(), tmp_path)
    adapter.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("file", [JSON, TENSORS])
@given(data=st.data())
def test_no_single_damaged_byte_gives_other_weights(name: str, file: str, data: st.DataObject) -> None:
    if name not in SAVED:
        folder = Path(tempfile.mkdtemp(dir=os.environ["NESTLING_CACHE"]))
        SAVED[name] = (folder, saved(folder, CONFIGS[name]))
    folder, vector = SAVED[name]
    good = (folder / file).read_bytes()
    # Half the draws at the beginning, where a tensor file has its header.
    position = data.draw(st.integers(0, len(good) - 1) | st.integers(0, min(200, len(good) - 1)))
    byte = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789"{}[],: ')))
    (folder / file).write_bytes(good[:position] + bytes([byte]) + good[position + 1 :])
    try:
        model = base()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            adapter = from_pretrained(model, folder)
        except NestlingError as error:
            assert error.exit_code in (3, 4, 5)  # noqa: PT017
            untouched(model, before)
        else:
            assert np.array_equal(adapter.vector(), vector)
            expected = nestling.attach(base(), CONFIGS[name])
            assert adapter.config == expected.config
            assert adapter.spec == expected.spec
    finally:
        (folder / file).write_bytes(good)


SAVED: dict[str, tuple[Path, np.ndarray]] = {}


@pytest.mark.parametrize("file", [JSON, TENSORS])
def test_a_truncated_or_empty_file_is_refused(tmp_path, config, file) -> None:
    saved(tmp_path, config)
    data = (tmp_path / file).read_bytes()
    for length in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 3):
        (tmp_path / file).write_bytes(data[:length])
        refused(tmp_path, 5)
    (tmp_path / file).write_bytes(data + b"x")
    refused(tmp_path, 5)


@pytest.mark.parametrize("file", [JSON, TENSORS])
def test_a_missing_file_or_folder_is_refused(tmp_path, config, file) -> None:
    saved(tmp_path / "a", config)
    (tmp_path / "a" / file).unlink()
    refused(tmp_path / "a", 3, 5)
    (tmp_path / "a" / file).mkdir()
    refused(tmp_path / "a", 3, 5)
    assert "not an adapter's folder" in str(refused(tmp_path / "none", 3))


def test_a_runs_folder_stands_for_the_adapter_in_it(tmp_path) -> None:
    vector = saved(tmp_path / "adapter", CONFIGS["latent"])
    assert "not an adapter's folder" in str(refused(tmp_path, 3))  # no run's: nothing says so
    (tmp_path / "config.toml").touch()
    assert np.array_equal(from_pretrained(base(), tmp_path).vector(), vector)


def test_another_base_is_refused_be_it_by_one_last_bit(tmp_path, config) -> None:
    saved(tmp_path, config)
    model = base()
    with torch.no_grad():
        model[2].bias[1] = torch.nextafter(model[2].bias[1], torch.tensor(torch.inf))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for wrong in (model, base(torch.float64), nn.Sequential(nn.Linear(4, 6))):
        with pytest.raises(ContextError, match="was trained on base") as caught:
            from_pretrained(wrong, tmp_path)
        assert caught.value.exit_code == 3
    untouched(model, before)


@pytest.mark.parametrize("key", ["seed", "dim", "rank", "budget"])
def test_other_maps_are_refused_as_such(tmp_path, key) -> None:
    saved(tmp_path, LatentConfig(seed=7, dim=4))
    edit(tmp_path, lambda about: about["config"].update({key: {"seed": 8, "dim": 3, "rank": 2, "budget": 9}[key]}))
    assert isinstance(refused(tmp_path, 4), SeedError)


def test_settings_that_contradict_the_tensors_are_refused(tmp_path, config) -> None:
    saved(tmp_path, config)
    original = (tmp_path / JSON).read_text()
    edits: list[Callable[[dict[str, Any]], Any]] = [
        lambda about: about["spec"].update(kind="other"),
        lambda about: about["spec"].update(targets=["?"]),
        lambda about: about["spec"].pop("targets"),
        lambda about: about.update(spec=None),
        lambda about: about["layout"].reverse(),
        lambda about: about["layout"].pop(),
        lambda about: about.update(layout=7),
        lambda about: about.update(vector="0" * 64),
        lambda about: about.update(vector=None),
        lambda about: about.update(extra=1),
        lambda about: about.pop("base_hash"),
        lambda about: about.update(format="nestling-adapter/v2"),
    ]
    for change in edits:
        (tmp_path / JSON).write_text(original)
        edit(tmp_path, change)
        refused(tmp_path, 4, 5)
    for text in ("[]", "null", "7", '"x"', "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")):
        (tmp_path / JSON).write_bytes(text if isinstance(text, bytes) else text.encode())
        refused(tmp_path, 5)


@pytest.mark.parametrize(
    "config",
    [
        None, [], "latent", {}, {"kind": "lora"}, {"kind": ["latent"]}, {"kind": "latent", "dim": 0},
        {"kind": "latent", "dim": 10**12}, {"kind": "latent", "budget": 10**12}, {"kind": "latent", "dim": 10**400},
        {"kind": "latent", "dim": 2.5}, {"kind": "latent", "seed": 2**64, "dim": 3}, {"kind": "latent", "typo": 1},
        {"kind": "latent", "targets": ["nothing"], "dim": 3}, {"kind": "full", "targets": "*"},
    ],
)  # fmt: skip
def test_settings_nobody_could_have_saved_are_refused_before_anything_is_made(tmp_path, config) -> None:
    saved(tmp_path, LatentConfig(seed=7, dim=3))
    edit(tmp_path, lambda about: about.update(config=config))
    refused(tmp_path, 3, 4, 5)


def test_a_file_that_does_not_hold_exactly_the_tensors_is_refused(tmp_path, config) -> None:
    saved(tmp_path, config)
    tensors = load_file(tmp_path / TENSORS)
    name, tensor = next(iter(tensors.items()))
    tensors = {key: value.clone() for key, value in tensors.items()}
    others = [
        tensors | {"extra": torch.zeros(1)},
        {key: value for key, value in tensors.items() if key != name},
        tensors | {name: tensor.double()},
        tensors | {name: tensor.view(torch.int32)},
        tensors | {name: tensor.reshape(-1, 1)},
        tensors | {name: torch.cat([tensor, tensor])},
        tensors | {name: tensor + 1},
        tensors | {name: torch.full_like(tensor, torch.nan)},
    ]
    for other in others:
        save_file(other, tmp_path / TENSORS)
        assert isinstance(refused(tmp_path, 5), WireError)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path, config) -> None:
    saved(tmp_path, config)
    data = (tmp_path / TENSORS).read_bytes()
    for header in (2**63, 2**40, len(data) - 7):
        (tmp_path / TENSORS).write_bytes(header.to_bytes(8, "little") + data[8:])
        assert "is no safetensors file" in str(refused(tmp_path, 5))
    (tmp_path / TENSORS).write_bytes(bytes(8) + data[8:])
    refused(tmp_path, 5)


def test_a_file_much_larger_than_the_adapter_is_refused_before_it_is_read(tmp_path, config) -> None:
    saved(tmp_path, config)
    with (tmp_path / TENSORS).open("wb") as file:  # sparse: it takes no room here
        file.write((8).to_bytes(8, "little") + b"{}      ")
        file.truncate(1 << 30)
    assert "is no safetensors file of at most" in str(refused(tmp_path, 5))


def test_a_mix_of_two_savings_is_refused(tmp_path, config) -> None:
    """As if a crash had come between the two files."""
    saved(tmp_path / "a", config)
    adapter = from_pretrained(base(), tmp_path / "a")
    adapter.load_vector(adapter.vector() + 1)
    adapter.save_pretrained(tmp_path / "b")
    shutil.copy(tmp_path / "b" / JSON, tmp_path / "a" / JSON)
    refused(tmp_path / "a", 5)


def test_an_adapted_model_is_told_to_take_the_first_off(tmp_path, config) -> None:
    saved(tmp_path, config)
    model = base()
    first = nestling.attach(model, LatentConfig(dim=2))
    with pytest.raises(NestlingError, match="carries an adapter already"):
        from_pretrained(model, tmp_path)
    first.detach()
    from_pretrained(model, tmp_path)


def test_places_that_cannot_be_written(tmp_path, config, monkeypatch) -> None:
    adapter = nestling.attach(base(), config)
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere", "a\0b"):
        with pytest.raises(ConfigError) as caught:
            adapter.save_pretrained(place)
        assert caught.value.exit_code == 2
    saved(tmp_path / "a", config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    def full(handle: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="No space"):
        adapter.save_pretrained(tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


@pytest.mark.parametrize("config", [LatentConfig(dim=2), FullConfig(targets=("0.*",))])
def test_an_adapter_whose_base_was_changed_is_not_saved(config, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    adapter = nestling.attach(model, config)
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(ContextError, match="frozen base has changed"):
        adapter.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_cat_029_an_adapter_of_another_version_is_refused_by_name(tmp_path) -> None:
    saved(tmp_path, LatentConfig(seed=7, dim=3))
    edit(tmp_path, lambda about: about.update(format="nestling-adapter/v2"))
    error = str(refused(tmp_path, 5))
    assert "not in the format nestling-adapter/v1" in error
    assert "another version" in error


@pytest.mark.parametrize("name", [TENSORS, "adapter_model.bin"])
def test_cat_071_a_pickled_adapter_is_refused_unread(tmp_path, name) -> None:
    class Marking:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "mark",)

    saved(tmp_path, LatentConfig(seed=7, dim=3))
    (tmp_path / TENSORS).unlink()
    (tmp_path / name).write_bytes(pickle.dumps(Marking()) + bytes(100))  # as long as the numbers would be
    error = refused(tmp_path, 3, 5)
    assert not (tmp_path / "mark").exists()
    if name == TENSORS:
        assert "is a pickle" in str(error)
    torch.save({"a": torch.zeros(100)}, tmp_path / TENSORS)
    assert "is a pickle" in str(refused(tmp_path, 3))


def test_cat_072_073_a_saved_adapter_follows_no_link_and_respects_the_umask(tmp_path) -> None:
    (tmp_path / "precious").write_bytes(b"keep")
    (tmp_path / "a").mkdir()
    for name in (TENSORS, JSON, "README.md"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "precious")
    before = os.umask(0o077)
    try:
        saved(tmp_path / "a", LatentConfig(seed=7, dim=3))
    finally:
        os.umask(before)
    assert (tmp_path / "precious").read_bytes() == b"keep"
    for path in (tmp_path / "a").iterdir():
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o600


def test_cat_020_an_adapter_does_not_fit_equal_weights_that_are_used_in_another_way(tmp_path) -> None:
    pytest.importorskip("transformers")
    from small import tiny_llama

    nestling.attach(tiny_llama(), LatentConfig(seed=7, dim=3, targets=("*o_proj*",))).save_pretrained(tmp_path)
    from_pretrained(tiny_llama(), tmp_path)
    with pytest.raises(ContextError, match="was trained on base") as caught:
        from_pretrained(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), tmp_path)
    assert caught.value.exit_code == 3


def test_cat_022_a_tampered_digest_of_the_maps_is_exit_4(tmp_path) -> None:
    saved(tmp_path, LatentConfig(seed=7, dim=3))
    right = json.loads((tmp_path / JSON).read_text())["spec"]["maps"]
    for wrong in (f"{int(right[0], 16) ^ 1:x}{right[1:]}", "", None):
        edit(tmp_path, lambda about, wrong=wrong: about["spec"].update(maps=wrong))
        assert "U and V do not come out the same here" in str(refused(tmp_path, 4))
    edit(tmp_path, lambda about: about["spec"].update(maps=right))
    from_pretrained(base(), tmp_path)
