"""The engine over Flower: our bytes, as one entry of one record, to nodes on other machines and back.

    push the messages    →    pull until all have answered, the deadline, or enough have    →    reply or Failure

Flower carries the bytes and knows who a node is; who is asked, how long is waited and what a reply is worth are ours. A
message is answered once, by the node that it was sent to, or the answer counts for nothing. A node that has not
answered is not sent another message until it has, or until it has gone or begun anew, or until the message expires: a
hung client costs its own replies and never a later round. Sites that leave use up no rounds: where too few are there,
it is waited. Only `push_messages`, `pull_messages` and `get_nodes` of Flower's grid are used.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from nestling.core.errors import ConfigError, RunError
from nestling.core.types import Failure
from nestling.engines import flower_compat as compat
from nestling.runs.files import printable

compat.require()
from flwr.app import ConfigRecord, Message, MessageType, RecordDict  # noqa: E402

RECORD, BODY, KIND = "nestling", "body", "kind"
"""The one record of a message, the bytes in it, and what they are for (`deploy/protocol.py`)."""
CODE, DETAIL = "code", "detail"
"""In the place of the bytes: why there are none."""

ROUND = "round"
_STABLE = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_LONGEST_DETAIL = 500
_SHARE, _LONGEST_PAUSE = 0.05, 2.0
"""A look costs both sides some milliseconds, so it may come late by this share of a round."""
_LOOK_AT_NODES = 10.0
"""Seconds between two looks at which nodes are connected, and since when."""
_BEGUN_ANEW = 2
"""So often at most: what ends every site that is asked would else be asked for ever."""


def to_record(body: bytes, kind: str = ROUND) -> RecordDict:
    """What travels to a node, or from it. Raises nothing.

    >>> from_record(to_record(b"hello"))
    b'hello'
    """
    return RecordDict({RECORD: ConfigRecord({KIND: kind, BODY: body})})


def to_refusal(failure: Failure) -> RecordDict:
    """What a client sends that has no bytes to send.

    >>> from_record(to_refusal(Failure("no_data", "has no training items")))
    Failure(code='no_data', detail='has no training items', trace='', sent=True)
    """
    return RecordDict({RECORD: ConfigRecord({CODE: failure.code, DETAIL: failure.detail[:_LONGEST_DETAIL]})})


def from_record(content: RecordDict) -> bytes | Failure:
    """The bytes in a record, or the reason why there are none; whatever else came is a `malformed_reply`."""
    record: Any = content.get(RECORD) if len(content) == 1 else None
    if isinstance(record, ConfigRecord):
        values = dict(record)
        if set(values) == {KIND, BODY} and isinstance(values[BODY], bytes):
            body: bytes = values[BODY]
            return body
        refused = set(values) == {CODE, DETAIL} and all(isinstance(value, str) for value in values.values())
        if refused and _STABLE.fullmatch(values[CODE]):
            return Failure(values[CODE], _plain(values[DETAIL]))
    return Failure("malformed_reply", f"is no record of one entry of bytes ({', '.join(map(str, content))[:80]})")


def kind_of(content: RecordDict) -> str:
    """What a message is for; empty if it does not say."""
    record: Any = content.get(RECORD)
    kind = record.get(KIND, "") if isinstance(record, ConfigRecord) else ""
    return kind if isinstance(kind, str) else ""


@runtime_checkable
class Grid(Protocol):
    """What is used of `flwr.serverapp.Grid`."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]: ...
    def get_nodes(self) -> Iterable[Any]: ...


@dataclass
class _Asked:
    """An exchange that is not over: who has which message, who waits for one, and what has come."""

    pending: dict[str, int] = field(default_factory=dict)
    answers: dict[int, bytes | Failure] = field(default_factory=dict)


