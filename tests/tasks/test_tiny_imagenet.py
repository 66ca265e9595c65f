"""Tiny ImageNet as its archive unpacks: who is labelled what, grey files, and an archive that came out damaged."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nestling.core.errors import ContextError, WireError
from nestling.tasks import tiny_imagenet
from nestling.tasks.data import load_images

CLASSES = [f"n{(79_190_003 * number) % 10**8:08d}" for number in range(1, 13)]  # in no alphabetical order


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve classes, one image of each and three to validate on; the published archive has 200, 500 and 10,000."""
    assert tiny_imagenet.SHAPES["tiny-imagenet"] == (3, 64, 200)
    assert (tiny_imagenet.PER_CLASS * 200, tiny_imagenet.VALIDATION) == (100_000, 10_000)
    monkeypatch.setitem(tiny_imagenet.SHAPES, "tiny-imagenet", (3, 64, 12))
    monkeypatch.setattr(tiny_imagenet, "PER_CLASS", 1)
    monkeypatch.setattr(tiny_imagenet, "VALIDATION", 3)


def jpeg(red: int, green: int, blue: int, *, side: int = 64, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (red, green, blue)).convert(mode).save(file, "JPEG", quality=95)
    return file.getvalue()


def write(folder: Path) -> Path:
    """The archive's layout; returns the folder that it makes."""
    place = folder / "tiny-imagenet-200"
    (place / "val" / "images").mkdir(parents=True)
    (place / "test" / "images").mkdir(parents=True)  # without labels: not read
    (place / "wnids.txt").write_text("\n".join(CLASSES) + "\n")
    for number, name in enumerate(CLASSES):
        images = place / "train" / name / "images"
        images.mkdir(parents=True)
        (images / f"{name}_0.JPEG").write_bytes(jpeg(20 * number, 100, 255 - 20 * number))
        (place / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t62\n")
    rows = []
    for item, name in enumerate([CLASSES[5], CLASSES[0], CLASSES[5]]):
        (place / "val" / "images" / f"val_{item}.JPEG").write_bytes(jpeg(10 * item, 20, 30))
        rows.append(f"val_{item}.JPEG\t{name}\t0\t32\t44\t62\n")
    (place / "val" / "val_annotations.txt").write_text("".join(rows))
    return place


@pytest.mark.parametrize("outer", [False, True])
def test_labels_are_the_alphabetical_places_of_the_classes(outer, tmp_path) -> None:
    place = write(tmp_path)
    train, test = load_images("tiny-imagenet", str(tmp_path if outer else place))
    assert test is not None
    assert train.x.shape == (12, 3, 64, 64)
    assert train.y.tolist() == list(range(12))
    order = sorted(CLASSES)
    wanted = np.array([20 * CLASSES.index(name) for name in order])
    assert wanted.tolist() != sorted(wanted)
    assert np.abs(train.x[:, 0].mean((1, 2)) - wanted).max() < 4  # JPEG keeps a flat colour to a few steps
    assert np.abs(train.x[:, 2].mean((1, 2)) - (255 - wanted)).max() < 4
    assert sorted(test.y.tolist()) == sorted([order.index(CLASSES[5])] * 2 + [order.index(CLASSES[0])])
    for x, y in zip(test.x, test.y, strict=True):
        items = (1,) if y == order.index(CLASSES[0]) else (0, 2)
        assert min(abs(float(x[0].mean()) - 10 * item) for item in items) < 4


def test_grey_files_become_grey_colours(tmp_path) -> None:
    place = write(tmp_path)
    (place / "train" / CLASSES[3] / "images" / f"{CLASSES[3]}_0.JPEG").write_bytes(jpeg(90, 90, 90, mode="L"))
    train, _ = load_images("tiny-imagenet", str(place))
    grey = train.x[sorted(CLASSES).index(CLASSES[3])]
    assert grey.shape == (3, 64, 64)
    assert np.unique(grey).tolist() == [90]


def test_what_is_missing_is_named(tmp_path) -> None:
    place = write(tmp_path)
    image = place / "train" / CLASSES[7] / "images" / f"{CLASSES[7]}_0.JPEG"
    for path, wanted in (
        (place / "wnids.txt", "wnids.txt: there is no such file"),
        (place / "val" / "val_annotations.txt", "val_annotations.txt: there is no such file"),
        (place / "val" / "images" / "val_1.JPEG", "val_1.JPEG: there is no such file"),
        (image, f"{CLASSES[7]}/images: holds 0 of 1 images"),
    ):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ContextError, match=f"{wanted}.*Unpack tiny-imagenet-200.zip once more") as caught:
            load_images("tiny-imagenet", str(place))
        assert caught.value.exit_code == 3
        path.write_bytes(content)
    (image.parent / "extra.JPEG").write_bytes(image.read_bytes())
    with pytest.raises(ContextError, match="holds 2 of 1 images"):
        load_images("tiny-imagenet", str(place))


def test_damaged_pictures_are_refused_by_name(tmp_path) -> None:
    place = write(tmp_path)
    image = place / "train" / CLASSES[7] / "images" / f"{CLASSES[7]}_0.JPEG"
    good = image.read_bytes()
    for content, wanted in (
        (good[: len(good) // 2], "no picture that can be decoded"),
        (b"", "no picture that can be decoded"),
        (b"GIF89a" + good[6:], "no picture that can be decoded"),
        (jpeg(1, 2, 3, side=32), "is 32×32, not 64×64"),
    ):
        image.write_bytes(content)
        with pytest.raises(WireError, match=rf"{image.name}: .*{wanted}") as caught:
            load_images("tiny-imagenet", str(place))
        assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
        lambda rows: [rows[0].replace(CLASSES[5], "n99999999"), *rows[1:]],
        lambda rows: [rows[0].replace("\t", " "), *rows[1:]],
        lambda rows: [rows[0].replace("val_0", "../../train/val_0"), *rows[1:]],
        lambda rows: ["é\n", *rows[1:]],
        lambda rows: [],
    ],
)
def test_a_damaged_table_is_refused(change, tmp_path) -> None:
    path = write(tmp_path) / "val" / "val_annotations.txt"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))), "utf-8")
    with pytest.raises(WireError, match=r"val_annotations\.txt"):
        load_images("tiny-imagenet", str(tmp_path))


@pytest.mark.parametrize("names", [CLASSES[:-1], [*CLASSES, "n12345678"], [*CLASSES[:-1], "../../x"], []])
def test_a_damaged_list_of_classes_is_refused(names, tmp_path) -> None:
    (write(tmp_path) / "wnids.txt").write_text("\n".join(names))
    with pytest.raises(WireError, match=r"wnids\.txt: does not hold the names of 12 classes"):
        load_images("tiny-imagenet", str(tmp_path))
