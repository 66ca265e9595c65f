"""A frozen causal language model and its tokenizer: packaged, from a folder, from a GGUF file, or from the hub.

    GGUF (quantised) → float32 safetensors + tokenizer, once, in the cache under the SHA-256 of the GGUF

A GGUF takes half a minute to load, and a model loaded from one cannot be saved, for it counts as quantised; its plain
copy loads in seconds with equal logits. The only file that needs the extra `llm` (transformers, gguf, accelerate).
"""

import contextlib
import copy
import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from os.path import isdir, isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from nestling.core.errors import ConfigError, ContextError, NestlingError, StorageError, WireError
from nestling.core.files import cache_folder, make_folder
from nestling.models import assets
from nestling.models.untrusted import refuse_code, refuse_pickles

if TYPE_CHECKING:
    import transformers

PACKAGED = "smollm2-135m"
"""The one model that needs no hub."""
CONVERSION = 1
"""Raise it when a change below changes what a GGUF becomes, so that no older conversion is used."""
DTYPES = ("bfloat16", "float32", "float16")
PLAIN: dict[str, Any] = {"trust_remote_code": False}  # unset, transformers asks at the terminal
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def load_language_model(
    source: str, *, dtype: str = "bfloat16", device: str = "cpu"
) -> "tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]":
    """The model, frozen and in eval mode, and its tokenizer. Code that comes with a model is not run.

    Args:
        source: smollm2-135m, a folder or a .gguf file, or a name on the hub such as Qwen/Qwen2.5-1.5B. The first load
            of a GGUF converts it (half a minute for 135 million weights, 4 bytes of disk each).
        dtype: of all floating-point weights: bfloat16, float32 or float16.
        device: where the weights go.

    Raises `ConfigError` (exit 2) for another dtype, `ContextError` (exit 3) if the model or the extra `llm` is not
    there, the model cannot be loaded whole, or its files name code to run or hold pickles, `WireError` (exit 5) if a
    file is damaged or holds weights that are not finite.

    >>> load_language_model("smollm2-135m", dtype="int3")
    Traceback (most recent call last):
    nestling.core.errors.ConfigError: dtype: 'int3' is not allowed. Give bfloat16, float32 or float16.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is not allowed", where="dtype", remedy="Give bfloat16, float32 or float16.")
    library = _transformers()
    place = _place(source)
    if place.endswith(".gguf"):
        place = str(_converted(Path(place), expected=assets.ASSETS[PACKAGED].sha256 if source == PACKAGED else ""))
    options = _options(place)
    with _quiet(), _errors(source):
        _refuse_untrusted(library, place, source)
        tokenizer = library.AutoTokenizer.from_pretrained(place, **options)
        model, found = library.AutoModelForCausalLM.from_pretrained(
            place,
            dtype=getattr(torch, dtype),
            use_safetensors=True,  # the other format can run code
            output_loading_info=True,
            **options,
        )
    if missing := sorted(found["missing_keys"]):  # transformers draws them at random and goes on
        raise ContextError(
            f"holds no weights for {len(missing)} tensors of the model, such as {missing[0]}",
            where=source,
            remedy="Check that it is a causal language model, saved whole.",
        )
    if broken := next((name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())), ""):
        raise WireError("non_finite", f"{broken} holds NaN or infinity as {dtype}", where=source)
    return _frozen(model).to(device), tokenizer


def language_shape(source: str) -> "transformers.PreTrainedConfig":
    """The settings of a model, without its weights: from what `load_language_model` takes, or a config.json.

    Raises `ContextError` (exit 3) if they or the extra `llm` are not there, cannot be read, or name code to run.
    """
    library = _transformers()
    place = source if source.endswith(".json") and isfile(source) else _place(source)
    options = _options(place)
    if place.endswith(".gguf"):
        path = Path(place)
        if isdir(ready := _conversion(_gguf_hash(path))):
            place = str(ready)
        else:
            _need_gguf(path)
            place, options = str(path.parent), options | {"gguf_file": path.name}
    with _quiet(), _errors(source):
        if "gguf_file" not in options:
            refuse_code(library.PreTrainedConfig.get_config_dict(place, **options)[0], file="config.json", where=source)
        return library.AutoConfig.from_pretrained(place, **options)


def empty_language_model(config: "transformers.PreTrainedConfig") -> "transformers.PreTrainedModel":
    """A model of this shape on the meta device: names and sizes of all tensors, no memory. For counting.

    Raises `ConfigError` if this is not the shape of a causal language model.
    """
    library = _transformers()
    try:
        with _quiet(), torch.device("meta"):
            return _frozen(library.AutoModelForCausalLM.from_config(config, **PLAIN))
    except ValueError as error:
        raise ConfigError(
            f"{config.model_type!r} is no causal language model", where="model_type", remedy="Give another model."
        ) from error


def _options(place: str) -> dict[str, Any]:
    """What every load is told: to run no code of the model's and, for what lies on this machine, to ask nobody."""
    return PLAIN | {"local_files_only": os.path.exists(place)}


