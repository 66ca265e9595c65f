"""Everything of Flower that is not its public interface, and the switches that must be set before it is imported.

Public is what can be reached through `__all__` from `flwr`; all else may change in any release. So one minor version is
pinned, every private name stands in this file, and one that is no longer there is an error at once and never a step
left out: the guards below are what keeps bundles from bringing code.
"""

import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

from nestling.core.errors import ContextError

PINNED = "1.42"
"""The minor version that this was tested with; server and sites must agree on it anyway."""

EXTRA = "nestling[flower]"

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

NODE_LOST = 5
"""`ErrorCode.NODE_UNAVAILABLE`: the node is gone. The server says it, so the sender of that reply is the server."""
EXPIRED = 3
"""`ErrorCode.MESSAGE_UNAVAILABLE`: its time is over, or what answers it was not sent in full."""

ADMITTED, UNLISTED, UNSIGNED, REVOKED = "admitted", "unlisted", "unsigned", "revoked"
"""What a server makes of a node, of `run_super_node`."""

CLIENT_APP, SERVER_APP = "flwr-clientapp", "flwr-serverapp"
"""The programs that Flower starts for a message and for a run, looked up in PATH."""


def task_programs() -> list[str]:
    """All programs that Flower may start because a bundle asks for it."""
    return sorted(set(import_module("flwr.supercore.constant").TASK_TYPE_TO_COMMAND.values()))


def require() -> None:
    """Raise `ContextError` unless the pinned minor version of Flower is installed."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError as error:
        raise ContextError("is not installed", where="flwr", remedy=f"pip install '{EXTRA}'") from error
    if version.split(".")[:2] != PINNED.split("."):
        raise ContextError(
            f"is version {version}, this package is made for {PINNED}", where="flwr", remedy=f"pip install '{EXTRA}'"
        )


def pretend_task(*, run: int = 1, node: int = 1) -> None:
    """Make messages possible outside a process that Flower started for a task: they take their run from it."""
    identity: Any = import_module("flwr.supercore.task_identity").TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = run, run, node


def import_client() -> None:
    """Import what `run_client_task` needs of Flower, so that a fork of this process need not."""
    for module in ("flwr.supernode.runtime.run_clientapp", "flwr.supernode.cli.flwr_clientapp"):
        import_module(module)


def run_client_task(load: Callable[[], Callable[..., Any]]) -> None:
    """`flwr-clientapp` with the app that `load` returns in the place of whatever app a run's bundle names: nothing of a
    bundle is unpacked or imported. It is loaded once the process has shown that it lives, for which Flower gives it a
    minute. The arguments are the process'."""
    where = import_module("flwr.supernode.runtime.run_clientapp")
    _replace(where, "install_from_fab", lambda *_, **__: None)
    _replace(where, "get_load_client_app_fn", lambda **_: lambda *__: load())
    _replace(where, "install_app_dependencies", _refuse)
    _replace(where, "start_parent_process_monitor", end_with)
    import_module("flwr.supernode.cli.flwr_clientapp").flwr_clientapp()


def ask(url: str, *, verify: ssl.SSLContext, patience: float) -> int | Exception:
    """The status with which a server answers, or what went wrong on the way: asked with the client that Flower's own
    programs use, so by way of the proxies that the environment names for them. `patience` is seconds for each step."""
    http = import_module("httpx")
    try:
        with http.Client(verify=verify, timeout=patience) as client, client.stream("GET", url) as answer:
            status: int = answer.status_code  # whatever follows it is not read
            return status
    except ImportError as error:
        raise ContextError(
            f"is one that Flower's client cannot use here ({error})",
            where="the proxy that the environment names",
            remedy="Unset ALL_PROXY, or name the server in NO_PROXY.",
        ) from error
    except (http.HTTPError, http.InvalidURL, ValueError) as error:  # the last two: a name that cannot be one
        problem: Exception = error
        return problem


def is_of_connection(error: Exception) -> bool:
    """Whether an error of the grid says something of the way to the server, and nothing of what came that way."""
    return isinstance(error, import_module("httpx").HTTPError)


def run_server_task(load: Callable[[], Callable[..., Any]]) -> None:
    """`flwr-serverapp` with the app that `load` returns in the place of whatever app a run's bundle names. Its settings
    are read in memory; nothing of it is unpacked, to a path that it may choose, or imported. The arguments are the
    process'.

    A run that is ended, by a signal, by `flwr stop` or with its server, ends by a KeyboardInterrupt as it does in a
    terminal, and only then in Flower's way, which leaves no time to write down how it ended.
    """
    where = import_module("flwr.superlink.runtime.run_serverapp")
    configs = import_module("flwr.common.config")
    bundle: list[bytes] = []

    def run(*, grid: Any, context: Any, **_: Any) -> Any:
        usual = {number: signal.signal(number, _interrupt) for number in _ENDS}
        try:
            try:
                load()(grid=StoppableGrid(grid), context=context)
            finally:
                for number, handler in usual.items():
                    signal.signal(number, handler)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)  # to Flower's handler
            raise
        return context

    def settings(_: object, override: Any) -> Any:
        return configs.get_fused_config_from_fab(bundle[-1], SimpleNamespace(override_config=override))

    _replace(where, "install_from_fab", lambda content, **_: bundle.append(content))
    _replace(where, "get_project_config", lambda _: configs.get_fab_config(bundle[-1]))
    _replace(where, "get_fused_config_from_dir", settings)
    _replace(where, "run_", run)
    _replace(where, "install_app_dependencies", _refuse)
    _replace(where, "start_parent_process_monitor", end_with)
    import_module("flwr.superlink.cli.flwr_serverapp").flwr_serverapp()


