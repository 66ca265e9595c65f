"""The two apps that Flower runs: the server's, which is `nestling.run` over Flower, and a site's, a call to its worker.

They take the place of whatever apps a run's bundle names (`programs.py`), so a bundle brings settings and no code. The
server's folder comes from the environment of `nestling serve`, the site's from the node's own configuration.
"""

import dataclasses
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestling.config.load import parse_config
from nestling.config.schema import BaseConfig, MachineConfig, NeedleConfig, RunConfig
from nestling.core.errors import ConfigError, NestlingError, RunError
from nestling.core.files import write_atomic
from nestling.core.types import Failure, Progress
from nestling.deploy.folder import FedSettings, make_private, read_settings, with_data
from nestling.deploy.keys import registered
from nestling.deploy.proxy import call
from nestling.deploy.said import ERROR, LINE, RESULT
from nestling.deploy.sites import Sites, gather
from nestling.engines import flower_compat as compat
from nestling.engines.flower import FlowerEngine, Grid, from_record, kind_of, to_record, to_refusal
from nestling.runs.files import printable, to_json

compat.require()
from flwr.app import Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402

from nestling.deploy.protocol import Hello, count_pieces  # noqa: E402

FED = "NESTLING_FED"
"""The server's folder, in the environment of the processes that 'nestling serve' starts."""
CONFIG, RESUME = "config", "resume"
"""Entries of a run's settings: a config as TOML text, or the name of a run folder to go on with."""

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
            answer = call(Path(str(context.node_config["site"])), kind_of(message.content), body)
        except NestlingError as error:
            answer = Failure("client_error", str(error))
    record = to_refusal(answer) if isinstance(answer, Failure) else to_record(answer, kind_of(message.content))
    return Message(record, reply_to=message)


@server_app.main()
def main(grid: Any, context: Context) -> None:
    """A run, from settings to result; its last line says which it was."""
    try:
        text = run_over(grid, Path(os.environ[FED]), dict(context.run_config))
        print(RESULT + text, flush=True)
    except NestlingError as error:
        told = {"error": printable(str(error)), "exit_code": error.exit_code}
        print(ERROR + to_json(told), flush=True)
        raise


def run_over(grid: Grid, fed: Path, given: Mapping[str, object]) -> str:
    """Run what was submitted, or go on with a run; returns its result as JSON.

    Raises what `nestling.run` does, and `RunError` (exit code 6) while another run is at work here, or if sites are
    missing.
    """
    settings = read_settings(FedSettings, fed)
    handle = os.open(fed / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                "another run is at work", where="server", remedy="Wait for it to end, or stop it.", locked=True
            ) from error
        folder = _folder_to_resume(fed, str(given.get(RESUME, "")))
        source = (folder / "config.toml").read_text("utf-8") if folder else str(given.get(CONFIG, ""))
        if not source.strip():  # it would be a run by the defaults
            raise ConfigError("is empty", where="config", remedy="Submit with 'nestling submit CONFIG'.")
        config, hello, base = prepare(own_settings(parse_config(source, where="config"), fed, settings), fed)
        hello = dataclasses.replace(hello, fresh=folder is None)
        sites = gather(
            grid, range(config.task.clients), hello, base, wait=settings.wait,
            registered=registered(fed) if settings.authenticated else None, note=_once(),
        )  # fmt: skip
        return to_json(_go(grid, config, sites, folder).to_dict())
    finally:
        os.close(handle)


def _go(grid: Grid, config: RunConfig, sites: Sites, folder: Path | None) -> Any:
    from nestling.api import resume, run

    engine = FlowerEngine(grid, sites.nodes, deadline=config.server.deadline, stragglers=config.server.stragglers)
    if folder is not None:
        return resume(folder, progress=_tell, command=["nestling.deploy"], engine=engine, examples=sites.examples)
    return run(config, progress=_tell, command=["nestling.deploy"], engine=engine, examples=sites.examples)


def own_settings(config: RunConfig, fed: Path, settings: FedSettings) -> RunConfig:
    """A submitted config with the server's own settings in the place of all that is a machine's affair.

    Raises `ConfigError` for weights that are not among the server's: a path is not for others to choose.
    """
    machine = MachineConfig(out=str(fed / "runs"), workers=1, device=settings.device, references=False)
    base = config.base
    if isinstance(base, BaseConfig) and base.weights:
        own = fed / "bases" / Path(base.weights).name
        if not own.is_file():
            raise ConfigError(
                "is not among the server's bases",
                where="base.weights",
                remedy=f"Put the file into {fed / 'bases'} and give its name.",
            )
        base = dataclasses.replace(base, weights=str(own))
    return dataclasses.replace(with_data(config, settings.data), machine=machine, base=base)


def prepare(config: RunConfig, fed: Path) -> tuple[RunConfig, Hello, bytes]:
    """The config with a base that lies in `fed`, what sites are told, and the base's bytes where we made it: a frozen
    model that was trained here is shared, for on another machine the same recipe may give other bits."""
    from nestling.build import build
    from nestling.config.load import dump_config
    from nestling.models.backbones import base_bytes

    parts = build(config, note=_once(), engine=_Nobody())
    content = base_bytes(parts.base) if isinstance(config.base, BaseConfig) else b""
    if isinstance(config.base, BaseConfig):
        path = make_private(fed / "bases") / f"{parts.base_hash}.safetensors"
        if not path.is_file():
            write_atomic(path, content)
        config = dataclasses.replace(config, base=dataclasses.replace(config.base, weights=str(path)))
    nowhere = "elsewhere" if isinstance(config.task, NeedleConfig) else ""  # each site has its own
    told = dataclasses.replace(with_data(config, nowhere), machine=MachineConfig())
    if isinstance(told.base, BaseConfig):
        told = dataclasses.replace(told, base=dataclasses.replace(told.base, weights=""))
    return config, Hello(dump_config(told), parts.base_hash, count_pieces(content), True), content


class _Nobody:
    """An engine for parts that are built before the sites are known."""

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        return {}


def _folder_to_resume(fed: Path, name: str) -> Path | None:
    if not name:
        return None
    folder = fed / "runs" / Path(name).name
    if not (folder / "config.toml").is_file():
        raise ConfigError(
            "is no run of this server", where=printable(name), remedy=f"See 'nestling ls {fed / 'runs'}'."
        )
    return folder


def _tell(progress: Progress) -> None:
    print(f"{LINE}{progress}", flush=True)


def _once() -> Any:
    last = [""]

    def note(text: str) -> None:
        if text != last[0]:
            print(f"{LINE}{text}", flush=True)
        last[0] = text

    return note
