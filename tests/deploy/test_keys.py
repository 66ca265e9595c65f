"""A key is made once and is its owner's alone; the list says which client it is for, and follows Flower's."""

import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the extra nestling[flower]")

from nestling.core.errors import ConfigError, RemoteError, RunError
from nestling.deploy.keys import add_key, fingerprint, list_keys, new_key, registered, revoke_key


class Flower:
    """Flower's command, as far as it is used."""

    def __init__(self) -> None:
        self.nodes: dict[int, str] = {}
        self.status: dict[int, str] = {}
        self.broken = self.crash = False

    def __call__(self, args: list[str]) -> str:
        if self.broken:
            return json.dumps({"success": False, "error-message": "nobody\x1b there"})
        verb, rest = args[1], args[2:]
        if verb == "register":
            assert rest[1] == "--name"
            if rest[0] in self.nodes.values():
                return json.dumps({"success": False, "error-message": "Public key already in use."})
            self.nodes[len(self.nodes) + 2**63] = rest[0]
            self.status[max(self.nodes)] = "online"
            if self.crash:
                raise KeyboardInterrupt
            return "warning\n" + json.dumps({"success": True, "node-id": max(self.nodes)})
        if verb == "unregister":
            if self.status.get(int(rest[0]), "unregistered") == "unregistered":
                return json.dumps({"success": False, "error-message": "Node not found."})
            self.status[int(rest[0])] = "unregistered"
            return '{"success": true}'
        nodes = [{"node-id": str(node), "status": status} for node, status in self.status.items()]
        return json.dumps({"success": True, "nodes": nodes})

    def may_join(self) -> list[str]:
        return [key for node, key in self.nodes.items() if self.status[node] != "unregistered"]


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return new_key(tmp_path / "keys" / "site")


def test_a_key_is_its_owners_alone_and_never_made_twice(public: Path) -> None:
    private = public.with_suffix("")
    assert private.read_bytes().startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert public.read_bytes().startswith(b"ecdsa-sha2-nistp384 ")
    with pytest.raises(ConfigError, match="is there already"):
        new_key(private)
    assert fingerprint(public) != fingerprint(new_key(private.with_name("other")))


def test_a_client_has_one_key_until_it_is_revoked(tmp_path: Path, public: Path) -> None:
    flower = Flower()
    key = add_key(flower, tmp_path, public, 2)
    assert registered(tmp_path) == {2: key.node} == {2: 2**63}
    with pytest.raises(ConfigError, match="revoke --client 2"):
        add_key(flower, tmp_path, public, 2)
    add_key(flower, tmp_path, new_key(tmp_path / "other"), 0)
    assert [(k.client, k.status) for k in list_keys(flower, tmp_path)] == [(0, "online"), (2, "online")]
    revoke_key(flower, tmp_path, 2)
    assert list(registered(tmp_path)) == [0]
    assert flower.may_join() == [str(tmp_path / "other.pub")]
    with pytest.raises(ConfigError, match="has no key"):
        revoke_key(flower, tmp_path, 2)
    with pytest.raises(RemoteError, match=r"already in use.*'nestling keys new' makes one"):
        add_key(flower, tmp_path, public, 3)
    assert list(registered(tmp_path)) == [0]
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_what_flower_refuses_is_not_on_the_list(tmp_path: Path, public: Path) -> None:
    flower = Flower()
    flower.broken = True
    with pytest.raises(RemoteError, match=r"nobody\\x1b there"):
        add_key(flower, tmp_path, public, 0)
    assert registered(tmp_path) == {}


def test_a_key_whose_adding_was_cut_short_is_on_the_list_and_can_be_revoked(tmp_path: Path, public: Path) -> None:
    flower = Flower()
    add_key(flower, tmp_path, new_key(tmp_path / "other"), 0)
    flower.crash = True
    with pytest.raises(KeyboardInterrupt):
        add_key(flower, tmp_path, public, 1)
    flower.crash = False
    assert list(registered(tmp_path)) == [0]
    assert [(k.client, k.status) for k in list_keys(flower, tmp_path)] == [
        (0, "online"), (1, "not registered, revoke it"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="revoke --client 1"):
        add_key(flower, tmp_path, public, 1)
    revoke_key(flower, tmp_path, 1)
    assert flower.may_join() == [str(tmp_path / "other.pub")]
    add_key(flower, tmp_path, new_key(tmp_path / "third"), 1)


def test_a_key_that_flower_has_forgotten_can_be_revoked(tmp_path: Path, public: Path) -> None:
    add_key(Flower(), tmp_path, public, 0)
    revoke_key(Flower(), tmp_path, 0)  # its database was lost
    add_key(Flower(), tmp_path, public, 0)


def test_two_commands_do_not_change_the_list_at_once(tmp_path: Path, public: Path) -> None:
    flower, other = Flower(), new_key(tmp_path / "other")

    def slow(args: list[str]) -> str:
        with pytest.raises(RunError, match="another command"):
            add_key(flower, tmp_path, other, 1)
        return flower(args)

    add_key(slow, tmp_path, public, 0)
    assert list(registered(tmp_path)) == [0]


def test_a_private_key_is_never_sent_for_a_public_one(tmp_path: Path, public: Path) -> None:
    for path in (public.with_suffix(""), tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="no public key"):
            add_key(Flower(), tmp_path, path, 0)
