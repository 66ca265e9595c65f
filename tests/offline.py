"""No test reaches beyond this machine: what tries to is refused, noted, and fails the test that made it try.

A refusal alone would not do, since libraries take it for a network that is down, and go on.
"""

import socket
from typing import Any, NoReturn

ATTEMPTS: list[str] = []
"""What was tried since a test began."""


def install() -> None:
    """Refuse every socket of the internet that leads elsewhere, and every question for an address, in this process."""
    for name in ("connect", "connect_ex", "sendto", "sendmsg"):
        setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        setattr(socket, name, _asking(getattr(socket, name)))


def _guarded(real: Any) -> Any:
    def guarded(own: socket.socket, *args: Any) -> Any:
        address = args[-1] if args and isinstance(args[-1], tuple) else None  # none: a socket that is connected
        if own.family in (socket.AF_INET, socket.AF_INET6) and address is not None and not _is_here(address[0]):
            _refuse(f"{real.__name__} {address}")
        return real(own, *args)

    return guarded


def _asking(real: Any) -> Any:
    def asking(host: Any, *args: Any, **options: Any) -> Any:
        if not _is_here(host):
            _refuse(f"{real.__name__} {host}")
        return real(host, *args, **options)

    return asking


def _is_here(host: Any) -> bool:
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return host is None or name in ("", "localhost", "::1", "0.0.0.0", "::") or name.startswith("127.")


def _refuse(attempt: str) -> NoReturn:
    ATTEMPTS.append(attempt)
    raise OSError(f"no test connects to anywhere ({attempt})")
