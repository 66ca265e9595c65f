"""Flower's programs, started with our settings: no telemetry, no installations, no code out of bundles.

    nestling serve   →   flower-superlink   →   for each run,     bin/flwr-serverapp, ours
    nestling join    →   flower-supernode   →   for each message, bin/flwr-clientapp, ours, of the site's starter

Flower looks up in PATH what it starts for a run or a message. The first folder there is `bin/` of the site or server,
in which each such program is ours: the two apps of `app.py`, whatever a bundle names; every other kind is refused.
"""

import ipaddress
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from nestling.core.errors import ConfigError, ContextError, RemoteError
from nestling.core.files import write_atomic
from nestling.deploy import starter
from nestling.deploy.folder import make_private, write_private
from nestling.deploy.process import start
from nestling.engines import flower_compat as compat

POLL = "0.5"
"""Seconds between two looks for a task; Flower's own are 1. Each look costs a few milliseconds on both sides."""


def is_loopback(host: str) -> bool:
    """Whether an address leads no further than this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_everywhere(host: str) -> bool:
    """Whether it stands for all addresses of this machine.

    >>> is_everywhere("::"), is_everywhere("192.0.2.7"), is_everywhere("localhost")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_secure(host: str, *, insecure: bool) -> None:
    """Raise `ConfigError` if a connection without TLS and keys would leave this machine."""
    if insecure and not is_loopback(host):
        raise ConfigError(
            f"without TLS and keys anybody on the way could read and change messages, and {host!r} is not this machine",
            where="--insecure",
            remedy="Leave it out, or give 127.0.0.1 to try things.",
        )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    >>> split_address("[::1]:8443")
    ('::1', 8443)
    """
    host, _, port = address.rpartition(":")
    if not host.strip("[]") or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no HOST:PORT", where="--server", remedy="Give server.example.org:8443.")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, of which `split_address` is the other way.

    >>> join_address("::1", 8443)
    '[::1]:8443'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_addresses(control: Sequence[str]) -> list[str]:
    """Addresses as a connection shows them. Raises `ConfigError` for a name or a network, which would equal none."""
    try:
        return [str(ipaddress.ip_address(address)) for address in control]
    except ValueError as error:
        raise ConfigError(str(error), where="--control", remedy="Give addresses such as 192.0.2.7.") from error


def environment(folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """That of Flower's programs for this folder: its own home, our programs first, nothing told to anybody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    own = {
        "FLWR_HOME": str(make_private(folder / "flower")),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": POLL,
        "FORWARDED_ALLOW_IPS": "",  # nobody says for another where a request comes from
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "PATH": _path(folder),
    }
    return {**kept, **own, **extra}


