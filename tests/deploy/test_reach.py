"""A server that is not there, is another, or speaks otherwise than it was meant to, is told apart first."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the extra nestling[flower]")

from nestling.core.errors import ConfigError, RemoteError
from nestling.deploy import reach
from nestling.deploy.certificates import CA, SERVER, SERVER_KEY, make_certificates


@contextmanager
def answering(certificates: Path | None, says: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n") -> Iterator[str]:
    """Something that listens on the loopback; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificates:
        context.load_cert_chain(certificates / SERVER, certificates / SERVER_KEY)

    def serve() -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                with accepted, suppress(OSError):
                    if certificates:
                        context.wrap_socket(accepted, server_side=True).close()
                    elif says:
                        accepted.recv(1)
                        accepted.sendall(says)
                    else:
                        accepted.recv(1 << 16)
                        done.wait(30)

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        done.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own")
    make_certificates(made, ["fed.example.org"])
    return made


def test_the_server_that_was_meant_is_reached_with_tls_and_without(own: Path) -> None:
    with answering(own) as address:
        reach.check_reached(address, own / CA)
        reach.check_reached(address.replace("127.0.0.1", "localhost"), own / CA)
    with answering(None) as address:
        reach.check_reached(address, None)


def test_nobody_there(own: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        for ca in (None, own / CA):
            assert reach.why_not_reached(address, ca) == "Connection refused"
        with pytest.raises(
            RemoteError, match=r"is not reached \(Connection refused\)\. See that 'nestling serve' runs"
        ):
            reach.check_reached(address, own / CA)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (UnicodeError("label empty or too long"), "label empty or too long"),  # before anybody is asked for the name
    ],
)
def test_a_name_that_nobody_has(error: Exception, why: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert reach.why_not_reached("no-such-host.invalid:1", own / CA) == why


def test_another_server(own: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path, [])
    with answering(tmp_path) as address, pytest.raises(RemoteError, match="is not a server that --ca vouches for"):
        reach.why_not_reached(address, own / CA)


def test_a_server_by_a_name_that_its_certificate_does_not_have(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(own) as address:
        port = address.rpartition(":")[2]
        there = socket.create_connection
        monkeypatch.setattr(socket, "create_connection", lambda to, **more: there(("127.0.0.1", to[1]), **more))
        reach.check_reached(f"fed.example.org:{port}", own / CA)
        with pytest.raises(RemoteError, match=r"mismatch.*--name other\.example\.org"):
            reach.check_reached(f"other.example.org:{port}", own / CA)


def test_tls_where_none_was_meant_and_none_where_it_was(own: Path) -> None:
    with answering(own) as address, pytest.raises(RemoteError, match=r"speaks TLS.*Leave out --insecure"):
        reach.check_reached(address, None)
    with answering(None) as address, pytest.raises(RemoteError, match=r"does not speak TLS.*--insecure"):
        reach.check_reached(address, own / CA)


def test_one_that_says_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PATIENCE", 0.2)
    with answering(None, says=b"") as address:
        assert "timed out" in reach.why_not_reached(address, own / CA)
    with answering(None, says=b"") as address:
        assert reach.why_not_reached(address, None) == ""  # a server without TLS may wait for more


def test_what_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no")
    with pytest.raises(ConfigError, match=r"ca\.crt: holds no certificate"):
        reach.why_not_reached("127.0.0.1:1", tmp_path / "ca.crt")


def test_one_that_hangs_up_may_be_there_later(own: Path) -> None:
    """As what forwards a port to a server that has not begun does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            accepted, _ = listening.accept()
            accepted.recv(1 << 16)
            accepted.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert reach.why_not_reached(f"127.0.0.1:{listening.getsockname()[1]}", own / CA) == "it hangs up"
        thread.join()
