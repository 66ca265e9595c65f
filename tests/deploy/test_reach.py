"""A server that is not there, is another, or speaks otherwise than it was meant to, is told apart first."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.core.errors import ConfigError, ContextError, RemoteError
from nestling.deploy import reach
from nestling.deploy.certificates import CA, SERVER, SERVER_KEY, make_certificates

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(certificates: Path | None, says: bytes = NOT_FOUND) -> Iterator[str]:
    """Something that listens on the loopback; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificates:
        context.load_cert_chain(certificates / SERVER, certificates / SERVER_KEY)

    def serve() -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                with (
                    suppress(OSError),
                    context.wrap_socket(accepted, server_side=True) if certificates else accepted as on,
                ):
                    asked.append(on.recv(1 << 16))
                    if says:
                        on.sendall(says)
                    else:
                        done.wait(30)

    done, asked = threading.Event(), list[bytes]()
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
    said = r"is not a server that --ca vouches for.*\. Ask the server's owner for its ca\.crt\.$"
    with answering(tmp_path) as address, pytest.raises(RemoteError, match=said):
        reach.why_not_reached(address, own / CA)


def test_a_server_by_a_name_that_its_certificate_does_not_have(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(own) as address:
        port = address.rpartition(":")[2]
        there = socket.create_connection
        monkeypatch.setattr(
            socket, "create_connection", lambda to, *more, **named: there(("127.0.0.1", to[1]), *more, **named)
        )
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
        assert "timed out" in reach.why_not_reached(address, None)


def test_what_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no")
    with pytest.raises(ConfigError, match=r"ca\.crt: holds no certificate"):
        reach.why_not_reached("127.0.0.1:1", tmp_path / "ca.crt")


def test_one_that_hangs_up_may_be_there_later(own: Path) -> None:
    """As what forwards a port to a server that has not begun does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            for _ in range(3):  # the last: whether it speaks TLS
                accepted, _ = listening.accept()
                accepted.recv(1 << 16)
                accepted.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert reach.why_not_reached(address, own / CA) == "it hangs up"
        assert "disconnected" in reach.why_not_reached(address, None)
        thread.join()


@pytest.mark.parametrize("status", [407, 502, 503, 504])
def test_what_answers_in_the_place_of_a_server_is_none(status: int, own: Path) -> None:
    says = b"HTTP/1.1 %d No\r\nContent-Length: 100000\r\nConnection: close\r\n\r\n" % status  # and no more comes
    with answering(own, says) as address:
        assert reach.why_not_reached(address, own / CA) == f"it answers {status}"


def test_a_proxy_that_flowers_client_cannot_use_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ContextError, match=r"the proxy.*ALL_PROXY"):
        reach.why_not_reached("127.0.0.1:1", own / CA)


def test_it_is_asked_by_way_of_the_proxy_that_flowers_programs_use(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Where only the proxy has a way to the server, and where the proxy has none."""
    seen: list[bytes] = []

    def tunnel() -> None:
        accepted, _ = listening.accept()
        with accepted:
            seen.append(accepted.recv(1 << 16))
            host, port = address.split(":")
            with socket.create_connection((host, int(port))) as behind:
                accepted.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=pump, args=(behind, accepted))
                back.start()
                pump(accepted, behind)
                back.join()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with answering(own) as address, socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread = threading.Thread(target=tunnel)
        thread.start()
        port = address.rpartition(":")[2]
        reach.check_reached(f"fed.example.org:{port}", own / CA)  # a name that this machine does not know
        thread.join()
        assert seen[0].startswith(b"CONNECT fed.example.org:")
    assert reach.why_not_reached(f"fed.example.org:{port}", own / CA) == "Connection refused"  # the proxy's port
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with answering(own) as address:
        reach.check_reached(address, own / CA)
