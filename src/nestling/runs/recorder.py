"""The record of a run: plain files that need no service, no database and no torch to be read.

| file | content |
|---|---|
| `config.toml`, `command.txt`, `env.json` | what was run, how, and on what |
| `metrics.jsonl` | one object per round; a number that is not finite is written as null |
| `bytes.jsonl` | one object per message with the server's verdict; client is null where who took part is a secret; an |
| | accepted reply with `norm`, `cosine` and `examples` (`federation/riders.py`), unless the run is private |
| `messages/last-up.msg`, `last-down.msg` | the last message each way, if at most 1 MiB |
| `log.txt`, `status`, `result.json` | lines with their time; one word; a `Result` |

Sizes are `len(bytes)` of the messages that travelled, never an estimate; the metrics' byte columns are summed here.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from nestling.core.errors import ContextError, WireError
from nestling.runs.environment import describe, without_private
from nestling.runs.files import LineFile, from_json, printable, read_file, read_lines, row_of, to_json
from nestling.runs.folder import RunFolder, Status, read_status
from nestling.runs.result import Result, plain

Direction = Literal["up", "down"]

_KEPT_MESSAGE = 1 << 20
_SMALL, _METRICS = 1 << 16, 1 << 24  # the most bytes that are read of a small file, and of metrics.jsonl
_RESULT = 1 << 24  # and of result.json, which may hold every item of every row
_SHOWN_REFUSED = 20
_MESSAGE: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("client", (int, NoneType)), ("direction", (str,)), ("codec", (str,)), ("wire_bytes", (int,)),
    ("payload_bytes", (int,)), ("accepted", (bool,)), ("reason", (str,)),
)  # fmt: skip


class Recorder:
    """Writes the record of a run into its folder while the run goes on. All methods may raise `StorageError`.

    >>> from tempfile import TemporaryDirectory
    >>> from nestling.runs.folder import create
    >>> with TemporaryDirectory() as here, create(Path(here), "demo", "c0ffee00") as folder:
    ...     recorder = Recorder.start(folder, config="rounds = 1", command=["nestling", "run", "demo.toml"])
    ...     recorder.message(b"12345678", round=1, direction="up", client=0, codec="float32", payload_bytes=4)
    ...     recorder.round(1, {"accuracy": 0.5, "loss": float("nan")})
    ...     recorder.close()
    ...     print((folder.path / "metrics.jsonl").read_text(), end="")
    {"round": 1, "accuracy": 0.5, "loss": null, "bytes_up": 8, "bytes_down": 0, "bytes_total": 8}
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._metrics = LineFile(folder.path / "metrics.jsonl")
        self._bytes = LineFile(folder.path / "bytes.jsonl")
        self._log = LineFile(folder.path / "log.txt")
        self._sent: dict[Direction, int] = {"up": 0, "down": 0}
        self._last: dict[Direction, bytes] = {}
        self._total = 0

    @classmethod
    def start(cls, folder: RunFolder, *, config: str, command: Sequence[str]) -> "Recorder":
        """Begin the record of a new run: the resolved configuration as TOML text, and the command as given."""
        folder.write("config.toml", config.encode("utf-8", "surrogateescape"))
        line = without_private(printable(" ".join(command)))
        folder.write("command.txt", f"{line}\n".encode())
        folder.write("env.json", to_json(describe(), indent=2).encode())
        return cls(folder)

    @classmethod
    def resume(cls, folder: RunFolder, *, rounds: int) -> "Recorder":
        """Go on with the record of a run of which so many rounds are kept: rows of later ones are cut off."""
        total = 0
        for name in ("metrics.jsonl", "bytes.jsonl"):
            path, kept, cut = folder.path / name, list[bytes](), False
            for number, line in enumerate(read_lines(path) if os.path.lexists(path) else (), 1):
                row = row_of(line, f"{printable(str(path))}, line {number}")
                if row["round"] > rounds:
                    cut = True
                else:
                    kept.append(line + b"\n")
                    total = row.get("bytes_total", total)
            if cut:
                folder.write(name, b"".join(kept))
        recorder = cls(folder)
        recorder._total = total
        return recorder

    def message(
        self,
        message: bytes,
        *,
        round: int,
        direction: Direction,
        client: int | None,
        codec: str,
        payload_bytes: int,
        accepted: bool = True,
        reason: str = "",
        keep: bool = True,
        measured: Mapping[str, object] | None = None,
    ) -> None:
        """Record one message as it travelled, with the server's verdict; a refused message has cost its bytes too.

        `client` is None where it is a secret. `keep`: it may become the `messages/last-….msg` that people look into.
        `measured`: what else is known of a reply.
        """
        row = {
            "round": round,
            "direction": direction,
            "client": client,
            "codec": codec,
            "wire_bytes": len(message),
            "payload_bytes": payload_bytes,
            "accepted": accepted,
            "reason": printable(reason),
            **(measured or {}),
        }
        self._bytes.append(to_json(plain(row)))
        self._sent[direction] += len(message)
        if keep and len(message) <= _KEPT_MESSAGE:
            self._last[direction] = message

    def round(self, number: int, values: Mapping[str, object]) -> None:
        """Record the end of a round: `values` (accuracy, loss, seconds, …), then the bytes of this round and so far."""
        up, down = self._sent["up"], self._sent["down"]
        self._total += up + down
        row = {"round": number, **values, "bytes_up": up, "bytes_down": down, "bytes_total": self._total}
        self._metrics.append(to_json(plain(row)))
        for file in (self._bytes, self._metrics):  # a checkpoint of this round may be written next
            file.sync()
        self._sent = {"up": 0, "down": 0}
        for direction, message in self._last.items():
            self.folder.write(f"messages/last-{direction}.msg", message)
        self._last = {}

    def log(self, text: str) -> None:
        """Add lines to `log.txt`, each with the time; control characters are escaped, so no line can be forged."""
        now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}"
        for line in text.splitlines() or [""]:
            self._log.append(f"{now} {without_private(printable(line))}")

    def result(self, result: Result) -> None:
        """Write what the run came to; it is not done before its report is written, too."""
        self.folder.write("result.json", (to_json(result.to_dict(), indent=2) + "\n").encode())

    def finish(self) -> None:
        """Say that the run is done."""
        self.folder.set_status("done")
        self.close()

    def stop(self, status: Literal["failed", "stopped"], reason: str) -> None:
        """Say why the run ended early; what was recorded stays."""
        self.log(f"{status}: {reason}")
        self.folder.set_status(status)
        self.close()

    def close(self) -> None:
        """Close the files; the folder stays locked. Closing twice does nothing."""
        for file in (self._metrics, self._bytes, self._log):
            file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; none if it is absent, and a torn last line is passed over. Raises `WireError`."""
    return list(_rows(path, _METRICS))


def read_messages(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of messages of a run folder, one at a time, for there may be many. Raises `WireError`."""
    for row in _rows(path / "bytes.jsonl"):
        if not all(type(row.get(name, ...)) in kinds for name, kinds in _MESSAGE):
            raise WireError("rows", "has a line that is not a message", where=printable(str(path / "bytes.jsonl")))
        yield row


