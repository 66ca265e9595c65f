"""Rounds with engines that lose, spoil and reorder: the loop goes on, counts every byte, and stops when it should."""

import gc
import os
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from small import START, Answers, agree, forge, honest, received

from nestling.config.schema import ServerConfig
from nestling.core.errors import RunError
from nestling.core.types import Failure
from nestling.engines.inprocess import InProcessEngine
from nestling.federation.agreement import Agreement
from nestling.federation.loop import Round, run_rounds
from nestling.federation.server import Server


def federate(
    engine, agreed: Agreement, *, clients: Sequence[int] = (0, 1, 2, 3), rounds: int = 3, per_round: int = 0,
    patience: int = 3, seed: int = 0, **settings,
) -> tuple[Server, list[Round]]:  # fmt: skip
    server = Server(START, agreed, ServerConfig(**settings), total_weight=100)
    done = run_rounds(
        server, engine, clients, lambda state: float(state[0]), rounds=rounds, per_round=per_round, patience=patience,
        seed=seed,
    )  # fmt: skip
    return server, list(done)


def with_one_bad(agreed: Agreement, bad: int, spoil) -> Answers:
    good = honest(agreed)

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        replies: dict[int, bytes | Failure] = {client: good(client, message) for client, message in messages.items()}
        if bad in replies:
            spoil(replies)
        return replies

    return Answers(answers)


def set_nan(replies: dict) -> None:
    replies[2] = forge(replies[2], body=np.full(11, np.nan, "<f4").tobytes())


def cut(replies: dict) -> None:
    replies[2] = replies[2][:40]


def copy_another(replies: dict) -> None:
    replies[2] = replies[1]


def lose(replies: dict) -> None:
    del replies[2]


def claim(replies: dict) -> None:
    replies[2] = forge(replies[2], num_examples=10**9)


@pytest.mark.parametrize("send", ["delta", "state"])
@pytest.mark.parametrize("spoil", [set_nan, cut, copy_another, lose, claim])
def test_cat_030_a_run_with_a_bad_client_ends_as_one_without_it(spoil, send: str) -> None:
    agreed = agree(send=send)
    server, done = federate(with_one_bad(agreed, 2, spoil), agreed)
    clean, _ = federate(InProcessEngine([honest(agreed)]), agreed, clients=(0, 1, 3))
    assert server.state.tobytes() == clean.state.tobytes()
    codes = {set_nan: "non_finite", cut: "short", copy_another: "client", lose: "no_reply", claim: "num_examples"}
    for finished in done:
        assert {client: failure.code for client, failure in finished.refused.items()} == {2: codes[spoil]}
        assert finished.used
        assert sorted(finished.replies) == [0, 1, 2, 3]


def test_cat_053_a_client_that_raises_costs_only_its_own_reply() -> None:
    agreed = agree()
    good = honest(agreed)

    def handler(client: int, message: bytes) -> bytes:
        if client == 2:
            raise MemoryError("out of memory")
        return good(client, message)

    server, done = federate(InProcessEngine([handler, handler]), agreed)
    clean, _ = federate(InProcessEngine([good]), agreed, clients=(0, 1, 3))
    assert server.state.tobytes() == clean.state.tobytes()
    failure = done[0].refused[2]
    assert failure.code == "client_error"
    assert "out of memory" in failure.detail
    assert "MemoryError" in failure.trace


def test_cat_047_049_when_all_replies_are_bad_the_state_stays_and_the_run_stops() -> None:
    agreed = agree()
    engine = Answers(lambda messages: {c: Failure("no_data", f"client {c}: has no training items") for c in messages})
    server = Server(START, agreed, ServerConfig(), total_weight=100)
    rounds = run_rounds(
        server, engine, [0, 1], lambda state: 0.5, rounds=10, per_round=0, patience=2, seed=0
    )  # fmt: skip
    seen = [next(rounds), next(rounds)]
    with pytest.raises(RunError) as caught:
        next(rounds)
    assert caught.value.exit_code == 7
    assert "no training items" in str(caught.value)
    assert caught.value.where == "round 2"
    assert caught.value.remedy
    assert [finished.used for finished in seen] == [False, False]
    assert len(engine.asked) == 2
    assert server.state.tobytes() == START.tobytes()


