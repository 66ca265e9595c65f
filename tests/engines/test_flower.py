"""The engine over Flower, on a grid in this process: whatever a node does costs its own replies, never a round."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from nestling.core.errors import ConfigError, ContextError, RunError
from nestling.core.types import Engine, Failure
from nestling.engines import flower_compat as compat
from nestling.engines.flower import FlowerEngine, from_record, kind_of, to_record, to_refusal

compat.pretend_task()
SITES = {7: 70, 3: 30, 9: 90, 1: 10}
MESSAGES = {client: b"to %d" % client for client in SITES}
SERVER = 1


class Metadata(SimpleNamespace):
    """What the engine reads of a reply."""


class Reply:
    """A reply of any kind, also of those that Flower itself would not make."""

    def __init__(self, content: RecordDict | Error, *, to: str, sender: int) -> None:
        self.metadata = Metadata(reply_to_message_id=to, src_node_id=sender)
        self.content = self.error = content

    def has_error(self) -> bool:
        return isinstance(self.error, Error)


Node = Callable[[int, str, bytes], Iterable[Any]]
"""What a node does with a message: (node, the message's identifier, its bytes) -> replies."""


def echo(node: int, identifier: str, body: bytes) -> list[Reply]:
    return [Reply(to_record(b"from %d: " % node + body), to=identifier, sender=node)]


def silent(node: int, identifier: str, body: bytes) -> list[Reply]:
    return []


class Grid:
    """Nodes as functions; what one sends can be pulled once, by its message's identifier, whatever it says itself."""

    def __init__(self, **nodes: Node) -> None:
        self.nodes = {node: nodes.get(f"n{node}", echo) for node in SITES.values()}
        self.offline: set[int] = set()
        self.since = dict.fromkeys(SITES.values(), "noon")
        self.waiting: list[tuple[str, Any]] = []
        self.pushed: list[tuple[int, bytes]] = []
        self.lives = set[float]()
        self.refuse = 0

    def get_nodes(self) -> list[Any]:
        there = (node for node in self.nodes if node not in self.offline)
        return [SimpleNamespace(node_id=node, last_activated_at=self.since[node]) for node in there]

    def push_messages(self, messages: Iterable[Message]) -> list[str | None]:
        identifiers: list[str | None] = []
        for message in messages:
            node, body = message.metadata.dst_node_id, from_record(message.content)
            assert isinstance(body, bytes)
            assert kind_of(message.content) == "round"
            if node == self.refuse:
                identifiers.append(None)
                continue
            identifiers.append(f"m{len(self.pushed)}")
            self.pushed.append((node, body))
            self.lives.add(message.metadata.ttl)
            self.come(str(identifiers[-1]), *self.nodes[node](node, str(identifiers[-1]), body))
        return identifiers

    def come(self, identifier: str, *replies: Any) -> None:
        self.waiting += [(identifier, reply) for reply in replies]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        wanted = list(message_ids)
        assert len(wanted) == len(set(wanted)) > 0
        taken = [reply for identifier, reply in self.waiting if identifier in wanted]
        self.waiting = [(identifier, reply) for identifier, reply in self.waiting if identifier not in wanted]
        if any(isinstance(reply, Exception) for reply in taken):  # what came with it is lost
            raise next(reply for reply in taken if isinstance(reply, Exception))
        return taken


def exchange(grid: Grid, **settings: float) -> dict[int, bytes | Failure]:
    return FlowerEngine(grid, SITES, **{"deadline": 0.05, "poll": 0.005, **settings}).exchange(MESSAGES)


def good(clients: Iterable[int] = SITES) -> dict[int, bytes]:
    return {client: b"from %d: to %d" % (SITES[client], client) for client in clients}


def test_each_client_gets_its_message_and_its_own_reply_comes_back() -> None:
    grid = Grid()
    engine: Engine = FlowerEngine(grid, SITES, poll=0.005)
    assert isinstance(engine, Engine)
    for _ in range(2):
        assert engine.exchange(MESSAGES) == good()
        assert list(engine.exchange(MESSAGES)) == list(MESSAGES)
    assert engine.exchange({}) == {}
    assert sorted(grid.pushed[:4]) == sorted((SITES[c], m) for c, m in MESSAGES.items())


def of_another_kind(node: int, identifier: str, body: bytes) -> list[Reply]:
    return [Reply(RecordDict({"nestling": ArrayRecord()}), to=identifier, sender=node)]


def with_text_for_bytes(node: int, identifier: str, body: bytes) -> list[Reply]:
    record = ConfigRecord({"kind": "round", "body": "text"})
    return [Reply(RecordDict({"nestling": record}), to=identifier, sender=node)]


def with_more(node: int, identifier: str, body: bytes) -> list[Reply]:
    record = to_record(body)
    record["more"] = ConfigRecord({})
    return [Reply(record, to=identifier, sender=node)]


def with_a_code_that_is_none(node: int, identifier: str, body: bytes) -> list[Reply]:
    return [Reply(to_refusal(Failure("\x1b[31m NO", "x")), to=identifier, sender=node)]


def error(code: int) -> Node:
    sender = SERVER if code == compat.NODE_LOST else 90
    return lambda node, identifier, body: [Reply(Error(code, "it\x1b broke\nhere"), to=identifier, sender=sender)]


def twice_otherwise(node: int, identifier: str, body: bytes) -> list[Reply]:
    return echo(node, identifier, body) + echo(node, identifier, b"other")


@pytest.mark.parametrize(
    ("node", "code"),
    [
        (silent, "late"),
        (error(5), "node_lost"),
        (error(3), "late"),
        (lambda node, identifier, body: [KeyError("no such object")], "malformed_reply"),
        (lambda node, identifier, body: [to_record(body)], "malformed_reply"),
        (lambda node, identifier, body: [Reply(Error(5, "gone"), to="m0", sender=node)], "misaddressed"),
        (error(2), "client_error"),
        (error(8), "client_error"),
        (error(99), "client_error"),
        (of_another_kind, "malformed_reply"),
        (with_text_for_bytes, "malformed_reply"),
        (with_more, "malformed_reply"),
        (with_a_code_that_is_none, "malformed_reply"),
        (twice_otherwise, "duplicate"),
        (lambda node, identifier, body: [Reply(to_record(body), to=identifier, sender=30)], "wrong_sender"),
        (lambda node, identifier, body: [Reply(to_record(body), to="none", sender=node)], "misaddressed"),
        (
            lambda node, identifier, body: [Reply(to_refusal(Failure("no_data", "none")), to=identifier, sender=node)],
            "no_data",
        ),
    ],
)
def test_what_a_node_does_is_its_own_failure(node: Node, code: str) -> None:
    replies = exchange(Grid(n90=node))
    failure = replies.pop(9)
    assert isinstance(failure, Failure)
    assert failure.code == code
    assert "client 9" in failure.detail
    assert failure.detail.isprintable()
    assert replies == good(replies)


def test_the_same_reply_twice_is_one_reply() -> None:
    assert exchange(Grid(n90=lambda *message: echo(*message) + echo(*message))) == good()


def test_a_client_without_a_node_and_one_whose_node_is_gone_are_not_waited_for() -> None:
    grid = Grid()
    grid.offline = {30}
    replies = FlowerEngine(grid, SITES).exchange({**MESSAGES, 5: b"x"})  # no deadline: it would wait for ever
    assert [(replies[c].code, replies[c].sent) for c in (3, 5)] == [("away", False), ("no_site", False)]
    assert {c: r for c, r in replies.items() if c in (7, 9, 1)} == good((7, 9, 1))
    grid.offline = set()
    assert FlowerEngine(grid, SITES).exchange(MESSAGES) == good()


def test_a_message_that_flower_does_not_take_is_a_failure() -> None:
    grid = Grid()
    grid.refuse = 70
    replies = exchange(grid)
    assert replies[7] == Failure("not_sent", "client 7: the message was not taken", sent=False)
    assert {c: r for c, r in replies.items() if c != 7} == good((3, 9, 1))


def test_a_hung_client_is_not_sent_another_message_and_delays_no_later_round() -> None:
    grid = Grid(n90=silent)
    engine = FlowerEngine(grid, SITES, deadline=0.05, poll=0.005)
    assert engine.exchange(MESSAGES)[9].code == "late"
    engine._deadline = 30.0  # a round that waited for it would now be noticed
    for _ in range(2):
        replies = engine.exchange(MESSAGES)
        assert replies[9].code == "busy"
        assert {c: r for c, r in replies.items() if c != 9} == good((7, 3, 1))
    assert engine.busy == [9]
    assert [node for node, _ in grid.pushed].count(90) == 1


def test_an_answer_that_comes_too_late_counts_for_nothing_and_frees_its_node() -> None:
    grid = Grid(n90=silent)
    engine = FlowerEngine(grid, SITES, deadline=0.05, poll=0.005)
    engine.exchange(MESSAGES)
    (identifier,) = engine._owed
    grid.come(identifier, Reply(to_record(b"of round 1"), to=identifier, sender=90))
    grid.nodes[90] = echo
    assert engine.exchange(MESSAGES) == good()
    assert engine.busy == []


def test_an_error_of_flower_frees_a_node_as_well() -> None:
    grid = Grid(n90=silent)
    engine = FlowerEngine(grid, SITES, deadline=0.05, poll=0.005)
    engine.exchange(MESSAGES)
    (identifier,) = engine._owed
    grid.come(identifier, Reply(Error(3, "expired"), to=identifier, sender=SERVER))
    grid.nodes[90] = echo
    assert engine.exchange(MESSAGES) == good()


def test_a_node_that_is_free_again_while_others_work_still_takes_part() -> None:
    grid = Grid(n90=silent)
    engine = FlowerEngine(grid, SITES, deadline=0.05, poll=0.005)
    engine.exchange(MESSAGES)
    (identifier,) = engine._owed
    engine._deadline, grid.nodes[90] = 30.0, echo
    usual, held, looks = grid.pull_messages, list[str](), list[int]()

    def pull(identifiers: Iterable[str]) -> list[Any]:
        if list(identifiers) == held:
            looks.append(1)
            if len(looks) == 3:
                grid.come(held[0], *echo(70, held[0], MESSAGES[7]))
                grid.come(identifier, Reply(to_record(b"late"), to=identifier, sender=90))
        return usual(identifiers)

    def hold(node: int, identifier: str, body: bytes) -> list[Reply]:
        held.append(identifier)
        return []

    grid.nodes[70], grid.pull_messages = hold, pull  # type: ignore[method-assign]
    # The third look brings both the last reply and the old answer: the node that is free is asked, and waited for.
    assert engine.exchange(MESSAGES) == good()


def test_where_all_others_are_gone_those_that_owe_an_answer_are_waited_for() -> None:
    grid = Grid(**dict.fromkeys(("n70", "n30", "n10"), silent))
    engine = FlowerEngine(grid, SITES, deadline=0.02, poll=0.005)
    engine.exchange(MESSAGES)
    grid.offline = {90}
    asked = [identifier for identifier, client in engine._owed.items() if client == 3]
    grid.nodes[30] = echo
    pull, looks = grid.pull_messages, []

    def late(message_ids: Iterable[str]) -> list[Any]:
        looks.append(1)
        if len(looks) == 4:  # its old answer comes while there is nobody else to wait for
            grid.come(asked[0], *echo(30, asked[0], b"old"))
        return pull(message_ids)

    grid.pull_messages = late  # type: ignore[method-assign]
    engine._deadline = 5
    answers = engine.exchange(MESSAGES)
    assert answers[3] == b"from 30: to 3"
    assert {c: a.code for c, a in answers.items() if isinstance(a, Failure)} == {7: "busy", 1: "busy", 9: "away"}
    assert not any(a.sent for a in answers.values() if isinstance(a, Failure))


def comes_back(grid: Grid, node: int, *, at: int) -> list[int]:
    """That node is there again at the so manieth look at who is."""
    usual, looks = grid.get_nodes, list[int]()

    def get_nodes() -> list[Any]:
        looks.append(1)
        if len(looks) == at:
            grid.offline.discard(node)
        return usual()

    grid.get_nodes = get_nodes  # type: ignore[method-assign]
    return looks


def test_an_exchange_begins_once_enough_sites_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.engines.flower.time.sleep", lambda seconds: None)
    grid, said = Grid(), list[str]()
    grid.offline = {10, 30, 90}
    comes_back(grid, 30, at=3)
    engine = FlowerEngine(grid, SITES, quorum=2, wait=60.0, note=said.append)
    replies = engine.exchange(MESSAGES)
    assert {c: r for c, r in replies.items() if c in (7, 3)} == good((7, 3))
    assert [replies[c].code for c in (9, 1)] == ["away", "away"]
    waits = ["waiting, 60 s at most: 1 of 2 sites that are needed are connected"] * 2
    assert said == [
        *waits,
        "client 1 is away: its site is not connected",
        "client 9 is away: its site is not connected",
    ]
    grid.offline = {90}
    engine.exchange(MESSAGES)
    assert said[4:] == ["client 1 is back"]
    assert engine.exchange({7: MESSAGES[7]}) == good([7])


def test_where_too_few_come_back_the_run_ends_and_no_round_is_used_up() -> None:
    grid = Grid()
    grid.offline = set(SITES.values())
    engine = FlowerEngine(grid, SITES, quorum=3, wait=0.05)
    with pytest.raises(
        RunError, match=r"sites: only 0 of 3 sites that are needed are connected, after 0\.05 s"
    ) as caught:
        engine.exchange(MESSAGES)
    assert caught.value.exit_code == 7
    assert grid.pushed == []


def test_a_secret_draw_waits_for_nobody_and_one_that_is_away_for_good_ends_no_run() -> None:
    """Else the wait would tell who was drawn; and with enough others there, a round is all that is lost."""
    grid, said = Grid(), list[str]()
    grid.offline = {10}
    for quorum in (0, 1, 3):
        engine = FlowerEngine(grid, SITES, quorum=quorum, wait=60.0, note=said.append)
        assert engine.exchange({1: MESSAGES[1]})[1].code == "away"
    grid.offline = set(SITES.values())
    assert FlowerEngine(grid, SITES, quorum=0, wait=60.0).exchange({1: MESSAGES[1]})[1].code == "away"
    assert grid.pushed == []
    assert said == ["client 1 is away: its site is not connected"] * 3  # as it is, whoever was drawn


def test_an_exchange_in_whose_midst_all_went_away_is_begun_anew_when_one_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nestling.engines.flower.time.sleep", lambda seconds: None)
    grid = Grid()

    def goes(node: int, identifier: str, body: bytes) -> list[Reply]:
        grid.offline.add(node)
        grid.nodes[node] = echo
        return [Reply(Error(5, "gone"), to=identifier, sender=SERVER)]

    for node in SITES.values():
        grid.nodes[node] = goes
    comes_back(grid, 90, at=4)
    replies = FlowerEngine(grid, SITES, wait=60.0).exchange(MESSAGES)
    assert replies.pop(9) == b"from 90: to 9"
    assert {r.code for r in replies.values() if isinstance(r, Failure)} == {"away"}


def test_what_ends_all_sites_again_and_again_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.engines.flower.time.sleep", lambda seconds: None)
    grid = Grid()

    def goes(node: int, identifier: str, body: bytes) -> list[Reply]:
        grid.offline.add(node)
        return [Reply(Error(5, "gone"), to=identifier, sender=SERVER)]

    for node in SITES.values():
        grid.nodes[node] = goes
    usual = grid.get_nodes

    def get_nodes() -> list[Any]:
        found = usual()
        grid.offline.clear()  # they are back before the next look
        return found

    grid.get_nodes = get_nodes  # type: ignore[method-assign]
    replies = FlowerEngine(grid, SITES, wait=60.0, poll=0.005).exchange(MESSAGES)
    assert {r.code for r in replies.values() if isinstance(r, Failure)} == {"node_lost"}
    assert len(grid.pushed) == 3 * len(SITES)


def test_stragglers_are_not_waited_for_once_the_others_have_replied() -> None:
    grid = Grid(n90=silent)
    replies = exchange(grid, stragglers=1, deadline=0.0)  # no deadline: it would wait for ever
    assert replies[9] == Failure("late", "client 9 was slower than the 3 that were enough")
    assert {c: r for c, r in replies.items() if c != 9} == good((7, 3, 1))


def test_more_replies_in_one_look_than_are_enough_are_enough() -> None:
    replies = exchange(Grid(n90=silent), stragglers=2, deadline=0.0)  # no deadline: it would wait for ever
    assert replies[9] == Failure("late", "client 9 was slower than the 3 that were enough")


@pytest.mark.parametrize("stragglers", [1, 2])
def test_where_all_may_be_stragglers_all_are_asked_and_waited_for(stragglers: int) -> None:
    grid = Grid()
    engine = FlowerEngine(grid, SITES, deadline=5.0, stragglers=stragglers, poll=0.005)
    assert engine.exchange({7: MESSAGES[7]}) == good([7])


def test_a_reply_that_cannot_be_read_takes_no_other_with_it_and_the_server_that_is_gone_ends_the_run() -> None:
    import httpx

    grid = Grid(n30=lambda *_: [ValueError("garbage")])
    replies = exchange(grid)
    assert replies[3] == Failure("malformed_reply", "client 3: cannot be read (ValueError)")
    assert {c: r for c, r in replies.items() if c != 3} == good((7, 9, 1))
    with pytest.raises(httpx.ConnectError):
        exchange(Grid(n30=lambda *_: [httpx.ConnectError("gone")]))


def test_a_message_lives_as_long_as_it_is_told() -> None:
    grid = Grid()
    FlowerEngine(grid, SITES, ttl=77.0, poll=0.005).exchange(MESSAGES)
    assert grid.lives == {77.0}


def test_a_node_that_began_anew_has_lost_its_message_and_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(n90=silent, n30=silent)
    engine = FlowerEngine(grid, SITES, deadline=0.05, poll=0.005)
    engine.exchange(MESSAGES)
    assert engine.busy == [3, 9]
    grid.since[90], grid.nodes[90] = "one o'clock", echo  # between two exchanges
    replies = engine.exchange(MESSAGES)
    assert {c: r for c, r in replies.items() if c != 3} == good((7, 9, 1))
    assert replies[3].code == "busy"

    monkeypatch.setattr("nestling.engines.flower._LOOK_AT_NODES", 0.0)

    def restart(node: int, identifier: str, body: bytes) -> list[Reply]:
        grid.since[node] = "two o'clock"
        return []

    grid.nodes[90] = restart
    engine = FlowerEngine(grid, SITES, poll=0.005)  # no deadline: it would wait for ever
    assert engine.exchange({9: MESSAGES[9]}) == {9: Failure("node_lost", "client 9: its site has begun anew")}


def test_what_a_node_answered_before_it_began_anew_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.engines.flower._LOOK_AT_NODES", 0.0)
    grid = Grid()

    def answer_and_restart(node: int, identifier: str, body: bytes) -> list[Reply]:
        grid.since[node] = "one o'clock"
        return echo(node, identifier, body)

    grid.nodes[90] = answer_and_restart
    assert exchange(grid) == good()


def test_flower_says_since_when_a_node_is_connected() -> None:
    from flwr.proto.node_pb2 import NodeInfo

    assert "last_activated_at" in NodeInfo.DESCRIPTOR.fields_by_name


def test_two_clients_cannot_have_one_node() -> None:
    with pytest.raises(ConfigError, match="sites"):
        FlowerEngine(Grid(), {1: 10, 2: 10})


def test_without_the_pinned_flower_the_import_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.metadata, "version", lambda name: "1.43.0")
    with pytest.raises(ContextError, match=r"made for 1\.42.*nestling\[flower\]"):
        compat.require()
    program = """
import sys
from importlib import metadata

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.version = missing
from nestling.core.errors import ContextError
try:
    import nestling.engines.flower
except ContextError as error:
    print(error)
assert "flwr" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "flwr: is not installed. pip install 'nestling[flower]'\n"


def test_flower_is_silent_before_it_is_imported() -> None:
    program = (
        "import os\nos.environ.pop('FLWR_TELEMETRY_ENABLED', None)\nos.environ.pop('FLWR_DISABLE_UPDATE_CHECK', None)\n"
        "import nestling.engines.flower_compat\nimport sys\nassert 'flwr' not in sys.modules\n"
        "print(os.environ['FLWR_TELEMETRY_ENABLED'], os.environ['FLWR_DISABLE_UPDATE_CHECK'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
