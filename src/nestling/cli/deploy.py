"""`nestling serve`, `join` and `keys`: the two sides of a federation over Flower, and who may take part."""

import dataclasses
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from nestling.core.errors import ConfigError, RemoteError

Positional = tyro.conf.Positional


@dataclasses.dataclass(frozen=True)
class ServeCommand:
    """Be the server: makes what it needs in DIR on first use, then waits for sites and runs until it is stopped."""

    dir: str
    """The server's folder: certificates, run database, bases, runs."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 for all of this machine's."""
    port: int = 8443
    name: tuple[str, ...] = ()
    """Names or addresses under which sites reach this machine; they go into the certificate."""
    control: tuple[str, ...] = ()
    """Addresses besides this machine's own from which runs may be submitted and keys registered."""
    data: str = ""
    """Where the held-out items lie, in the place of task.path."""
    model: str = ""
    """For language runs: the model on this machine, in the place of base.model."""
    device: str = "cpu"
    wait: float = 300.0
    """Seconds to wait for the sites before a run is given up."""
    insecure: bool = False
    """No TLS and no keys: only to try things on one machine."""


def serve(args: Sequence[str]) -> int:
    """`nestling serve`; returns the exit code.

    Raises `RunError` (exit code 6) while another one is at work in the folder.
    """
    c = tyro.cli(tyro.conf.FlagCreatePairsOff[ServeCommand], args=list(args), prog="nestling serve")
    from nestling.deploy import programs
    from nestling.deploy.folder import make_private, only_one

    host = c.host.strip("[]")
    if not 0 < c.port < 65536:
        raise ConfigError(f"is {c.port}", where="--port", remedy="Give 1 to 65535.")
    programs.check_secure(host, insecure=c.insecure)
    allowed = ["127.0.0.1", "::1", *programs.check_addresses(c.control)]
    fed = make_private(Path(c.dir).resolve())
    with (
        only_one(fed / "serve.lock", "another 'nestling serve' is at work in it", where=str(fed)),
        # Held by Flower's server as well, which outlives a 'serve' that was killed while it ends its runs.
        only_one(
            fed / "server.lock", "its last server is still at work", where=str(fed), wait=ENDING,
            note=lambda: print("nestling: the last server here is still ending; waiting", file=sys.stderr, flush=True),
        ) as held,
    ):  # fmt: skip
        _check_free(host, c.port)
        return _serve(c, fed, host, allowed, held)


ENDING = 60.0
"""Seconds to wait for the server of a 'serve' that was killed."""


def _serve(c: ServeCommand, fed: Path, host: str, allowed: list[str], held: int) -> int:
    from nestling.deploy import programs, reach
    from nestling.deploy.folder import FedSettings, write_settings

    programs.write_programs(fed)
    settings = FedSettings(
        _resolved(c.data), device=c.device, wait=c.wait, authenticated=not c.insecure, model=_model(c.model)
    )
    write_settings(fed, settings)
    everywhere = programs.is_everywhere(host)
    ca = None
    if not c.insecure:
        from nestling.deploy.certificates import is_good, make_certificates

        ca = fed / "certificates"
        names = [*c.name, *([] if everywhere else [host])]
        if not is_good(ca, names):
            make_certificates(ca, names)
        if everywhere and not c.name:
            print("nestling: the certificate is for this machine alone; give --name for others", file=sys.stderr)
    loopback = "::1" if ":" in host else "127.0.0.1"
    here = programs.join_address(loopback if everywhere else host, c.port)
    # Nothing is downloaded because a run says so.
    environment = programs.environment(fed, {"NESTLING_FED": str(fed), "HF_HUB_OFFLINE": "1"})
    programs.write_connection(fed / "flower", server=here, ca=ca / "ca.crt" if ca else None)
    line = programs.super_link(fed, host=host, port=c.port, certificates=ca, control=allowed)

    def is_up() -> bool:
        try:
            return not reach.why_not_reached(here, ca / "ca.crt" if ca else None)
        except RemoteError:  # half up
            return False

    def told() -> None:
        print(f"nestling: serving at {programs.join_address(host, c.port)} from {fed}", flush=True)
        if ca:
            add = f"nestling keys add SITE.pub --client N --dir {c.dir}"
            print(f"nestling: sites need {ca / 'ca.crt'}, and their keys: {add}", flush=True)

    code = programs.run_until_ended(line, environment, [held], is_up=is_up, told=told)
    return _of_flower(code, "flower-superlink")


