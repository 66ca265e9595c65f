"""What a command line names where it asks for a model: a run's folder, an adapter's, or a model by itself."""

from dataclasses import dataclass
from os.path import isfile  # unlike Path.is_file, False for a name too long for the system
from pathlib import Path

from nestling.config.load import parse_config
from nestling.config.schema import LanguageConfig, RunConfig
from nestling.core.errors import ConfigError
from nestling.runs.files import printable, read_file

LARGEST_CONFIG = 1 << 20


@dataclass(frozen=True)
class Place:
    """A language model and what is put on it: the adapter's folder or None, the model's name, the type of its weights,
    and the settings of the run that trained the adapter, where they lie beside it."""

    adapter: Path | None
    model: str
    dtype: str
    settings: RunConfig | None = None


def is_adapted(path: Path) -> bool:
    """Whether a run's or an adapter's folder is there.

    >>> is_adapted(Path("no such folder"))
    False
    """
    return isfile(path / "adapter.json") or isfile(path / "config.toml")


def place_of(run: str, *, model: str = "", dtype: str = "") -> Place:
    """What `run` stands for: a run's folder, or an adapter's; empty: the model alone.

    Args:
        model, dtype: where they are not empty, in place of the run's; without either: smollm2-135m in bfloat16.

    Raises `ConfigError` (exit 2) if there is no such folder, or the run was one over images or bytes, `WireError`
    (exit 5) if its settings are damaged.
    """
    path = Path(run) if run else None
    if path is None or isfile(path / "adapter.json"):
        adapter, folder = path, path.resolve().parent if path and path.resolve().name == "adapter" else None
    elif isfile(path / "config.toml"):
        adapter, folder = path / "adapter", path
    else:
        raise ConfigError(
            "is neither a run's folder nor an adapter's",
            where=printable(str(path)),
            remedy="See 'nestling ls' for the runs.",
        )
    settings = None
    if folder is not None and isfile(folder / "config.toml"):
        file = folder / "config.toml"
        text = read_file(file, LARGEST_CONFIG).decode("utf-8", "replace")
        settings = parse_config(text, where=printable(str(file)))
        if not isinstance(settings.base, LanguageConfig):
            raise ConfigError(
                "was a run over images, or over bytes by a small GPT: neither is a language model with a tokenizer",
                where=printable(str(folder)),
                remedy="Give another run.",
            )
        model, dtype = model or settings.base.model, dtype or settings.base.dtype
    return Place(adapter, model or "smollm2-135m", dtype or "bfloat16", settings)
