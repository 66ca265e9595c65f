"""A run begins when every client has its site, each is who its key says, and each holds the base."""

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra nestling[flower]")

from nestling.core.errors import ContextError, RunError
from nestling.core.types import Failure
from nestling.deploy.folder import LONGEST_CALL
from nestling.deploy.protocol import PIECE, Hello, Ready, count_pieces, from_piece, read, write
from nestling.deploy.proxy import GRACE, START
from nestling.deploy.sites import Sites, gather
from nestling.engines import flower_compat as compat
from nestling.engines.flower import from_record, kind_of, to_record, to_refusal

compat.pretend_task()
BASE = bytes(PIECE) + b"end"
HELLO = Hello("name = 'x'", "0" * 64, count_pieces(BASE), "f" * 32)


class Site:
    """Says it is ready once it has all pieces."""

    def __init__(self, client: int, *, has_base: bool = True, limit: int = 60) -> None:
        self.client, self.has_base, self.limit, self.got = client, has_base, limit, b""

    def __call__(self, kind: str, body: bytes) -> bytes | Failure:
        if kind == "hello":
            assert read(Hello, body) == HELLO
        else:
            assert kind == "base"
            number, piece = from_piece(body)
            assert number * PIECE == len(self.got)
            self.got += piece
            self.has_base = self.got == BASE
        return write(Ready(self.client, self.has_base, 10 * (self.client + 1), -(-len(self.got) // PIECE), self.limit))


class Grid:
    """Nodes that appear one after the other, one more at each look."""

    def __init__(self, *nodes: tuple[int, Callable[[str, bytes], bytes | Failure | None]], all_at_once: bool = True):
        self.nodes, self.waiting, self.looks = nodes, list[Any](), len(nodes) if all_at_once else 0

    def get_nodes(self) -> list[Any]:
        self.looks += 1
        return [SimpleNamespace(node_id=node) for node, _ in self.nodes[: self.looks]]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"m{id(message)}-{len(self.waiting)}-{message.metadata.dst_node_id}")
            node = message.metadata.dst_node_id
            answer = dict(self.nodes)[node](kind_of(message.content), from_record(message.content))
            if answer is not None:
                record = to_refusal(answer) if isinstance(answer, Failure) else to_record(answer)
                facts = SimpleNamespace(reply_to_message_id=ids[-1], src_node_id=node)
                self.waiting.append(SimpleNamespace(metadata=facts, content=record, has_error=lambda: False))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        ids = set(message_ids)
        come = [reply for reply in self.waiting if reply.metadata.reply_to_message_id in ids]
        self.waiting = [reply for reply in self.waiting if reply not in come]
        return come


def gathered(grid: Grid, *, registered: dict[int, int] | None = None, wait: float = 10.0, **more: Any) -> Sites:
    return gather(grid, [0, 1], HELLO, BASE, wait=wait, registered=registered, poll=0.005, **more)


@pytest.mark.parametrize("registered", [None, {0: 50, 1: 60, 7: 70}])
def test_sites_are_found_one_by_one_and_those_that_lack_the_base_are_sent_it(registered: dict[int, int] | None) -> None:
    lacking, said = Site(1, has_base=False, limit=90), list[str]()
    sites = gathered(Grid((60, lacking), (50, Site(0)), all_at_once=False), registered=registered, note=said.append)
    assert sites == Sites({0: 50, 1: 60}, 30, START + 90 + GRACE)
    assert lacking.got == BASE
    assert said[0].startswith("waiting for the sites of clients 0, 1")
    assert any("piece 2 of 2" in line for line in said)


def test_a_missing_site_ends_the_wait_with_its_name() -> None:
    with pytest.raises(RunError, match=r"sites of clients 1: are not there after 0\.05 s"):
        gathered(Grid((50, Site(0))), wait=0.05)


def test_a_site_that_does_not_answer_is_named_with_the_reason() -> None:
    with pytest.raises(RunError, match=r"sites of clients 1: .*late: client 1 did not answer"):
        gathered(Grid((50, Site(0)), (60, lambda kind, body: None)), registered={0: 50, 1: 60}, wait=0.05)


def test_a_site_that_refuses_ends_the_run_at_once() -> None:
    def refuses(kind: str, body: bytes) -> Failure:
        return Failure("context", "base: is 012, this site has agreed to abc")

    with pytest.raises(ContextError, match=r"the site of client 1: refuses: .*agreed to abc"):
        gathered(Grid((50, Site(0)), (60, refuses)), registered={0: 50, 1: 60})


def test_a_site_cannot_choose_which_client_it_is() -> None:
    with pytest.raises(ContextError, match="the site of client 1: says it is client 0"):
        gathered(Grid((50, Site(0)), (60, Site(0))), registered={0: 50, 1: 60})


@pytest.mark.parametrize("other", [0, 2])
def test_without_keys_two_sites_are_not_one_client_and_none_is_another(other: int) -> None:
    with pytest.raises(ContextError, match=f"node 60: says it is client {other}"):
        gathered(Grid((50, Site(0)), (60, Site(other))))


def test_nodes_without_a_key_on_the_list_are_not_asked() -> None:
    def asked(kind: str, body: bytes) -> bytes:
        raise AssertionError

    sites = gathered(Grid((40, asked), (50, Site(0)), (60, Site(1))), registered={0: 50, 1: 60})
    assert sites.nodes == {0: 50, 1: 60}


def test_a_site_that_never_has_enough_is_refused() -> None:
    def never(kind: str, body: bytes) -> bytes:
        return write(Ready(0, False, 0, 5, 60))

    with pytest.raises(ContextError, match="a piece that there is not"):
        gathered(Grid((50, never), (60, Site(1))), registered={0: 50, 1: 60})


def test_cat_055_a_worker_killed_between_two_pieces_is_sent_them_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    site, killed = Site(1, has_base=False), list[int]()

    def once(kind: str, body: bytes) -> bytes | Failure:
        if kind == "base" and from_piece(body)[0] == 1 and not killed:
            killed.append(1)
            site.got = b""
            return Failure("begun_anew", "the worker is younger than the hello")
        return site(kind, body)

    assert gathered(Grid((50, Site(0)), (60, once)), registered={0: 50, 1: 60}).nodes == {0: 50, 1: 60}
    assert (killed, site.got) == ([1], BASE)


@pytest.mark.parametrize("code", ["worker_died", "hung", "client_error", "busy"])
def test_a_worker_that_dies_at_the_greeting_is_greeted_again_and_not_at_once(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, pauses = list[str](), list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)

    def dies_twice(kind: str, body: bytes) -> bytes | Failure:
        asked.append(kind)
        return Failure(code, "") if len(asked) < 3 else Site(1)(kind, body)

    assert gathered(Grid((50, Site(0)), (60, dies_twice)), registered={0: 50, 1: 60}).nodes == {0: 50, 1: 60}
    assert asked == ["hello"] * 3
    assert pauses.count(1.0) == 2


@pytest.mark.parametrize(
    ("examples", "limit"), [(2**31, 60), (2**63 - 1, 60), (10, 0), (10, LONGEST_CALL + 1), (10, 2**63 - 1)]
)
def test_a_site_whose_numbers_no_run_can_use_is_named(examples: int, limit: int) -> None:
    """Two sites of 2^31 items would be one too many for a message's field, which is that of the whole run."""
    with pytest.raises(ContextError, match=r"the site of client 1: says it has [0-9,]+ items, and [0-9,]+ s for a"):
        gathered(
            Grid((50, Site(0)), (60, lambda kind, body: write(Ready(1, True, examples, 0, limit)))),
            registered={0: 50, 1: 60},
        )
    most = Ready(1, True, 2**31 - 1, 0, LONGEST_CALL)
    sites = gathered(Grid((50, Site(0)), (60, lambda kind, body: write(most))), registered={0: 50, 1: 60})
    assert sites.examples < 2**32
