"""The two apps that Flower runs: the server's, which is `nestling.run` over Flower, and a site's, a call to its worker.

They take the place of whatever apps a run's bundle names (`programs.py`), so a bundle brings settings and no code. The
server's folder comes from the environment of `nestling serve`, the site's from the node's own configuration. Plain
Flower imports them because the bundle says so; then both folders are in Flower's home (`examples/flower`).
"""

import dataclasses
import os
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from nestling.config.load import dump_config, load_config, parse_config
from nestling.config.schema import MachineConfig, NeedleConfig, OwnBase, RunConfig
from nestling.core.errors import ConfigError, NestlingError
from nestling.core.files import write_atomic
from nestling.core.types import Failure, Progress
from nestling.deploy.folder import (
    LONGEST_SOCKET,
    FedSettings,
    SiteSettings,
    home_folder,
    make_private,
    only_one,
    read_settings,
    with_data,
)  # fmt: skip
from nestling.deploy.keys import registered
from nestling.deploy.proxy import SOCKET, call, kill
from nestling.deploy.said import ERROR, FOLDER, LINE, RESULT
from nestling.deploy.sites import Sites, gather
from nestling.engines import flower_compat as compat
from nestling.engines.flower import FlowerEngine, Grid, from_record, kind_of, to_record, to_refusal
from nestling.models.assets import ASSETS
from nestling.runs.files import printable, read_file, to_json
from nestling.runs.folder import read_status
from nestling.runs.recorder import read_result

compat.require()
from flwr.app import Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402

from nestling.deploy.protocol import Hello, count_pieces  # noqa: E402

FED = "NESTLING_FED"
"""The server's folder, in the environment of the processes that 'nestling serve' starts."""
DATA = "NESTLING_DATA"
"""Under plain Flower: where the server's held-out items lie, in the environment of 'flower-superlink'."""
CONFIG, RESUME = "config", "resume"
"""Entries of a run's settings: a config as TOML text, or the name of a run folder to go on with."""
COMMAND = "nestling.deploy"
"""With the name under which the sites know it, what a run's folder has as the command that was typed."""
NODE = "node-config"

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A message of the server to the site's worker, and its answer back. Nothing raises that can be told instead."""
    body = from_record(message.content)
    if isinstance(body, Failure):
        answer: bytes | Failure = Failure("malformed_message", body.detail)
    else:
        try:
            answer = call(site_folder(context.node_config), kind_of(message.content), body)
        except Exception as error:  # whose text, which may name files of this machine, Flower would send
            traceback.print_exc()
            code = "config" if isinstance(error, ConfigError) else "client_error"
            said = isinstance(error, NestlingError) and error.where == NODE
            answer = Failure(code, str(error) if said else f"raised {type(error).__name__}; see the log at the site")
    record = to_refusal(answer) if isinstance(answer, Failure) else to_record(answer, kind_of(message.content))
    return Message(record, reply_to=message)


@server_app.main()
def main(grid: Any, context: Context) -> None:
    """A run, from settings to result; its last line says which it was."""
    try:
        text = run_over(grid, fed_folder(), dict(context.run_config), name=f"run {context.run_id}")
        print(RESULT + text, flush=True)
    except NestlingError as error:
        told = {"error": printable(str(error)), "exit_code": error.exit_code}
        print(ERROR + to_json(told), flush=True)
        raise


def site_folder(node: Mapping[str, object]) -> Path:
    """The folder of the site whose node has this configuration: that of 'nestling join', or one in Flower's home.

    Raises `ConfigError` unless it says `site`, or which client it is (`partition-id`) and where its data lies
    (`data-path`, which may be left out for data that is inside a package).
    """
    if "site" in node:
        return Path(str(node["site"]))
    client, data = node.get("partition-id"), node.get("data-path", "")
    if type(client) is not int or client < 0 or not isinstance(data, str):
        raise ConfigError(
            "says neither whose folder nor which client, from 0, this site is",
            where=NODE,
            remedy="flower-supernode … --node-config 'partition-id=0 data-path=\"/srv/images\"', or 'nestling join'.",
        )
    folder, moved = home_folder(f"site-{client}", SiteSettings(client, str(Path(data).absolute()) if data else ""))
    if len(str(folder / SOCKET).encode()) > LONGEST_SOCKET:
        raise ConfigError("is too long a path for a socket", where="FLWR_HOME", remedy="Give one nearer to the root.")
    if moved:
        kill(folder)  # its worker has the data of before
    return folder


def fed_folder() -> Path:
    """The server's folder: that of 'nestling serve', or one in Flower's home, where sites say which client they are."""
    if own := os.environ.get(FED):
        return Path(own)
    return home_folder("fed", FedSettings(os.environ.get(DATA, ""), authenticated=False))[0]


def run_over(grid: Grid, fed: Path, given: Mapping[str, object], *, name: str = "") -> str:
    """Run what was submitted, or go on with a run; returns its result as JSON. `name` is Flower's, for who comes next.

    Raises what `nestling.run` does, and `RunError` (exit code 6) while another run is at work here, or if sites are
    missing.
    """
    settings = read_settings(FedSettings, fed)
    with only_one(fed / "run.lock", "another run is at work", where="server", name=name):
        folder = _folder_to_resume(fed, str(given.get(RESUME, "")))
        if folder is not None and read_status(folder) == "done":
            return to_json(read_result(folder).to_dict())
        if folder is not None:
            config, name = load_config(folder / "config.toml"), _name_of(folder)
            settings = dataclasses.replace(settings, device=config.machine.device)  # another gives other bits
        else:
            source, name = str(given.get(CONFIG, "")), token_hex(16)
            if not source.strip():  # it would be a run by the defaults
                raise ConfigError("is empty", where="config", remedy="Submit with 'nestling submit CONFIG'.")
            config = parse_config(source, where="config")
        config, hello, base, fewest = prepare(own_settings(config, fed, settings), fed, name)
        sites = gather(
            grid, range(config.task.clients), hello, base, wait=settings.wait,
            registered=registered(fed) if settings.authenticated else None, note=_once(),
        )  # fmt: skip
        engine = FlowerEngine(
            grid, sites.nodes, deadline=config.server.deadline, stragglers=config.server.stragglers,
            ttl=sites.patience, quorum=fewest, wait=settings.wait, note=_once(),
        )  # fmt: skip
        return to_json(_go(engine, config, sites, folder, name).to_dict())


