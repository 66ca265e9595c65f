"""`python -m nestling.deploy.task PROGRAM …`: what stands in the place of a program of Flower's.

flwr-serverapp, flwr-clientapp    our app, whatever the bundle names
flower-superlink ADDRESSES        Flower's, whose control interface answers only these addresses
flower-supernode CLIENT FOLDER    Flower's, which says in our words what the server makes of this client's site, and
                                  before it the site's starter
anything else                     refused: a run of ours needs none
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nestling.core.errors import RemoteError
from nestling.deploy import starter
from nestling.engines import flower_compat as compat


def main() -> None:
    """Take the program's name off the arguments, and run it with those that follow."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.argv = [name, *sys.argv[2:]]
    if name == compat.CLIENT_APP:
        compat.run_client_task(_client_app)
    elif name == compat.SERVER_APP:
        compat.run_server_task(_server_app)
    elif name == "flower-superlink":
        allowed = sys.argv.pop(1).split(",")
        compat.run_super_link(frozenset(filter(None, allowed)))
    elif name == "flower-supernode":
        _be_site(sys.argv.pop(1), Path(sys.argv.pop(1)))
    else:
        sys.exit(f"nestling: {name} is not started here: a run brings settings, and no code")


REFUSALS = {
    compat.UNLISTED: "its key is not on the server's list, or was taken off it, or its site is connected already: "
    "one that was killed seems to be for a minute. 'nestling keys list' at the server tells which",
    compat.UNSIGNED: "what it signs is not believed. The clocks of this machine and the server's have to agree",
    compat.REVOKED: "its key is no longer on the server's list ('nestling keys revoke'), or the clocks no longer agree",
}
"""Why a site is not one, or no longer; the server says a number."""


LONGEST_END = 25.0
"""Seconds that a node which is refused is given to end by itself; Flower allows itself as many for a part of it."""


def _be_site(client: str, folder: Path) -> None:
    """The node, until it is ended, or is refused: exit code 9, with the reason after all that Flower says."""
    with _without_threads():
        compat.import_client()
        _client_app()
    if starter.begin(folder):
        if sys.argv[:1] != [compat.CLIENT_APP]:
            sys.exit(f"nestling: {sys.argv[:1]} is not started here")
        compat.run_client_task(_client_app)
        return
    last, ending = "", threading.Lock()

    def told(news: str) -> None:
        nonlocal last
        last = news
        text = "refused" if news in REFUSALS else "admitted; it waits for runs"
        with suppress(OSError):  # nobody reads it any more: no reason not to be a site
            print(f"nestling: client {client} is {text}", flush=True)
        if news in REFUSALS:
            late = threading.Timer(LONGEST_END, end)
            late.daemon = True
            late.start()

    def end() -> None:
        """At once: Flower's threads and handlers would end the process in their own way, and with 0."""
        with ending:
            if last not in REFUSALS:  # it has been let in again
                return
            with suppress(OSError):
                print(f"nestling: client {client} is refused: {REFUSALS[last]}.", file=sys.stderr, flush=True)
            os._exit(RemoteError.exit_code)

    try:
        compat.run_super_node(told)
    finally:
        if last in REFUSALS:
            end()


@contextmanager
def _without_threads() -> Iterator[None]:
    """NumPy's linear algebra starts threads as it is imported, and neither a node nor a message needs them."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:  # a worker has its own number
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _client_app() -> Any:
    from nestling.deploy.app import client_app

    return client_app


def _server_app() -> Any:
    from nestling.deploy.app import server_app

    return server_app


if __name__ == "__main__":
    os.umask(0o077)
    main()
