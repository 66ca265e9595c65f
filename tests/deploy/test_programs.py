"""Flower's programs are started with our settings and ours in front, and nothing without TLS leaves this machine."""

import asyncio
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.cli.main import main
from nestling.core.errors import ConfigError, ContextError
from nestling.deploy import programs
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


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
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


def test_the_environment_is_silent_and_has_our_programs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_LICENSE_KEY", "secret")
    found = programs.environment(tmp_path, {"NESTLING_FED": "here"})
    assert found["PATH"].split(":")[:2] == [str(tmp_path / "bin"), str(Path(sys.executable).parent)]
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"], found["NESTLING_FED"]) == (
        "0", "1", "here",
    )  # fmt: skip
    assert "FLWR_LICENSE_KEY" not in found


def test_a_secure_server_asks_for_keys_and_installs_nothing(tmp_path: Path) -> None:
    line = programs.super_link(tmp_path, host="192.0.2.1", port=1, certificates=tmp_path, control=["127.0.0.1"])
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(line)
    assert "--insecure" not in line


@pytest.mark.parametrize("ca", [None, Path("/a/ca.crt")])
def test_the_connection_is_as_flower_reads_it(tmp_path: Path, ca: Path | None) -> None:
    programs.write_connection(tmp_path, server="host:1", ca=ca)
    told = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["nestling"]
    assert told == {"address": "host:1"} | ({"root-certificates": "/a/ca.crt"} if ca else {"insecure": True})


def answered(path: str, host: str) -> int:
    """The status that a request from `host` gets."""
    said: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        said.append(200)

    async def send(message: dict[str, Any]) -> None:
        if "status" in message:
            said.append(message["status"])

    scope = {"type": "http", "path": path, "client": (host, 5)}
    asyncio.run(compat.OnlyFrom(app, allowed=frozenset({"127.0.0.1"}))(scope, None, send))
    return said[0]


def test_only_nodes_are_answered_from_elsewhere() -> None:
    for path in ("/v1/control/start-run", "/v1/runtime/pull-task", "/docs", "/v1/fleetx", "/V1/fleet/", ""):
        assert answered(path, "192.0.2.1") == 403, path
        assert answered(path, "127.0.0.1") == 200, path
    assert answered("/v1/fleet/pull-messages", "192.0.2.1") == 200


def test_a_private_name_that_is_gone_is_an_error_and_never_a_guard_left_out() -> None:
    with pytest.raises(ContextError, match="bundles could bring code"):
        compat._replace(subprocess, "no_such_name", None)


def test_the_private_names_are_there() -> None:
    from importlib import import_module

    for module, names in (
        ("flwr.supernode.runtime.run_clientapp", "install_from_fab get_load_client_app_fn install_app_dependencies"),
        ("flwr.superlink.runtime.run_serverapp", "run_ install_app_dependencies"),
        ("flwr.superlink.extensions", "get_middleware"),
    ):
        for name in names.split():
            assert hasattr(import_module(module), name), name


@pytest.mark.parametrize(
    "args",
    [
        ["serve", "--dir", "fed", "--host", "0.0.0.0", "--insecure"],
        ["join", "--server", "fed.example.org:1", "--client", "0", "--insecure"],
        ["join", "--server", "127.0.0.1:1", "--client", "0"],
        ["submit", "flite-digits", "--server", "fed.example.org:1", "--insecure"],
        ["submit", "flite-digits", "--server", "fed.example.org:1"],
        ["submit", "flite-digits"],
        ["keys", "list", "--dir", "nowhere"],
    ],
)
def test_what_is_not_safe_or_not_there_is_refused_before_anything_is_made(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert capsys.readouterr().err.startswith("nestling: ")
    assert list(tmp_path.iterdir()) == []
