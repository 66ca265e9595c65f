"""Tiny ImageNet as its published archive unpacks: one JPEG an item, the class in the folder or in a table.

    wnids.txt                        200 names of classes
    train/<class>/images/*.JPEG      500 of each class
    val/images/*.JPEG                10,000, their classes in val/val_annotations.txt: file, class, and a box, by tabs

Label c is the c-th name in alphabetical order, as on the hub; wnids.txt has another order. About two in a hundred files
are grey and become grey RGB. The archive's own test images have no labels and are not read.
"""

import re
from os.path import isdir, isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path

import numpy as np

from nestling.core.errors import ContextError, WireError
from nestling.tasks.pictures import decode
from nestling.tasks.sets import SHAPES, Images

FOLDER = "tiny-imagenet-200"
PER_CLASS, VALIDATION = 500, 10_000
"""Items of each class in train/, and of all in val/: fewer mean an archive that was not unpacked to its end."""
_CLASS, _FILE = re.compile(r"n\d{8}"), re.compile(r"[\w.-]+\.JPEG")
_REMEDY = "Unpack tiny-imagenet-200.zip once more."


def find_unpacked(folder: Path) -> Path | None:
    """The folder with wnids.txt or a train/ and val/: `folder`, or the one inside it that the archive makes."""
    for place in (folder, folder / FOLDER):
        if isfile(place / "wnids.txt") or (isdir(place / "train") and isdir(place / "val")):
            return place
    return None


def read_unpacked(place: Path) -> tuple[Images, Images]:
    """Training and validation images, by class and then by the files' names.

    Raises `ContextError` if files are missing, `WireError` if one is damaged or of another size.
    """
    classes = _classes(place / "wnids.txt")
    return _pictures(_train_files(place, classes)), _pictures(_validation_files(place / "val", classes))


def _lines(path: Path) -> list[str]:
    if not isfile(path):
        raise ContextError("there is no such file", where=str(path), remedy=_REMEDY)
    try:
        return [line for line in path.read_text("ascii").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error


def _classes(path: Path) -> dict[str, int]:
    """The label of each class."""
    names, wanted = sorted({line.strip() for line in _lines(path)}), SHAPES["tiny-imagenet"][2]
    if len(names) != wanted or not all(map(_CLASS.fullmatch, names)):
        raise WireError("damaged", f"does not hold the names of {wanted} classes", where=str(path))
    return {name: label for label, name in enumerate(names)}


def _train_files(place: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    found = []
    for name, label in classes.items():
        folder = place / "train" / name / "images"
        files = sorted(folder.glob("*.JPEG"))  # of a folder that is not there: none
        if len(files) != PER_CLASS:
            raise ContextError(f"holds {len(files)} of {PER_CLASS} images *.JPEG", where=str(folder), remedy=_REMEDY)
        found += [(file, label) for file in files]
    return found


def _validation_files(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    path, found = folder / "val_annotations.txt", dict[str, int]()
    for number, line in enumerate(_lines(path), 1):
        file, name = [*line.split("\t"), ""][:2]
        if name not in classes or not _FILE.fullmatch(file) or file in found:
            raise WireError("damaged", f"line {number} does not name a new file and its class", where=str(path))
        found[file] = classes[name]
    if len(found) != VALIDATION:
        raise WireError("damaged", f"names {len(found):,} of {VALIDATION:,} images", where=str(path), remedy=_REMEDY)
    return [(folder / "images" / file, label) for file, label in sorted(found.items(), key=lambda x: (x[1], x[0]))]


def _pictures(files: list[tuple[Path, int]]) -> Images:
    channels, side, _ = SHAPES["tiny-imagenet"]
    x = np.empty((len(files), channels, side, side), np.uint8)
    for item, (path, _) in enumerate(files):
        if not isfile(path):
            raise ContextError("there is no such file", where=str(path), remedy=_REMEDY)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error
        x[item] = decode(data, channels=channels, side=side, where=str(path))
    return Images(x, np.array([label for _, label in files], np.int64))