def _go(engine: FlowerEngine, config: RunConfig, sites: Sites, folder: Path | None, name: str) -> Any:
    from nestling.api import resume, run

    more: Any = {"progress": _told, "command": [COMMAND, name], "engine": engine, "examples": sites.examples}
    if folder is None:
        return run(config, **more)
    # Where data and bases lie may be other places than when it began; whatever else has changed is refused.
    write_atomic(folder / "config.toml", dump_config(config).encode("utf-8", "surrogateescape"))
    return resume(folder, **more)


def own_settings(config: RunConfig, fed: Path, settings: FedSettings) -> RunConfig:
    """A submitted config with the server's own settings in the place of all that is a machine's affair.

    Raises `ConfigError` for weights that are not among the server's, and for a language model that is neither packaged
    nor the server's own: a path, or what is downloaded, is not for others to choose.
    """
    machine = MachineConfig(out=str(fed / "runs"), workers=1, device=settings.device, references=False)
    base = config.base
    if isinstance(base, OwnBase) and base.weights:
        own = fed / "bases" / Path(base.weights).name
        if not own.is_file():
            raise ConfigError(
                "is not among the server's bases",
                where="base.weights",
                remedy=f"Put the file into {fed / 'bases'} and give its name.",
            )
        base = dataclasses.replace(base, weights=str(own))
    if isinstance(base, OwnBase):
        base = dataclasses.replace(base, path="")  # a set to train a base on is found in the usual places
    elif settings.model:
        base = dataclasses.replace(base, model=settings.model)
    elif base.model not in ASSETS:
        raise ConfigError(
            "is not a packaged model", where="base.model", remedy="nestling serve … --model PATH says where it is."
        )
    return dataclasses.replace(with_data(config, settings.data), machine=machine, base=base)


def prepare(config: RunConfig, fed: Path, name: str) -> tuple[RunConfig, Hello, bytes, int]:
    """The config with a base that lies in `fed`, what sites are told of the run of that name, the base's bytes where we
    made it, and how many usable replies a round needs. A frozen model that was trained here is shared, for on another
    machine the same recipe may give other bits."""
    from nestling.build import build
    from nestling.models.backbones import base_bytes

    parts = build(config, note=_once(), engine=_Nobody())
    content = base_bytes(parts.base) if isinstance(config.base, OwnBase) else b""
    if isinstance(config.base, OwnBase):
        path = make_private(fed / "bases") / f"{parts.base_hash}.safetensors"
        if not path.is_file():
            write_atomic(path, content)
        config = dataclasses.replace(config, base=dataclasses.replace(config.base, weights=str(path)))
    nowhere = "elsewhere" if isinstance(config.task, NeedleConfig) else ""  # each site has its own
    told = dataclasses.replace(with_data(config, nowhere), machine=MachineConfig())
    if isinstance(told.base, OwnBase):
        told = dataclasses.replace(told, base=dataclasses.replace(told.base, weights=""))
    elif told.base.model not in ASSETS:  # sites have their own, and this one's path is the server's affair
        told = dataclasses.replace(told, base=dataclasses.replace(told.base, model=Path(told.base.model).name))
    return config, Hello(dump_config(told), parts.base_hash, count_pieces(content), name), content, parts.server.fewest


class _Nobody:
    """An engine for parts that are built before the sites are known."""

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        return {}


def _folder_to_resume(fed: Path, name: str) -> Path | None:
    if not name:
        return None
    folder = fed / "runs" / Path(name).name
    if not (folder / "config.toml").is_file():
        newest = sorted((path.parent.stat().st_mtime, path.parent.name) for path in fed.glob("runs/*/config.toml"))[-3:]
        names = ", ".join(name for _, name in newest) or "none"
        raise ConfigError("is no run of this server", where=printable(name), remedy=f"The last that it has: {names}.")
    return folder


def _name_of(folder: Path) -> str:
    """The name under which sites know a run, from its folder."""
    command = folder / "command.txt"
    text = read_file(command, 1 << 16).decode("utf-8", "replace") if command.is_file() else ""
    found = re.fullmatch(rf"{re.escape(COMMAND)} ([0-9a-f]{{32}})\n", text)
    if found is None:
        raise ConfigError(
            "was not begun over these sites, or ended at once", where=folder.name, remedy="Submit its config anew."
        )
    return found[1]


def _told(progress: Progress) -> None:
    """Each step in a line of the log. The name of the run's folder stands before it: `submit` shows the first."""
    if progress.run_dir and progress.step:
        print(f"{FOLDER}{Path(progress.run_dir).name}", flush=True)
    print(f"{LINE}{progress}", flush=True)


def _once() -> Any:
    last = [""]

    def note(text: str) -> None:
        if text != last[0]:
            print(f"{LINE}{text}", flush=True)
        last[0] = text

    return note