def end_with(parent: int) -> None:
    """Interrupt the main thread when that process has ended. Flower's own monitor raises the signal in a thread of its
    own, which a main thread that waits for others never notices: it would hold a run's lock for ever."""
    main = threading.main_thread().ident

    def watch() -> None:
        while True:
            time.sleep(0.2)
            try:
                os.kill(parent, 0)
            except OSError:
                if main is not None:
                    signal.pthread_kill(main, signal.SIGINT)
                return

    threading.Thread(target=watch, daemon=True).start()


_ENDS = (signal.SIGINT, signal.SIGTERM)


def _interrupt(*_: object) -> None:
    for number in _ENDS:  # one is enough; others may follow while the run's state is written
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class StoppableGrid:
    """Flower's grid, where a run that the server has ended is a KeyboardInterrupt at the next call."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._ended: Any = import_module("flwr.supercore.run").RunNotRunningException

    def get_nodes(self) -> Iterable[Any]:
        nodes: Iterable[Any] = self._unless_ended(self._grid.get_nodes)
        return nodes

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        identifiers: Iterable[str] = self._unless_ended(self._grid.push_messages, messages)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        replies: Iterable[Any] = self._unless_ended(self._grid.pull_messages, message_ids)
        return replies

    def _unless_ended(self, call: Callable[..., Any], *args: object) -> Any:
        try:
            return call(*args)
        except self._ended:
            _interrupt()
        except import_module("httpx").HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                _interrupt()
            raise


def run_super_link(allowed: frozenset[str]) -> None:
    """`flower-superlink`, which answers addresses that are neither its machine's own nor in `allowed` only as nodes,
    which sign what they ask: of those who submit, stop, register keys or run tasks it asks nothing. The arguments are
    the process'."""
    middleware = import_module("starlette.middleware").Middleware
    extensions = import_module("flwr.superlink.extensions")
    usual = extensions.get_middleware
    prefix = import_module("flwr.superlink.routers.fleet.router").router.prefix
    if prefix != "/v1/fleet":
        raise ContextError(f"answers nodes at {prefix!r}", where="flwr", remedy=f"pip install '{EXTRA}'")
    _replace(extensions, "get_middleware", lambda: [middleware(OnlyFrom, allowed=allowed), *usual()])
    import_module("flwr.superlink.cli.flower_superlink").flower_superlink()


def run_super_node(told: Callable[[str], None]) -> None:
    """`flower-supernode`, which calls `told` as soon as the server has said what it makes of this node: ADMITTED, later
    perhaps REVOKED, or one of the two refusals. It looks for messages more often than Flower's, which waits three
    seconds between two looks. The arguments are the process'."""
    where = import_module("flwr.supernode.fleet_http_connection")
    rejected: Any = import_module("httpx").HTTPStatusError
    said = ""

    def hear(status: int, path: str) -> None:
        nonlocal said
        activates = path.endswith("/activate-node")
        if status == 200:  # whatever it asks, once it was refused: a lone refusal is one of the clocks, say
            news = ADMITTED if activates or said == REVOKED else ""
        elif status == 401:  # its signature is no longer believed, or was not to begin with
            news = REVOKED if said else UNSIGNED
        else:
            news = UNLISTED if status == 412 and activates else ""
        if news and news != said:
            said = news
            told(news)

    class Watched(where.FleetHttpClient):  # type: ignore[misc, name-defined]
        def _unary_unary(self, *, path: str, **rest: Any) -> Any:
            try:
                answer = super()._unary_unary(path=path, **rest)
            except rejected as error:
                hear(error.response.status_code, path)
                raise
            hear(200, path)
            return answer

    for name in ("_unary_unary", "from_server_address", "ActivateNode"):
        if not hasattr(where.FleetHttpClient, name):
            raise ContextError(f"FleetHttpClient has no {name}", where="flwr", remedy=f"pip install '{EXTRA}'")
    _replace(where, "FleetHttpClient", Watched)
    loop = import_module("flwr.supernode.start_client_internal")
    _replace(loop, "time", SimpleNamespace(sleep=Waits().sleep))
    import_module("flwr.supernode.cli.flower_supernode").flower_supernode()


class Waits:
    """Sleeps between two looks for the same thing: a twentieth of the time it has been waited for, so what comes soon
    is seen soon and a node with nothing to do asks as seldom as Flower's. Which thing it is, Flower's seconds tell."""

    SHORTEST, SHARE = 0.1, 0.05

    def __init__(self, sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.monotonic) -> None:
        self._sleep, self._now, self._since, self._kind = sleep, now, now(), 0.0

    def sleep(self, seconds: float) -> None:
        now = self._now()
        if seconds != self._kind:
            self._since, self._kind = now, seconds
        self._sleep(min(seconds, max(self.SHORTEST, self.SHARE * (now - self._since))))


class OnlyFrom:
    """An ASGI middleware: from addresses not in `allowed`, all but what nodes ask for is answered by 403.

    Who connects to an address of his own machine comes from that address, and nobody else does."""

    def __init__(self, app: Any, *, allowed: frozenset[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind, path = scope["type"], str(scope.get("path", ""))
        host = (scope.get("client") or ("",))[0]
        own = (scope.get("server") or ("",))[0]
        trusted = host in self._allowed or (host and host == own)
        if kind != "lifespan" and not path.startswith("/v1/fleet/") and not trusted:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


def _refuse(*_: object, **__: object) -> None:
    raise ContextError("nothing is installed for a run", where="flwr")


def _replace(module: Any, name: str, value: object) -> None:
    if not hasattr(module, name):
        raise ContextError(
            f"{module.__name__} has no {name}, so bundles could bring code",
            where="flwr",
            remedy=f"pip install '{EXTRA}'",
        )
    setattr(module, name, value)
