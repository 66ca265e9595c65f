"""Flower's programs are started with our settings and ours in front, and nothing without TLS leaves this machine."""

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.cli.main import main
from nestling.core.errors import ConfigError, ContextError, RemoteError
from nestling.deploy import programs
from nestling.deploy.folder import FedSettings, read_settings
from nestling.deploy.process import start
from nestling.engines import flower_compat as compat


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "fed.example.org", "localhost.example.org", ""])
def test_without_tls_only_this_machine_is_reached(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        programs.check_secure(host, insecure=True)
    programs.check_secure(host, insecure=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_the_loopback_may_be_tried_without_tls(host: str) -> None:
    programs.check_secure(host, insecure=True)


def test_a_name_that_begins_like_the_loopback_is_not_it() -> None:
    with pytest.raises(ConfigError):
        programs.check_secure("127.evil.example", insecure=True)


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "https://host:1"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        programs.split_address(address)


def test_every_program_that_a_bundle_could_ask_for_is_ours(tmp_path: Path) -> None:
    programs.write_programs(tmp_path)
    made = sorted((tmp_path / "bin").iterdir())
    assert [path.name for path in made] == compat.task_programs()
    assert {compat.CLIENT_APP, compat.SERVER_APP, "flwr-agentapp"} <= {path.name for path in made}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    done = subprocess.run([tmp_path / "bin" / "flwr-agentapp", "--insecure"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "settings, and no code" in done.stderr


def test_a_program_that_cannot_be_executed_is_never_left_to_flowers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk mounted noexec: what is looked up in PATH would be the next of that name."""
    usual = Path.chmod
    monkeypatch.setattr(Path, "chmod", lambda path, mode: usual(path, 0o600 if path.name == "flwr-clientapp" else mode))
    with pytest.raises(ContextError, match=r"flwr-clientapp: cannot be executed.*noexec"):
        programs.write_programs(tmp_path)


@pytest.mark.parametrize("sign", [":", '"', "\\", "\n"])
def test_a_folder_that_would_be_told_as_another_is_refused(sign: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a{sign}b"
    folder.mkdir()
    with pytest.raises(ConfigError, match="--dir"):
        programs.write_programs(folder)
    assert list(folder.iterdir()) == []


def test_no_module_comes_from_the_folder_in_which_a_command_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "here" / "nestling"
    planted.mkdir(parents=True)
    (planted / "__init__.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(planted.parent)
    programs.write_programs(tmp_path)
    done = subprocess.run([tmp_path / "bin" / "flwr-agentapp"], capture_output=True, text=True)
    assert "settings, and no code" in done.stderr
    line = programs.super_link(tmp_path, host="::1", port=1, certificates=None, control=[])
    assert line[:3] == [sys.executable, "-P", "-m"]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_ends_what_it_started(number: int, tmp_path: Path) -> None:
    program = f"""
import os, sys
from nestling.cli.main import _signals
from nestling.deploy.programs import run_until_ended
with _signals():
    run_until_ended(["{shutil.which("sh")}", "-c", "echo $$; exec sleep 60"], os.environ)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(30)
    until = time.monotonic() + 30
    while is_there(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_environment_is_silent_and_has_our_programs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_LICENSE_KEY", "secret")
    found = programs.environment(tmp_path, {"NESTLING_FED": "here"})
    assert found["PATH"].split(":")[:2] == [str(tmp_path / "bin"), str(Path(sys.executable).parent)]
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"], found["NESTLING_FED"]) == (
        "0", "1", "here",
    )  # fmt: skip
    assert "FLWR_LICENSE_KEY" not in found
    assert found["FORWARDED_ALLOW_IPS"] == ""


def test_a_secure_server_asks_for_keys_and_installs_nothing(tmp_path: Path) -> None:
    line = programs.super_link(tmp_path, host="192.0.2.1", port=1, certificates=tmp_path, control=["127.0.0.1"])
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(line)
    assert "--insecure" not in line


@pytest.mark.parametrize("ca", [None, Path("/a/ca.crt")])
def test_the_connection_is_as_flower_reads_it(tmp_path: Path, ca: Path | None) -> None:
    programs.write_connection(tmp_path, server="host:1", ca=ca)
    told = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["nestling"]
    assert programs.read_connection(tmp_path) == ("host:1", ca)
    assert told == {"address": "host:1"} | ({"root-certificates": "/a/ca.crt"} if ca else {"insecure": True})


def answered(path: str, host: str, *, to: str = "203.0.113.1", claims: str = "", trusted: str = "") -> int:
    """The status that a request from `host` to our address `to` gets, behind what uvicorn makes of its claims."""
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    said: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        said.append(200)

    async def send(message: dict[str, Any]) -> None:
        if "status" in message:
            said.append(message["status"])

    headers = [(b"x-forwarded-for", claims.encode())] if claims else []
    scope: Any = {"type": "http", "path": path, "client": (host, 5), "server": (to, 8443), "headers": headers}
    guarded: Any = ProxyHeadersMiddleware(compat.OnlyFrom(app, allowed=frozenset({"127.0.0.1"})), trusted_hosts=trusted)
    asyncio.run(guarded(scope, None, send))
    return said[0]


def test_only_nodes_are_answered_from_elsewhere() -> None:
    for path in ("/v1/control/start-run", "/v1/runtime/pull-task", "/docs", "/v1/fleetx", "/V1/fleet/", ""):
        assert answered(path, "192.0.2.1") == 403, path
        assert answered(path, "127.0.0.1") == 200, path
    assert answered("/v1/fleet/pull-messages", "192.0.2.1") == 200


def test_who_connects_to_an_address_of_this_machine_from_it_is_this_machine() -> None:
    assert answered("/v1/control/start-run", "203.0.113.1", to="203.0.113.1") == 200
    assert answered("/v1/control/start-run", "", to="") == 403


def test_nobody_can_claim_to_come_from_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    assert answered("/v1/control/start-run", "192.0.2.1", claims="127.0.0.1", trusted="*") == 200
    trusted = programs.environment(tmp_path, {})["FORWARDED_ALLOW_IPS"]
    assert answered("/v1/control/start-run", "192.0.2.1", claims="127.0.0.1", trusted=trusted) == 403


@pytest.fixture
def port() -> int:
    """One that nobody listens at, at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("[::1]", "[::1]"),
        ("localhost", "localhost"),
    ],
)
def test_a_server_is_told_where_it_is_and_what_is_its_own(
    host: str, here: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def run(line: list[str], environment: dict[str, str], keep: list[int], **more: object) -> int:
        started.append((line, environment))
        return 0

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(programs, "run_until_ended", run)
    fed, where = tmp_path / "fed", ["--host", host, "--port", str(port)]
    assert main(["serve", "--dir", str(fed), *where, "--control", "2001:DB8::1", "--model", "hub/name"]) == 0
    line, environment = started[0]
    assert line[4:6] == ["flower-superlink", "127.0.0.1,::1,2001:db8::1"]
    assert line[line.index("--host") + 1] == host.strip("[]")
    assert programs.read_connection(fed / "flower") == (f"{here}:{port}", fed / "certificates" / "ca.crt")
    assert environment["HF_HUB_OFFLINE"] == "1"
    settings = read_settings(FedSettings, fed)
    assert (settings.model, settings.authenticated) == ("hub/name", True)


def test_a_second_server_in_a_folder_changes_nothing_there(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fed, second = tmp_path / "fed", list[int]()

    def runs(line: object, environment: object, keep: object, **more: object) -> int:
        if not second:
            second.append(main(["serve", "--dir", str(fed), "--port", "1", "--wait", "7"]))
        return 0

    monkeypatch.setattr(programs, "run_until_ended", runs)
    assert main(["serve", "--dir", str(fed), "--port", str(port)]) == 0
    assert second == [6]
    assert "another 'nestling serve' is at work in it" in capsys.readouterr().err
    assert programs.read_connection(fed / "flower")[0] == f"127.0.0.1:{port}"
    assert read_settings(FedSettings, fed).wait == 300
    assert main(["serve", "--dir", str(fed), "--port", str(port)]) == 0


def test_the_server_of_a_serve_that_was_killed_is_waited_for(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It holds a lock of the folder by itself, as long as it ends its runs; two would share one database."""
    fed, left = tmp_path / "fed", list[Any]()

    def killed(line: object, environment: object, keep: list[int], **more: object) -> int:
        left.append(start([sys.executable, "-c", "import time; time.sleep(60)"], keep=keep))
        return 0

    monkeypatch.setattr(programs, "run_until_ended", killed)
    monkeypatch.setattr("nestling.cli.deploy.ENDING", 0.5)
    serve = ["serve", "--dir", str(fed), "--port", str(port)]
    assert main(serve) == 0
    try:
        assert main(serve) == 6
        err = capsys.readouterr().err
        assert err.count("the last server here is still ending; waiting") == 1
        assert "its last server is still at work" in err
    finally:
        left[0].kill()
        left[0].wait()
    monkeypatch.setattr(programs, "run_until_ended", lambda *_, **__: 0)
    assert main(serve) == 0


def test_a_port_that_is_taken_is_named_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--dir", str(tmp_path / "fed"), "--port", str(port)]) == 2
    assert f"127.0.0.1 port {port}: cannot be listened at" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "fed").iterdir()) == ["serve.lock", "server.lock"]


def test_a_name_is_tried_at_each_of_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert main(["serve", "--dir", str(tmp_path / "fed"), "--host", "localhost", "--port", str(port)]) == 2
    assert f"localhost port {port}: cannot be listened at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "family", "address"),
    [
        ("192.0.2.1", socket.AF_INET, ("192.0.2.1", 8443)),  # kept for documents, so nobody's
        ("2001:db8::1", socket.AF_INET6, ("2001:db8::1", 8443, 0, 0)),
    ],
)
def test_what_is_no_address_of_this_machine_is_no_traceback(
    host: str,
    family: int,
    address: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(family, socket.SOCK_STREAM, 0, "", address)])
    assert main(["serve", "--dir", str(tmp_path / "fed"), "--host", host]) == 2
    assert f"{host} port 8443: cannot be listened at" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "65536", "70000", "-1"])
