"""`nestling pretrain`: the base a run would make, in a file that a run takes, with where it comes from."""

import json
from pathlib import Path

import numpy as np
import pytest
from small import images, toml

from nestling.build import pretrain_base
from nestling.cli.main import main
from nestling.config.load import load_config
from nestling.models.backbones import base_bytes, base_hash, provenance_of, read_tensors
from nestling.tasks.data import load_images


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.toml"
    path.write_text(toml(tmp_path / "runs"))
    return str(path)


def test_it_writes_the_base_of_a_run_once(settings, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "new" / "base.safetensors"
    assert main(["pretrain", settings, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "training the base, epoch 1 of 16" in said
    assert "epoch 11 of 16" in said
    assert f"--base.weights {out}" in said
    provenance = json.loads(provenance_of(out))
    assert f"{provenance['held_out_accuracy']:.1%} right on held-out items of fashion" in said
    assert (provenance["items"], provenance["classes"], provenance["device"]) == (240, 10, "cpu")
    assert provenance["base"]["epochs"] == 16
    assert str(images()) not in provenance_of(out)  # where files lie is nobody else's business

    # The same base again comes from the cache, and the bytes are the same; a run makes the same one.
    again = tmp_path / "again.safetensors"
    assert main(["pretrain", settings, "--out", str(again), "--json"]) == 0
    printed = capsys.readouterr()
    assert "epoch" not in printed.err
    answer = json.loads(printed.out)
    assert answer["provenance"] == provenance
    assert again.read_bytes() == out.read_bytes()
    model, text = pretrain_base(load_config(settings))
    assert base_bytes(model, text) == out.read_bytes()
    assert base_hash(model) == answer["base_hash"]
    assert len(read_tensors(out)) == len(model.state_dict())

    def no_training(*_: object, **__: object) -> None:
        raise AssertionError("a base is trained although its weights were given")

    monkeypatch.setattr("nestling.models.pretrain.pretrain", no_training)
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "empty"))
    flags = ["--base.weights", str(out), "--rounds", "1", "--machine.no-references", "--json"]
    assert main(["run", settings, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["base_hash"] == answer["base_hash"]


def test_the_digest_is_of_the_pixels(settings, tmp_path) -> None:
    _, text = pretrain_base(load_config(settings))
    import hashlib

    train, _ = load_images("fashion", str(images()))
    head = f"{np.dtype('uint8')}{train.x.shape}{np.dtype('int64')}".encode()
    assert json.loads(text)["data_sha256"] == hashlib.sha256(head + train.x.tobytes() + train.y.tobytes()).hexdigest()


def test_nothing_is_overwritten_and_that_is_found_out_first(settings, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("nestling.build.pretrain_base", lambda *_, **__: pytest.fail("it was trained all the same"))
    there = tmp_path / "base.safetensors"
    there.write_bytes(b"mine")
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "nowhere")
    for path in (there, link, tmp_path):
        assert main(["pretrain", settings, "--out", str(path)]) == 2
        assert "exists already" in capsys.readouterr().err
    assert there.read_bytes() == b"mine"
    assert main(["pretrain", settings, "--out", str(there / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_file_that_came_in_between_is_kept(settings, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "base.safetensors"

    def trained(*args: object, **kwargs: object) -> object:
        made = pretrain_base(*args, **kwargs)  # type: ignore[arg-type]
        out.write_bytes(b"another's")
        return made

    monkeypatch.setattr("nestling.build.pretrain_base", trained)
    assert main(["pretrain", settings, "--out", str(out), "--base.epochs", "4"]) == 2
    assert out.read_bytes() == b"another's"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--base.pretrain-on", "none"], 2, "base.pretrain_on: leaves nothing to train"),
        (["--base.epochs", "0"], 2, "base.epochs: leaves nothing to train"),
        (["--base.weights", "there.safetensors"], 2, "base.weights: leaves nothing to train"),
        (["--base.pretrain-on", "cifar10"], 2, "cifar10 has 3 colour channels"),
        (["--base.path", "/nowhere"], 3, "/nowhere"),
        (["--machine.device", "nonsense"], 2, "machine.device"),
        (["--base.epochs", "1", "--base.lr", "1e6"], 3, "pre-training ended at"),
        (["--out", "https://host/base.safetensors"], 2, "--out: is an address"),
    ],
)
def test_what_it_refuses(flags, code, words, settings, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", settings, *flags]) == code
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_language_model_is_not_trained_here(tmp_path, capsys) -> None:
    assert main(["pretrain", "needle-smollm2-short", "--out", str(tmp_path / "x")]) == 2
    assert "base.kind: a language model is not trained here" in capsys.readouterr().err


def test_the_bases_data_may_lie_elsewhere_than_the_tasks(settings, tmp_path) -> None:
    """With a path of its own the task's folder is not looked at."""
    text = toml(tmp_path / "runs", data=tmp_path / "nowhere").replace("[base]", f'[base]\npath = "{images()}"')
    other = tmp_path / "other.toml"
    other.write_text(text)
    assert base_hash(pretrain_base(load_config(other))[0]) == base_hash(pretrain_base(load_config(settings))[0])
