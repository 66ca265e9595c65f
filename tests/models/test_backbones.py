"""The hash of a base, and its file: what changes them, what does not, what is refused."""

import hashlib
import json
import pickle
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from nestling.core.errors import ConfigError, ContextError, NestlingError, WireError
from nestling.models import backbones
from nestling.models.backbones import base_bytes, base_hash, load_base, provenance_of, read_tensors


class Holder(nn.Module):
    """A model whose state is any named tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def tensors() -> dict[str, Tensor]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "steps": torch.tensor([7]),
        "mask": torch.tensor([True, False]),
    }


def hash_of(values: dict[str, Tensor]) -> str:
    return base_hash(Holder(values))


def test_the_hash_is_its_definition() -> None:
    """Written out for one tensor: name, dtype and shape as JSON, a zero byte, the little-endian bytes."""
    digest = hashlib.sha256(b"nestling-base/v1\0")
    digest.update(json.dumps(["a", "int16", [2, 2]]).encode() + b"\0" + b"\x01\x00\x02\x00\x03\x00\xff\xff")
    assert hash_of({"a": torch.tensor([[1, 2], [3, -1]], dtype=torch.int16)}) == digest.hexdigest()


def test_the_hash_does_not_depend_on_order_or_memory() -> None:
    values = tensors()
    expected = hash_of(values)
    assert hash_of(dict(reversed(values.items()))) == expected
    assert hash_of(OrderedDict(sorted(values.items()))) == expected
    strided = values | {"a": torch.arange(6.0).reshape(2, 3).T.contiguous().T}
    assert not strided["a"].is_contiguous()
    assert hash_of(strided) == expected
    offset = values | {"a": torch.arange(-2.0, 6.0)[2:].reshape(2, 3)}
    assert hash_of(offset) == expected
    image = {"w": torch.randn(2, 3, 4, 4)}
    assert hash_of(image) == hash_of({"w": image["w"].to(memory_format=torch.channels_last)})


@given(st.sampled_from(sorted(set(tensors()) - {"empty", "mask"})), st.integers(0, 10**6))
def test_one_flipped_bit_changes_the_hash(name: str, bit: int) -> None:
    values = tensors()
    raw = values[name].clone().reshape(-1).view(torch.uint8)
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    flipped = raw.view(values[name].dtype).reshape(values[name].shape)
    assert hash_of(values | {name: flipped}) != hash_of(values)


def test_names_shapes_and_dtypes_count() -> None:
    values = tensors()
    a = values["a"]
    variants = [
        values,
        {("c" if name == "a" else name): tensor for name, tensor in values.items()},
        values | {"a": a.reshape(3, 2)},
        values | {"a": a.reshape(6)},
        values | {"a": a.view(torch.int32)},
        values | {"b": values["b"].reshape(1)},
        values | {"empty": torch.zeros(3, 0)},
        values | {"empty": torch.zeros(0)},
        values | {"empty": torch.zeros(0, 3, dtype=torch.float64)},
        {name: tensor for name, tensor in values.items() if name != "empty"},
        values | {"a": torch.where(a == 0, -0.0, a)},
    ]
    assert len({hash_of(variant) for variant in variants}) == len(variants)


def test_bytes_cannot_move_between_tensors() -> None:
    assert hash_of({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}) != hash_of(
        {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 3.0])}
    )


def test_a_buffer_that_is_not_kept_does_not_count() -> None:
    model = nn.Linear(2, 2)
    before = base_hash(model)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    assert base_hash(model) == before
    model.register_buffer("kept", torch.zeros(3))
    assert base_hash(model) != before


def model_of(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))
        model[0].bias.zero_()
    return model


def test_a_base_comes_back_from_its_file(tmp_path) -> None:
    path, model = tmp_path / "base.safetensors", model_of()
    path.write_bytes(base_bytes(model))
    other = model_of(1)
    assert base_hash(other) != base_hash(model)
    load_base(other, path)
    assert base_hash(other) == base_hash(model)
    assert base_bytes(other) == path.read_bytes()
    path.write_bytes(b"")  # nothing of the model lies in the file any more
    assert base_hash(other) == base_hash(model)


def test_a_file_from_elsewhere_needs_no_hash(tmp_path) -> None:
    save_file(model_of().state_dict(), tmp_path / "x.safetensors")
    other = model_of(1)
    load_base(other, tmp_path / "x.safetensors")
    assert base_hash(other) == base_hash(model_of())


def refused(path: Path) -> NestlingError:
    model = model_of(1)
    before = base_hash(model)
    with pytest.raises(NestlingError) as caught:
        load_base(model, path)
    assert base_hash(model) == before
    return caught.value


@given(st.data())
def test_no_damaged_byte_gives_another_base(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    good = base_bytes(model_of())
    position = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != good[position]))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(good[:position] + bytes([byte]) + good[position + 1 :])
    model = model_of(1)
    before = base_hash(model)
    try:
        load_base(model, path)
    except NestlingError as error:
        assert error.exit_code in (3, 5)  # noqa: PT017
        assert base_hash(model) == before
    else:
        assert base_hash(model) == base_hash(model_of())


def test_files_of_other_models_are_refused(tmp_path) -> None:
    path, state = tmp_path / "x.safetensors", model_of().state_dict()
    name = "0.weight"
    for other, message in (
        (state | {"extra": torch.zeros(1)}, "unexpected"),
        ({key: value for key, value in state.items() if key != name}, "missing"),
        (state | {name: torch.zeros(3, 4)}, name),
        (state | {name: state[name].double()}, name),
    ):
        save_file(other, path)
        error = refused(path)
        assert isinstance(error, ContextError)
        assert message in str(error)
    assert refused(tmp_path / "none").exit_code == 3
    assert refused(tmp_path).exit_code == 3


def test_damaged_files_are_refused(tmp_path) -> None:
    path, good = tmp_path / "x.safetensors", base_bytes(model_of())
    for data in (b"", b"1234", good[:20], good[:-1], good + b"0", (1 << 62).to_bytes(8, "little") + good[8:]):
        path.write_bytes(data)
        error = refused(path)
        assert isinstance(error, WireError)
        assert error.code == "damaged"
    for value in (torch.nan, torch.inf):
        state = model_of().state_dict()
        state["0.weight"] = state["0.weight"].clone()
        state["0.weight"][0, 0] = value
        save_file(state, path)
        error = refused(path)
        assert isinstance(error, WireError)
        assert error.code == "non_finite"


def test_a_file_larger_than_allowed_is_refused_unread(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(base_bytes(model_of()))
    assert set(read_tensors(path, max_bytes=path.stat().st_size)) == set(model_of().state_dict())
    with pytest.raises(WireError, match="at most"):
        read_tensors(path, max_bytes=path.stat().st_size - 1)


def test_extra_state_counts_and_what_has_no_content_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": self.in_features}

    first, second = Extra(2, 2), nn.Linear(2, 2)
    second.load_state_dict({n: t for n, t in first.state_dict().items() if n != "_extra_state"})
    assert base_hash(first) == base_hash(first) != base_hash(second)
    with pytest.raises(ConfigError, match="no content"):
        base_hash(nn.Linear(2, 2, device="meta"))


def test_the_settings_of_a_language_model_count_and_no_others() -> None:
    values = hash_of(tensors())

    def with_settings(**settings: object) -> str:
        model = Holder(tensors())
        model.config = SimpleNamespace(**settings)
        return base_hash(model)

    assert with_settings() == with_settings(_name_or_path="x", transformers_version="5") == values
    one, other = with_settings(rms_norm_eps=1e-5), with_settings(rms_norm_eps=1e-6)
    assert len({values, one, other, with_settings(rope_parameters={"rope_theta": 1e4})}) == 4
    assert with_settings(head_dim=8, hidden_act="silu") == with_settings(hidden_act="silu", head_dim=8)


# What a hostile file can hold.


def file_of(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HOSTILE = {
    "a name twice": file_of(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", bytes(4)),
    "100,000 empty tensors": file_of(
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(100_000)) + b"}"
    ),
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "a header as long as memory": (1 << 40).to_bytes(8, "little") + b"{}",
    "deep nesting": file_of(b"[" * 100_000),
    "no text": file_of(b"\xff\xfe{}"),
    "numbers beyond the end": file_of(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', bytes(4)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_cat_070_a_hostile_file_is_refused_in_little_time_and_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    refused(path)  # what is imported on the way is imported
    tracemalloc.start()
    began = time.process_time()
    error = refused(path)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(error, WireError)
    assert error.code == "damaged"
    assert peak < 20e6
    assert seconds < 1.0  # a tenth, but for a machine that is busy


def test_cat_070_a_header_beyond_the_bound_never_reaches_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that takes a second and 100 MB, outside what `tracemalloc` sees."""
    monkeypatch.setattr(backbones, "load_file", lambda path: pytest.fail("was asked to read it"))
    path = tmp_path / "x.safetensors"
    for name in ("a name twice", "100,000 empty tensors", "a header of 2^63 bytes", "deep nesting"):
        path.write_bytes(HOSTILE[name])
        assert isinstance(refused(path), WireError)


def test_a_provenance_travels_in_the_file_and_changes_no_hash(tmp_path: Path) -> None:
    model, path = model_of(), tmp_path / "base.safetensors"
    path.write_bytes(base_bytes(model))
    assert provenance_of(path) == ""
    said = '{"données": "é", "n": 1}'
    path.write_bytes(base_bytes(model, said))
    assert provenance_of(path) == said
    other = model_of(seed=1)
    load_base(other, path)
    assert base_hash(other) == base_hash(model)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert {base_bytes(model, said) for _ in range(20)} == {path.read_bytes()}  # the library alone shuffles its entries


def test_cat_071_a_pickle_in_place_of_weights_is_refused_with_how_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "base.pt"

    class Marking:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "mark",)

    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        path.write_bytes(pickle.dumps(Marking(), protocol=protocol))
        error = refused(path)
        assert isinstance(error, ContextError)
        assert "is a pickle, which can run code. Save it again as safetensors" in str(error)
    torch.save(model_of().state_dict(), path)
    assert "is a pickle" in str(refused(path))
    assert not (tmp_path / "mark").exists()
