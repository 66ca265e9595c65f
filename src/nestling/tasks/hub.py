"""A data set by its name on the hub, through the library `datasets`, which comes with the extra `hub`."""

from collections.abc import Callable
from typing import Any, TypeVar

from nestling.core.errors import ContextError, WireError

Read = TypeVar("Read")


def from_hub(source: str, *more: str, read: Callable[[Any], Read]) -> Read:
    """What `read` makes of the splits of `source` (by name), of which `more` names the subset.

    Raises `ContextError` if the library is missing or the set, or a part of it, cannot be loaded; `WireError` if `read`
    finds it damaged.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ContextError(
            f"{source} is read through the package datasets, which is not installed",
            where="task.data",
            remedy="pip install 'nestling[hub]', or set task.path to a folder with the data.",
        ) from error
    try:
        return read(load_dataset(source, *more))
    except WireError:
        raise
    except Exception as error:  # the library raises many kinds: offline, gone, no such split
        raise ContextError(
            f"could not be loaded ({type(error).__name__}: {error})",
            where=source,
            remedy="Check the network, or set task.path to a folder with the data.",
        ) from error
