"""A site trains what the server asks on its own data, keeps what is its own, and refuses what it has not agreed to."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from small import config, images

from nestling.build import Parts, build
from nestling.config.load import dump_config
from nestling.config.schema import LanguageConfig, MachineConfig, MemoryConfig, NeedleConfig, RunConfig
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.types import Failure
from nestling.deploy import proxy, warm
from nestling.deploy.folder import SiteSettings, make_private, write_settings
from nestling.deploy.protocol import Hello, Ready, count_pieces, read, to_piece, write
from nestling.deploy.warm import Site, outcome
from nestling.models.backbones import base_bytes, base_hash
from nestling.models.resnet import make_resnet


class Killed(BaseException):
    """In the place of a signal that nothing can catch."""


@cache
def parts(rule: str = "plain") -> tuple[RunConfig, Parts, bytes]:
    made = config("nowhere")
    made = dataclasses.replace(made, local=dataclasses.replace(made.local, rule=rule))
    built = build(made)
    return made, built, base_bytes(built.base)


def hello(rule: str = "plain", **changes: object) -> Hello:
    made, built, base = parts(rule)
    told = dataclasses.replace(made, machine=MachineConfig(), task=dataclasses.replace(made.task, path=""))
    return dataclasses.replace(Hello(dump_config(told), built.base_hash, count_pieces(base), run_name(0)), **changes)


def run_name(number: int) -> str:
    return f"{number:032x}"


def kept(folder: Path, number: int = 0) -> list[int]:
    """The rounds of which a site has what its client kept in that run."""
    return sorted(int(path.stem[6:]) for path in (folder / "kept" / run_name(number)).glob("round-*"))


def settle(folder: Path, **settings: object) -> Path:
    write_settings(make_private(folder), SiteSettings(**{"client": 1, "data": str(images()), **settings}))
    return folder


def meet(site: Site, said: Hello, base: bytes) -> Ready:
    ready = read(Ready, site.answer("hello", write(said)))
    while not ready.ready:
        ready = read(Ready, site.answer("base", to_piece(base, ready.piece)))
    return ready


@pytest.mark.parametrize("rule", ["plain", "ssi"])
def test_a_reply_is_to_the_bit_that_of_a_client_in_the_servers_process(tmp_path: Path, rule: str) -> None:
    """With and without something that the client keeps, and with a worker that is a new process each time."""
    _, here, base = parts(rule)
    here.workers[0].kept.clear()
    ready = meet(Site(settle(tmp_path)), hello(rule), base)
    assert ready == Ready(1, True, here.task.examples(1), 0, 3600)
    for number in (1, 2, 3):
        message = here.server.broadcast(number)
        reply = Site(tmp_path).answer("round", message)
        assert reply == here.workers[0].handle(1, message)
        assert reply == Site(tmp_path).answer("round", message), "asked twice, it answers the same"
    assert kept(tmp_path) == ([1, 2, 3] if rule == "ssi" else [])


def test_each_run_has_what_it_kept_itself_whatever_came_between(tmp_path: Path) -> None:
    _, here, base = parts("ssi")
    site, messages = Site(settle(tmp_path)), [here.server.broadcast(n) for n in range(6)]
    meet(site, hello("ssi"), base)
    replies = [site.answer("round", messages[n]) for n in (1, 2)]
    meet(site, hello("ssi", run=run_name(1)), base)
    assert kept(tmp_path) == [0, 1, 2]  # a hello deletes nothing
    assert site.answer("round", messages[2]) != replies[1], "it begins with nothing"
    for number in (3, 4, 5):
        site.answer("round", messages[number])
    meet(site, hello("ssi"), base)
    assert site.answer("round", messages[2]) == replies[1]
    assert (kept(tmp_path), kept(tmp_path, 1)) == ([0, 1, 2], [3, 4, 5])


def test_a_round_that_is_done_again_ends_what_came_after_it(tmp_path: Path) -> None:
    _, here, base = parts("ssi")
    site, messages = Site(settle(tmp_path)), [here.server.broadcast(n) for n in range(6)]
    meet(site, hello("ssi"), base)
    replies = [site.answer("round", messages[n]) for n in range(1, 6)]
    assert kept(tmp_path) == [3, 4, 5]
    meet(site, hello("ssi"), base)
    assert site.answer("round", messages[4]) == replies[3]
    assert kept(tmp_path) == [3, 4]
    for number in (1, 3):  # what it would begin with is gone, and it does not begin with something else
        with pytest.raises(ContextError, match=f"before round {number} is not here any more"):
            site.answer("round", messages[number])
    assert kept(tmp_path) == [3, 4]


def test_old_runs_are_forgotten_one_by_one_and_not_gone_on_with_as_if_they_were_new(tmp_path: Path) -> None:
    _, here, base = parts("ssi")
    site = Site(settle(tmp_path))
    for number in range(8):
        site._kept = tmp_path / "kept" / run_name(number)
        site._keep({"x": np.float32([number])}, 5)
        os.utime(site._kept, (number, number))
    assert all(kept(tmp_path, number) == [0, 5] for number in range(8))
    meet(site, hello("ssi", run=run_name(8)), base)
    site.answer("round", here.server.broadcast(1))
    assert [kept(tmp_path, number) for number in (0, 1, 7, 8)] == [[], [0, 5], [0, 5], [0, 1]]
    meet(site, hello("ssi", run=run_name(0)), base)
    with pytest.raises(ContextError, match="not here any more"):
        site.answer("round", here.server.broadcast(6))


@pytest.mark.parametrize("name", ["../../bases", "F" * 32, "0" * 31, ""])
def test_a_runs_name_that_is_none_names_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(WireError, match="no name of a run"):
        Site(settle(tmp_path)).answer("hello", write(hello(run=name)))


def test_the_base_comes_once_and_another_one_is_refused_until_the_user_says_so(tmp_path: Path) -> None:
    _, _, base = parts()
    meet(Site(settle(tmp_path)), hello(), base)
    assert read(Ready, Site(tmp_path).answer("hello", write(hello()))).ready  # no piece was asked for
    other = make_resnet("resnet8", width=8, channels=1, classes=10, seed=5)
    changed = hello(base=base_hash(other), pieces=count_pieces(base_bytes(other)))
    with pytest.raises(ContextError, match="this site has agreed to"):
        Site(tmp_path).answer("hello", write(changed))
    (tmp_path / "pinned").unlink()  # join --new-base
    assert meet(Site(tmp_path), changed, base_bytes(other)).ready


def test_a_base_that_is_not_what_was_said_is_neither_used_nor_kept(tmp_path: Path) -> None:
    _, _, base = parts()
    site = Site(settle(tmp_path))
    with pytest.raises(ContextError, match="has the hash"):
        meet(site, hello(base="f" * 64), base)
    with pytest.raises((ContextError, WireError)):
        meet(site, hello(), base[:-1] + bytes([base[-1] ^ 1]))
    assert list((tmp_path / "bases").glob("*.safetensors")) == []
    assert not (tmp_path / "pinned").exists()
    with pytest.raises(ContextError, match="has not been told"):
        site.answer("round", b"")


def test_a_site_that_lacks_its_data_says_so_and_not_where_it_lies_and_keeps_the_base(tmp_path: Path) -> None:
    _, _, base = parts()
    secret = tmp_path / "patients of ward 7"
    site = Site(settle(tmp_path / "s", data=str(secret)))
    for _ in range(2):  # the base comes, and is there the second time
        told = outcome(lambda kind, body: write(meet(site, hello(), base)), "", b"")
        assert isinstance(told, Failure)
        assert told.code == "context"
        assert "data, base or device" in told.detail
        assert "ward" not in told.detail
        assert "/" not in told.detail
        assert len(list((tmp_path / "s" / "bases").glob("*.safetensors"))) == 1
    shutil.copytree(images(), secret)
    assert read(Ready, site.answer("hello", write(hello()))).ready
    damaged = next((tmp_path / "s" / "bases").glob("*.safetensors"))
    damaged.write_bytes(base[:-9])
    with pytest.raises(ContextError, match="data, base or device"):
        site.answer("hello", write(hello()))
    assert meet(site, hello(), base).ready  # it was deleted, so it is sent again
    pinned = tmp_path / "s" / "pinned"
    pinned.unlink()
    pinned.symlink_to("elsewhere")
    pinned.with_name("elsewhere").touch()
    told = outcome(site.answer, "hello", write(hello()))
    assert told == Failure("damaged", "raised WireError; see worker.log at the site")


@pytest.mark.parametrize("hashed", ["../../etc/passwd", "F" * 64, "0" * 63, ""])
def test_a_hash_that_is_none_names_no_file(tmp_path: Path, hashed: str) -> None:
    with pytest.raises(WireError, match="no hash"):
        Site(settle(tmp_path)).answer("hello", write(hello(base=hashed)))


def test_pieces_out_of_turn_are_refused(tmp_path: Path) -> None:
    _, _, base = parts()
    site = Site(settle(tmp_path))
    with pytest.raises(WireError, match="younger than the hello"):
        site.answer("base", to_piece(base, 0))
    site.answer("hello", write(hello(pieces=2)))
    with pytest.raises(WireError, match="out of turn"):
        site.answer("base", to_piece(base, 0)[:0] + (1).to_bytes(8, "little") + b"x")
    with pytest.raises(WireError, match="no message of ours"):
        site.answer("delete", b"")


def test_machine_and_data_are_the_sites_own_whatever_the_config_says(tmp_path: Path) -> None:
    made, _, _ = parts()
    evil = dataclasses.replace(
        made,
        machine=MachineConfig(out="/etc", workers=64, device="cuda:7"),
        task=dataclasses.replace(made.task, path="/etc"),
        base=dataclasses.replace(made.base, weights="/etc/passwd"),
    )
    own = Site(settle(tmp_path))._own(evil)
    assert (own.task.path, own.base.weights, own.machine.out) == (str(images()), "", "runs")
    assert (own.machine.workers, own.machine.device, own.machine.references) == (1, "cpu", False)


def test_a_language_model_is_a_packaged_one_or_the_one_that_the_site_names(tmp_path: Path) -> None:
    def asks_for(model: str) -> RunConfig:
        return RunConfig(task=NeedleConfig(), base=LanguageConfig(model=model), adapter=MemoryConfig())

    site = Site(settle(tmp_path / "a"))
    for model in ("/etc", "meta/llama", "../x"):
        with pytest.raises(ContextError, match="not a packaged model"):
            site._own(asks_for(model))
    assert site._own(asks_for("smollm2-135m")).base == LanguageConfig()
    named = Site(settle(tmp_path / "b", model="/models/mine"))
    assert named._own(asks_for("/etc")).base == LanguageConfig(model="/models/mine")


def test_a_site_whose_data_is_all_its_own_trains_on_all_of_it(tmp_path: Path) -> None:
    _, here, base = parts()
    ready = meet(Site(settle(tmp_path, whole=True)), hello(), base)
    assert ready.examples == len(here.task) > here.task.examples(1)


def test_a_client_that_is_not_in_the_run_takes_no_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this site is number 3"):
        Site(settle(tmp_path, client=3)).answer("hello", write(hello()))


def raising(error: Exception) -> Callable[[str, bytes], bytes]:
    def answer(kind: str, body: bytes) -> bytes:
        raise error

    return answer


def test_what_is_raised_is_told_by_its_code_and_of_a_surprise_only_its_kind(capsys: pytest.CaptureFixture) -> None:
    assert outcome(raising(WireError("context", "is another")), "", b"").code == "context"
    assert outcome(raising(ContextError("is another", where="base")), "", b"").code == "context"
    told = outcome(raising(ValueError("patient 17")), "", b"")
    assert told == Failure("client_error", "raised ValueError; see worker.log at the site")
    assert "patient 17" in capsys.readouterr().out


def test_what_a_server_says_cannot_pass_for_a_line_of_the_sites_log(capsys: pytest.CaptureFixture) -> None:
    outcome(raising(ConfigError("a\n2026-11-30 21:00:00+0000 round 9: 1 B came\x1b[2J")), "", b"")
    said = capsys.readouterr().out
    assert "round 9" in said
    assert all(line.startswith("  ") for line in said.splitlines())
    assert "\x1b" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_full_disk_under_the_log_loses_no_round(tmp_path: Path) -> None:
    _, here, base = parts()
    message = here.server.broadcast(1)
    full = open("/dev/full", "w")  # noqa: SIM115 its close raises as well
    with redirect_stdout(full), redirect_stderr(full):
        site = Site(settle(tmp_path))
        meet(site, hello(), base)
        reply = outcome(site.answer, "round", message)
        refused = outcome(raising(ValueError("patient 17")), "", b"")
    with suppress(OSError):
        full.close()
    assert reply == here.workers[0].handle(1, message)
    assert isinstance(refused, Failure)


# The process and its socket.


@pytest.fixture
def site() -> Iterator[Path]:
    with TemporaryDirectory(prefix="nestling-") as short:  # a socket's path has to be
        folder = settle(Path(short) / "s", limit=600.0)
        yield folder
        proxy.kill(folder)


def test_a_worker_is_started_once_answers_and_ends_with_its_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, here, base = parts()
    monkeypatch.setattr(proxy, "LARGEST_LOG", 3)
    (site / "worker.log").write_text("an older log")
    ready = proxy.call(site, "hello", write(hello()))
    assert isinstance(ready, bytes)
    assert not read(Ready, ready).ready
    process = int((site / "worker.alive").read_text())
    assert isinstance(proxy.call(site, "base", to_piece(base, 0)), bytes)
    message = here.server.broadcast(1)
    assert proxy.call(site, "round", message) == here.workers[0].handle(1, message)
    refusal = proxy.call(site, "round", b"x" * 64)
    assert isinstance(refusal, Failure)
    assert refusal.code == "magic"
    assert int((site / "worker.alive").read_text()) == process
    for name in ("worker.sock", "worker.key", "worker.log"):
        assert (site / name).stat().st_mode & 0o077 == 0
    log = (site / "worker.log").read_text()
    assert log.count(f"holds base {here.base_hash[:12]} and ") == 1
    assert log.count(f"round 1: {len(message):,} B came, ") == 1
    assert (site / "worker.log.1").read_text() == "an older log"
    proxy.kill(site)
    assert not proxy.is_alive(site)


HANGS = """
import sys, time
from pathlib import Path
from nestling.deploy import warm
warm.Site.answer = lambda self, kind, body: time.sleep(60) or b"" if kind == "round" else body
warm.serve(Path(sys.argv[1]))
"""


def test_a_call_that_hangs_is_ended_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="nestling-") as short:
        folder = settle(Path(short) / "s", limit=1.0)
        monkeypatch.setattr(
            proxy, "_start", lambda site: subprocess.Popen([sys.executable, "-c", HANGS, str(site)], stderr=-3)
        )
        assert proxy.call(folder, "hello", b"here") == b"here"
        began = time.monotonic()
        assert proxy.call(folder, "round", b"") == Failure("hung", "did not end within 1 s")
        assert time.monotonic() - began < proxy.GRACE, "it ended itself"
        assert proxy.call(folder, "hello", b"again") == b"again"
        proxy.kill(folder)


DIES = """
import fcntl, os, sys
from multiprocessing.connection import Listener
from pathlib import Path
from nestling.deploy.proxy import ALIVE, KEY, SOCKET, frame, unframe
site = Path(sys.argv[1])
alive = os.open(site / ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(alive, fcntl.LOCK_EX)
(site / KEY).write_bytes(b"k" * 32)
(site / SOCKET).unlink(missing_ok=True)
with Listener(str(site / SOCKET), "AF_UNIX", authkey=b"k" * 32) as listener:
    while True:
        with listener.accept() as connection:
            body = unframe(connection.recv_bytes())[1]
            with (site / "times").open("ab") as file:
                file.write(b"x")
            if os.stat(site / "times").st_size <= int(body):
                os.kill(os.getpid(), 9)
            connection.send_bytes(frame({}, b"done"))
"""
"""A worker without torch that is killed the first times it is asked."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list["subprocess.Popen[bytes]"]]]:
    """A site with such a worker, and the workers that were started."""
    started = list["subprocess.Popen[bytes]"]()

    def start(site: Path) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen([sys.executable, "-c", DIES, str(site)]))
        return started[-1]

    monkeypatch.setattr(proxy, "_start", start)
    with TemporaryDirectory(prefix="nestling-") as short:
        yield settle(Path(short) / "s", limit=600.0), started
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("kills", [0, 1, 2, 3])
def test_cat_055_a_worker_killed_at_work_is_started_anew_and_asked_again(
    kills: int, dying: tuple[Path, list["subprocess.Popen[bytes]"]]
) -> None:
    folder, started = dying
    answer = proxy.call(folder, "round", str(kills).encode())
    if kills < proxy.TRIES:
        assert answer == b"done"
    else:
        assert isinstance(answer, Failure)
        assert answer.code == "worker_died"
    tries = min(kills + 1, proxy.TRIES)
    assert (folder / "times").stat().st_size == len(started) == tries


