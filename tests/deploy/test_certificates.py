"""The certificates work for the names that were asked for, for no others, and the keys are their owner's alone."""

import datetime
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the extra nestling[flower]")

from nestling.core.errors import ConfigError
from nestling.deploy import certificates
from nestling.deploy.certificates import CA, CA_KEY, SERVER, SERVER_KEY, is_good, make_certificates, names_of


def shake_hands(folder: Path, name: str, ca: Path) -> None:
    """A TLS connection to a server with the certificate, over pipes in memory. Raises `ssl.SSLError` if it fails."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / SERVER, folder / SERVER_KEY)
    client = ssl.create_default_context(cafile=str(ca))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(10):
        done = 0
        for side in (ours, theirs):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                pass
        if done == 2:
            return
    raise AssertionError("they go on shaking hands")


def test_the_names_asked_for_and_this_machine_are_trusted_and_nobody_else(tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", ["fed.example.org", "192.0.2.7"])
    make_certificates(tmp_path / "b", ["fed.example.org"])
    own = tmp_path / "a" / CA
    for name in ("fed.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"):
        shake_hands(tmp_path / "a", name, own)
    for folder, name, ca in (("a", "other.example.org", own), ("b", "fed.example.org", own)):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(tmp_path / folder, name, ca)
    assert names_of(tmp_path / "a")[:2] == ["fed.example.org", "192.0.2.7"]
    assert names_of(tmp_path) == []


def test_the_authority_stays_when_the_server_gets_another_name(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["a.example.org"])
    before = (tmp_path / CA).read_bytes()
    make_certificates(tmp_path, ["b.example.org"])
    assert (tmp_path / CA).read_bytes() == before
    shake_hands(tmp_path, "b.example.org", tmp_path / CA)


def test_a_certificate_is_made_anew_before_it_ends_and_when_it_fits_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert not is_good(own, [])
    make_certificates(own, ["a.example.org"])
    make_certificates(other, ["a.example.org"])
    assert is_good(own, ["a.example.org"])
    assert not is_good(own, ["b.example.org"])
    for name in (SERVER, SERVER_KEY, CA):
        before = (own / name).read_bytes()
        (own / name).write_bytes((other / name).read_bytes())
        assert not is_good(own, ["a.example.org"]), name
        (own / name).unlink()
        assert not is_good(own, ["a.example.org"]), name
        (own / name).write_bytes(before)
    assert is_good(own, ["a.example.org"])
    for days, good in ((61, True), (59, False), (0, False)):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "SERVER_LIFE", datetime.timedelta(days=days))
            make_certificates(own, ["a.example.org"])
        assert is_good(own, ["a.example.org"]) is good


def test_an_authority_without_its_key_is_never_replaced_in_silence(tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", [])
    make_certificates(tmp_path / "b", [])
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    (tmp_path / "a" / CA_KEY).write_bytes((tmp_path / "b" / CA_KEY).read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key: is missing, or is not that of ca\.crt"):
        make_certificates(tmp_path / "a", [])
    (tmp_path / "a" / CA_KEY).unlink()
    with pytest.raises(ConfigError, match=r"ca\.key: is missing"):
        make_certificates(tmp_path / "a", ["b.example.org"])
    assert (tmp_path / "a" / CA).read_bytes() == files[CA]
    assert (tmp_path / "a" / SERVER).read_bytes() == files[SERVER]


def test_keys_are_private(tmp_path: Path) -> None:
    make_certificates(tmp_path / "new", [])
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert {stat.S_IMODE((tmp_path / "new" / key).stat().st_mode) for key in (CA_KEY, SERVER_KEY)} == {0o600}


@pytest.mark.parametrize("name", ["", "https://x", "a b", "a:1", "ü@x"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name"):
        make_certificates(tmp_path, [name])
