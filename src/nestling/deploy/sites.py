"""Before the first round: which node is which client, and whether each has what it needs.

    wait for the nodes    →    hello to each    →    the base's pieces to those that lack it    →    all are ready

Where nodes have registered keys, the key decides which client a node is, and a site that says otherwise is refused;
without authentication there is only the site's word.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nestling.core.errors import ContextError, RunError, WireError
from nestling.core.types import Failure
from nestling.deploy.folder import LONGEST_CALL
from nestling.deploy.protocol import BASE, HELLO, Hello, Ready, read, to_piece, write
from nestling.deploy.proxy import GRACE, START
from nestling.engines.flower import FlowerEngine, Grid

TRY_AGAIN = ("late", "busy", "away", "node_lost", "not_sent", "worker_died", "hung", "client_error", "begun_anew")
"""What may be better a moment later; a site that refuses will refuse again."""


@dataclass(frozen=True)
class Sites:
    """The node of each client, how many training items all have together, and after how many seconds no site is still
    at work on a message: the longest that a worker may take to start, and then to answer or be ended."""

    nodes: dict[int, int]
    examples: int
    patience: float


def gather(
    grid: Grid,
    clients: Sequence[int],
    hello: Hello,
    base: bytes,
    *,
    wait: float,
    registered: Mapping[int, int] | None,
    note: Callable[[str], object] = lambda text: None,
    poll: float = 0.2,
) -> Sites:
    """Wait until every client has a site that is ready.

    Args:
        grid: Flower's.
        clients: all that may be asked in a run.
        hello: what a site is told.
        base: the tensors that a site may ask for, piece by piece.
        wait: seconds for all of it.
        registered: the node of each client that has a key; None: sites say themselves which client they are.
        note: told what is waited for.

    Raises `RunError` if sites are missing when the time is over, `ContextError` if one refuses or is not who it says.
    """
    until, ready = time.monotonic() + wait, dict[int, tuple[int, Ready]]()
    why: dict[int, Failure] = {}
    while missing := [client for client in clients if client not in ready]:
        left = until - time.monotonic()
        reasons = "; ".join(sorted({f"{f.code}: {f.detail}" for f in why.values()})[:3])
        reasons = f" ({reasons})" if reasons else ""
        if left <= 0:
            raise RunError(
                f"are not there after {wait:g} s{reasons}",
                where=f"sites of clients {', '.join(map(str, missing[:10]))}",
                remedy="See that 'nestling join' runs there, and that its key is in 'nestling keys list'.",
            )
        known = {node for node, _ in ready.values()}
        nodes = [int(node.node_id) for node in grid.get_nodes() if int(node.node_id) not in known]
        if registered is not None:
            asked = {client: registered[client] for client in missing if registered.get(client) in nodes}
        else:
            asked = {-1 - number: node for number, node in enumerate(nodes)}
        note(f"waiting for the sites of clients {', '.join(map(str, missing[:10]))}{reasons}")
        if not asked:
            time.sleep(min(1.0, max(left, 0.01)))
            continue
        why.clear()
        for number, answer in _greet(grid, asked, hello, base, deadline=left, poll=poll, note=note).items():
            if isinstance(answer, Failure):
                if answer.code not in TRY_AGAIN:
                    raise ContextError(
                        f"refuses: {answer.detail.rstrip('.')}",
                        where=_called(number, asked),
                        remedy="See worker.log there.",
                    )
                why[number] = answer
                continue
            client = answer.client if number < 0 else number
            if answer.client != client or client in ready or (number < 0 and client not in clients):
                raise ContextError(
                    f"says it is client {answer.client}",
                    where=_called(number, asked),
                    remedy="Each site is another client: see --client of 'nestling join', and 'nestling keys list'.",
                )
            if answer.examples >= 2**32 // len(clients) or not 0 < answer.limit <= LONGEST_CALL:
                raise ContextError(
                    f"says it has {answer.examples:,} items, and {answer.limit:,} s for a call",
                    where=_called(number, asked),
                    remedy=f"All together have fewer than 2^32 items; a call takes 1 to {LONGEST_CALL:,} s.",
                )
            ready[client] = (asked[number], answer)
        if why:  # each greeting starts a process at the site
            time.sleep(max(0.0, min(1.0, until - time.monotonic())))
    said = {client: ready[client] for client in clients}
    patience = START + GRACE + max((answer.limit for _, answer in said.values()), default=0)
    examples = sum(answer.examples for _, answer in said.values())
    return Sites({client: node for client, (node, _) in said.items()}, examples, patience)


def _called(number: int, asked: Mapping[int, int]) -> str:
    return f"the site of client {number}" if number >= 0 else f"node {asked[number]}"


def _greet(
    grid: Grid,
    asked: Mapping[int, int],
    hello: Hello,
    base: bytes,
    *,
    deadline: float,
    poll: float,
    note: Callable[[str], object],
) -> dict[int, Ready | Failure]:
    """What each node says to the hello and to whatever pieces it needs after it."""
    engine = FlowerEngine(grid, asked, deadline=deadline, poll=poll)
    said = {n: _read(a) for n, a in engine.exchange(dict.fromkeys(asked, write(hello)), kind=HELLO).items()}
    for _ in range(hello.pieces):
        needed = {n: a.piece for n, a in said.items() if isinstance(a, Ready) and not a.ready}
        if not needed:
            break
        for n in [n for n, piece in needed.items() if piece >= hello.pieces]:
            said[n] = Failure("hello", "asks for a piece that there is not")
            del needed[n]
        note(f"sending the base to {len(needed)} sites, piece {min(needed.values(), default=0) + 1} of {hello.pieces}")
        sent = engine.exchange({n: to_piece(base, piece) for n, piece in needed.items()}, kind=BASE)
        said |= {n: _read(answer) for n, answer in sent.items()}
    for n in [n for n, answer in said.items() if _unready(answer)]:
        said[n] = Failure("hello", "has the base and is not ready")
    return said


def _unready(answer: Ready | Failure) -> bool:
    return isinstance(answer, Ready) and not answer.ready


def _read(answer: bytes | Failure) -> Ready | Failure:
    if isinstance(answer, Failure):
        return answer
    try:
        return read(Ready, answer)
    except WireError as error:
        return Failure("malformed_reply", str(error))
