"""The app bundle that Flower wants for a run: a pyproject.toml and a licence, in which the settings travel.

It names our apps, which are installed on every machine; nothing in it is code, and nothing of it would be run.
"""

import json
from pathlib import Path

from nestling import __version__
from nestling.config.load import dump_config
from nestling.config.schema import RunConfig
from nestling.core.files import make_folder, write_atomic

_TEMPLATE = """\
[project]
name = "nestling-run"
version = "{version}"
description = "A federated run of Nestling: settings, and no code"
license = {{ file = "LICENSE" }}
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "nestling"

[tool.flwr.app.components]
serverapp = "nestling.deploy.app:server_app"
clientapp = "nestling.deploy.app:client_app"

[tool.flwr.app.config]
config = {config}
resume = {resume}
"""


def write_bundle(folder: Path, config: RunConfig | None, *, resume: str = "") -> None:
    """Write what `flwr run` sends: a run's settings, or the name of a run folder on the server to go on with.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as here:
    ...     write_bundle(Path(here), RunConfig(name="trial"))
    ...     sorted(path.name for path in Path(here).iterdir())
    ['LICENSE', 'pyproject.toml']
    """
    text = dump_config(config) if config is not None else ""
    made = _TEMPLATE.format(version=__version__, config=_quoted(text), resume=_quoted(resume))
    write_atomic(make_folder(folder) / "pyproject.toml", made.encode())
    write_atomic(folder / "LICENSE", b"Apache-2.0\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
