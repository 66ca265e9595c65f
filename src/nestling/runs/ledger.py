"""What a run has spent of its privacy: one line a round, on the disk before the round's noise is drawn.

A crash can therefore only count too much: a round that was charged and came to nothing stays charged, and one that is
repeated is charged again, for its noise is another. ε is a function of all lines together (`strategies/privacy.py`).
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nestling.core.errors import WireError
from nestling.core.files import sync_folder
from nestling.runs.files import LineFile, from_json, printable, read_lines, to_json

LEDGER = "privacy.jsonl"
_KINDS: dict[str, Any] = {
    "round": int, "noise_multiplier": float, "clip": float, "cohort": int, "sampling_rate": float, "delta": float,
}  # fmt: skip


@dataclass(frozen=True)
class Charge:
    """One round that was charged for, whatever came of it.

    `noise_multiplier` and `clip` are those of the round, `cohort` the clients planned for it, and `sampling_rate` is 1
    unless each of them was drawn with that probability, in secret; `delta` is what the run reports ε at.
    """

    round: int
    noise_multiplier: float
    clip: float
    cohort: int
    sampling_rate: float
    delta: float

    @property
    def mechanism(self) -> tuple[float, float]:
        """What ε depends on: (noise multiplier, sampling rate)."""
        return self.noise_multiplier, self.sampling_rate


class Ledger:
    """The ledger in a run's folder, which the caller holds the lock of. `charges` are all that were ever made.

    Opening cuts off a torn last line: its round never got its noise. Raises `StorageError` if the disk refuses,
    `WireError` if a line is not a charge, for to pass over it would be to count too little.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here:
    ...     ledger = Ledger(Path(here))
    ...     ledger.charge(Charge(1, noise_multiplier=1.0, clip=0.5, cohort=8, sampling_rate=1.0, delta=1e-5))
    ...     ledger.close()
    ...     print((Path(here) / LEDGER).read_text(), end="")
    ...     [charge.mechanism for charge in read_charges(Path(here))]
    {"round": 1, "noise_multiplier": 1.0, "clip": 0.5, "cohort": 8, "sampling_rate": 1.0, "delta": 1e-05}
    [(1.0, 1.0)]
    """

    def __init__(self, folder: Path) -> None:
        self._file = LineFile(folder / LEDGER)
        try:
            self.charges = read_charges(folder)
            sync_folder(folder)  # so that the file's name is on the disk too
        except BaseException:
            self._file.close()
            raise

    def charge(self, charge: Charge) -> None:
        """Write it down; only when this has returned may the round's noise be drawn. Raises `StorageError`."""
        line = to_json(asdict(charge))
        read_back = _charge(line, "charge")
        self._file.append(line)
        self._file.sync()
        self.charges.append(read_back)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._file.close()


def read_charges(folder: Path) -> list[Charge]:
    """The charges of a run, oldest first; none if it has no ledger, and a torn last line is passed over.

    Raises `WireError` if a line is not a charge.
    """
    path = folder / LEDGER
    if not os.path.lexists(path):
        return []
    charges: list[Charge] = []
    for number, line in enumerate(read_lines(path), 1):
        charges.append(_charge(line, f"{printable(str(path))}, line {number}"))
    return charges


def _charge(line: str | bytes, where: str) -> Charge:
    values = from_json(line, where)
    if not isinstance(values, dict) or values.keys() != _KINDS.keys():
        raise WireError("rows", f"is not an object with {', '.join(_KINDS)}", where=where)
    for name, kind in _KINDS.items():
        if type(values[name]) not in ((int,) if kind is int else (int, float)):
            raise WireError("rows", f"has an unusable value for {name}", where=where)
    charge = Charge(**{name: kind(values[name]) for name, kind in _KINDS.items()})
    if not (
        charge.round >= 0
        and charge.cohort >= 1
        and charge.noise_multiplier >= 0
        and charge.clip > 0
        and 0 < charge.sampling_rate <= 1
        and 0 < charge.delta < 1
    ):
        raise WireError("rows", "has a number that cannot be", where=where)
    return charge