def test_cat_055_a_worker_killed_before_it_listens_is_started_anew(
    dying: tuple[Path, list["subprocess.Popen[bytes]"]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder, started), real = dying, proxy._start
    ended = list[int]()

    def start(site: Path) -> "subprocess.Popen[bytes]":
        if len(ended) == proxy.TRIES - 1:
            return real(site)
        ended.append(0)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(proxy, "_start", start)
    assert proxy.call(folder, "round", b"0") == b"done"
    assert (len(ended), len(started)) == (proxy.TRIES - 1, 1)


def test_cat_055_a_worker_killed_between_two_pieces_of_a_base_asks_for_the_hello_again(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="younger than the hello") as raised:
        Site(settle(tmp_path)).answer("base", to_piece(parts()[2], 0))
    assert raised.value.code == "begun_anew"  # one of those of `deploy/sites.py` that are tried again


def test_cat_055_what_a_killed_worker_left_half_written_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    places = [settle(tmp_path), tmp_path / "bases", tmp_path / "kept" / run_name(0)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / ".round-0000000001.safetensors.tmp.0123456789abcdef").write_bytes(b"ha")
        (place / "whole").touch()
    warm._sweep(tmp_path)
    assert not list(tmp_path.rglob(".*"))
    assert len(list(tmp_path.rglob("whole"))) == len(places)
    assert (tmp_path / "site.json").is_file()


@pytest.mark.parametrize("instant", range(1, 7))
def test_cat_055_a_round_killed_at_any_of_its_writes_is_done_again_to_the_bit(
    instant: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each rename and each deletion in turn, once before it and once after; then a new process."""
    _, here, base = parts("ssi")
    site, messages = Site(settle(tmp_path)), [here.server.broadcast(n) for n in range(6)]
    meet(site, hello("ssi"), base)
    expected = [site.answer("round", messages[number]) for number in range(1, 5)]
    before = {path.name: path.read_bytes() for path in (tmp_path / "kept" / run_name(0)).iterdir()}
    calls = list[str]()

    def killed(real: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            calls.append("")
            if len(calls) == instant:
                raise Killed
            done = real(*args, **named)
            calls.append("")
            if len(calls) == instant:
                raise Killed
            return done

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed(os.replace))
        patched.setattr(os, "unlink", killed(os.unlink))
        patched.setattr(Path, "unlink", killed(Path.unlink))
        with pytest.raises(Killed):
            site.answer("round", messages[5])
    for path in (tmp_path / "kept" / run_name(0)).iterdir():  # each file is an old one, or whole
        if not path.name.startswith("."):
            assert path.read_bytes() == before.get(path.name, path.read_bytes())
            load(path.read_bytes())
    warm._sweep(tmp_path)  # with which a new process begins
    again = Site(tmp_path).answer("round", messages[5])
    other = settle(tmp_path / "peace")
    peace = Site(other)
    meet(peace, hello("ssi"), base)
    assert [peace.answer("round", messages[n]) for n in range(1, 6)] == [*expected, again]
    names = [path.name for path in sorted((tmp_path / "kept" / run_name(0)).iterdir())]
    assert names == [path.name for path in sorted((other / "kept" / run_name(0)).iterdir())]
    for name in names:
        assert (tmp_path / "kept" / run_name(0) / name).read_bytes() == (
            other / "kept" / run_name(0) / name
        ).read_bytes()


def test_a_worker_that_is_busy_is_waited_for_and_if_it_dies_another_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller is gone, as when Flower's process for a message is killed: it listens, and does not answer."""
    with TemporaryDirectory(prefix="nestling-") as short:
        folder = settle(Path(short) / "s", limit=2.0)
        monkeypatch.setattr(
            proxy, "_start", lambda site: subprocess.Popen([sys.executable, "-c", HANGS, str(site)], stderr=-3)
        )
        assert proxy.call(folder, "hello", b"here") == b"here"
        gone = proxy._connected(folder, time.monotonic() + proxy.START)
        assert not isinstance(gone, Failure)
        gone.send_bytes(proxy.frame({"kind": "round"}, b""))
        gone.close()
        monkeypatch.setattr(proxy, "START", 0.2)
        assert proxy.call(folder, "hello", b"") == Failure("busy", "the worker is still at work on an earlier message")
        monkeypatch.setattr(proxy, "START", 300.0)
        assert proxy.call(folder, "hello", b"again") == b"again"
        silent = proxy._connected(
            folder, time.monotonic() + proxy.START
        )  # it says nothing, and does not hold the worker for ever
        assert not isinstance(silent, Failure)
        assert proxy.call(folder, "hello", b"once more") == b"once more"
        silent.close()
        proxy.kill(folder)


def test_a_worker_is_this_package_wherever_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` alone would import a folder `nestling` from where the command was typed."""
    lines: list[list[str]] = []
    monkeypatch.setattr(proxy, "start", lambda line, **_: lines.append(line) or subprocess.Popen(["true"]))
    proxy._start(settle(tmp_path)).wait()
    assert lines[0][1:4] == ["-P", "-m", "nestling.deploy.warm"]


def test_a_workers_threads_are_the_sites_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(warm, "serve", lambda folder: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for number in (1, 3):
        monkeypatch.setattr(sys, "argv", ["warm", str(settle(tmp_path, threads=number))])
        warm.main()
    assert threads == [1, 3]


def test_a_worker_that_cannot_start_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_start", lambda site: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    answer = proxy.call(settle(tmp_path), "hello", b"")
    assert isinstance(answer, Failure)
    assert answer.code == "worker_died"
