"""The files of a run: written a line at a time, and read with suspicion, since a run may come from somebody else.

Nothing is read through a link, from a pipe or without a bound; JSON is strict (no NaN, no number that breaks a sum
later); text that reaches a terminal or a log has its control characters escaped.
"""

import errno
import io
import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from nestling.core.errors import StorageError, WireError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_LARGEST_FILE, _LONGEST_LINE, _DEEPEST = 1 << 28, 1 << 20, 100
_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # also one that does not end: linear whatever it holds
_COUNTS = ("round", "bytes_up", "bytes_down", "bytes_total", "wire_bytes", "payload_bytes")


def printable(text: str, *, keep: str = "") -> str:
    r"""`text` with control, direction-changing and undecodable characters written as escapes; `keep` lists exceptions.

    >>> printable("a\x1b[31mb\u202e"), printable("a\nb", keep="\n")
    ('a\\x1b[31mb\\u202e', 'a\nb')
    """
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return "".join(
        c.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(c) in hidden and c not in keep
        else c
        for c in text
    )


def to_json(value: object, *, indent: int | None = None) -> str:
    """JSON text without NaN or Infinity: those raise ValueError, for a reader elsewhere would refuse the whole file.

    >>> to_json({"round": 1, "loss": None})
    '{"round": 1, "loss": null}'
    """
    return json.dumps(value, allow_nan=False, indent=indent)


def from_json(text: str | bytes, where: str) -> Any:
    """Parse JSON strictly. Raises `WireError` for what is not JSON, NaN, Infinity, 1e999, 10^400 and much nesting.

    >>> from_json("[1, 2.5]", "here")
    [1, 2.5]
    """
    try:
        characters = text if isinstance(text, str) else text.decode()
        # What is nested too deeply for Python may fail later, where it is shown. Few brackets cannot be deep.
        if characters.count("[") + characters.count("{") > _DEEPEST and _depth(characters) > _DEEPEST:
            raise ValueError("nesting")
        return _JSON.decode(characters)
    except ValueError as error:
        raise WireError("json", f"is not valid JSON ({type(error).__name__})", where=where) from error


def _depth(characters: str) -> int:
    """How deeply brackets are nested, those in texts left out."""
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    return max(accumulate(steps.get(character, 0) for character in _TEXT.sub("", characters)), default=0)


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(digits)
    return number


def _word(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**64:  # a seed may be 2^64 - 1
        raise ValueError(digits)
    return number


_JSON = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, parse_int=_word)


def row_of(line: bytes, where: str) -> dict[str, Any]:
    """One row of metrics or messages, in which the columns that are computed with can be. Raises `WireError`.

    >>> row_of(b'{"round": 1, "accuracy": 0.5}', "here")
    {'round': 1, 'accuracy': 0.5}
    """
    row = from_json(line, where)
    if not isinstance(row, dict) or "round" not in row:
        raise WireError("rows", "is not an object with its round", where=where)
    for name in _COUNTS:
        if type(row.get(name, 0)) is not int or row.get(name, 0) < 0:
            raise WireError("rows", f"has an unusable value for {name}", where=where)
    accuracy = row.get("accuracy")
    if accuracy is not None and (type(accuracy) not in (int, float) or not 0 <= accuracy <= 1):
        raise WireError("rows", "has an unusable value for accuracy", where=where)
    return row


@contextmanager
def _opened(path: Path, limit: int) -> Iterator[io.BufferedReader]:
    try:
        # O_NONBLOCK: opening a pipe does not wait for its other end.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > limit:
                raise ValueError(f"not a regular file of at most {limit:,} bytes")
            yield file
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WireError("damaged", f"cannot be read ({reason})", where=printable(str(path))) from error


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file. Raises `WireError` for a link, a pipe, a device, a folder, over `limit` bytes.

    >>> read_file(Path("/dev/zero"), 10)
    Traceback (most recent call last):
    nestling.core.errors.WireError: /dev/zero: cannot be read (not a regular file of at most 10 bytes).
    """
    with _opened(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_lines(path: Path, limit: int = _LARGEST_FILE) -> Iterator[bytes]:
    """The whole lines of a file, one at a time: a torn last one is passed over. Raises `WireError` as `read_file`."""
    with _opened(path, limit) as file:
        while line := file.readline(_LONGEST_LINE):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) == _LONGEST_LINE:
                raise ValueError(f"a line of over {_LONGEST_LINE:,} bytes")


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def storage_error(path: Path, needed: int, error: OSError) -> StorageError:
    return StorageError(
        f"could not be written, {needed:,} bytes needed ({error.strerror})",
        where=printable(str(path)),
        remedy="Free some space or choose another folder; what was there before is intact.",
    )


class LineFile:
    """An append-only text file in which a line is whole or absent; each line is handed to the system at once.

    Opening cuts off the torn last line that a killed process may have left.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here:
    ...     _ = Path(here, "x").write_text("whole\\nto")
    ...     LineFile(Path(here, "x")).append("next")
    ...     Path(here, "x").read_text()
    'whole\\nnext\\n'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._handle: int | None = os.open(path, flags, 0o666)
            os.ftruncate(self._handle, last_line(path)[1])
        except OSError as error:
            raise storage_error(path, 0, error) from error

    def append(self, line: str) -> None:
        """Add one line. Raises `StorageError` if the disk refuses; the file then ends as it did before."""
        assert self._handle is not None, "closed"
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        size = os.fstat(self._handle).st_size
        try:
            _write_all(self._handle, data)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, size)
            raise storage_error(self.path, len(data), error) from error

    def sync(self) -> None:
        """Wait until the disk has all lines. Raises `StorageError`."""
        assert self._handle is not None, "closed"
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise storage_error(self.path, 0, error) from error

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def last_line(path: Path) -> tuple[bytes, int]:
    """The last complete line of a file without its newline, and the file's length up to and with that newline.

    Raises `WireError` as `read_file`.
    """
    with _opened(path, _LARGEST_FILE) as file:
        size, window = file.seek(0, os.SEEK_END), 1 << 16
        while True:
            start = max(0, size - window)
            file.seek(start)
            chunk = file.read(size - start)
            end = chunk.rfind(b"\n")
            begin = chunk.rfind(b"\n", 0, max(end, 0))
            if start == 0 or begin >= 0:
                break
            if window > _LONGEST_LINE:
                raise ValueError(f"a line of over {_LONGEST_LINE:,} bytes")
            window *= 4
    return (chunk[begin + 1 : end], start + end + 1) if end >= 0 else (b"", 0)
