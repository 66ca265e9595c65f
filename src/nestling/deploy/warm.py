"""A site's worker: one long-lived process that keeps the frozen model and the data, and answers what the server sends.

    hello    →    settings read, base pinned, model built        round    →    the reply of `Worker.handle`

The server decides what is trained, and nothing else: data, device and limits are the site's own; settings are read as
strictly as a user's; a language model is one that the user named or that is packaged; and a base other than the one
that was met first is refused until the user says so. What the client keeps between rounds never leaves the folder.
A call that hangs is ended by a timer of the interpreter's own, with the process, and the next one starts it anew. A
process that is killed leaves whole files: the old or the new, and half written ones under names that nothing reads and
the next process deletes.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import math
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
from nestling.config.schema import LanguageConfig, MachineConfig, OwnBase, RunConfig
from nestling.core.errors import ConfigError, ContextError, NestlingError, WireError
from nestling.core.files import sync_folder, write_atomic
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
from nestling.runs.files import printable, read_file
from nestling.tasks.items import ItemsTask

PINNED, AGREED, KEPT, BASES = "pinned", "agreed.json", "kept", "bases"
FORGOTTEN = "forgotten"
"""In the folder of a run of which there is nothing any more."""
_ROUNDS, _RUNS = 3, 8
"""Of how many of a run's rounds, and of how many runs, a site has what its client kept. A server may lack the
checkpoint of the last round, and have a damaged one of the round before."""


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
        self._kept = folder / KEPT
        """Where what the client keeps of the run is: round N in round-N, and nothing in round 0."""

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
        _check_hex(hello.base, 64, "hash of a base")
        _check_hex(hello.run, 32, "name of a run")
        self._check_pin(hello.base)
        self._hello = hello
        if isinstance(config.base, OwnBase) and not self._base(hello.base).is_file():
            return self._ready(False)
        return self._prepare(hello, config)

    def _ready(self, ready: bool, *, examples: int = 0, piece: int = 0) -> Ready:
        return Ready(self.settings.client, ready, examples, piece, math.ceil(self.settings.limit))

    def _take(self, number: int, piece: bytes) -> Ready:
        """One piece of the base; the last one completes it."""
        hello = self._hello
        if hello is None:
            raise WireError("begun_anew", "the worker is younger than the hello", where="site")
        if number != self._next or number >= hello.pieces or number * PIECE >= LARGEST_BASE:
            raise WireError("base", f"piece {number} comes out of turn", where="site")
        path = self._base(hello.base).with_suffix(".part")
        make_private(path.parent)
        with path.open("wb" if number == 0 else "ab") as file:
            file.write(piece)
            if number + 1 == hello.pieces:
                file.flush()
                os.fsync(file.fileno())
        self._next = number + 1
        if self._next < hello.pieces:
            return self._ready(False, piece=self._next)
        os.replace(path, self._base(hello.base))
        sync_folder(path.parent)
        return self._prepare(hello, self._own(parse_config(hello.config)))

    def _prepare(self, hello: Hello, config: RunConfig) -> Ready:
        """Build the worker; only a base of the hash that was said is kept and pinned.

        Raises `ContextError` if it cannot be built, with a text of our own: what is missing is in the site's log.
        """
        own = self._base(hello.base)
        if isinstance(config.base, OwnBase):
            config = dataclasses.replace(config, base=dataclasses.replace(config.base, weights=str(own)))
        try:
            parts = build(config)
        except NestlingError as error:
            if error.where == str(own):  # damaged, or of another model
                own.unlink(missing_ok=True)
            raise ContextError(
                f"data, base or device are not as this run needs them ({type(error).__name__})",
                where="site",
                remedy="See worker.log at the site.",
            ) from error
        if parts.base_hash != hello.base:
            own.unlink(missing_ok=True)
            raise ContextError(
                f"has the hash {parts.base_hash[:12]}, the server has {hello.base[:12]}",
                where="base",
                remedy="Both sides need the same model, and the same versions.",
            )
        worker = parts.workers[0]
        if self.settings.whole:
            if not isinstance(parts.task, ItemsTask):
                raise ConfigError(
                    "is for images and text", where="--whole", remedy="Each client of this task has its own items."
                )
            worker = dataclasses.replace(worker, task=parts.task.whole(self.settings.client))
        write_private(self._folder / PINNED, hello.base.encode())
        write_private(self._folder / AGREED, write(hello))
        self._worker, self._kept = worker, self._folder / KEPT / hello.run
        examples = worker.task.examples(self.settings.client)
        _note(f"holds base {hello.base[:12]} and {examples:,} examples of client {self.settings.client}")
        return self._ready(True, examples=examples)

    def _round(self, message: bytes) -> bytes:
        if self._worker is None:  # this process is younger than the run
            path = self._folder / AGREED
            if not path.is_file():
                raise ContextError("has not been told of a run", where="site")
            if not self._meet(read(Hello, read_file(path, 1 << 20))).ready or self._worker is None:
                raise ContextError("its base is gone", where="site")
        worker, client, number = self._worker, self.settings.client, peek(message).round
        worker.kept.clear()
        if before := self._kept_before(number):
            worker.kept[client] = before
        begun = time.monotonic()
        reply = worker.handle(client, message)
        if kept := worker.kept.get(client):
            self._keep(kept, number)
        _note(f"round {number}: {len(message):,} B came, {len(reply):,} B go, {time.monotonic() - begun:.1f} s")
        return reply

    def _own(self, config: RunConfig) -> RunConfig:
        """The server's settings with the site's own in the place of all that is a machine's affair.

        Raises `ContextError` for a model that is neither packaged nor named by the site: a name may be a path here, or
        a download.
        """
        s = self.settings
        base = config.base
        machine = MachineConfig(workers=1, device=s.device, references=False)
        if isinstance(base, OwnBase):
            base = dataclasses.replace(base, weights="", path="")
        elif s.model:
            base = dataclasses.replace(base, model=s.model)
        elif isinstance(base, LanguageConfig) and base.model not in ASSETS:
            raise ContextError(
                "is not a packaged model", where="base.model", remedy="nestling join … --model PATH says where it is."
            )
        return dataclasses.replace(with_data(config, s.data), base=base, machine=machine)

    def _check_pin(self, base: str) -> None:
        path = self._folder / PINNED
        if path.is_file() and (pinned := read_file(path, 100).decode("ascii", "replace")) != base:
            raise ContextError(
                f"is {base[:12]}, this site has agreed to {pinned[:12]}",
                where="base",
                remedy="If the site's owner agrees to the new one: nestling join … --new-base.",
            )

    def _base(self, hashed: str) -> Path:
        return self._folder / BASES / f"{hashed}.safetensors"

    def _kept_before(self, number: int) -> ClientState:
        """What the client kept in the last round before `number` of this run.

        Raises `ContextError` if that is not here any more, `WireError` if the file is damaged.
        """
        rounds = _rounds(self._kept)
        before = [path for path in rounds if path.name < _name(number)]
        if not before and (rounds or (self._kept / FORGOTTEN).exists()):
            raise ContextError(f"what its client kept before round {number} is not here any more", where="site")
        if not before:
            return {}
        try:
            arrays: ClientState = load(read_file(before[-1], 1 << 36))
        except (SafetensorError, ValueError) as error:
            raise WireError("damaged", "what the client kept cannot be read", where=before[-1].name) from error
        return arrays

    def _keep(self, kept: ClientState, number: int) -> None:
        folder = self._kept
        if not folder.is_dir():
            runs = [run for run in make_private(folder.parent).iterdir() if _rounds(run)]
            for run in sorted(runs, key=lambda run: run.stat().st_mtime)[: 1 - _RUNS]:
                (run / FORGOTTEN).touch()
                for path in _rounds(run):
                    path.unlink()
        if not _rounds(make_private(folder)):
            write_atomic(folder / _name(0), save({}))
        for path in _rounds(folder):
            if path.name >= _name(number):  # of rounds that the server has given up
                path.unlink()
        data = save({name: np.ascontiguousarray(array) for name, array in kept.items()})
        write_atomic(folder / _name(number), data)
        for path in _rounds(folder)[:-_ROUNDS]:
            path.unlink()


def _note(text: str) -> None:
    """A line for the site's log; none where its disk is full, for that is no reason to lose a round."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {text}", flush=True)


