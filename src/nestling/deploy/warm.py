"""A site's worker: one long-lived process that keeps the frozen model and the data, and answers what the server sends.

    hello    →    settings read, base pinned, model built        round    →    the reply of `Worker.handle`

The server decides what is trained, and nothing else: data, device and limits are the site's own; settings are read as
strictly as a user's; a language model is one that the user named or that is packaged; and a base other than the one
that was met first is refused until the user says so. What the client keeps between rounds never leaves the folder.
A call that hangs is ended by a timer of the interpreter's own, with the process, and the next one starts it anew.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from pathlib import Path
from secrets import token_bytes

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from nestling.build import build
from nestling.codec.message import peek
from nestling.config.load import parse_config
from nestling.config.schema import BaseConfig, LanguageConfig, MachineConfig, RunConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.files import write_atomic
from nestling.core.types import Failure
from nestling.deploy.folder import SiteSettings, make_private, read_settings, with_data, write_private
from nestling.deploy.protocol import (
    BASE,
    HELLO,
    LARGEST_BASE,
    PIECE,
    ROUND,
    Hello,
    Ready,
    from_piece,
    read,
    write,
)  # fmt: skip
from nestling.deploy.proxy import ALIVE, KEY, SOCKET, STOP, frame, unframe
from nestling.federation.client import Worker
from nestling.federation.local import ClientState
from nestling.models.assets import ASSETS
from nestling.runs.files import read_file
from nestling.tasks.images import ImageTask

PINNED, AGREED, KEPT, BASES = "pinned", "agreed.json", "kept", "bases"
_KEEP = 2
"""Rounds of which a site has what its client kept: a server that goes on from its last checkpoint may be one behind."""


class Site:
    """What a worker does, apart from the socket. One client; its state is in files, so that a new process goes on.

    Args:
        folder: the site's, with its settings.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.settings = folder, read_settings(SiteSettings, folder)
        self._worker: Worker | None = None
        self._next = 0
        """The piece of a base that is needed next."""
        self._hello: Hello | None = None

    def answer(self, kind: str, body: bytes) -> bytes:
        """The answer to one message. Raises `NestlingError` or `Declined` if there is none."""
        if kind == HELLO:
            return write(self._meet(read(Hello, body)))
        if kind == BASE:
            return write(self._take(*from_piece(body)))
        if kind == ROUND:
            return self._round(body)
        raise WireError("kind", "is no message of ours", where="site")

    def _meet(self, hello: Hello) -> Ready:
        self._worker, self._next = None, 0
        config = self._own(parse_config(hello.config, where="the server's config"))
        if config.task.clients <= self.settings.client:
            raise ConfigError(
                f"has {config.task.clients} clients, this site is number {self.settings.client}", where="task.clients"
            )
        self._check_pin(hello.base)
        if hello.fresh:
            for path in self._kept():
                path.unlink()
        self._hello = hello
        if isinstance(config.base, BaseConfig) and not self._base(hello.base).is_file():
            return Ready(self.settings.client, False, 0, 0)
        return self._prepare(hello, config)

    def _take(self, number: int, piece: bytes) -> Ready:
        """One piece of the base; the last one completes it."""
        hello = self._hello
        if hello is None or number != self._next or number >= hello.pieces or number * PIECE >= LARGEST_BASE:
            raise WireError("base", f"piece {number} comes out of turn", where="site")
        path = self._base(hello.base).with_suffix(".part")
        make_private(path.parent)
        with path.open("wb" if number == 0 else "ab") as file:
            file.write(piece)
        self._next = number + 1
        if self._next < hello.pieces:
            return Ready(self.settings.client, False, 0, self._next)
        os.replace(path, self._base(hello.base))
        return self._prepare(hello, self._own(parse_config(hello.config)))

    def _prepare(self, hello: Hello, config: RunConfig) -> Ready:
        """Build the worker; only a base of the hash that was said is kept and pinned."""
        own = self._base(hello.base)
        if isinstance(config.base, BaseConfig):
            config = dataclasses.replace(config, base=dataclasses.replace(config.base, weights=str(own)))
        try:
            parts = build(config)
            if parts.base_hash != hello.base:
                raise ContextError(
                    f"has the hash {parts.base_hash[:12]}, the server has {hello.base[:12]}",
                    where="base",
                    remedy="Both sides need the same model, and the same versions.",
                )
        except (ContextError, WireError):
            own.unlink(missing_ok=True)
            raise
        worker = parts.workers[0]
        if self.settings.whole:
            if not isinstance(parts.task, ImageTask):
                raise ConfigError(
                    "is for images", where="--whole", remedy="Each client of this task has its own items."
                )
            worker = dataclasses.replace(worker, task=parts.task.whole(self.settings.client))
        write_private(self._folder / PINNED, hello.base.encode())
        write_private(self._folder / AGREED, write(hello))
        self._worker = worker
        return Ready(self.settings.client, True, worker.task.examples(self.settings.client), 0)

    def _round(self, message: bytes) -> bytes:
        if self._worker is None:  # this process is younger than the run
            path = self._folder / AGREED
            if not path.is_file():
                raise ContextError("has not been told of a run", where="site")
            hello = dataclasses.replace(read(Hello, read_file(path, 1 << 20)), fresh=False)
            if not self._meet(hello).ready or self._worker is None:
                raise ContextError("its base is gone", where="site")
        worker, client, number = self._worker, self.settings.client, peek(message).round
        worker.kept.clear()
        if before := self._kept_before(number):
            worker.kept[client] = before
        reply = worker.handle(client, message)
        if kept := worker.kept.get(client):
            self._keep(kept, number)
        return reply

    def _own(self, config: RunConfig) -> RunConfig:
        """The server's settings with the site's own in the place of all that is a machine's affair.

        Raises `ContextError` for a model that is neither packaged nor named by the site: a name may be a path here, or
        a download.
        """
        s = self.settings
        base = config.base
        machine = MachineConfig(workers=1, device=s.device, references=False)
        if isinstance(base, BaseConfig):
            base = dataclasses.replace(base, weights="")
        elif s.model:
            base = dataclasses.replace(base, model=s.model)
        elif isinstance(base, LanguageConfig) and base.model not in ASSETS:
            raise ContextError(
                "is not a packaged model", where="base.model", remedy="nestling join … --model PATH says where it is."
            )
        return dataclasses.replace(with_data(config, s.data), base=base, machine=machine)

    def _check_pin(self, base: str) -> None:
        if len(base) != 64 or not set(base) <= set("0123456789abcdef"):
            raise WireError("hello", "is no hash of a base", where="site")
        path = self._folder / PINNED
        if path.is_file() and (pinned := read_file(path, 100).decode("ascii", "replace")) != base:
            raise ContextError(
                f"is {base[:12]}, this site has agreed to {pinned[:12]}",
                where="base",
                remedy="If the site's owner agrees to the new one: nestling join … --new-base.",
            )

    def _base(self, hashed: str) -> Path:
        return self._folder / BASES / f"{hashed}.safetensors"

    def _kept(self) -> list[Path]:
        """What the client kept, by round, oldest first."""
        return sorted((self._folder / KEPT).glob("round-*.safetensors"))

    def _kept_before(self, number: int) -> ClientState:
        """What it kept in the last round before `number`. Raises `WireError` if the file is damaged."""
        before = [path for path in self._kept() if path.stem < f"round-{number:08d}"]
        if not before:
            return {}
        try:
            arrays: ClientState = load(read_file(before[-1], 1 << 36))
        except (SafetensorError, ValueError) as error:
            raise WireError("damaged", "what the client kept cannot be read", where=before[-1].name) from error
        return arrays

    def _keep(self, kept: ClientState, number: int) -> None:
        folder = make_private(self._folder / KEPT)
        data = save({name: np.ascontiguousarray(array) for name, array in kept.items()})
        write_atomic(folder / f"round-{number:08d}.safetensors", data)
        for path in self._kept()[:-_KEEP]:
            path.unlink()


