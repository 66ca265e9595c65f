"""What stands in the place of a part of Flower: a run ends as in a terminal, and of a bundle nothing is kept."""

import io
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.deploy.bundle import write_bundle
from nestling.engines import flower_compat as compat

NAMES = ("install_from_fab", "get_project_config", "get_fused_config_from_dir", "run_", "install_app_dependencies")


class ServerApp:
    """`flwr-serverapp`, which does `body` with the module whose names were replaced, under handlers of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where: Any = import_module("flwr.superlink.runtime.run_serverapp")
        for name in NAMES:  # as they were, after the test
            monkeypatch.setattr(self.where, name, getattr(self.where, name))
        self.body: Callable[[Any], object] = lambda where: None
        self.handled: list[int] = []
        monkeypatch.setattr(import_module("flwr.superlink.cli.flwr_serverapp"), "flwr_serverapp", self)

    def __call__(self) -> None:
        self.body(self.where)

    def handle(self, number: int, frame: object) -> None:
        self.handled.append(number)
        raise SystemExit(0)


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerApp]:
    made = ServerApp(monkeypatch)
    usual = {number: signal.signal(number, made.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    yield made
    for number, handler in usual.items():
        signal.signal(number, handler)


class Ended:
    """A grid whose run is over."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def get_nodes(self) -> list[Any]:
        raise self.error


def http(status: int) -> Exception:
    import httpx

    return httpx.HTTPStatusError("no", request=httpx.Request("POST", "https://a"), response=httpx.Response(status))


def not_running() -> BaseException:
    ended: BaseException = import_module("flwr.supercore.run").RunNotRunningException()
    return ended


@pytest.mark.parametrize(
    "end",
    [
        lambda grid: signal.raise_signal(signal.SIGINT),
        lambda grid: signal.raise_signal(signal.SIGTERM),
        lambda grid: compat.StoppableGrid(Ended(not_running())).get_nodes(),
        lambda grid: compat.StoppableGrid(Ended(http(401))).get_nodes(),
        lambda grid: compat.StoppableGrid(Ended(http(403))).get_nodes(),
        lambda grid: grid.get_nodes(),
    ],
)
def test_a_run_that_is_ended_can_say_so_before_flower_ends_the_process(
    end: Callable[[Any], object], flower: ServerApp
) -> None:
    said: list[object] = []

    def app(grid: Any, context: object) -> None:
        try:
            end(grid)
        except BaseException as error:
            signal.raise_signal(signal.SIGINT)  # a second one does not come between
            said.append((type(error), list(flower.handled)))
            raise

    flower.body = lambda where: where.run_(
        grid=Ended(not_running()), context=None, server_app_dir="", server_app_attr=""
    )
    with pytest.raises(SystemExit):
        compat.run_server_task(lambda: app)
    assert said == [(KeyboardInterrupt, [])]
    assert flower.handled == [signal.SIGINT]


def test_another_error_of_the_grid_stays_one_and_flowers_handlers_come_back(flower: ServerApp) -> None:
    flower.body = lambda where: where.run_(grid=Ended(http(500)), context=None)
    with pytest.raises(type(http(500))):
        compat.run_server_task(lambda: lambda grid, context: grid.get_nodes())
    assert signal.getsignal(signal.SIGTERM) == flower.handle


def test_the_settings_of_a_bundle_are_read_and_nothing_of_it_reaches_the_disk(
    flower: ServerApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "flower"
    home.mkdir(parents=True)
    monkeypatch.setenv("FLWR_HOME", str(home))
    write_bundle(tmp_path / "bundle", None, resume="trial")
    text = (tmp_path / "bundle" / "pyproject.toml").read_text()
    version = next(line for line in text.splitlines() if line.startswith("version"))
    text = text.replace(version, 'version = "1/../../../out/x"')  # a part of the path that Flower unpacks it to
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as bundle:
        for name, content in (
            ("pyproject.toml", text),
            ("LICENSE", "x"),
            ("evil.py", "raise SystemExit"),
            (".info/CONTENT", ""),
        ):
            bundle.writestr(name, content)
    before = sorted(tmp_path.rglob("*"))
    read: list[Any] = []

    def body(where: Any) -> None:
        where.install_from_fab(packed.getvalue(), skip_prompt=True)
        read.append(where.get_project_config("nowhere")["tool"]["flwr"]["app"]["components"]["serverapp"])
        read.append(where.get_fused_config_from_dir(Path("nowhere"), {"config": "given"}))

    flower.body = body
    compat.run_server_task(lambda: lambda grid, context: None)
    assert read == ["nestling.deploy.app:server_app", {"config": "given", "resume": "trial"}]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_of_the_way_is_told_from_one_of_what_came() -> None:
    assert compat.is_of_connection(http(500))
    assert not compat.is_of_connection(ValueError("garbage"))


def test_flower_has_the_codes_by_these_numbers() -> None:
    codes = import_module("flwr.common.constant").ErrorCode
    assert SimpleNamespace(lost=codes.NODE_UNAVAILABLE, expired=codes.MESSAGE_UNAVAILABLE) == SimpleNamespace(
        lost=compat.NODE_LOST, expired=compat.EXPIRED
    )


def test_what_comes_soon_is_seen_soon_and_an_idle_node_asks_as_seldom_as_flowers() -> None:
    clock, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    waits = compat.Waits(sleep, lambda: clock[0])
    while clock[0] < 200:
        waits.sleep(3.0)
    assert slept[0] == 0.1
    assert slept == sorted(slept)
    assert slept[-1] == 3
    assert len(slept) < 20 + 60 / 0.05 / 20 + 140 / 3 + 40
    slept.clear()
    for kind in (0.5, 3.0):  # another thing is waited for: a message has come, its answer has been sent
        waits.sleep(kind)
        assert slept.pop() == 0.1
    for _ in range(300):
        waits.sleep(0.5)
    assert max(slept) == 0.5


def test_flowers_node_waits_by_the_module_that_is_replaced() -> None:
    from importlib import import_module
    from inspect import getsource

    source = getsource(import_module("flwr.supernode.start_client_internal"))
    assert {line.strip() for line in source.splitlines() if "time." in line and "total time" not in line} == {
        "time.sleep(3)", "time.sleep(0.5)",
    }  # fmt: skip


def test_a_main_thread_that_waits_for_others_notices_that_its_parent_has_ended() -> None:
    """As one does that pushes or pulls objects, by Flower's own threads, from a server that is gone."""
    program = """
import signal, subprocess, sys, threading
from nestling.engines.flower_compat import end_with
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever it was for who has started the tests
parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
end_with(parent.pid)
threading.Timer(0.5, parent.communicate).start()
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout == "interrupted\n", done.stderr