def _path(folder: Path) -> str:
    return os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def write_programs(folder: Path) -> None:
    """Make `bin/`, with a program of ours for each that Flower may start.

    Raises `ContextError` without Flower, or if a program of Flower's would be found in the place of ours; `ConfigError`
    for a folder that cannot be told to Flower.
    """
    compat.require()
    if odd := sorted(set(str(folder)) & {os.pathsep, '"', "\\", "\n"}):
        raise ConfigError(f"has {', '.join(map(repr, odd))} in it", where="--dir", remedy="Give another folder.")
    names = compat.task_programs()
    if not {compat.CLIENT_APP, compat.SERVER_APP} <= set(names):
        raise ContextError(f"starts other programs than {names}", where="flwr", remedy=f"pip install '{compat.EXTRA}'")
    own = make_private(folder / "bin")
    for name in names:
        line = f"-P -m nestling.deploy.task {shlex.quote(name)}"
        if name == compat.CLIENT_APP:  # one for each message
            call = [str(Path(starter.__file__).with_name("starter_call.py")), str(folder / starter.SOCKET), name]
            line = f"-I -S {shlex.join(call)}"
        write_private(own / name, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {line} "$@"\n'.encode())
        (own / name).chmod(0o700)
        if shutil.which(name, path=_path(folder)) != str(own / name):  # Flower's own is next, and runs bundles
            raise ContextError(
                "cannot be executed", where=str(own / name), remedy="Give a --dir on a disk not mounted as noexec."
            )


def super_link(folder: Path, *, host: str, port: int, certificates: Path | None, control: Sequence[str]) -> list[str]:
    """The command line of the server."""
    line = [sys.executable, "-P", "-m", "nestling.deploy.task", "flower-superlink", ",".join(control)]
    line += ["--host", host, "--port", str(port), "--database", str(folder / "flower" / "state.db")]
    line += ["--disable-runtime-dependency-installation"]
    if certificates is None:
        return [*line, "--insecure"]
    line += ["--ssl-ca-certfile", str(certificates / "ca.crt"), "--ssl-certfile", str(certificates / "server.crt")]
    return [*line, "--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth"]


def super_node(
    folder: Path, *, client: int, server: str, ca: Path | None, key: Path | None, port: int
) -> list[str]:  # fmt: skip
    """The command line of a site."""
    line = [sys.executable, "-P", "-m", "nestling.deploy.task", "flower-supernode", str(client), str(folder)]
    line += ["--superlink", server, "--host", "127.0.0.1", "--port", str(port)]
    line += ["--node-config", f'site="{folder}"']
    if ca is None:
        return [*line, "--insecure"]
    return [*line, "--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]


def read_connection(home: Path) -> tuple[str, Path | None]:
    """The address that `write_connection` has told, and its authority. Raises `ConfigError` if there is none."""
    path = home / "config.toml"
    try:
        told = tomllib.loads(path.read_text())["superlink"]["nestling"]
        address, ca = str(told["address"]), told.get("root-certificates")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("says of no server", where=str(path), remedy="'nestling serve --dir' writes it.") from error
    return address, Path(ca) if ca else None


def write_connection(home: Path, *, server: str, ca: Path | None) -> None:
    """Tell `flwr` where the server is, as its connection `nestling`."""
    trust = "insecure = true" if ca is None else f'root-certificates = "{ca}"'
    text = f'[superlink]\ndefault = "nestling"\n[superlink.nestling]\naddress = "{server}"\n{trust}\n'
    write_atomic(home / "config.toml", text.encode())


PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "1000"}
"""So that `flwr` prints lines to be read by a program: no colours, and none that is broken."""
_COLOURED = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""What would make it print as on a terminal all the same."""
_LONGEST_ANSWER = 120.0


def flwr(folder: Path, args: Sequence[str]) -> str:
    """What `flwr` prints, run against the connection of `write_connection`. Raises `RemoteError` if it hangs."""
    done = follow(folder, args)
    try:
        out, _ = done.communicate(timeout=_LONGEST_ANSWER)
    except subprocess.TimeoutExpired as error:
        done.kill()
        done.communicate()
        raise RemoteError(
            f"has not answered for {_LONGEST_ANSWER:g} s", where="the server", remedy="See its output, and try again."
        ) from error
    return out.decode("utf-8", "replace") if out else ""


def follow(folder: Path, args: Sequence[str]) -> "subprocess.Popen[bytes]":
    """`flwr` started, its output in a pipe."""
    plain = {name: value for name, value in environment(folder, PLAIN).items() if name not in _COLOURED}
    return start([_program("flwr"), *args], environment=plain, output=subprocess.PIPE)


def run_until_ended(
    line: Sequence[str],
    environment: Mapping[str, str],
    keep: Sequence[int] = (),
    *,
    is_up: Callable[[], bool] = lambda: True,
    told: Callable[[], object] = lambda: None,
) -> int:
    """Run a program of Flower's and pass on Ctrl-C, SIGTERM and SIGHUP; returns its exit code.

    Args:
        line, environment: what to run.
        keep: descriptors that it inherits.
        is_up: asked now and then, until it is.
        told: called then.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGHUP, signal.default_int_handler)
    process = start(line, environment=environment, with_parent=True, keep=keep)
    try:
        while not is_up():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.3)
        told()
        return process.wait()
    except KeyboardInterrupt:
        with suppress(OSError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _program(name: str) -> str:
    path = Path(sys.executable).parent / name
    if find_spec("flwr") is None or not path.is_file():
        raise ContextError("is not installed", where=name, remedy=f"pip install '{compat.EXTRA}'")
    return str(path)
