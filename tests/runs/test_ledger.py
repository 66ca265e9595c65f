"""The ledger: whatever a crash leaves of the file, no round that got its noise is missing from it."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nestling.core.errors import StorageError, WireError
from nestling.runs.ledger import LEDGER, Charge, Ledger, read_charges

CHARGE = Charge(round=1, noise_multiplier=1.0, clip=0.5, cohort=8, sampling_rate=1.0, delta=1e-5)
CHARGES = [CHARGE, replace(CHARGE, round=2, noise_multiplier=0.7, clip=1 / 3), replace(CHARGE, round=3)]


def write(folder: Path, charges: list[Charge]) -> bytes:
    ledger = Ledger(folder)
    for charge in charges:
        ledger.charge(charge)
    ledger.close()
    return (folder / LEDGER).read_bytes()


def test_what_is_charged_is_what_is_read(tmp_path: Path) -> None:
    assert read_charges(tmp_path) == []
    write(tmp_path, CHARGES)
    assert read_charges(tmp_path) == CHARGES
    again = Ledger(tmp_path)
    assert again.charges == CHARGES
    again.charge(CHARGES[2])  # the round is repeated after a crash: it counts twice
    assert again.charges == read_charges(tmp_path) == [*CHARGES, CHARGES[2]]
    again.close()
    again.close()


def test_cat_094_a_cut_at_every_byte_loses_no_whole_line(tmp_path: Path) -> None:
    privacy = pytest.importorskip("nestling.strategies.privacy")
    pytest.importorskip("dp_accounting")
    data = write(tmp_path, CHARGES)
    epsilons = [privacy.spent([c.mechanism for c in CHARGES[:n]], 1e-5) for n in range(4)]
    assert epsilons == sorted(set(epsilons))
    for cut in range(len(data) + 1):
        whole = data[:cut].count(b"\n")
        (tmp_path / LEDGER).write_bytes(data[:cut])
        assert read_charges(tmp_path) == CHARGES[:whole]
        ledger = Ledger(tmp_path)
        assert ledger.charges == CHARGES[:whole]
        ledger.charge(CHARGE)
        ledger.close()
        assert read_charges(tmp_path) == [*CHARGES[:whole], CHARGE]
        if data[cut - 1 : cut] in (b"", b"\n"):
            assert privacy.spent([c.mechanism for c in read_charges(tmp_path)], 1e-5) > epsilons[whole]


def test_a_line_is_on_the_disk_before_charge_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        seen.append((tmp_path / LEDGER).read_bytes())

    monkeypatch.setattr(os, "fsync", watched)
    ledger = Ledger(tmp_path)
    assert seen == [b""]  # the folder, with the new file's name
    ledger.charge(CHARGE)
    assert seen[1:] == [(tmp_path / LEDGER).read_bytes()]
    assert seen[1].endswith(b"}\n")
    ledger.close()


def test_a_disk_that_refuses_stops_the_round_and_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)

    def refuses(_handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuses)
    with pytest.raises(StorageError):
        ledger.charge(CHARGE)
    monkeypatch.undo()
    ledger.close()
    assert read_charges(tmp_path) in ([], [CHARGE])  # too much at worst: the noise was never drawn


GOOD = '{"round": 1, "noise_multiplier": 1, "clip": 0.5, "cohort": 8, "sampling_rate": 1, "delta": 1e-05}'


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[1]",
        "\0" * len(GOOD),
        GOOD.replace('"clip": 0.5, ', ""),
        GOOD.replace("}", ', "more": 1}'),
        GOOD.replace("0.5", "NaN"),
        GOOD.replace("0.5", "0"),
        GOOD.replace("0.5", '"0.5"'),
        GOOD.replace('"round": 1', '"round": true'),
        GOOD.replace('"round": 1', '"round": 1.0'),
        GOOD.replace('"round": 1', '"round": -1'),
        GOOD.replace('"noise_multiplier": 1', '"noise_multiplier": -1'),
        GOOD.replace('"noise_multiplier": 1', '"noise_multiplier": 1e999'),
        GOOD.replace('"sampling_rate": 1', '"sampling_rate": 1.5'),
        GOOD.replace('"sampling_rate": 1', '"sampling_rate": 0'),
        GOOD.replace('"cohort": 8', '"cohort": 0'),
        GOOD.replace("1e-05", "1"),
    ],
)
def test_a_line_that_is_no_charge_is_never_passed_over(tmp_path: Path, line: str) -> None:
    (tmp_path / LEDGER).write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(WireError, match="line 2"):
        read_charges(tmp_path)
    with pytest.raises(WireError, match="line 2"):
        Ledger(tmp_path)
    assert (tmp_path / LEDGER).read_text() == f"{GOOD}\n{line}\n{GOOD}\n"


def test_whole_numbers_and_numpys_pass_for_floats(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text(f"{GOOD}\n")
    assert read_charges(tmp_path) == [CHARGE]
    ledger = Ledger(tmp_path)
    ledger.charge(replace(CHARGE, clip=np.float64(0.1)))
    ledger.close()
    assert type(ledger.charges[1].clip) is float
    assert read_charges(tmp_path) == ledger.charges


@pytest.mark.parametrize("bad", [{"clip": float("nan")}, {"noise_multiplier": float("inf")}, {"cohort": 0}])
def test_a_charge_that_could_not_be_read_is_not_written(tmp_path: Path, bad: dict[str, float]) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises((WireError, ValueError)):
        ledger.charge(replace(CHARGE, **bad))
    ledger.close()
    assert (tmp_path / LEDGER).read_bytes() == b""
    assert ledger.charges == []


def test_a_ledger_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / LEDGER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        Ledger(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == ""
