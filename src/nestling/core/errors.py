"""The eight ways a command can fail, each with a cause, a place, a remedy and an exit code.

An error raised for a user's input is one of these; `assert` is kept for our own bugs. The text is one line:
``place: cause. remedy`` so that it reads the same in a terminal, a log and a test.

| class | exit | when |
|---|---|---|
| `ConfigError` | 2 | a setting, a command line or a path that cannot be used |
| `ContextError` | 3 | data, a model or a base that is missing, or is not the one agreed on |
| `SeedError` | 4 | a seed or a regenerated stream that differs from the agreed one |
| `WireError` | 5 | a message or a stored file that is damaged or does not follow the format |
| `RunError` | 6, 7 | a run that cannot go on: its folder is taken (6), too few usable replies (7) |
| `StorageError` | 8 | the disk refused to keep a result |
| `PrivateStateError` | 2 | the private state of a stream was about to be copied, stored or unread |
| `RemoteError` | 9 | the other side of a federation is not reached, is not who it should be, refuses, or failed |
"""


class NestlingError(Exception):
    """Base of the eight classes.

    Args:
        cause: what is wrong, without a final full stop.
        where: the setting, file, tensor or client at fault.
        remedy: what the reader can do about it.

    >>> print(ConfigError("is negative", where="rounds", remedy="Give 1 or more."))
    rounds: is negative. Give 1 or more.
    """

    exit_code = 1

    def __init__(self, cause: str, *, where: str = "", remedy: str = "") -> None:
        self.cause, self.where, self.remedy = cause, where, remedy
        place = f"{where}: " if where else ""
        advice = f" {remedy}" if remedy else ""
        super().__init__(f"{place}{cause}.{advice}")


class ConfigError(NestlingError, ValueError):
    """A setting, a command line or a path cannot be used."""

    exit_code = 2


class ContextError(NestlingError):
    """Data, a model or a base is missing, or is not the one both sides agreed on."""

    exit_code = 3


class SeedError(NestlingError, ValueError):
    """A seed is outside 0 … 2^64 − 1, or the stream regenerated from it is not the agreed one."""

    exit_code = 4


class WireError(NestlingError, ValueError):
    """A message or a stored file is damaged. `code` is stable and safe to count and to log.

    >>> WireError("truncated", "has 10 bytes of 712").code
    'truncated'
    """

    exit_code = 5

    def __init__(self, code: str, cause: str, *, where: str = "", remedy: str = "") -> None:
        self.code = code
        super().__init__(cause, where=where or f"message [{code}]", remedy=remedy)


class RunError(NestlingError):
    """A run cannot go on: its folder is in use (exit 6) or too few replies were usable (exit 7)."""

    exit_code = 7

    def __init__(self, cause: str, *, where: str = "", remedy: str = "", locked: bool = False) -> None:
        if locked:
            self.exit_code = 6
        super().__init__(cause, where=where, remedy=remedy)


class StorageError(NestlingError, OSError):
    """The disk refused to keep a result; what was there before is intact."""

    exit_code = 8


class PrivateStateError(NestlingError, TypeError):
    """The private state of a stream was about to be copied, stored or unread."""

    exit_code = 2


class RemoteError(NestlingError):
    """The other side of a federation is not reached, is not who it should be, refuses, or failed."""

    exit_code = 9
