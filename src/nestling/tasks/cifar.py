"""CIFAR-10 and CIFAR-100 in their published binary version: fixed records of label bytes and pixels, no code.

    CIFAR-10   record = label, 1024 red, 1024 green, 1024 blue          10,000 records a file, five files and one
    CIFAR-100  record = coarse label, fine label, 1024 red, green, blue           50,000 and 10,000 records

(Krizhevsky, "Learning multiple layers of features from tiny images", 2009.) Rows of pixels run from the top. The
*python* version of the same sets is pickled, and reading a pickle can run code: it is refused.
"""

from dataclasses import dataclass
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path

import numpy as np

from nestling.core.errors import ContextError, WireError
from nestling.tasks.sets import SHAPES, Images


@dataclass(frozen=True)
class Published:
    """How one of the sets is published. `labels` are how many classes each label byte knows, the last one is used."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: tuple[int, ...]
    train_items: int
    test_items: int
    archive: str
    pickled_folder: str
    pickled: str


PUBLISHED = {
    "cifar10": Published(
        "cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",), (10,),
        10_000, 10_000, "cifar-10-binary.tar.gz", "cifar-10-batches-py", "data_batch_1",
    ),
    "cifar100": Published(
        "cifar-100-binary", ("train.bin",), ("test.bin",), (20, 100),
        50_000, 10_000, "cifar-100-binary.tar.gz", "cifar-100-python", "train",
    ),
}  # fmt: skip
"""The numbers of items are those of each file."""


def find_binary(name: str, folder: Path) -> Path | None:
    """The folder with at least one of the set's binary files: `folder`, or the one inside it that the archive makes."""
    known = PUBLISHED[name]
    for place in (folder, folder / known.folder):
        if any(isfile(place / file) for file in known.train + known.test):
            return place
    return None


def refuse_pickled(name: str, folder: Path) -> None:
    """Raise `ContextError` if the set's python version lies in `folder`."""
    known = PUBLISHED[name]
    for place in (folder, folder / known.pickled_folder):
        if isfile(place / known.pickled):
            raise ContextError(
                "is the python version, a pickle, and reading a pickle can run code that it holds",
                where=str(place / known.pickled),
                remedy=f"Use the binary version, {known.archive}, unpacked, or the hub's parquet files.",
            )


def read_binary(name: str, place: Path) -> tuple[Images, Images]:
    """Training and test images, in the order of the files.

    Raises `ContextError` if a file is missing, `WireError` if one has another length or a label out of range.
    """
    known = PUBLISHED[name]
    train = [_records(name, place / file, known.train_items) for file in known.train]
    test = [_records(name, place / file, known.test_items) for file in known.test]
    return _joined(train), _joined(test)


def _joined(parts: list[Images]) -> Images:
    return Images(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _records(name: str, path: Path, items: int) -> Images:
    known, (channels, side, _) = PUBLISHED[name], SHAPES[name]
    if not isfile(path):
        raise ContextError("there is no such file", where=str(path), remedy=f"Unpack {known.archive} once more.")
    first, record = len(known.labels), len(known.labels) + channels * side * side
    try:
        size = path.stat().st_size
        if size != items * record:
            raise ValueError(f"{size:,} bytes, not {items:,} records of {record:,}")
        table = np.frombuffer(path.read_bytes(), np.uint8).reshape(items, record)
    except (OSError, ValueError) as error:
        raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error
    for byte, classes in enumerate(known.labels):
        if (largest := int(table[:, byte].max())) >= classes:
            raise WireError("damaged", f"has a label {largest}, of {classes} classes", where=str(path))
    return Images(
        np.ascontiguousarray(table[:, first:]).reshape(items, channels, side, side),
        table[:, first - 1].astype(np.int64),
    )
