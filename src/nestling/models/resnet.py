"""The ResNets of the papers for 32×32 images: a 3×3 stem, GroupNorm, and a frozen classifier with orthonormal rows.

    logits = scale · H · f / ‖f‖,     H Hᵀ = I

H is drawn once from the base's seed, belongs to the base and is never trained or sent (FLITE, arXiv 2607.18343). The
features f are normalised and the logits scaled by a constant, a choice of ours: with rows of unit length the plain
product makes logits too small to learn from. torchvision is not used: it binds a build of torch, and its ResNet has a
7×7 stem and BatchNorm, whose statistics do not average over clients.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nestling.core.errors import ConfigError
from nestling.core.seeds import Stream, check_seed

BLOCKS = {"resnet8": (1, 1, 1), "resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
LOGIT_SCALE = 8.0


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut; the shortcut is a 1×1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = _norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = _norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential()
            self.shortcut.add_module("conv", conv)
            self.shortcut.add_module("norm", _norm(channels))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages of `Block`s (each stage after the first halves the image), mean over the image, classifier.

    >>> model = ResNet(blocks=(1, 1, 1), width=8, channels=1, classes=10)
    >>> model(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, *, blocks: tuple[int, ...], width: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential()
        self.stem.add_module("conv", nn.Conv2d(channels, width, 3, 1, 1, bias=False))
        self.stem.add_module("norm", _norm(width))
        self.stages = nn.ModuleList()
        wide = width
        for depth, count in enumerate(blocks):
            out = width * 2**depth
            stride = 1 if depth == 0 else 2
            stage = [Block(wide, out, stride)] + [Block(out, out, 1) for _ in range(count - 1)]
            self.stages.append(nn.Sequential(*stage))
            wide = out
        self.head = nn.Linear(wide, classes, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        x = F.relu(self.stem(images))
        for stage in self.stages:
            x = stage(x)
        return LOGIT_SCALE * self.head(F.normalize(x.mean((2, 3)), dim=-1))


def make_resnet(name: str, *, width: int, channels: int, classes: int, seed: int, head: str = "orthonormal") -> ResNet:
    """A randomly initialised network of the given name with its frozen classifier.

    Args:
        name: resnet8, resnet18 or resnet34.
        width: channels of the first stage (a multiple of 8).
        channels: of the images: 1 or 3.
        classes: rows of the classifier; at most the number of features.
        seed: decides the classifier and the initial weights.
        head: orthonormal rows, or random ones of unit length.

    >>> sum(p.numel() for n, p in make_resnet("resnet8", width=16, channels=1, classes=10, seed=0).named_parameters()
    ...     if "conv" in n)
    76432
    """
    if name not in BLOCKS:
        raise ConfigError(f"there is no model {name!r}", where="base.model", remedy=f"Known: {', '.join(BLOCKS)}.")
    check_seed(seed)
    with torch.random.fork_rng(devices=[]):  # the caller's generator is left as it was
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed every GPU's generator
        model = ResNet(blocks=BLOCKS[name], width=width, channels=channels, classes=classes)
    if model.head.weight.device.type != "meta":
        rows = orthonormal_rows if head == "orthonormal" else random_rows
        with torch.no_grad():
            model.head.weight.copy_(torch.from_numpy(rows(seed, classes, model.head.in_features)))
    model.head.weight.requires_grad_(False)
    return model


def orthonormal_rows(seed: int, rows: int, columns: int) -> np.ndarray:
    """float32[rows, columns] with orthonormal rows, from signs of the seed's stream. A longer matrix of the same seed
    begins with the same rows, up to sign conventions of the factorisation."""
    if rows > columns:
        raise ConfigError(
            f"{rows} classes cannot have orthogonal rows in {columns} features",
            where="base.width",
            remedy="Choose a wider model.",
        )
    signs = Stream(seed, "head", "orthonormal").signs(rows * columns).astype(np.float64).reshape(rows, columns)
    q, r = np.linalg.qr(signs.T)
    return np.ascontiguousarray((q * np.where(np.diag(r) < 0, -1.0, 1.0)).T.astype(np.float32))


def random_rows(seed: int, rows: int, columns: int) -> np.ndarray:
    """float32[rows, columns], random signs of size 1/√columns: rows of unit length, orthogonal only on average."""
    signs = Stream(seed, "head", "random").signs(rows * columns).reshape(rows, columns)
    return (signs / np.sqrt(columns)).astype(np.float32)
