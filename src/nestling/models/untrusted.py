"""A model's folder may name code to run: such a folder is refused, by what its settings say, before a library reads it.

transformers ignores most of these entries unless it is told to trust them; but it has run two of them in spite of that
(CVE-2026-4372: `_attn_implementation_internal`; CVE-2026-5241: a nested `trust_remote_code`). Pickled weights are
refused as well, since reading a pickle is running it.
"""

import json
from collections.abc import Iterator, Mapping
from os.path import isfile
from pathlib import Path

from nestling.core.errors import ContextError, WireError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 64 << 20
CONVERT = "Save it again as safetensors (model.save_pretrained), where running what it holds does no harm."


def refuse_code(settings: object, *, file: str, where: str) -> None:
    """Raise `ContextError` naming the entry, if the content of a JSON file names code to run.

    Args:
        settings: what the file holds.
        file: its name.
        where: the model.

    >>> refuse_code({"model_type": "llama", "attn_implementation": "sdpa"}, file="config.json", where="model")
    >>> refuse_code({"text_config": {"auto_map": {"AutoModel": "own.Model"}}}, file="config.json", where="model")
    Traceback (most recent call last):
    nestling.core.errors.ContextError: model: names code to run (text_config.auto_map in config.json). No code that \
comes with a model is run: use a copy of it without that entry.
    """
    for path, value in _entries(settings, ""):
        name = path.rpartition(".")[2]
        trusts = name in ("auto_map", "trust_remote_code") and bool(value)
        # A name with a slash is one on the hub, from where kernels are loaded. The inner entry is in no honest file.
        kernel = "_implementation" in name and value is not None and ("/" in str(value) or name.endswith("_internal"))
        if trusts or kernel:
            raise ContextError(
                f"names code to run ({path[:80]} in {file})",
                where=where,
                remedy="No code that comes with a model is run: use a copy of it without that entry.",
            )


def refuse_pickles(folder: Path, *, where: str) -> None:
    """Raise `ContextError` if weights in a model's folder are pickled, `WireError` if their index is damaged.

    Pickled weights beside a safetensors file are nobody's business: they are not read.
    """
    names = sorted(path.name for path in folder.iterdir())
    if isfile(folder / INDEX):
        names = _shards(folder / INDEX)
    elif any(name.endswith(".safetensors") for name in names):
        return
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        raise ContextError(
            f"has its weights in a pickle ({pickles[0][:80]}), which can run code", where=where, remedy=CONVERT
        )


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins so is what `torch.save` or `pickle` writes.

    >>> is_pickle(b"PK\\x03\\x04"), is_pickle(b"\\x80\\x02c"), is_pickle(b"\\x40\\0\\0\\0\\0\\0\\0\\0{")
    (True, True, False)
    """
    is_header = len(head) > 8 and head[8:9] == b"{"  # 128 is also the first byte of some lengths of a header
    return not is_header and (head.startswith(b"PK\x03\x04") or head[:1] == b"\x80")


def _entries(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Every entry of nested JSON under its dotted path."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            inner = f"{path}.{key}" if path else str(key)
            yield inner, entry
            yield from _entries(entry, inner)
    elif isinstance(value, list):
        for entry in value:
            yield from _entries(entry, path)


def _shards(index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise ValueError("too large")
        return sorted({str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WireError("damaged", f"cannot be read ({type(error).__name__})", where=str(index)) from error
