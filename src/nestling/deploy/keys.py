"""Who a site is: a key pair of its own, whose public half the server's owner puts on the list of those that may join.

The list is Flower's, in the run database, and is changed through Flower's own command on the server's machine. Beside
it, `keys.json` says which client a key is for, so that a site cannot choose which client it is.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)  # fmt: skip

from nestling.core.errors import ConfigError, RemoteError, WireError
from nestling.core.files import make_folder, write_atomic
from nestling.deploy.folder import only_one, write_private
from nestling.deploy.said import forbidden, is_forbidden, plain
from nestling.runs.files import from_json, printable, read_file, to_json

Flower = Callable[[list[str]], str]
"""Runs `flwr` with these arguments against the server's own; returns what it printed."""


KEYS = "keys.json"
_PENDING = 0
"""In the place of the node, as long as Flower has not said which it is; Flower's own identifiers are never 0."""


@dataclass(frozen=True)
class Key:
    """A line of the list: the client, the node that its key stands for in Flower's database, and what its site does."""

    client: int
    node: int
    fingerprint: str
    status: str


def registered(fed: Path) -> dict[int, int]:
    """The node of each client that has a key."""
    return {client: node for client, (node, _) in _read(fed).items() if node != _PENDING}


def new_key(path: Path) -> Path:
    """Make a key pair: `path`, which only its owner can read, and `path`.pub, which is returned.

    Raises `ConfigError` if one is there: whoever has lost a key makes another and has the old one revoked.
    """
    public = path.with_name(path.name + ".pub")
    if path.exists() or public.exists():
        raise ConfigError("is there already", where=str(path), remedy="Give another name, or go on with that key.")
    make_folder(path.parent)
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_atomic(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def add_key(flower: Flower, fed: Path, public: Path, client: int) -> Key:
    """Put a public key onto the list as that of `client`.

    Raises `ConfigError` if the client has one or the file is no public key, `RemoteError` if Flower refuses: as it does
    a key that was ever on the list.
    """
    name = fingerprint(public)
    with _alone(fed):
        keys = _read(fed)
        if client in keys:
            raise ConfigError(
                "has a key",
                where=f"client {client}",
                remedy=f"For another, first 'nestling keys revoke --client {client}': the one it has cannot come back.",
            )
        _write(fed, keys | {client: (_PENDING, name)})  # so that what Flower has taken can be revoked, come what may
        try:
            said = flower(["supernode", "register", str(public), "--name", f"client-{client}", "--format", "json"])
            found = answer(said, remedy="One that was ever on the list cannot be again; 'nestling keys new' makes one.")
        except RemoteError:
            _write(fed, keys)
            raise
        keys[client] = (int(found["node-id"]), name)
        _write(fed, keys)
        return Key(client, keys[client][0], name, "registered")


def check_private(path: Path) -> None:
    """Raise `ConfigError` unless the file holds a key of 'nestling keys new', without a password."""
    try:
        if not isinstance(load_ssh_private_key(read_file(path, 1 << 14), None), ec.EllipticCurvePrivateKey):
            raise ValueError("no elliptic curve")
    except (WireError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: a password is missing
        raise ConfigError(
            f"holds no key ({error})", where=str(path), remedy="Give what 'nestling keys new' made, without .pub."
        ) from error


def list_keys(flower: Flower, fed: Path) -> list[Key]:
    """The keys that may join, by client."""
    status = _nodes(flower) | {_PENDING: "not registered, revoke it"}
    return [Key(c, node, name, status.get(node, "unknown")) for c, (node, name) in sorted(_read(fed).items())]


def revoke_key(flower: Flower, fed: Path, client: int) -> None:
    """Take a client's key off the list: its site is refused from then on, in a run that is at work, too.

    Raises `ConfigError` if the client has none, `RemoteError` if Flower refuses.
    """
    with _alone(fed):
        keys = _read(fed)
        if client not in keys:
            raise ConfigError("has no key", where=f"client {client}", remedy="See 'nestling keys list'.")
        node = keys.pop(client)[0]
        known = {each for each, status in _nodes(flower).items() if status != "unregistered"}
        # Of a key whose adding was cut short it is not known which node it is: one of those that are nobody's.
        gone = known - {each for each, _ in keys.values()} if node == _PENDING else known & {node}
        for each in sorted(gone):
            answer(flower(["supernode", "unregister", str(each), "--format", "json"]))
        _write(fed, keys)


def fingerprint(public: Path) -> str:
    """What two people compare to know that a key is the same: as `ssh-keygen -lf` prints it.

    Raises `ConfigError` if the file holds no public key.
    """
    try:
        key = load_ssh_public_key(read_file(public, 1 << 14))
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("no elliptic curve")
    except (WireError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"is no public key of 'nestling keys new' ({error})", where=str(public), remedy="Give the site's .pub file."
        ) from error
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _read(fed: Path) -> dict[int, tuple[int, str]]:
    path = fed / KEYS
    if not path.is_file():
        return {}
    values = from_json(read_file(path, 1 << 24), str(path))
    return {int(client): (int(node), str(name)) for client, (node, name) in values.items()}


def _write(fed: Path, keys: dict[int, tuple[int, str]]) -> None:
    write_private(fed / KEYS, to_json({str(client): list(key) for client, key in keys.items()}, indent=2).encode())


def _alone(fed: Path) -> AbstractContextManager[int]:
    return only_one(fed / "keys.lock", "another command is changing the list", where="nestling keys")


def _nodes(flower: Flower) -> dict[int, str]:
    """The nodes in Flower's database, and what they do."""
    nodes = answer(flower(["supernode", "list", "--format", "json"]))["nodes"]
    return {int(node["node-id"]): printable(str(node.get("status", ""))) for node in nodes}


def answer(said: str, *, remedy: str = "See that 'nestling serve' runs there.") -> dict[str, Any]:
    """The JSON object that Flower's command ends with. Raises `RemoteError` if it says that it failed, or nothing."""
    start = said.find("{")
    try:
        found = json.loads(said[start:]) if start >= 0 else {}
    except ValueError:
        found = {}
    if not isinstance(found, dict) or found.get("success") is not True:
        reason = str(found.get("error-message", "")) if isinstance(found, dict) else ""
        if is_forbidden(reason or said):
            raise forbidden()
        raise RemoteError(
            f"refuses ({plain(reason or said)[-200:] or 'no answer'})",
            where="the server",
            remedy=remedy,
        )
    return found