def test_what_is_no_port_is_told(number: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["serve", "--dir", str(tmp_path / "fed"), "--port", number]) == 2
    assert f"--port: is {number}. Give 1 to 65535." in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize(("code", "ours"), [(0, 0), (1, 9), (9, 9), (-9, 9)])
def test_how_a_program_of_flowers_ends_is_never_called_a_bug_of_ours(
    code: int, ours: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "run_until_ended", lambda *_, **__: code)
    assert main(["serve", "--dir", str(tmp_path / "fed"), "--port", str(port)]) == ours


class Answers:
    """In the place of Flower's connection to a server: what that says to one request after another."""

    statuses: ClassVar[list[int]] = []

    def _unary_unary(self, *, path: str, **rest: Any) -> str:
        import httpx

        status = self.statuses.pop(0)
        request = httpx.Request("POST", f"https://fed.example.org{path}")
        httpx.Response(status, request=request).raise_for_status()
        return path

    from_server_address = ActivateNode = None


ACTIVATE, PULL = "/v1/fleet/activate-node", "/v1/fleet/pull-messages"


@pytest.mark.parametrize(
    ("asked", "said", "why"),
    [
        ([(ACTIVATE, 200), (PULL, 200), (PULL, 503), (PULL, 200)], ["admitted"], ""),
        ([(ACTIVATE, 412)], ["refused"], "its key is not on the server's list"),
        ([(ACTIVATE, 401)], ["refused"], "what it signs is not believed. The clocks"),
        (
            [(ACTIVATE, 200), (PULL, 401), (PULL, 401)],
            ["admitted", "refused"],
            "its key is no longer on the server",
        ),
        ([(ACTIVATE, 200), (PULL, 412)], ["admitted"], ""),
        ([(ACTIVATE, 503), (ACTIVATE, 200)], ["admitted"], ""),
        ([(ACTIVATE, 200), (PULL, 401), (PULL, 200)], ["admitted", "refused", "admitted"], ""),  # a lone refusal
    ],
)
def test_a_site_is_told_what_the_server_makes_of_it(
    asked: list[tuple[str, int]],
    said: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from importlib import import_module

    from nestling.deploy import task

    where: Any = import_module("flwr.supernode.fleet_http_connection")

    def node() -> None:
        client = where.FleetHttpClient()
        for path, _ in asked:
            with suppress(import_module("httpx").HTTPError):
                assert client._unary_unary(path=path, request=None) == path

    monkeypatch.setattr(where, "FleetHttpClient", Answers)
    monkeypatch.setattr(Answers, "statuses", [status for _, status in asked])
    monkeypatch.setattr(import_module("flwr.supernode.cli.flower_supernode"), "flower_supernode", node)
    monkeypatch.setattr("sys.argv", ["task", "flower-supernode", "3", str(tmp_path), "--insecure"])
    monkeypatch.setattr(task.starter, "begin", lambda folder: folder != tmp_path)
    monkeypatch.setattr(threading, "Timer", MagicMock())  # it would end this process
    monkeypatch.setattr(os, "_exit", sys.exit)
    if why:
        with pytest.raises(SystemExit) as ended:
            task.main()
        assert ended.value.code == 9
    else:
        task.main()
    out, err = capsys.readouterr()
    assert [line.partition(" is ")[2].split(";")[0] for line in out.splitlines()] == said
    assert (f"nestling: client 3 is refused: {why}" in err) if why else (err == "")


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os.kill(os.getpid(), 15)", "time.sleep(60)"])
def test_however_flower_ends_a_site_that_is_refused_it_ends_with_our_code(ending: str) -> None:
    """What is refused in one of Flower's threads ends the process by a handler that calls it a success, or hangs."""
    program = f"""
import os, signal, sys, threading, time
from nestling.deploy import task
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
def node(told):
    told(task.compat.ADMITTED)
    thread = threading.Thread(target=told, args=[task.compat.REVOKED])
    thread.start()
    thread.join()
    {ending}
    time.sleep(60)
task.LONGEST_END, task.compat.run_super_node, task.starter.begin = 1.0, node, lambda folder: False
task._be_site("3", None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 9
    assert done.stdout.splitlines() == [
        "nestling: client 3 is admitted; it waits for runs",
        "nestling: client 3 is refused",
    ]
    assert done.stderr.startswith("nestling: client 3 is refused: its key is no longer on the server's list")


def test_only_the_process_of_a_message_comes_from_a_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nestling.deploy import task

    ran: list[str] = []
    monkeypatch.setattr(compat, "run_client_task", lambda load: ran.append(load().__class__.__name__))
    for name, good in (("flwr-clientapp", True), ("flwr-serverapp", False)):

        def become(folder: Path, name: str = name) -> bool:
            sys.argv = [name, "--token", "x"]
            return True

        monkeypatch.setattr(task.starter, "begin", become)
        monkeypatch.setattr("sys.argv", ["task", "flower-supernode", "3", str(tmp_path)])
        if good:
            task.main()
        else:
            with pytest.raises(SystemExit, match="is not started here"):
                task.main()
    assert ran == ["ClientApp"]


def test_a_node_of_ours_looks_for_messages_by_waits_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    loop: Any = import_module("flwr.supernode.start_client_internal")
    monkeypatch.setattr(loop, "time", time)
    monkeypatch.setattr(import_module("flwr.supernode.fleet_http_connection"), "FleetHttpClient", Answers)
    slept: list[float] = []

    def node() -> None:
        began = time.monotonic()
        loop.time.sleep(3.0)
        slept.append(time.monotonic() - began)

    monkeypatch.setattr(import_module("flwr.supernode.cli.flower_supernode"), "flower_supernode", node)
    compat.run_super_node(lambda news: None)
    assert 0.1 <= slept[0] < 2


def test_it_is_told_once_when_what_was_started_is_up(capsys: pytest.CaptureFixture) -> None:
    looks, told = iter([False, False, True]), list[str]()
    line = [sys.executable, "-c", "import time; time.sleep(1.2)"]
    code = programs.run_until_ended(line, os.environ, is_up=lambda: next(looks), told=lambda: told.append("up"))
    assert (code, told, list(looks)) == (0, ["up"], [])
    line = [sys.executable, "-c", "import sys; sys.exit(3)"]
    assert programs.run_until_ended(line, os.environ, is_up=lambda: False, told=lambda: told.append("no")) == 3
    assert told == ["up"]


def test_what_flower_runs_holds_the_lock_that_is_kept_for_it(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from nestling.deploy.folder import only_one
from nestling.deploy.programs import run_until_ended
with only_one(Path(sys.argv[1]), "", where="") as held:
    sleeper = "import time; print('up', flush=True); time.sleep(60)"
    run_until_ended([sys.executable, "-c", sleeper], os.environ, keep=[held])
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "lock")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        locks = [Path(f"/proc/{child}/fd") for child in children]
        held = [os.readlink(fd) for folder in locks for fd in folder.iterdir()]
        process.terminate()
    assert str(tmp_path / "lock") in held


def test_a_private_name_that_is_gone_is_an_error_and_never_a_guard_left_out() -> None:
    with pytest.raises(ContextError, match="bundles could bring code"):
        compat._replace(subprocess, "no_such_name", None)


def test_the_private_names_are_there() -> None:
    from importlib import import_module

    for module, names in (
        (
            "flwr.supernode.runtime.run_clientapp",
            "install_from_fab get_load_client_app_fn install_app_dependencies start_parent_process_monitor",
        ),
        (
            "flwr.superlink.runtime.run_serverapp",
            "run_ install_app_dependencies install_from_fab get_project_config get_fused_config_from_dir "
            "start_parent_process_monitor",
        ),
        ("flwr.common.config", "get_fused_config_from_fab get_fab_config"),
        ("flwr.supercore.run", "RunNotRunningException"),
        ("flwr.superlink.extensions", "get_middleware"),
        ("flwr.supernode.fleet_http_connection", "FleetHttpClient"),
        ("flwr.supernode.start_client_internal", "time"),
    ):
        for name in names.split():
            assert hasattr(import_module(module), name), name


@pytest.mark.parametrize(
    "args",
    [
        ["serve", "--dir", "fed", "--host", "0.0.0.0", "--insecure"],
        ["serve", "--dir", "fed", "--control", "admin.example.org"],
        ["serve", "--dir", "fed", "--control", "192.0.2.0/24"],
        ["submit", "--stop", "1", "--server", "fed.example.org:1", "--insecure"],
        ["join", "--server", "fed.example.org:1", "--client", "0", "--insecure"],
        ["join", "--server", "127.0.0.1:1", "--client", "0"],
        ["submit", "flite-digits", "--server", "fed.example.org:1", "--insecure"],
        ["submit", "flite-digits", "--server", "fed.example.org:1"],
        ["submit", "flite-digits"],
        ["keys", "list", "--dir", "nowhere"],
        ["join", "--server", "127.0.0.1:1", "--client", "0", "--ca", __file__, "--key", __file__],
    ],
)
def test_what_is_not_safe_or_not_there_is_refused_before_anything_is_made(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert capsys.readouterr().err.startswith("nestling: ")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_connection_is_told(tmp_path: Path) -> None:
    for text in ("", "[superlink", "superlink = 3"):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.toml: says of no server"):
            programs.read_connection(tmp_path)


def test_flowers_command_is_asked_for_plain_lines_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "flwr"
    shown.write_text('#!/bin/sh\nenv; [ "$1" = hang ] && exec sleep 60\nexit 0\n')
    shown.chmod(0o700)
    monkeypatch.setattr(programs, "_program", lambda name: str(shown))
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.setenv(name, "1")
    said = programs.flwr(tmp_path, ["list"]).splitlines()
    assert "NO_COLOR=1" in said
    assert not [line for line in said if line.startswith(("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"))]
    monkeypatch.setattr(programs, "_LONGEST_ANSWER", 0.2)
    with pytest.raises(RemoteError, match=r"has not answered for 0\.2 s"):
        programs.flwr(tmp_path, ["hang"])


def test_a_key_is_on_no_list_where_the_server_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Whatever it is that stands in the way."""
    monkeypatch.setattr(programs, "flwr", lambda folder, args: pytest.fail("was asked"))
    fed, key = tmp_path / "fed", tmp_path / "key"
    (fed / "flower").mkdir(parents=True)
    programs.write_connection(fed / "flower", server="127.0.0.1:1", ca=tmp_path / "gone.crt")
    assert main(["keys", "new", str(key)]) == 0
    for command in (["add", f"{key}.pub", "--client", "0"], ["list"], ["revoke", "--client", "0"]):
        assert main(["keys", *command, "--dir", str(fed)]) == 2
        assert "gone.crt: cannot be read" in capsys.readouterr().err
    programs.write_connection(fed / "flower", server="127.0.0.1:1", ca=None)
    assert main(["keys", "add", f"{key}.pub", "--client", "0", "--dir", str(fed)]) == 9
    assert "127.0.0.1:1: is not reached (Connection refused)" in capsys.readouterr().err
    assert not (fed / "keys.json").exists()


@pytest.mark.parametrize("wait", ["nan", "-1", "inf"])
def test_a_wait_that_never_ends_is_refused(wait: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["serve", "--dir", str(tmp_path / "fed"), "--port", str(port), "--wait", wait]) == 2
    assert "--wait: is " in capsys.readouterr().err
