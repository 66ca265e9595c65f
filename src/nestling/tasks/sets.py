"""The image sets that are known by name: what they hold, where they lie on the hub, and the form they are loaded in."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8

SHAPES = {
    "digits": (1, 28, 10),
    "digits8": (1, 28, 10),
    "fashion": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "tiny-imagenet": (3, 64, 200),
}
"""Channels, side and classes of each set, known without reading it."""
TRAINED_ON = {"digits": 3500, "fashion": 54_000, "cifar10": 45_000, "cifar100": 45_000, "tiny-imagenet": 90_000}
"""Training images of each set as it is published, less the tenth that is kept for validation (and of digits the fifth
that is kept for testing)."""
TITLES = {
    "digits": "MNIST-5k",
    "fashion": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny ImageNet",
}
"""What people call them."""
HUB = {
    "cifar10": ("uoft-cs/cifar10", "img", "label", "test"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label", "test"),
    "fashion": ("zalando-datasets/fashion_mnist", "image", "label", "test"),
    "tiny-imagenet": ("zh-plus/tiny-imagenet", "image", "label", "valid"),
}
"""Where a set lies on the hub, its two columns, and the split that it is judged on. Tiny ImageNet's own test images
were published without labels, so everybody reports on its validation images."""


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
