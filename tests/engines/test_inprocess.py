"""The engine carries bytes, uses all its workers, one client each at a time, and loses a client but never a round."""

import subprocess
import sys
import threading
import time

import pytest

from nestling.core.errors import WireError
from nestling.core.types import Engine, Failure
from nestling.engines.inprocess import InProcessEngine
from nestling.federation.local import Declined

MESSAGES = {client: f"to {client}".encode() for client in (7, 3, 9, 1)}


def echo(client: int, message: bytes) -> bytes:
    return b"from %d: " % client + message


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_client_gets_its_message_and_its_own_reply_comes_back(count: int) -> None:
    replies = InProcessEngine([echo] * count).exchange(MESSAGES)
    assert replies == {client: echo(client, message) for client, message in MESSAGES.items()}
    assert list(replies) == list(MESSAGES)


def test_no_messages_no_replies() -> None:
    assert InProcessEngine([echo]).exchange({}) == {}


def test_cat_053_whatever_a_client_raises_is_its_own_failure() -> None:
    raised = {
        7: Declined("no_data", "has no training items"),
        3: WireError("digest", "was changed on its way"),
        9: RuntimeError("CUDA out of memory"),
    }

    def handler(client: int, message: bytes) -> bytes:
        if client in raised:
            raise raised[client]
        return echo(client, message)

    engine = InProcessEngine([handler])
    for _ in range(2):  # workers are free again afterwards
        replies = engine.exchange(MESSAGES)
        assert replies[1] == echo(1, MESSAGES[1])
        for client, code in ((7, "no_data"), (3, "digest"), (9, "client_error")):
            failure = replies[client]
            assert isinstance(failure, Failure)
            assert failure.code == code
            assert f"client {client}" in failure.detail
            assert str(raised[client]) in failure.detail
            assert "Traceback" in failure.trace


def test_workers_work_side_by_side_and_each_serves_one_client_at_a_time() -> None:
    meeting = threading.Barrier(3, timeout=30)  # three clients at once, or the test fails here
    busy: dict[int, bool] = {}

    def worker(number: int):
        def handler(client: int, message: bytes) -> bytes:
            assert not busy.get(number), "two clients on one worker"
            busy[number] = True
            meeting.wait()
            busy[number] = False
            return message

        return handler

    replies = InProcessEngine([worker(n) for n in range(3)]).exchange(dict.fromkeys(range(6), b"x"))
    assert replies == dict.fromkeys(range(6), b"x")
    assert sorted(busy) == [0, 1, 2]


def test_cat_081_ten_thousand_clients_are_served_by_the_workers_there_are() -> None:
    used, threads = set(), set()

    def worker(number: int):
        def handler(client: int, message: bytes) -> bytes:
            used.add(number)
            threads.add(threading.get_ident())
            return message

        return handler

    replies = InProcessEngine([worker(0), worker(1)]).exchange(dict.fromkeys(range(10000), b"x"))
    assert len(replies) == 10_000
    assert used <= {0, 1}
    assert len(threads) <= 2


def test_cat_056_an_interrupt_starts_no_further_client() -> None:
    # In a process of its own: a signal is not caught by whatever else a test session does.
    program = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, where the tests run in the background
from nestling.engines.inprocess import InProcessEngine

started = []

def handler(client, message):
    started.append(client)
    if len(started) == 2:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # Ctrl-C
    time.sleep(0.01)
    return message

try:
    InProcessEngine([handler]).exchange({client: b"x" for client in range(1_000)})
except KeyboardInterrupt:
    print(len(started))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 500


def given_up(stop: threading.Event) -> None:
    """Work that ends only when it is told to."""
    assert stop.wait(timeout=30), "nobody said stop"
    raise Declined("stopped", "was interrupted")


def test_cat_050_a_deadline_leaves_out_who_is_slow_and_the_next_round_has_all_again() -> None:
    stop, slow = threading.Event(), {3}

    def handler(client: int, message: bytes) -> bytes:
        if client in slow:
            given_up(stop)
        return echo(client, message)

    engine = InProcessEngine([handler] * 2, deadline=0.5, stop=stop)
    replies = engine.exchange(MESSAGES)
    assert {c: r for c, r in replies.items() if c != 3} == {c: echo(c, m) for c, m in MESSAGES.items() if c != 3}
    assert replies[3] == Failure("late", "client 3 did not answer within 0.5 s")
    slow.clear()
    assert engine.exchange(MESSAGES) == {c: echo(c, m) for c, m in MESSAGES.items()}