def test_cat_047_an_engine_that_brings_nothing_back_is_an_abandoned_round() -> None:
    with pytest.raises(RunError) as caught:
        federate(Answers(lambda messages: {}), agree(), patience=1)
    assert "did not answer" in str(caught.value)


def test_cat_049_patience_counts_rounds_in_a_row() -> None:
    agreed = agree()
    good, calls = honest(agreed), []

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        calls.append(messages)
        if len(calls) % 3 == 0:
            return {client: good(client, message) for client, message in messages.items()}
        return {}

    server, done = federate(Answers(answers), agreed, rounds=9, patience=3)
    assert [finished.used for finished in done] == [False, False, True] * 3
    assert server.state.tobytes() != START.tobytes()


def test_cat_048_fewer_replies_than_the_least_are_not_used() -> None:
    agreed = agree()
    engine = with_one_bad(agreed, 2, lose)
    server, done = federate(engine, agreed, rounds=2, min_replies=3, patience=3)
    assert [finished.used for finished in done] == [True, True]
    with pytest.raises(RunError):
        federate(engine, agreed, min_replies=4, patience=1)
    assert server.state.tobytes() != START.tobytes()


def test_a_mean_out_of_bounds_is_given_as_the_reason() -> None:
    from small import answer

    agreed = agree()
    push = np.full(11, 9_999, np.float32)
    engine = Answers(lambda messages: {c: answer(agreed, m, c, push) for c, m in messages.items()})
    with pytest.raises(RunError, match="out of bounds"):
        federate(engine, agreed, rounds=9, patience=2)


@pytest.mark.parametrize(("bits", "down_bits"), [(32, 32), (8, 4), (4, 16)])
def test_bytes_are_the_lengths_of_what_travelled_usable_or_not(bits: int, down_bits: int) -> None:
    agreed = agree(bits=bits, down_bits=down_bits)
    up, down = [], []

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        replies: dict[int, bytes | Failure] = {c: honest(agreed)(c, m) for c, m in messages.items()}
        replies[1] = b"nonsense of some length"
        replies[3] = Failure("no_data", "has none")
        up.append(sum(len(r) for r in replies.values() if isinstance(r, bytes)))
        down.append(sum(len(m) for m in messages.values()))
        return replies

    _, done = federate(Answers(answers), agreed)
    assert [finished.bytes_up for finished in done] == up
    assert [finished.bytes_down for finished in done] == down
    assert all(len(finished.accepted) == 2 for finished in done)


def test_what_was_sent_to_nobody_is_no_traffic() -> None:
    agreed = agree()

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        replies: dict[int, bytes | Failure] = {c: honest(agreed)(c, m) for c, m in messages.items()}
        return replies | {1: Failure("away", "is not connected", sent=False), 3: Failure("late", "was slow")}

    _, done = federate(Answers(answers), agreed)
    assert [finished.bytes_down for finished in done] == [3 * len(finished.broadcast) for finished in done]


def test_every_client_of_a_round_gets_the_same_bytes() -> None:
    agreed = agree()
    seen: list[set[bytes]] = []

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        seen.append(set(messages.values()))
        return {c: honest(agreed)(c, m) for c, m in messages.items()}

    _, done = federate(Answers(answers), agreed)
    assert [{finished.broadcast} for finished in done] == seen
    assert len(set.union(*seen)) == 3  # each round's are its own


def test_a_round_asks_its_cohort_and_no_answer_of_others_counts() -> None:
    agreed = agree()

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        message = next(iter(messages.values()))
        return {client: honest(agreed)(client, message) for client in range(10)}  # also those not asked

    engine = Answers(answers)
    _, done = federate(engine, agreed, clients=range(10), rounds=6, per_round=3)
    for asked, finished in zip(engine.asked, done, strict=True):
        assert len(asked) == 3
        assert list(finished.replies) == asked == [reply.client for reply in finished.accepted]
    assert len({tuple(asked) for asked in engine.asked}) > 1


