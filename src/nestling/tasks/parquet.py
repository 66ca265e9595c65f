"""A set as its repository on the hub holds it: parquet files by split, one row an item, read from a local folder.

    train-00000-of-00002.parquet …     columns: the picture, a struct {bytes, path}, and its label; or a text

The files are read by pyarrow itself, which comes with the extra `hub`: no name is looked up and nothing is copied into
another library's cache. They may lie in the folder or, as most repositories have them, in one folder inside it.
"""

import re
from collections.abc import Callable
from os.path import isdir  # unlike Path.is_dir, False for a name too long for the system
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nestling.core.errors import ContextError, WireError
from nestling.tasks.pictures import decode
from nestling.tasks.sets import HUB, SHAPES, Images

MOST = 2_000_000
"""Rows; a damaged file may claim any number, and room is made for all of them."""
_ROWS = 512
Part = TypeVar("Part")


def find_parquet(folder: Path) -> Path | None:
    """The folder with parquet files: `folder`, or the one inside it. Raises `ContextError` if several have some."""
    if not isdir(folder):
        return None
    if any(folder.glob("*.parquet")):
        return folder
    inside = sorted({path.parent for path in folder.glob("*/*.parquet")})
    if len(inside) > 1:
        raise ContextError(
            f"has parquet files in several folders ({', '.join(path.name for path in inside[:4])})",
            where=str(folder),
            remedy="Set task.path to one of them.",
        )
    return inside[0] if inside else None


def read_parquet(name: str, place: Path) -> tuple[Images, Images]:
    """The training split and the one that the set is judged on, in the order of the rows.

    Raises `ContextError` if pyarrow, a file or a column is missing, `WireError` if a file or picture is damaged.
    """
    train, test = _shards(place, "train"), _shards(place, HUB[name][3])
    return _pictures(name, train), _pictures(name, test)


def read_texts(source: str, place: Path, split: str, column: str) -> list[str]:
    """A column of texts of one split, in the order of the rows; `source` names the repository for errors.

    Raises `ContextError` if pyarrow, a file or the column is missing, `WireError` if a file is damaged.
    """

    def rows(file: Any, where: str) -> list[str]:
        _has_columns(file, [column], source, where)
        texts = [text for batch in file.iter_batches(_ROWS, columns=[column]) for text in batch.column(0).to_pylist()]
        if not all(isinstance(text, str) for text in texts):
            raise WireError("damaged", f"has a row without a text in {column!r}", where=where)
        return texts

    return [text for part in _each(_shards(place, split), rows) for text in part]


def _shards(place: Path, split: str) -> list[Path]:
    """The files of a split, all of them."""
    named = re.compile(rf"{split}(?:-(\d+)-of-(\d+))?(?:-[0-9a-f]+)?\.parquet")
    found = [(match, path) for path in sorted(place.glob("*.parquet")) if (match := named.fullmatch(path.name))]
    if not found:
        raise ContextError(
            f"holds no file of the split {split}",
            where=str(place),
            remedy=f"Put {split}-00000-of-00001.parquet there, or {split}.parquet.",
        )
    numbers = [(int(match[1] or 0), int(match[2] or 1)) for match, _ in found]
    if numbers != [(number, numbers[0][1]) for number in range(numbers[0][1])]:
        raise ContextError(
            f"does not hold each file of the split {split} once ({', '.join(path.name for _, path in found[:4])})",
            where=str(place),
            remedy="Download them once more, into an empty folder.",
        )
    return [path for _, path in found]


def _pictures(name: str, paths: list[Path]) -> Images:
    parts = _each(paths, lambda file, where: _rows(name, file, where))
    if len(parts) == 1:
        return parts[0]
    return Images(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _each(paths: list[Path], read: Callable[[Any, str], Part]) -> list[Part]:
    """What `read` makes of each file, given open and with its name."""
    try:
        from pyarrow import ArrowException
        from pyarrow import parquet as library
    except ImportError as error:
        raise ContextError(
            "is a parquet file, read through the package pyarrow, which is not installed",
            where=str(paths[0]),
            remedy="pip install 'nestling[hub]'",
        ) from error
    parts: list[Part] = []
    for path in paths:
        try:
            with library.ParquetFile(path) as file:
                parts.append(read(file, str(path)))
        except (OSError, ValueError, ArrowException) as error:
            if isinstance(error, WireError):
                raise
            raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error
    return parts


def _has_columns(file: Any, columns: list[str], source: str, where: str) -> None:
    for column in columns:
        if column not in file.schema_arrow.names:
            raise ContextError(
                f"has no column {column!r}", where=where, remedy=f"Give the files of {source} on the hub."
            )


def _rows(name: str, file: Any, where: str) -> Images:
    (channels, side, classes), (_, image, label, _) = SHAPES[name], HUB[name]
    _has_columns(file, [image, label], HUB[name][0], where)
    count = file.metadata.num_rows
    if count > MOST:
        raise WireError("damaged", f"claims {count:,} rows", where=where)
    x, y, row = np.empty((count, channels, side, side), np.uint8), np.empty(count, np.int64), 0
    for batch in file.iter_batches(_ROWS, columns=[image, label]):
        for picture, value in zip(batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True):
            data = picture.get("bytes") if isinstance(picture, dict) else None
            if not isinstance(data, bytes) or type(value) is not int or not 0 <= value < classes or row == count:
                raise WireError("damaged", f"row {row} has no picture, or no label below {classes}", where=where)
            x[row] = decode(data, channels=channels, side=side, where=f"{where}, row {row}")
            y[row] = value
            row += 1
    if row != count:
        raise WireError("damaged", f"has {row:,} of {count:,} rows", where=where)
    return Images(x, y)
