"""A set as the hub's repository holds it, in a local folder: columns, shards, and files that are damaged."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nestling.core.errors import ContextError, WireError
from nestling.tasks import parquet
from nestling.tasks.data import load_images

SETS = [("cifar10", "img", "label", "test", 32), ("cifar100", "img", "fine_label", "test", 32)]
SETS += [("tiny-imagenet", "image", "label", "valid", 64)]


def png(value: int, *, side: int = 32, mode: str = "RGB") -> bytes:
    pixels = np.full((side, side, 3), value, np.uint8)
    pixels[0, 1] = (1, 2, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


def write(path: Path, columns: dict[str, Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    path.parent.mkdir(exist_ok=True)
    library.write_table(pyarrow.table(columns), path)


def rows(image: str, label: str, values: list[int], labels: list[Any], *, side: int = 32) -> dict[str, Any]:
    pictures = [{"bytes": png(value, side=side), "path": f"{value}.png"} for value in values]
    return {label: labels, image: pictures, "coarse_label": [0] * len(labels)}


@pytest.mark.parametrize("inside", ["", "plain_text"])
@pytest.mark.parametrize(("name", "image", "label", "test_split", "side"), SETS)
def test_the_hubs_files(name, image, label, test_split, side, inside, tmp_path) -> None:
    folder = tmp_path / inside
    write(folder / "train-00000-of-00002-1359597a978bc4fa.parquet", rows(image, label, [10, 20], [3, 4], side=side))
    write(folder / "train-00001-of-00002-70d52db3c749a935.parquet", rows(image, label, [30], [9], side=side))
    write(folder / f"{test_split}-00000-of-00001.parquet", rows(image, label, [40], [5], side=side))
    train, test = load_images(name, str(tmp_path))
    assert test is not None
    assert train.x.shape == (3, 3, side, side)
    assert train.x[:, :, 0, 1].tolist() == [[1, 2, 3]] * 3  # channels first
    assert train.x[:, 1, 5, 5].tolist() == [10, 20, 30]
    assert train.y.tolist() == [3, 4, 9]
    assert (test.x[0, 0, 5, 5], test.y.tolist()) == (40, [5])


def test_a_grey_picture_becomes_grey_colours(tmp_path) -> None:
    grey = {"image": [{"bytes": png(7, side=64, mode="L"), "path": None}], "label": [199]}
    write(tmp_path / "train.parquet", grey)
    write(tmp_path / "valid.parquet", grey)
    train, _ = load_images("tiny-imagenet", str(tmp_path))
    assert train.x[0, :, 5, 5].tolist() == [7, 7, 7]
    assert train.y.tolist() == [199]


def test_more_rows_than_are_read_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "_ROWS", 2)
    write(tmp_path / "train.parquet", rows("img", "label", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    write(tmp_path / "test.parquet", rows("img", "label", [1], [0]))
    assert load_images("cifar10", str(tmp_path))[0].x[:, 0, 9, 9].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        {"label": [0, 10]}, {"label": [0, -1]}, {"label": [0, None]}, {"label": ["a", "b"]}, {"label": [0.0, 1.0]},
        {"img": [{"bytes": png(1), "path": ""}, {"bytes": None, "path": "a.png"}]},
        {"img": [{"bytes": png(1), "path": ""}, {"bytes": png(1)[:40], "path": ""}]},
        {"img": [{"bytes": png(1), "path": ""}, {"bytes": png(1, side=28), "path": ""}]},
        {"img": [b"a", b"b"]}, {"img": [{"other": 1}, {"other": 2}]},
    ],
)  # fmt: skip
def test_a_damaged_row_is_refused(change, tmp_path) -> None:
    good = rows("img", "label", [1, 2], [0, 1])
    write(tmp_path / "test.parquet", good)
    write(tmp_path / "train.parquet", good | change)
    with pytest.raises(WireError, match=r"train\.parquet.*row [01]") as caught:
        load_images("cifar10", str(tmp_path))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("name", ["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"])
def test_a_truncated_file_is_refused(name, tmp_path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}-00000-of-00001.parquet", rows("img", "label", [1], [0]))
    path = tmp_path / name
    content = path.read_bytes()
    for damaged in (
        b"",
        content[:-1],
        content[: len(content) // 2],
        b"PAR1",
        content[:200] + b"\xff" * 64 + content[264:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(WireError) as caught:
            load_images("cifar10", str(tmp_path))
        assert name in str(caught.value)


def test_a_column_that_is_not_there_is_named(tmp_path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", rows("img", "label", [1], [0]))
    with pytest.raises(ContextError, match=r"has no column 'fine_label'.*uoft-cs/cifar100"):
        load_images("cifar100", str(tmp_path))  # the folder of the other set


def test_a_claim_of_too_many_rows_makes_no_room_for_them(tmp_path, monkeypatch) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", rows("img", "label", [1, 2, 3], [0, 0, 0]))
    monkeypatch.setattr(parquet, "MOST", 2)
    with pytest.raises(WireError, match="claims 3 rows"):
        load_images("cifar10", str(tmp_path))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["train-00000-of-00001"], "holds no file of the split test"),
        (["test"], "holds no file of the split train"),
        (["train-00001-of-00002", "test"], "does not hold each file of the split train once"),
        (["train-00000-of-00003", "train-00002-of-00003", "test"], "does not hold each file of the split train once"),
        (["train-00000-of-00001-aa", "train-00000-of-00001-bb", "test"], "does not hold each file"),
        (["train", "train-00000-of-00001", "test"], "does not hold each file"),
        (["train-00000-of-00001", "train-00001-of-00002", "test"], "does not hold each file"),
        (["a/train", "b/train"], "in several folders (a, b)"),
        (["training", "test"], "holds no file of the split train"),
    ],
)
def test_shards_are_all_there_or_it_is_said_which_split_is_not(files, wanted, tmp_path) -> None:
    """By the names alone: nothing is opened, so this needs no pyarrow."""
    for name in files:
        (tmp_path / f"{name}.parquet").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    with pytest.raises(ContextError) as caught:
        load_images("cifar10", str(tmp_path))
    assert wanted in str(caught.value)
    assert caught.value.exit_code == 3


def test_the_extra_is_named_where_pyarrow_is_missing(tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").write_bytes(b"PAR1")
    with pytest.raises(ContextError, match=r"pyarrow, which is not installed.*nestling\[hub\]"):
        load_images("cifar10", str(tmp_path))