def _refuse_untrusted(library: ModuleType, place: str, source: str) -> None:
    """Raise if the model's files name code to run, hold pickles, or stand for another model."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils import find_adapter_config_file

    options = _options(place)
    refuse_code(library.PreTrainedConfig.get_config_dict(place, **options)[0], file="config.json", where=source)
    refuse_code(get_tokenizer_config(place, **options), file="tokenizer_config.json", where=source)
    if isdir(place):
        refuse_pickles(Path(place), where=source)
    # With peft installed, transformers would follow this file to whatever model it names.
    if find_adapter_config_file(place, local_files_only=options["local_files_only"]) is not None:
        raise ContextError(
            "is an adapter of another library (adapter_config.json)", where=source, remedy="Give the model it is for."
        )


def _frozen(model: Any) -> Any:
    """It reads alike each time, while an adapter is trained too: dropout would draw from torch's own generator."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.eval().requires_grad_(False)


def _transformers() -> ModuleType:
    try:
        import transformers  # a second, and only for those who use language models
    except ImportError as error:
        raise ContextError(
            f"language models need the package transformers ({error})",
            where="base",
            remedy='pip install "nestling[llm]"',
        ) from error
    return transformers


def _place(source: str) -> str:
    """The folder, the .gguf file or the hub name that `source` stands for."""
    if source == PACKAGED:
        if path := assets.find(PACKAGED):
            return str(path)
        raise ContextError("is not on this machine", where=source, remedy=f"nestling fetch {PACKAGED}")
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        if isfile(path):
            return str(path)
        raise ContextError("there is no such file", where=source, remedy="Give the path of a .gguf file.")
    if isdir(path) and source:
        if isfile(path / "config.json"):
            return str(path)
        raise ContextError("holds no config.json", where=source, remedy="Give the folder of a saved model.")
    if HUB_NAME.fullmatch(source):
        return source
    raise ContextError(
        "is no model: neither a folder, nor a .gguf file, nor a name on the hub",
        where=source or "base",
        remedy=f"Give {PACKAGED}, a path, or a name such as Qwen/Qwen2.5-1.5B.",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, warnings or log lines below an error, from transformers or what it uses, until the end."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _errors(source: str) -> Iterator[None]:
    """The many kinds of exceptions of the library, as ours."""
    try:
        yield
    except NestlingError:
        raise
    except SafetensorError as error:
        raise WireError("damaged", f"its weights cannot be read ({error})", where=source) from error
    except Exception as error:  # offline, gone, gated, an architecture it does not know, a file left out …
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        is_local = source == PACKAGED or os.path.exists(os.path.expanduser(source))
        raise ContextError(
            f"could not be loaded ({reason.strip().rstrip('.:')})",
            where=source,
            remedy="Check that it is a causal language model, saved whole with its tokenizer."
            if is_local
            else "Check the name and the network, or give a local folder. A gated model needs its terms accepted on "
            "its page, and 'hf auth login'.",
        ) from error


# A GGUF becomes a folder that loads fast.


def _gguf_hash(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise WireError("damaged", "is no GGUF file", where=str(path))
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _need_gguf(path: Path) -> None:
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ContextError(
            f"a GGUF file needs the packages gguf and accelerate (missing: {', '.join(missing)})",
            where=str(path),
            remedy='pip install "nestling[llm]"',
        )


def _conversion(digest: str) -> Path:
    return cache_folder() / "models" / f"{digest[:32]}-{CONVERSION}"


def _converted(path: Path, *, expected: str) -> Path:
    """The folder with the plain copy of a GGUF; made if it is not there, whole or not at all."""
    digest = _gguf_hash(path)
    if expected and digest != expected:
        raise WireError("damaged", "has another SHA-256 than it should", where=str(path), remedy="Delete the file.")
    folder = _conversion(digest)
    if isdir(folder):
        return folder
    _need_gguf(path)
    make_folder(folder.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(folder.parent / f".{folder.name}.lock", flags, 0o666), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several clients may start at once: one converts, the others wait
        if isdir(folder):
            return folder
        part = folder.parent / f".{folder.name}.part"
        shutil.rmtree(part, ignore_errors=True)  # of a conversion that was killed
        try:
            with _quiet(), _errors(str(path)):
                model, tokenizer = _read_gguf(path)
            with _quiet():
                model.save_pretrained(part)
                tokenizer.save_pretrained(part)
            for file in (*part.iterdir(), part):
                handle = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            part.rename(folder)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"could not be written ({error})",
                where=str(folder),
                remedy="Free some space, or set NESTLING_CACHE to another folder.",
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _read_gguf(path: Path) -> tuple[Any, Any]:
    """The model a GGUF holds, dequantised to float32 and able to be saved, and its tokenizer."""
    library = _transformers()
    options: dict[str, Any] = {"gguf_file": path.name, **_options(str(path))}
    tokenizer = library.AutoTokenizer.from_pretrained(path.parent, **options)
    if hasattr(library, "GgufConfig"):  # newer versions keep the blocks packed where they have a kernel for them
        options["quantization_config"] = library.GgufConfig(dequantize=True)
    loaded = library.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True, strict=False)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    if empty := [name for name, parameter in plain.named_parameters() if parameter.is_meta]:
        raise ContextError(f"holds no weights for {empty[0]}", where=str(path), remedy="Give another file.")
    return plain, tokenizer