def _check_free(host: str, port: int) -> None:
    """Raise `ConfigError` if this machine cannot listen there, at each of the addresses that a name has."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            if family == socket.AF_INET6 and len(found) > 1 and not _speaks_ipv6():
                continue
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's own
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot be listened at ({getattr(error, 'strerror', None) or error})",
            where=f"{host} port {port}",
            remedy="Give another --host or --port, or end what listens there.",
        ) from error


def _speaks_ipv6() -> bool:
    """Whether this machine does: a name may have such an address all the same."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return True
    except OSError:
        return False


def _of_flower(code: int, name: str) -> int:
    """0 or 9 of a program of Flower's. Raises `RemoteError` for what else it ends with, which is no bug of ours."""
    if code not in (0, RemoteError.exit_code):
        raise RemoteError(f"has failed ({code}); what it says of it stands above", where=name, remedy="Start it again.")
    return code


@dataclasses.dataclass(frozen=True)
class JoinCommand:
    """Be a site: its data stays here, and a worker trains on it whenever the server asks."""

    server: str
    """HOST:PORT of 'nestling serve'."""
    client: int
    """Which client of the federation this site is."""
    dir: str = "site"
    """The site's folder: what it has agreed to, and what its client keeps between rounds."""
    ca: str = ""
    """The server's ca.crt."""
    key: str = ""
    """This site's key, of 'nestling keys new'."""
    data: str = ""
    """Where its data lies, in the place of task.path."""
    whole: bool = False
    """All training items there are this client's; else its share of a set that all sites hold."""
    model: str = ""
    """For language runs: the model on this machine, in the place of base.model."""
    device: str = "cpu"
    limit: float = 3600.0
    """Seconds after which a call is taken to hang, and ended."""
    idle: float = 1800.0
    """Seconds without a call after which the worker frees its memory."""
    threads: int = 1
    """The worker's; more are faster for a large model, and may give other bits than a run in one process."""
    new_base: bool = False
    """Agree to another base than the one this site has met first."""
    insecure: bool = False
    """No TLS and no key: only to try things on one machine."""


def join(args: Sequence[str]) -> int:
    """`nestling join`; returns the exit code.

    Raises `RunError` (exit code 6) while another one is at work in the folder, `RemoteError` (exit code 9) if who
    answers at --server is not who it should be. A server that is not there yet is waited for.
    """
    c = tyro.cli(tyro.conf.FlagCreatePairsOff[JoinCommand], args=list(args), prog="nestling join")
    from nestling.deploy import programs, proxy, reach
    from nestling.deploy.folder import LONGEST_SOCKET, SiteSettings, make_private, only_one, write_settings
    from nestling.engines import flower_compat as compat

    programs.check_secure(programs.split_address(c.server)[0], insecure=c.insecure)
    compat.require()  # it brings what reads keys
    ca, key = _credentials(c.ca, c.key, insecure=c.insecure)
    settings = SiteSettings(
        c.client, _resolved(c.data), c.whole, _model(c.model), c.device, c.limit, c.idle, threads=c.threads
    )
    site = make_private(Path(c.dir).resolve())
    if len(str(site / proxy.SOCKET).encode()) > LONGEST_SOCKET:
        raise ConfigError("is too long a path for a socket", where="--dir", remedy="Give a folder nearer to the root.")
    with (
        only_one(site / "join.lock", "another 'nestling join' is at work in it", where=str(site)),
        only_one(  # held by Flower's node as well, which outlives a 'join' that was killed for a moment
            site / "node.lock", "its last node is still at work", where=str(site), wait=ENDING,
            note=lambda: print("nestling: the last node here is still ending; waiting", file=sys.stderr, flush=True),
        ) as held,
    ):  # fmt: skip
        why = reach.why_not_reached(c.server, ca)  # before anything is changed: it raises if another answers
        if proxy.is_alive(site):
            proxy.kill(site)  # of an earlier 'join', with its settings
        if c.new_base:
            (site / "pinned").unlink(missing_ok=True)
        programs.write_programs(site)
        write_settings(site, settings)
        line = programs.super_node(site, client=c.client, server=c.server, ca=ca, key=key, port=_free_port())
        print(f"nestling: client {c.client} joins {c.server} from {site}", flush=True)
        if why:
            print(f"nestling: {c.server} is not reached ({why}); waiting until it is", file=sys.stderr, flush=True)
        try:
            code = programs.run_until_ended(line, programs.environment(site, {}), keep=[held])
            return _of_flower(code, "flower-supernode")
        finally:
            proxy.kill(site)