def _trace() -> None:
    """The error that is being handled, for the site's log: indented and without control characters, so that what the
    server has put into its text cannot pass for a line of ours."""
    with contextlib.suppress(OSError):
        for line in traceback.format_exc().splitlines():
            print(f"  {printable(line)}")
        sys.stdout.flush()


def _name(number: int) -> str:
    return f"round-{number:010d}.safetensors"


def _rounds(folder: Path) -> list[Path]:
    """What is kept of a run, oldest first."""
    return sorted(folder.glob("round-*.safetensors"))


def _check_hex(text: str, length: int, what: str) -> None:
    if len(text) != length or not set(text) <= set("0123456789abcdef"):  # it becomes part of a path
        raise WireError("hello", f"is no {what}", where="site")


def outcome(answer: Callable[[str, bytes], bytes], kind: str, body: bytes) -> bytes | Failure:
    """The answer, or a `Failure` of the code that the in-process engine would give. Of an error that nobody foresaw
    only the kind is told: its text may hold data. Nor is a text with a slash in it, which may name the site's files.
    All of it is in the site's log."""
    try:
        return answer(kind, body)
    except Exception as error:
        _trace()
        code = getattr(error, "code", "")
        if not code:
            kinds: dict[type, str] = {ConfigError: "config", ContextError: "context"}
            code = kinds.get(type(error), "client_error")
        told = str(error)
        if code == "client_error" or "/" in told:
            told = f"raised {type(error).__name__}; see worker.log at the site"
        return Failure(str(code), told)


def serve(folder: Path) -> None:
    """Answer calls until there was none for as long as the site's settings say, or `stop`."""
    alive = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not _locked(alive):
        return  # another worker is at work
    os.ftruncate(alive, 0)
    os.pwrite(alive, str(os.getpid()).encode(), 0)
    _sweep(folder)
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
                time.sleep(0.1)  # too many open files, for one, will be so in the next moment
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            with connection, contextlib.suppress(OSError, EOFError):
                faulthandler.dump_traceback_later(site.settings.limit, exit=True)
                try:
                    head, body = unframe(connection.recv_bytes())
                    if head["kind"] == STOP:
                        return
                    answer = outcome(site.answer, head["kind"], body)
                    if isinstance(answer, Failure):
                        connection.send_bytes(frame({"code": answer.code, "detail": answer.detail}, b""))
                    else:
                        connection.send_bytes(frame({}, answer))
                finally:
                    faulthandler.cancel_dump_traceback_later()


def _sweep(folder: Path) -> None:
    """Delete what a killed process left half written; nobody else writes here while this one holds the lock."""
    for place in (folder, folder / BASES, *folder.glob(f"{KEPT}/*")):
        for leftover in place.glob(".*.tmp.*"):
            leftover.unlink(missing_ok=True)


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

    site = Path(sys.argv[1])
    # One, unless the site's owner says otherwise, is as everywhere in a run: the same bits on any machine load.
    torch.set_num_threads(read_settings(SiteSettings, site).threads)
    serve(site)


if __name__ == "__main__":
    main()
