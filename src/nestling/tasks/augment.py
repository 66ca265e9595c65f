"""Random crops and mirror images for local training, as CIFAR is usually trained: 4 pixels of margin, then a flip.

    image (h × w) → zeros around it, 4 wide → a window of h × w at (top, left), 0 … 8 each → mirrored or not

All 9 · 9 · 2 outcomes are equally likely. They are drawn from the project's own integer stream by (seed, client, epoch)
and the item's place in the epoch, and pixels are only moved: the same bits on every machine, for any number of workers
and any size of batches.
"""

import numpy as np
from jaxtyping import Int64, UInt8

from nestling.core.seeds import Stream

MARGIN = 4
CHOICES = 2 * (2 * MARGIN + 1) ** 2


def draws(count: int, *, seed: int, client: int | None, epoch: int) -> Int64[np.ndarray, " n"]:
    """What happens to each item of a client's epoch, in the order in which they are trained on: 0 … 161.

    >>> draws(3, seed=0, client=1, epoch=0).max() < CHOICES
    np.True_
    """
    return Stream(seed, "augment", f"{client}/{epoch}").integers(count, CHOICES)


def crop_flip(x: UInt8[np.ndarray, "n c h w"], drawn: Int64[np.ndarray, " n"]) -> UInt8[np.ndarray, "n c h w"]:
    """The images moved and mirrored: number v is flip = v mod 2, left = ⌊v/2⌋ mod 9, top = ⌊v/18⌋.

    >>> image = np.arange(9, dtype=np.uint8).reshape(1, 1, 3, 3)
    >>> unmoved = 2 * (MARGIN + 9 * MARGIN)
    >>> crop_flip(image, np.array([unmoved + 1]))[0, 0].tolist()
    [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    """
    side = 2 * MARGIN + 1
    flip, left, top = drawn % 2 == 1, drawn // 2 % side, drawn // (2 * side)
    n, _, h, w = x.shape
    wide = np.pad(x, ((0, 0), (0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)))
    rows = top[:, None] + np.arange(h)
    columns = left[:, None] + np.where(flip[:, None], np.arange(w)[::-1], np.arange(w))
    # Indices around a slice put its axis last: [n, h, w, c].
    moved = wide[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(moved.transpose(0, 3, 1, 2))
