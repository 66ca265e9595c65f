"""TOML ↔ `RunConfig`, strictly: an unknown key, a wrong type or a missing file is an error that names the near miss."""

import dataclasses
import difflib
import json
import tomllib
import types
from importlib import resources
from os.path import isfile
from pathlib import Path
from reprlib import repr as short  # of whatever length and depth a file holds
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nestling.config.schema import (
    AdapterConfig,
    FullConfig,
    LatentConfig,
    LoraConfig,
    MappingConfig,
    MemoryConfig,
    RunConfig,
)
from nestling.core.errors import ConfigError

ADAPTERS: dict[str, type] = {
    "latent": LatentConfig,
    "full": FullConfig,
    "memory": MemoryConfig,
    "lora": LoraConfig,
    "mapping": MappingConfig,
}
_WANTED = {int: "a whole number", float: "a number", str: 'text in quotes, such as "x"', bool: "true or false"}


def preset_names() -> list[str]:
    """The presets that come with the package.

    >>> "flite-digits" in preset_names()
    True
    """
    return sorted(p.name.removesuffix(".toml") for p in _presets().iterdir() if p.name.endswith(".toml"))


def _presets() -> Any:
    return resources.files("nestling.config") / "presets"


def preset_text(name: str) -> str:
    """The TOML text of a preset, comments included. Raises `ConfigError` for an unknown name."""
    if name not in preset_names():
        raise ConfigError("there is no such preset", where=name, remedy=near(name, preset_names()))
    return str((_presets() / f"{name}.toml").read_text("utf-8"))


def load_config(source: str | Path) -> RunConfig:
    """A run's settings from a TOML file, or from a preset's name.

    Raises `ConfigError` if there is neither such a file nor such a preset, or if its content is not allowed.

    >>> load_config("flite-digits").method
    'flite'
    """
    path = Path(source)
    if isfile(path):  # Path.is_file raises on names that are too long
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read ({error})", where=str(path), remedy="Give a UTF-8 TOML file.") from error
        return parse_config(text, where=str(path))
    if str(source) in preset_names():
        return parse_config(preset_text(str(source)), where=str(source))
    names = preset_names() + sorted(str(p) for p in Path().glob("*.toml") if p.name != "pyproject.toml")
    raise ConfigError("is neither a TOML file nor a preset", where=str(source), remedy=near(str(source), names))


def parse_config(text: str, *, where: str = "config") -> RunConfig:
    """A run's settings from TOML text; `where` is named in errors."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # plain ValueError: a number of thousands of digits
        raise ConfigError(f"is not valid TOML ({error})", where=where, remedy="Mend that line.") from error
    config = _build(RunConfig, table, "")
    assert isinstance(config, RunConfig)
    return config


def parse_table(table: object) -> AdapterConfig:
    """An adapter's settings from a plain dict (as `save_pretrained` stores them), as strictly as from TOML."""
    config = _value(AdapterConfig, table, "adapter")
    assert isinstance(config, AdapterConfig)
    return config


def _build(cls: type, table: Any, prefix: str) -> Any:
    """A dataclass from a table, key by key; `prefix` is the path of the table, for errors."""
    if not isinstance(table, dict):
        raise ConfigError(
            f"{short(table)} is not a table", where=prefix.rstrip("."), remedy=f"Write [{prefix.rstrip('.')}]."
        )
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in table:
        if key not in names:
            raise ConfigError("is not a setting", where=f"{prefix}{key}", remedy=near(key, names))
    return cls(**{key: _value(hints[key], value, f"{prefix}{key}") for key, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` if it fits the type `hint`, converted where nothing is lost (1 → 1.0, list → tuple)."""
    if get_origin(hint) in (Union, types.UnionType) and all(map(dataclasses.is_dataclass, get_args(hint))):
        kinds = {cls.kind: cls for cls in get_args(hint)}  # the default of the field `kind`; the first is the usual one
        kind = value.get("kind", next(iter(kinds))) if isinstance(value, dict) else next(iter(kinds))
        if not isinstance(kind, str) or kind not in kinds:
            raise ConfigError(
                f"{short(kind)} is not a kind of {where}",
                where=f"{where}.kind",
                remedy=near(short(kind), list(kinds)),
            )
        return _build(kinds[kind], value, f"{where}.")
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{where}.")  # type: ignore[arg-type]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        raise ConfigError(
            f"{short(value)} is not allowed", where=where, remedy=near(short(value), [str(a) for a in args])
        )
    if origin is tuple:
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise ConfigError(f"{short(value)} is not a list of texts", where=where, remedy='Write ["*conv*"].')
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise ConfigError("is too large a number", where=where, remedy="Give one of at most 64 bits.")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(
            f"{short(value)} is {type(value).__name__}, not {hint.__name__}",
            where=where,
            remedy=f"Give {_WANTED[hint]}.",
        )
    return value


def near(word: str, names: list[str]) -> str:
    """Advice for a name that does not exist: the closest one, and all there are.

    >>> near("round", ["rounds", "seed"])
    "Did you mean 'rounds'? Known: rounds, seed."
    """
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    known = "Known: " + ", ".join(names) + "."
    return f"Did you mean {close[0]!r}? {known}" if close else known


def dump_config(config: RunConfig) -> str:
    """The settings as TOML text that `parse_config` reads back to an equal `RunConfig`.

    >>> config = load_config("fedavg-digits")
    >>> parse_config(dump_config(config)) == config
    True
    """
    lines, tables = [], []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            entries = [(g.name, getattr(value, g.name)) for g in dataclasses.fields(value)]
            tables.append([f"\n[{f.name}]", *(f"{k} = {_toml(v)}" for k, v in entries if v is not None)])
        else:
            lines.append(f"{f.name} = {_toml(value)}")
    return "\n".join(lines + [line for table in tables for line in table]) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
