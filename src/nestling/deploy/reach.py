"""Whether a server is where it is said to be, and is who it should be: asked before Flower's programs are started.

Theirs is to try again for ever, or a number; a look at the port tells the four cases apart in a moment: nothing there,
another certificate, TLS where none was meant, and none where it was.
"""

import socket
import ssl
from pathlib import Path

from nestling.core.errors import ConfigError, RemoteError
from nestling.deploy.programs import split_address

PATIENCE = 10.0
"""Seconds for a connection, and again for what the other side says first."""


def why_not_reached(address: str, ca: Path | None) -> str:
    """Empty if a server answers there as it should, else why none does, which may be better in a while.

    Args:
        address: HOST:PORT.
        ca: the certificate of the authority that vouches for it; None: it is asked without TLS.

    Raises `ConfigError` if `ca` holds no certificate, `RemoteError` (exit code 9) if who answers is another.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=ca) if ca else _trusting()
    except ssl.SSLError as error:
        raise ConfigError("holds no certificate", where=str(ca), remedy="Give the server's ca.crt.") from error
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(ca), remedy="Give ca.crt.") from error
    try:
        with socket.create_connection((host, port), timeout=PATIENCE) as opened:
            return _greeted(context, opened, address, host)
    except (OSError, ValueError) as error:  # the second: a name that cannot be one
        return getattr(error, "strerror", None) or str(error)


def check_reached(address: str, ca: Path | None) -> None:
    """Raise `RemoteError` (exit code 9) unless a server answers at HOST:PORT as it should."""
    if why := why_not_reached(address, ca):
        raise RemoteError(
            f"is not reached ({why})",
            where=address,
            remedy="See that 'nestling serve' runs there, and that no firewall is between.",
        )


def _trusting() -> ssl.SSLContext:
    """Only to see whether TLS is spoken: nothing is sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _greeted(context: ssl.SSLContext, opened: socket.socket, address: str, host: str) -> str:
    secure = context.verify_mode != ssl.CERT_NONE
    try:
        context.wrap_socket(opened, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise RemoteError(
            f"is not a server that --ca vouches for ({error.verify_message.rstrip('.')})",
            where=address,
            remedy=f"Ask its owner for ca.crt; 'nestling serve --name {host}' puts this name into its certificate.",
        ) from error
    except ssl.SSLEOFError:  # it hangs up, as what forwards to a server that is not there does
        return "it hangs up" if secure else ""
    except ssl.SSLError as error:  # it has answered, in another way
        if secure:
            raise RemoteError(
                f"does not speak TLS as it should ({error.reason or error})",
                where=address,
                remedy="It was started with --insecure, or is another program.",
            ) from error
        return ""
    except OSError:
        if secure:
            raise
        return ""
    if not secure:
        raise RemoteError("speaks TLS", where=address, remedy="Leave out --insecure, and give the server's --ca.")
    return ""
