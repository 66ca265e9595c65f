"""Named tensors as one flat float32 vector, in an order that never changes.

What is trained and sent is always one vector; a `Layout` says which slice of it is which tensor. The order is the
order given (the model's own), so the layout itself is part of what client and server agree on.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt

import numpy as np
from jaxtyping import Float32

from nestling.core.errors import ContextError

Vector = Float32[np.ndarray, "n"]


def norm(vector: Vector) -> float:
    """‖vector‖, in float64, in which no float32 overflows.

    >>> norm(np.float32([3, 4])), norm(np.float32([3e38, 3e38])) > 4e38
    (5.0, True)
    """
    return sqrt(float(np.square(vector, dtype=np.float64).sum()))


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a flat vector, in order.

    >>> layout = Layout.of([("a", (2, 3)), ("b", (4,))])
    >>> layout.size, layout.slice("b")
    (10, slice(6, 10, None))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Iterable[int]]]) -> "Layout":
        """Build from (name, shape) pairs. Raises `ContextError` if a name occurs twice."""
        pairs = [(name, tuple(int(side) for side in shape)) for name, shape in entries]
        names = tuple(name for name, _ in pairs)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ContextError("occurs twice in one layout", where=twice, remedy="Names must be unique.")
        return cls(names, tuple(shape for _, shape in pairs))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Number of elements of the whole vector."""
        return sum(self.sizes)

    @cached_property
    def _slices(self) -> dict[str, slice]:
        slices, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            slices[name] = slice(start, start + size)
            start += size
        return slices

    def slice(self, name: str) -> slice:
        """Where the tensor `name` lies in the flat vector."""
        return self._slices[name]

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return iter(zip(self.names, self.shapes, strict=True))

    def pack(self, tensors: Mapping[str, np.ndarray]) -> Vector:
        """One flat float32 vector from named arrays. Raises `ContextError` on a missing, extra or misshapen one."""
        extra, missing = set(tensors) - set(self.names), set(self.names) - set(tensors)
        if extra or missing:
            raise ContextError(
                f"tensors differ from the layout (missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]})",
                where="layout",
                remedy="Both sides must attach the same adapter to the same model.",
            )
        flat = np.empty(self.size, np.float32)
        for name, shape in self:
            if tuple(tensors[name].shape) != shape:
                raise ContextError(f"has shape {tuple(tensors[name].shape)}, the layout says {shape}", where=name)
            flat[self.slice(name)] = np.asarray(tensors[name], np.float32).reshape(-1)
        return flat

    def unpack(self, vector: Vector) -> dict[str, np.ndarray]:
        """Named views into a flat vector (no copy). Raises `ContextError` if its length is not the layout's."""
        if vector.shape != (self.size,):
            raise ContextError(
                f"has shape {vector.shape}, the layout holds {self.size} numbers",
                where="vector",
                remedy="Was it made by another adapter or model?",
            )
        return {name: vector[self.slice(name)].reshape(shape) for name, shape in self}