def test_clients_that_had_not_begun_by_the_deadline_never_do() -> None:
    stop, begun = threading.Event(), list[int]()

    def handler(client: int, message: bytes) -> bytes:
        begun.append(client)
        given_up(stop)
        return message

    replies = InProcessEngine([handler], deadline=0.2, stop=stop).exchange(MESSAGES)
    assert begun == [7]
    assert {r.code for r in replies.values() if isinstance(r, Failure)} == {"late"}
    assert list(replies) == list(MESSAGES)


def test_stragglers_are_not_waited_for_once_the_others_have_replied() -> None:
    stop = threading.Event()

    def handler(client: int, message: bytes) -> bytes:
        if client == 9:
            given_up(stop)
        return echo(client, message)

    replies = InProcessEngine([handler] * 4, stragglers=1, stop=stop).exchange(MESSAGES)
    assert replies[9] == Failure("late", "client 9 was slower than the 3 that were enough")
    assert sum(isinstance(r, bytes) for r in replies.values()) == 3


def test_a_client_that_fails_is_no_reply_that_a_straggler_could_be_left_for() -> None:
    def handler(client: int, message: bytes) -> bytes:
        if client == 7:
            raise Declined("no_data", "has none")
        return echo(client, message)

    replies = InProcessEngine([handler], stragglers=1).exchange(MESSAGES)  # 3 of 4 are enough, and all three come
    assert [c for c, r in replies.items() if isinstance(r, bytes)] == [3, 9, 1]
    assert isinstance(replies[7], Failure)
    assert replies[7].code == "no_data"


def test_a_reply_that_was_ready_when_the_others_were_stopped_still_counts() -> None:
    stop = threading.Event()

    def handler(client: int, message: bytes) -> bytes:
        if client == 9:
            assert stop.wait(timeout=30)  # in its last batch
        return echo(client, message)

    replies = InProcessEngine([handler] * 4, stragglers=1, stop=stop).exchange(MESSAGES)
    assert replies == {c: echo(c, m) for c, m in MESSAGES.items()}
    assert not stop.is_set()


@pytest.mark.parametrize("deadline", [0.0, 30.0])
def test_an_error_of_who_listens_is_no_clients_deadline(deadline: float) -> None:
    def heard(answered: int, asked: int) -> None:
        raise TimeoutError("of a tracker somewhere")

    engine = InProcessEngine([lambda client, message: message], deadline=deadline, heard=heard)
    with pytest.raises(TimeoutError, match="of a tracker"):
        engine.exchange({0: b"a", 1: b"b"})


def test_it_is_told_how_many_have_answered() -> None:
    told: list[tuple[int, int]] = []
    engine = InProcessEngine([lambda c, m: m] * 2, heard=lambda answered, asked: told.append((answered, asked)))
    engine.exchange({0: b"a", 1: b"b", 2: b"c"})
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_it_is_an_engine() -> None:
    engine: Engine = InProcessEngine([echo])
    assert callable(engine.exchange)


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_cat_078_a_clock_that_jumps_by_a_day_moves_no_deadline(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, now, calls = threading.Event(), time.time, []

    def jumping() -> float:
        calls.append(1)
        return now() + jump * len(calls)

    def handler(client: int, message: bytes) -> bytes:
        if client == 3:
            assert stop.wait(timeout=60)
            raise Declined("stopped", "was interrupted")
        return echo(client, message)

    monkeypatch.setattr(time, "time", jumping)
    began = time.monotonic()
    replies = InProcessEngine([handler] * 4, deadline=0.5, stop=stop).exchange(MESSAGES)
    seconds = time.monotonic() - began
    assert replies.pop(3) == Failure("late", "client 3 did not answer within 0.5 s")
    assert replies == {c: echo(c, m) for c, m in MESSAGES.items() if c != 3}
    assert 0.5 <= seconds < 30  # as long as a busy machine may take