class FlowerEngine:
    """Sends each client's message to its node, and waits for the replies as the in-process engine does.

    Args:
        grid: Flower's.
        sites: the node of each client; a node has one client, for it works on one message at a time.
        deadline: seconds for one exchange; 0: as long as it takes, which a node that hangs can make hours.
        stragglers: so many clients are not waited for once the others have replied, if there are others.
        ttl: seconds after which a message expires, and its answer is not waited for any more; Flower gives each message
            to its node once, so that what is lost on the way is known by nothing else.
        poll: seconds between two looks at what has come; they grow to a twentieth of the time waited, up to 2.
        quorum: so many sites have to be connected before an exchange begins; 0: it begins in any case.
        wait: seconds to wait for them; 0: it begins in any case. An exchange in the midst of which all that were asked
            went away, and too few are left, is begun anew when there are enough, up to twice; bytes count it once.
        note: told what is waited for, and which clients' sites have gone or come back.

    A client that has no reply has a `Failure`, of code

    | code | what happened |
    |---|---|
    | `no_site` | it has no node |
    | `away` | its node is not connected, and was sent nothing |
    | `node_lost` | its node went away or began anew before it answered |
    | `busy` | its node still owes the answer to an earlier message |
    | `late` | no answer by the deadline, before the others were enough, or before its message expired |
    | `client_error` | its app raised or died |
    | `malformed_reply` | the answer cannot be read, or is no record of ours |
    | `wrong_sender` | another node answered its message |
    | `misaddressed` | what answers its message says that it answers another |
    | `duplicate` | its message was answered twice, and not alike |
    | `not_sent` | Flower did not take the message |

    and whatever codes clients themselves give for declining (`no_data`, `context` …).

    Raises `ConfigError` if two clients have one node; `exchange` raises `RunError` if too few came back in time.
    """

    def __init__(
        self,
        grid: Grid,
        sites: Mapping[int, int],
        *,
        deadline: float = 0.0,
        stragglers: int = 0,
        ttl: float = 43200.0,
        poll: float = 0.1,
        quorum: int = 1,
        wait: float = 0.0,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        if len(set(sites.values())) != len(sites):
            raise ConfigError("two clients have one node", where="sites", remedy="Give each client a site of its own.")
        self._grid, self._sites = grid, dict(sites)
        self._deadline, self._stragglers, self._ttl, self._poll = deadline, stragglers, ttl, poll
        self._quorum, self._wait, self._note = quorum, wait, note
        self._away = set[int]()
        self._owed: dict[str, int] = {}
        """Messages of earlier exchanges that have no answer yet, and their clients."""
        self._since: dict[int, str] = {}
        """Since when a client's node had been connected as it was last sent a message."""

    @property
    def busy(self) -> list[int]:
        """Clients whose node owes an answer to an earlier exchange."""
        return sorted(self._owed.values())

    def exchange(self, messages: Mapping[int, bytes], *, kind: str = ROUND) -> dict[int, bytes | Failure]:
        """Replies by client, in the order of the messages."""
        answers = dict[int, bytes | Failure]()
        for _ in range(_BEGUN_ANEW + 1):
            self._until_there()
            answers = self._once(messages, kind)
            gone = (isinstance(answer, Failure) and answer.code in ("away", "node_lost") for answer in answers.values())
            if not all(gone) or self._missing() == 0:
                break
        return answers

    def _missing(self) -> int:
        """How many sites have to come back before an exchange may begin: of all, not of those that are asked, for who
        is asked may be a secret, and a round whose only client is away for good is one that is lost."""
        needed = min(self._quorum, len(self._sites)) if self._wait else 0
        return max(0, needed - len(self._connected().keys() & set(self._sites.values()))) if needed else 0

    def _until_there(self) -> None:
        """Return when enough of them are connected. Raises `RunError` if that takes too long."""
        until, needed = time.monotonic() + self._wait, min(self._quorum, len(self._sites))
        while missing := self._missing():
            there = needed - missing
            said = f"{there} of {needed} sites that are needed are connected"
            if time.monotonic() >= until:
                raise RunError(
                    f"only {said}, after {self._wait:g} s",
                    where="sites",
                    remedy="'nestling keys list' says which are; then go on with the run.",
                )
            self._note(f"waiting, {self._wait:g} s at most: {said}")
            time.sleep(min(1.0, self._wait))

    def _once(self, messages: Mapping[int, bytes], kind: str) -> dict[int, bytes | Failure]:
        asked, began = _Asked(), time.monotonic()
        online, seen = self._connected(), began
        self._tell_who_is_away({client for client, node in self._sites.items() if node not in online})
        waiting = dict(messages)
        for client in messages:
            if client not in self._sites:
                asked.answers[client] = Failure("no_site", f"client {client} has no site", sent=False)
            elif self._sites[client] not in online:
                asked.answers[client] = Failure("away", f"client {client}: its site is not connected", sent=False)
            if client in asked.answers:
                del waiting[client]
        enough = len(messages) - self._stragglers if self._stragglers else -1
        over = ""
        while True:
            look = time.monotonic()
            if look - seen >= _LOOK_AT_NODES:
                online, seen = self._connected(), look
            self._pull(asked)  # after the look at the nodes, so that what one answered before it ended still counts
            self._forget_lost(asked, online)
            replies = sum(isinstance(answer, bytes) for answer in asked.answers.values())
            if 0 < enough <= replies:
                over = f"was slower than the {replies} that were enough"
            if over:
                break
            free = {c: m for c, m in waiting.items() if c not in self._owed.values()}
            self._push(asked, free, kind, online)
            waiting = {c: m for c, m in waiting.items() if c not in free}
            # Those that owe an answer keep no round open, unless it has no other reply, and a deadline.
            nothing_else = replies == 0 and self._deadline > 0
            if not (asked.pending or (waiting and nothing_else)):
                break
            now = time.monotonic()
            waited = now - began
            pause = max(self._poll, now - look, min(_LONGEST_PAUSE, waited * _SHARE))
            time.sleep(max(0.0, min(pause, self._deadline - waited)) if self._deadline else pause)
            if self._deadline and time.monotonic() - began >= self._deadline:  # with one last look at what has come
                over = f"did not answer within {self._deadline:g} s"
        for identifier, client in asked.pending.items():
            self._owed[identifier] = client
            asked.answers[client] = Failure("late", f"client {client} {over}")
        for client in waiting:
            asked.answers[client] = Failure(
                "busy", f"client {client} still owes the answer to an earlier message", sent=False
            )
        return {client: asked.answers[client] for client in messages}

    def _tell_who_is_away(self, away: set[int]) -> None:
        for client in sorted(away - self._away):
            self._note(f"client {client} is away: its site is not connected")
        for client in sorted(self._away - away):
            self._note(f"client {client} is back")
        self._away = away

    def _connected(self) -> dict[int, str]:
        """The nodes that are there, and since when."""
        return {int(node.node_id): str(getattr(node, "last_activated_at", "")) for node in self._grid.get_nodes()}

    def _push(self, asked: _Asked, messages: Mapping[int, bytes], kind: str, online: Mapping[int, str]) -> None:
        if not messages:
            return
        records = {body: to_record(body, kind) for body in set(messages.values())}  # one record for a broadcast
        made = [Message(records[b], self._sites[c], MessageType.TRAIN, ttl=self._ttl) for c, b in messages.items()]
        identifiers: list[str | None] = list(self._grid.push_messages(made))
        identifiers += [None] * (len(made) - len(identifiers))
        for client, identifier in zip(messages, identifiers, strict=True):
            if identifier:
                asked.pending[str(identifier)] = client
                self._since[client] = online.get(self._sites[client], "")
            else:
                asked.answers[client] = Failure("not_sent", f"client {client}: the message was not taken", sent=False)

    def _pull(self, asked: _Asked) -> None:
        """Take what has come, message by message: whatever is pulled is taken from the server, and what one node has
        sent may be such that Flower fails to read it, and all that came with it."""
        for identifier, client in [*asked.pending.items(), *self._owed.items()]:
            answers = self._answers_to(identifier, client)
            if not answers:
                continue
            if self._owed.pop(identifier, None) is not None:  # too late to count, and its node is free again
                continue
            del asked.pending[identifier]
            if any(answer != answers[0] for answer in answers):
                answers = [Failure("duplicate", f"client {client} answered twice, and not alike")]
            asked.answers[client] = answers[0]

    def _forget_lost(self, asked: _Asked, online: Mapping[int, str]) -> None:
        """Those whose node has begun anew since it was sent a message. Of nodes that are not there Flower says so."""
        for identifier, client in [*asked.pending.items(), *self._owed.items()]:
            if online.get(self._sites[client], self._since[client]) != self._since[client]:
                self._owed.pop(identifier, None)
                if asked.pending.pop(identifier, None) is not None:
                    asked.answers[client] = Failure("node_lost", f"client {client}: its site has begun anew")

    def _answers_to(self, identifier: str, client: int) -> list[bytes | Failure]:
        try:
            return [self._answer(reply, identifier, client) for reply in self._grid.pull_messages([identifier])]
        except Exception as error:
            if compat.is_of_connection(error):
                raise
            return [Failure("malformed_reply", f"client {client}: cannot be read ({type(error).__name__})")]

    def _answer(self, reply: Any, identifier: str, client: int) -> bytes | Failure:
        if str(reply.metadata.reply_to_message_id) != identifier:  # it is what the node wrote, whatever Flower knows
            return Failure("misaddressed", f"client {client} answered no message of its own")
        if reply.has_error():
            code = {compat.NODE_LOST: "node_lost", compat.EXPIRED: "late"}.get(reply.error.code, "client_error")
            return Failure(code, f"client {client}: {_plain(str(reply.error.reason))} (code {reply.error.code})")
        sender = int(reply.metadata.src_node_id)
        if sender != self._sites[client]:
            return Failure("wrong_sender", f"client {client}: node {sender} answered in its place")
        answer = from_record(reply.content)
        if isinstance(answer, Failure):
            return Failure(answer.code, f"client {client}: {answer.detail}")
        return answer


def _plain(text: str) -> str:
    return printable(text.partition("\n")[0])[:_LONGEST_DETAIL]
