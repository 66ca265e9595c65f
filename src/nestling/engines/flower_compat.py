"""Everything of Flower that is not its public interface, and the switches that must be set before it is imported.

Public is what can be reached through `__all__` from `flwr`; all else may change in any release. So one minor version is
pinned, every private name stands in this file, and one that is no longer there is an error at once and never a step
left out: the guards below are what keeps bundles from bringing code.
"""

import os
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from nestling.core.errors import ContextError

PINNED = "1.42"
"""The minor version that this was tested with; server and sites must agree on it anyway."""

EXTRA = "nestling[flower]"

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

NODE_LOST = 5
"""`ErrorCode.NODE_UNAVAILABLE`: the node is gone. The server says it, so the sender of that reply is the server."""

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


def run_client_task(load: Callable[[], Callable[..., Any]]) -> None:
    """`flwr-clientapp` with the app that `load` returns in the place of whatever app a run's bundle names: nothing of a
    bundle is unpacked or imported. It is loaded once the process has shown that it lives, for which Flower gives it a
    minute. The arguments are the process'."""
    where = import_module("flwr.supernode.runtime.run_clientapp")
    _replace(where, "install_from_fab", lambda *_, **__: None)
    _replace(where, "get_load_client_app_fn", lambda **_: lambda *__: load())
    _replace(where, "install_app_dependencies", _refuse)
    import_module("flwr.supernode.cli.flwr_clientapp").flwr_clientapp()


def run_server_task(load: Callable[[], Callable[..., Any]]) -> None:
    """`flwr-serverapp` with the app that `load` returns in the place of whatever app a run's bundle names. It is
    unpacked, for its settings are read from there, and nothing of it is imported. The arguments are the process'."""
    where = import_module("flwr.superlink.runtime.run_serverapp")

    def run(*, grid: Any, context: Any, **_: Any) -> Any:
        load()(grid=grid, context=context)
        return context

    _replace(where, "run_", run)
    _replace(where, "install_app_dependencies", _refuse)
    import_module("flwr.superlink.cli.flwr_serverapp").flwr_serverapp()


def run_super_link(allowed: frozenset[str]) -> None:
    """`flower-superlink`, which answers addresses that are not in `allowed` only as nodes, which sign what they ask:
    of those who submit, stop, register keys or run tasks it asks nothing. The arguments are the process'."""
    middleware = import_module("starlette.middleware").Middleware
    extensions = import_module("flwr.superlink.extensions")
    usual = extensions.get_middleware
    prefix = import_module("flwr.superlink.routers.fleet.router").router.prefix
    if prefix != "/v1/fleet":
        raise ContextError(f"answers nodes at {prefix!r}", where="flwr", remedy=f"pip install '{EXTRA}'")
    _replace(extensions, "get_middleware", lambda: [middleware(OnlyFrom, allowed=allowed), *usual()])
    import_module("flwr.superlink.cli.flower_superlink").flower_superlink()


class OnlyFrom:
    """An ASGI middleware: from addresses not in `allowed`, all but what nodes ask for is answered by 403."""

    def __init__(self, app: Any, *, allowed: frozenset[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind, path = scope["type"], str(scope.get("path", ""))
        host = (scope.get("client") or ("",))[0]
        if kind != "lifespan" and not path.startswith("/v1/fleet/") and host not in self._allowed:
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