def _rows(path: Path, *limit: int) -> Iterator[dict[str, Any]]:
    if os.path.lexists(path):
        for number, line in enumerate(read_lines(path, *limit), 1):
            yield row_of(line, f"{printable(str(path))}, line {number}")


def read_result(path: Path) -> Result:
    """The result of a run folder. Raises `ContextError` if the run has none yet, `WireError` if it is damaged."""
    file = path / "result.json"
    if not os.path.lexists(file):
        remedy = "The run is not finished: see 'nestling ls'."
        raise ContextError("has no result", where=printable(str(path)), remedy=remedy)
    values = from_json(read_file(file, _RESULT), printable(str(file)))
    if not isinstance(values, dict):
        raise WireError("fields", "is not an object", where=printable(str(file)))
    return Result.from_dict(values, where=printable(str(file)))


@dataclass(frozen=True)
class Traffic:
    """All messages of one direction and codec: how many, their sizes, and their bytes together."""

    direction: str
    codec: str
    messages: int
    smallest: int
    largest: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class RunRecord:
    """A finished run as read back from its folder.

    `refusals` counts the messages the server did not use by reason, and `refused` are the rows of the first of them.
    """

    path: Path
    status: Status
    result: Result
    config: str
    command: str
    environment: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    traffic: list[Traffic]
    refused: list[dict[str, Any]]
    refusals: Mapping[str, int]


def read_run(path: Path) -> RunRecord:
    """Read a finished run. Raises `ConfigError` (no run folder), `ContextError` (no result), `WireError` (damaged)."""
    status, result = read_status(path), read_result(path)
    environment = from_json(_text(path / "env.json") or "{}", printable(str(path / "env.json")))
    traffic, refused, refusals = _messages(path)
    return RunRecord(
        path,
        status,
        result,
        config=_text(path / "config.toml"),
        command=_text(path / "command.txt").strip(),
        environment=environment if isinstance(environment, dict) else {},
        metrics=read_rows(path / "metrics.jsonl"),
        traffic=traffic,
        refused=refused,
        refusals=refusals,
    )


def _text(path: Path) -> str:
    return read_file(path, _SMALL).decode("utf-8", "backslashreplace") if os.path.lexists(path) else ""


def _messages(path: Path) -> tuple[list[Traffic], list[dict[str, Any]], Counter[str]]:
    """The traffic, the first refused rows and the count of each refusal."""
    sizes: dict[tuple[str, str], list[int]] = {}
    refused: list[dict[str, Any]] = []
    refusals: Counter[str] = Counter()
    for row in read_messages(path):
        wire = row["wire_bytes"]
        kind = sizes.setdefault((row["direction"], row["codec"]), [0, wire, wire, 0, 0])  # as in Traffic
        kind[:] = kind[0] + 1, min(kind[1], wire), max(kind[2], wire), kind[3] + row["payload_bytes"], kind[4] + wire
        if not row["accepted"]:
            refusals[row["reason"]] += 1
            if len(refused) < _SHOWN_REFUSED:
                refused.append(row)
    return [Traffic(*kind, *sizes[kind]) for kind in sorted(sizes)], refused, refusals
