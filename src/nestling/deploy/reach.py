"""Whether a server is where it is said to be, and is who it should be: asked before Flower's programs are started.

Theirs is to try again for ever, or a number; one question, asked over HTTP as they will ask theirs (by way of the same
proxies), tells the four cases apart in a moment: nothing there, another certificate, TLS where none was meant, and none
where it was.
"""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestling.core.errors import ConfigError, RemoteError
from nestling.deploy.programs import join_address, split_address
from nestling.engines import flower_compat as compat

PATIENCE = 10.0
"""Seconds for a connection, and again for what the other side says first."""
_OTHER_NAME = (62, 64)
"""`X509_V_ERR_HOSTNAME_MISMATCH` and `X509_V_ERR_IP_ADDRESS_MISMATCH`."""
_NOBODY_BEHIND = (407, 502, 503, 504)
"""What a proxy answers in the place of a server: it lets nobody through, or there is none."""


def why_not_reached(address: str, ca: Path | None) -> str:
    """Empty if a server answers there as it should, else why none does, which may be better in a while.

    Args:
        address: HOST:PORT.
        ca: the certificate of the authority that vouches for it; None: it is asked without TLS.

    Raises `ConfigError` if `ca` holds no certificate, `RemoteError` (exit code 9) if who answers is another.
    """
    host, port = split_address(address)
    address = join_address(host, port)
    try:
        context = ssl.create_default_context(cafile=ca) if ca else _trusting()
    except ssl.SSLError as error:
        raise ConfigError("holds no certificate", where=str(ca), remedy="Give the server's ca.crt.") from error
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(ca), remedy="Give ca.crt.") from error
    answer = compat.ask(f"{'https' if ca else 'http'}://{address}/health", verify=context, patience=PATIENCE)
    if isinstance(answer, int):
        return f"it answers {answer}" if answer in _NOBODY_BEHIND else ""
    if ca:
        return _why(answer, address, host)
    # What speaks TLS hangs up, or answers nothing, where it is asked without.
    spoken = compat.ask(f"https://{address}/health", verify=context, patience=PATIENCE)
    if isinstance(spoken, int) and spoken not in _NOBODY_BEHIND:
        raise RemoteError("speaks TLS", where=address, remedy="Leave out --insecure, and give the server's --ca.")
    return _why(answer, address, host)


def check_reached(address: str, ca: Path | None) -> None:
    """Raise `RemoteError` (exit code 9) unless a server answers at HOST:PORT as it should."""
    if why := why_not_reached(address, ca):
        raise RemoteError(
            f"is not reached ({why})",
            where=address,
            remedy="See that 'nestling serve' runs there, and that no firewall is between.",
        )


def _trusting() -> ssl.SSLContext:
    """Only to see whether TLS is spoken: nothing is told over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _why(error: Exception, address: str, host: str) -> str:
    causes: list[Any] = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            named = f" 'nestling serve --name {host}' puts this name into its certificate."
            raise RemoteError(
                f"is not a server that --ca vouches for ({cause.verify_message.rstrip('.')})",
                where=address,
                remedy=named.strip() if cause.verify_code in _OTHER_NAME else "Ask the server's owner for its ca.crt.",
            ) from error
        if isinstance(cause, ssl.SSLEOFError):  # as what forwards to a server that is not there does
            return "it hangs up"
        if isinstance(cause, ssl.SSLError):  # it has answered, in another way
            raise RemoteError(
                f"does not speak TLS as it should ({cause.reason or cause})",
                where=address,
                remedy="It was started with --insecure, or is another program.",
            ) from error
    said = (getattr(cause, "strerror", None) for cause in reversed(causes))
    return next(filter(None, said), None) or str(error) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