def outcome(answer: Callable[[str, bytes], bytes], kind: str, body: bytes) -> bytes | Failure:
    """The answer, or a `Failure` of the code that the in-process engine would give. Of an error that nobody foresaw
    only the kind is told: its text may hold data. All of it is in the site's log."""
    try:
        return answer(kind, body)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        code = getattr(error, "code", "")
        if not code:
            code = {ConfigError: "config", ContextError: "context"}.get(type(error), "client_error")
        told = str(error) if code != "client_error" else f"raised {type(error).__name__}; see worker.log at the site"
        return Failure(str(code), told)


def serve(folder: Path) -> None:
    """Answer calls until there was none for as long as the site's settings say, or `stop`."""
    alive = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not _locked(alive):
        return  # another worker is at work
    os.ftruncate(alive, 0)
    os.pwrite(alive, str(os.getpid()).encode(), 0)
    key = token_bytes(32)
    write_private(folder / KEY, key)
    (folder / SOCKET).unlink(missing_ok=True)
    before = os.umask(0o077)
    try:
        listener = Listener(str(folder / SOCKET), "AF_UNIX", authkey=key)
    finally:
        os.umask(before)
    site = Site(folder)
    signal.signal(signal.SIGALRM, _idle)
    with listener:
        while True:
            signal.setitimer(signal.ITIMER_REAL, site.settings.idle)
            try:
                connection = listener.accept()
            except TimeoutError:
                return
            except (OSError, EOFError, AuthenticationError):
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            with connection, contextlib.suppress(OSError, EOFError):
                head, body = unframe(connection.recv_bytes())
                if head["kind"] == STOP:
                    return
                faulthandler.dump_traceback_later(site.settings.limit, exit=True)
                try:
                    answer = outcome(site.answer, head["kind"], body)
                finally:
                    faulthandler.cancel_dump_traceback_later()
                if isinstance(answer, Failure):
                    connection.send_bytes(frame({"code": answer.code, "detail": answer.detail}, b""))
                else:
                    connection.send_bytes(frame({}, answer))


def _idle(*_: object) -> None:
    raise TimeoutError


def _locked(handle: int) -> bool:
    for _ in range(20):  # whoever asks whether a worker lives holds the lock for an instant
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def main() -> None:
    """`python -m nestling.deploy.warm SITE`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded because a server says so
    import torch

    torch.set_num_threads(1)  # as everywhere in a run: the same bits on any machine load
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
