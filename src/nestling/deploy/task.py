"""`python -m nestling.deploy.task PROGRAM …`: what stands in the place of a program of Flower's.

flwr-serverapp, flwr-clientapp    our app, whatever the bundle names
flower-superlink ADDRESSES        Flower's, whose control interface answers only these addresses
anything else                     refused: a run of ours needs none
"""

import os
import sys
from typing import Any

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
    else:
        sys.exit(f"nestling: {name} is not started here: a run brings settings, and no code")


def _client_app() -> Any:
    from nestling.deploy.app import client_app

    return client_app


def _server_app() -> Any:
    from nestling.deploy.app import server_app

    return server_app


if __name__ == "__main__":
    os.umask(0o077)
    main()
