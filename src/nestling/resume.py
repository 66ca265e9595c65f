"""What a run keeps after each round, and how it is put back: a resumed run gives the bits of one never interrupted.

    after round t   state, what the server's rule keeps, what each client keeps, sums of the record    → a checkpoint
    resume          the same settings, base and data are built again, the arrays put back              → round t + 1

No generator is kept: every draw is decided by (seed, purpose, round, client). The settings are kept beside the arrays,
so that a folder whose settings were changed is refused, setting by setting, rather than continued as another run.
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

from nestling.build import Parts
from nestling.config.schema import OwnBase, RunConfig, deciding
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.federation.loop import Round
from nestling.federation.reference import References
from nestling.runs.checkpoint import Checkpoint
from nestling.runs.files import from_json, printable, read_file, to_json
from nestling.runs.folder import RunFolder
from nestling.runs.result import is_row

_REFERENCES = "references.json"
_LARGEST = 1 << 24
_MAY_CHANGE = ("machine.out", "machine.workers", "machine.references", "task.path", "base.path", "base.weights")
"""Where things lie and how many clients are trained side by side: it changes no result."""


@dataclasses.dataclass
class Tally:
    """What a run has come to so far, besides the state and what the two sides keep; plain values.

    `accuracy` is of the last round; `seconds` of all rounds; `abandoned` counts rounds without enough usable replies in
    a row, and `used` those with. `averaging_error` is measured after the last round only. `charges` is how many a
    private run's ledger holds at least.
    """

    round: int = 0
    accuracy: float = float("nan")
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    abandoned: int = 0
    used: int = 0
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)
    averaging_error: float | None = None
    charges: int = 0

    def add(self, done: Round, *, seconds: float) -> None:
        """Count a round; `seconds` is the time of all rounds up to its end."""
        self.round, self.accuracy, self.seconds = done.number, done.accuracy, seconds
        self.bytes_up += done.bytes_up
        self.bytes_down += done.bytes_down
        self.abandoned, self.used = done.abandoned, self.used + done.used
        self.refusals = dict(Counter(self.refusals) + Counter(f.code for f in done.refused.values()))


def snapshot(config: RunConfig, parts: Parts, tally: Tally) -> Checkpoint:
    """All that outlives the round just ended."""
    facts = dataclasses.asdict(tally) | {"settings": flat(config), "base_hash": parts.base_hash}
    facts["data"] = parts.task.digest
    for name in ("accuracy", "averaging_error"):
        facts[name] = facts[name] if facts[name] is not None and math.isfinite(facts[name]) else None
    kept = parts.workers[0].kept  # one dict for all workers
    return Checkpoint(tally.round, parts.server.state, parts.server.kept(), kept, facts)


def restore(config: RunConfig, parts: Parts, found: Checkpoint) -> Tally:
    """Put a checkpoint back into freshly built parts; returns the sums to go on with.

    Raises `ConfigError` if the settings are not those it was written with, `ContextError` if base or data are not.
    """
    facts = dict(found.facts)
    try:
        settings, hashed, data = (facts.pop(name) for name in ("settings", "base_hash", "data"))
        facts["accuracy"] = float("nan") if facts["accuracy"] is None else facts["accuracy"]
        tally = Tally(**facts)
        same = found.state.size == parts.agreement.layout.size and tally.round == found.round
    except (KeyError, TypeError) as error:
        raise WireError("checkpoint", "lacks what is needed to go on", where=f"round {found.round}") from error
    changed = differing(settings, flat(config))
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}",
            where="config.toml, changed since the run began",
            remedy="Put these settings back, or begin a new run with them: 'nestling run'.",
        )
    if hashed != parts.base_hash or not same:
        raise ContextError(
            f"its base was {str(hashed)[:12]}, the one made now is {parts.base_hash[:12]}",
            where=f"round {found.round}",
            remedy="Put the run's base.safetensors, or the model it names, back as it was.",
        )
    if data != parts.task.digest:
        raise ContextError(
            "the clients' items or the held-out ones are not those it was begun with",
            where=f"round {found.round}",
            remedy="Put the data back as it was, or begin a new run with 'nestling run'.",
        )
    parts.server.restore(found.state, found.server, round=found.round)
    parts.workers[0].kept.clear()
    parts.workers[0].kept.update({client: dict(kept) for client, kept in found.clients.items()})
    return tally


def flat(config: RunConfig) -> dict[str, Any]:
    """Settings by dotted name, those left out that change no result.

    >>> flat(RunConfig())["codec.bits"], "machine.workers" in flat(RunConfig())
    (32, False)
    """
    found: dict[str, Any] = {}
    for name, value in deciding(config).items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}.{key}".rstrip("."): list(v) if isinstance(v, tuple) else v for key, v in entries}
    return {name: value for name, value in found.items() if not name.startswith(_MAY_CHANGE)}


def differing(before: Any, now: dict[str, Any]) -> list[str]:
    """What differs, in words, setting by setting.

    >>> differing({"codec.bits": 32, "seed": 0}, {"codec.bits": 4, "seed": 0})
    ['codec.bits was 32 and is 4']
    """
    before = before if isinstance(before, dict) else {}
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{printable(name)} was {before.get(name)!r} and is {now.get(name)!r}" for name in names]


def with_own_base(config: RunConfig, folder: Path) -> RunConfig:
    """The settings with the base that lies in the run's folder, so that it need not be made again."""
    own = folder / "base.safetensors"
    if isinstance(config.base, OwnBase) and not config.base.weights and own.is_file():
        return dataclasses.replace(config, base=dataclasses.replace(config.base, weights=str(own)))
    return config


def write_references(folder: RunFolder, found: References, seconds: float | None) -> None:
    """Keep the rows to compare with, which take as long as the run itself."""
    entries: dict[str, Any] = {}
    if found.recalls:
        from nestling.federation.recalls import entries as entries_of  # needs transformers

        entries = entries_of(found.recalls)
    numbers = {"local_only": found.local_only, "centralised": found.centralised, "seconds": seconds}
    plain = {name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()}
    folder.write(_REFERENCES, to_json(plain | {"recalls": entries}).encode())


def read_references(folder: Path) -> tuple[References, float | None] | None:
    """What `write_references` wrote; None if the run was ended before. Raises `WireError` if it is damaged."""
    path = folder / _REFERENCES
    if not path.is_file():
        return None
    where = printable(str(path))
    values = from_json(read_file(path, _LARGEST), where)
    try:
        local, centralised, seconds = values["local_only"], values["centralised"], values["seconds"]
        rows = values["recalls"]
        numbers = [x for x in (local, centralised, seconds) if x is not None]
        if not all(type(x) in (int, float) for x in numbers) or not all(map(is_row, rows.values())):
            raise TypeError
        recalls = {}
        if rows:
            from nestling.federation.recalls import from_entries

            recalls = from_entries(rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError("references", "is damaged", where=where, remedy="Delete it: they are trained again.") from error
    nan = float("nan")
    return References(nan if local is None else local, nan if centralised is None else centralised, recalls), seconds