def test_a_secret_draw_hangs_on_no_seed_and_a_round_of_nobody_is_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = agree()

    def rounds(engine: Answers) -> list[Round]:
        server = Server(START, agreed, ServerConfig(), total_weight=100)
        done = run_rounds(
            server, engine, range(100), lambda state: 0.0, rounds=3, per_round=50, patience=9, seed=7, secret=True
        )
        return list(done)

    def answers(messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        return {client: honest(agreed)(client, message) for client, message in messages.items()}

    engine = Answers(answers)
    done = rounds(engine) + rounds(engine)
    assert len({tuple(asked) for asked in engine.asked}) == 6  # the same is drawn twice once in 2^85
    assert [list(finished.replies) for finished in done] == engine.asked
    monkeypatch.setattr("nestling.federation.loop.poisson_cohort", lambda clients, *, count: [])
    (first, *_) = rounds(engine)
    assert (first.replies, first.bytes_up, first.bytes_down) == ({}, 0, 0)


def test_cat_062_the_order_in_which_an_engine_answers_changes_no_bit() -> None:
    agreed = agree(bits=8)
    results = []
    for turn in (sorted, lambda messages: sorted(messages, reverse=True)):
        engine = Answers(lambda messages, turn=turn: {c: honest(agreed)(c, messages[c]) for c in turn(messages)})
        server, done = federate(engine, agreed)
        results.append((server.state.tobytes(), [finished.broadcast for finished in done]))
    assert results[0] == results[1]


def test_the_state_that_is_evaluated_is_the_one_just_made() -> None:
    agreed = agree()
    server, done = federate(InProcessEngine([honest(agreed)]), agreed, rounds=2)
    assert [finished.number for finished in done] == [1, 2]
    assert done[-1].accuracy == float(server.state[0])
    assert done[0].accuracy != done[1].accuracy


@pytest.mark.parametrize("codec", [{"down_bits": 16}, {"down_bits": 4}, {"down_kind": "rotated", "down_bits": 2}])
def test_what_is_judged_is_what_clients_receive_next(codec: dict) -> None:
    agreed = agree(**codec)
    server, done = federate(InProcessEngine([honest(agreed)]), agreed, rounds=3)
    for finished, following in pairwise(done):
        assert finished.state.tobytes() == received(agreed, following.broadcast).tobytes()
    assert done[-1].state.tobytes() == received(agreed, server.broadcast(4)).tobytes() != server.state.tobytes()
    assert [finished.accuracy for finished in done] == [float(finished.state[0]) for finished in done]


def test_cat_046_one_client_is_a_federation_too() -> None:
    agreed = agree()
    _, done = federate(InProcessEngine([honest(agreed)]), agreed, clients=(0,))
    assert all(finished.used for finished in done)


def test_cat_083_rounds_leave_nothing_behind() -> None:
    """Looked at after a hundred, for what is allocated once and for good."""
    agreed = agree()
    server = Server(START, agreed, ServerConfig(), total_weight=100)
    rounds = run_rounds(
        server, InProcessEngine([honest(agreed)]), (0, 1, 2), lambda state: 0.5, rounds=160, per_round=2, patience=3,
        seed=0,
    )  # fmt: skip
    seen = []
    try:
        for finished in rounds:
            if finished.number == 100:
                tracemalloc.start()
            if finished.number in (120, 160):
                gc.collect()
                held = tracemalloc.get_traced_memory()[0]
                seen.append((held, len(os.listdir("/proc/self/fd")), threading.active_count()))
    finally:
        tracemalloc.stop()
    before, after = seen
    assert after[0] - before[0] < 40 * 250  # a round would leave a kilobyte if it left its messages
    assert after[1:] == before[1:]
