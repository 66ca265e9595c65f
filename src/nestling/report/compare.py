"""Runs side by side, with a warning for whatever differs besides seed and method, for that difference is compared too.

A method is its adapter and its codec; the seed, the name and the machine may differ without saying so.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nestling.core.errors import ContextError
from nestling.report.riders import rider_lines
from nestling.report.tables import Row, caption_of, rows_of, settings_of
from nestling.runs.files import printable
from nestling.runs.recorder import RunRecord, read_run
from nestling.runs.result import Result

_METHOD = ("name", "seed", "adapter", "codec", "machine")
_MUST_AGREE = ("task", "rounds", "clients", "alpha", "test_items", "evaluated_on", "base_hash")


@dataclass(frozen=True)
class Comparison:
    """The runs that have a result, in the order given; their rows and caption; and what a reader must be told."""

    runs: list[RunRecord]
    rows: list[Row]
    caption: str
    warnings: list[str]


def compare(run_dirs: Sequence[Path]) -> Comparison:
    """Read and set side by side. A run without a result is left out with a warning.

    Raises `ContextError` if no run has a result, `ConfigError` or `WireError` for a folder that is none or is damaged.
    """
    runs, warnings = [], []
    for path in run_dirs:
        try:
            runs.append(read_run(path))
        except ContextError:
            warnings.append(f"{printable(path.name)} has no result yet and is left out")
    if not runs:
        raise ContextError("no run to show has a result", where="runs", remedy="See 'nestling ls'.")
    results = [run.result for run in runs]
    warnings += differences([run.config for run in runs], results)
    warnings += [f"{run} is given more than once; the last one counts" for run in _repeated(results)]
    for run in runs:
        whose = f"{printable(run.path.name)}: " if len(runs) > 1 else ""
        warnings += [f"{whose}{line}" for line in rider_lines(run.result)]
    return Comparison(runs, rows_of(results), caption_of(results), warnings)


def differences(configs: Sequence[str], results: Sequence[Result]) -> list[str]:
    """One sentence for each setting, other than seed and method, in which the runs differ. `configs` are TOML texts."""
    tables = [dict(_settings(text)) for text in configs]
    found = {}
    for key in sorted({key for table in tables for key in table}):
        if key.split(".")[0] not in _METHOD:
            found[key] = [table.get(key, "unset") for table in tables]
    said = {key.split(".")[-1] for key, values in found.items() if len(set(values)) > 1}
    for key in _MUST_AGREE:
        if key not in said:
            found[key] = [_short(getattr(result, key)) for result in results]
    return [
        f"the runs also differ in {printable(key)}: {', '.join(sorted(set(values)))}"
        for key, values in found.items()
        if len(set(values)) > 1
    ]


def _settings(text: str) -> Iterator[tuple[str, str]]:
    try:
        yield from _flat(tomllib.loads(text), "")
    except (ValueError, RecursionError):  # ValueError: also a number of 5,000 digits
        yield "the configuration itself", "one cannot be read"


def _flat(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _short(value)


def _short(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 24 else f"{text[:12]}…"


def _repeated(results: Sequence[Result]) -> list[str]:
    runs = Counter((settings_of(result), result.seed) for result in results)
    # The last of the settings is their digest, which says nothing to a reader.
    return [", ".join([*settings[:-1], f"seed {seed}"]) for (settings, seed), times in runs.items() if times > 1]