def _credentials(ca: str, key: str, *, insecure: bool) -> tuple[Path | None, Path | None]:
    if insecure:
        return None, None
    from nestling.deploy.keys import check_private

    for where, given in (("--ca", ca), ("--key", key)):
        if not given or not Path(given).is_file():
            raise ConfigError(
                f"{given!r} is no file" if given else "is missing",
                where=where,
                remedy="Give the server's ca.crt." if where == "--ca" else "'nestling keys new' makes one.",
            )
    check_private(Path(key))
    return Path(ca).resolve(), Path(key).resolve()


def _resolved(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def _model(model: str) -> str:
    return _resolved(model) if Path(model).exists() else model


def _free_port() -> int:
    """A port on the loopback for the site's own processes; nobody else has it at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass(frozen=True)
class NewKey:
    """At a site: make its key pair."""

    path: Positional[str]
    """The private key, which stays; beside it PATH.pub, which goes to the server's owner."""


@dataclasses.dataclass(frozen=True)
class AddKey:
    """At the server, while it runs: let the owner of a key join, as one client."""

    public: Positional[str]
    """The site's .pub file."""
    client: int
    dir: str = "fed"
    """The server's folder."""


@dataclasses.dataclass(frozen=True)
class ListKeys:
    """At the server, while it runs: who may join, and who is connected."""

    dir: str = "fed"
    """The server's folder."""


@dataclasses.dataclass(frozen=True)
class RevokeKey:
    """At the server, while it runs: refuse a client's key from now on."""

    client: int
    dir: str = "fed"
    """The server's folder."""


Keys = (
    Annotated[NewKey, tyro.conf.subcommand("new")]
    | Annotated[AddKey, tyro.conf.subcommand("add")]
    | Annotated[ListKeys, tyro.conf.subcommand("list")]
    | Annotated[RevokeKey, tyro.conf.subcommand("revoke")]
)


def keys(args: Sequence[str]) -> int:
    """`nestling keys new|add|list|revoke`."""
    command: object = tyro.cli(Keys, args=list(args), prog="nestling keys")
    from nestling.engines import flower_compat

    flower_compat.require()  # it brings what makes keys
    from nestling.deploy import keys as made
    from nestling.deploy import programs, reach

    if isinstance(command, NewKey):
        public = made.new_key(Path(command.path))
        print(f"{public}  {made.fingerprint(public)}")
        return 0
    assert isinstance(command, AddKey | ListKeys | RevokeKey)
    fed = Path(command.dir).resolve()
    if not (fed / "flower" / "config.toml").is_file():
        raise ConfigError("is no server's folder", where=str(fed), remedy="It is made by 'nestling serve --dir'.")

    def flower(arguments: list[str]) -> str:
        return programs.flwr(fed, arguments)

    reach.check_reached(*programs.read_connection(fed / "flower"))  # before anything is changed
    if isinstance(command, AddKey):
        if command.client < 0:
            raise ConfigError("is negative", where="--client", remedy="Give 0, 1, 2, …")
        key = made.add_key(flower, fed, Path(command.public), command.client)
        print(f"client {key.client}  {key.fingerprint}")
    elif isinstance(command, RevokeKey):
        made.revoke_key(flower, fed, command.client)
        print(f"client {command.client} is refused from now on")
    else:
        table = Table("client", "key", "site", box=None)
        for key in made.list_keys(flower, fed):
            table.add_row(str(key.client), key.fingerprint, key.status)
        Console().print(table)
    return 0
