"""A bad reply costs only itself; what is left is averaged exactly, in any order, whatever the codec."""

import gc
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import LAYOUT, START, agree, answer, forge, honest, received, target

from nestling.codec.form import Limits
from nestling.codec.message import HEADER_SIZE, peek, state_digest
from nestling.config.schema import PrivacyConfig, ServerConfig
from nestling.core.errors import ConfigError, ContextError
from nestling.core.types import Failure
from nestling.federation.server import Reply, Server
from nestling.runs.ledger import Ledger, read_charges

SENDS = ("delta", "state")


def serve(agreed, *, total_weight: int = 100, state: np.ndarray = START, asked: int = 0, **settings) -> Server:
    return Server(state, agreed, ServerConfig(**settings), total_weight=total_weight, asked=asked)


def test_cat_014_a_broadcast_is_a_header_and_the_state() -> None:
    agreed = agree()
    server = serve(agreed)
    message = server.broadcast(7)
    header = peek(message)
    assert (header.direction, header.round, header.num_examples, header.is_difference) == ("downlink", 7, 0, False)
    assert len(message) == HEADER_SIZE + 4 * LAYOUT.size
    assert received(agreed, message).tobytes() == START.tobytes()
    assert server.broadcast(7) == message


@pytest.mark.parametrize("send", SENDS)
def test_the_next_state_is_the_weighted_mean_of_what_clients_reached(send: str) -> None:
    agreed = agree(send=send)
    server = serve(agreed)
    message = server.broadcast(1)
    trained = {client: (START + target(client)).astype(np.float32) for client in range(3)}
    weights = {0: 1, 1: 10, 2: 37}
    replies = {c: answer(agreed, message, c, trained[c] - START, examples=weights[c]) for c in trained}
    accepted, refused = server.judge(1, replies)
    assert not refused
    assert [(r.client, r.weight) for r in accepted] == [(0, 1), (1, 10), (2, 37)]
    for reply in accepted:
        np.testing.assert_allclose(reply.state, trained[reply.client], rtol=0, atol=1e-6)
    assert server.update(accepted)
    wanted = sum(weights[c] * trained[c].astype(np.float64) for c in trained) / 48
    np.testing.assert_allclose(server.state, wanted, rtol=0, atol=5e-7)
    assert server.state.dtype == np.float32


def test_uniform_weighting_counts_heads() -> None:
    agreed = agree()
    server = serve(agreed, weighting="uniform", total_weight=2)
    message = server.broadcast(1)
    one = np.ones(LAYOUT.size, np.float32)
    replies = {0: answer(agreed, message, 0, one, examples=100), 1: answer(agreed, message, 1, -one, examples=1)}
    accepted, _ = server.judge(1, replies)
    assert [r.weight for r in accepted] == [1, 1]
    assert server.update(accepted)
    assert server.state.tobytes() == START.tobytes()


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("down_bits", [16, 8, 4])
def test_a_lossy_broadcast_is_what_clients_start_from(down_bits: int, send: str) -> None:
    agreed = agree(down_bits=down_bits, send=send)
    server = serve(agreed)
    message = server.broadcast(1)
    start = received(agreed, message)
    assert start.tobytes() != START.tobytes()  # else this tests nothing
    change = target(1)
    accepted, refused = server.judge(1, {1: answer(agreed, message, 1, change)})
    assert not refused
    np.testing.assert_allclose(accepted[0].state, start + change, rtol=0, atol=1e-6)
    assert server.update(accepted)
    # Differences are added to the server's own state, which keeps what the broadcast could not say.
    np.testing.assert_allclose(server.state, (START if send == "delta" else start) + change, rtol=0, atol=1e-6)


def test_a_client_that_trains_nothing_leaves_a_lossy_state_as_it_is() -> None:
    agreed = agree(down_bits=4)
    server = serve(agreed)
    for number in range(1, 6):
        message = server.broadcast(number)
        accepted, _ = server.judge(number, {0: answer(agreed, message, 0, np.zeros(LAYOUT.size, np.float32))})
        assert server.update(accepted)
    assert server.state.tobytes() == START.tobytes()


NAN = np.full(LAYOUT.size, np.nan, "<f4").tobytes()
INF = np.full(LAYOUT.size, -np.inf, "<f4").tobytes()
HUGE = np.full(LAYOUT.size, 1.1e4, "<f4").tobytes()

# What client 3 makes of its good reply, and the code under which it is dropped.
SPOILT = {
    "NaN": (lambda good, down: forge(good, body=NAN), "non_finite"),
    "infinite": (lambda good, down: forge(good, body=INF), "non_finite"),
    "huge": (lambda good, down: forge(good, body=HUGE), "abs"),
    "cut off": (lambda good, down: good[:-1], "length"),
    "cut to the header": (lambda good, down: good[:64], "length"),
    "cut short": (lambda good, down: good[:63], "short"),
    "empty": (lambda good, down: b"", "short"),
    "extended": (lambda good, down: good + b"\0", "length"),
    "endless": (lambda good, down: good + bytes(1 << 20), "length"),
    "one number less": (lambda good, down: forge(good, body=good[64:-4], total_len=len(good) - 4), "length"),
    "a bit flipped": (lambda good, down: good[:70] + bytes([good[70] ^ 1]) + good[71:], "digest"),
    "garbage": (lambda good, down: bytes(range(256))[: len(good)], "magic"),
    "the broadcast itself": (lambda good, down: down, "magic"),
    "another version": (lambda good, down: forge(good, version=2), "version"),
    "another codec": (lambda good, down: forge(good, codec=1), "codec"),
    "an unknown codec": (lambda good, down: forge(good, codec=200), "codec"),
    "an unknown flag": (lambda good, down: forge(good, flags=2), "flags"),
    "the other kind of update": (lambda good, down: forge(good, flags=1 - good[6]), "flags"),
    "another context": (lambda good, down: forge(good, context=bytes(16)), "context"),
    "an old round": (lambda good, down: forge(good, round=0), "stale_round"),
    "a later round": (lambda good, down: forge(good, round=2**32 - 1), "future_round"),
    "speaks for another": (lambda good, down: forge(good, client=1), "client"),
    "speaks for the server": (lambda good, down: forge(good, client=2**64 - 1), "client"),
    "no items": (lambda good, down: forge(good, num_examples=0), "num_examples"),
    "too many items": (lambda good, down: forge(good, num_examples=101), "num_examples"),
    "all items there are": (lambda good, down: forge(good, num_examples=2**32 - 1), "num_examples"),
    "no reply": (lambda good, down: Failure("no_data", "has none"), "no_data"),
}


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("case", SPOILT)
def test_cat_030_a_bad_reply_is_dropped_under_its_code_and_costs_only_itself(case: str, send: str) -> None:
    agreed = agree(send=send)
    answer_of = honest(agreed)
    states = []
    for spoil, wanted in ((None, None), SPOILT[case]):
        server = serve(agreed)
        for number in (1, 2, 3):
            message = server.broadcast(number)
            replies = {client: answer_of(client, message) for client in (0, 1, 2)}
            if spoil:
                replies[3] = spoil(answer_of(3, message), message)
            accepted, refused = server.judge(number, replies)
            assert [r.client for r in accepted] == [0, 1, 2]
            assert {c: f.code for c, f in refused.items()} == ({3: wanted} if wanted else {})
            assert server.update(accepted)
        states.append(server.state.tobytes())
    assert states[0] == states[1]
    assert states[0] != START.tobytes()


def test_cat_026_a_reply_counts_for_its_own_sender_alone() -> None:
    agreed = agree()
    server = serve(agreed)
    message = server.broadcast(1)
    mine = honest(agreed)(1, message)
    accepted, refused = server.judge(1, {1: mine, 2: mine, 3: mine})
    assert [r.client for r in accepted] == [1]
    assert {c: f.code for c, f in refused.items()} == {2: "client", 3: "client"}


def test_cat_023_a_reply_kept_for_later_is_of_no_use() -> None:
    agreed = agree()
    server = serve(agreed)
    kept = honest(agreed)(1, server.broadcast(1))
    accepted, _ = server.judge(1, {1: kept})
    assert server.update(accepted)
    server.broadcast(2)
    assert server.judge(2, {1: kept})[1][1].code == "context"  # made from another state
    same = serve(agreed)
    same.broadcast(1)
    same.broadcast(2)
    assert same.judge(2, {1: kept})[1][1].code == "stale_round"  # from the same state, in an abandoned round


def test_cat_027_a_reply_of_another_run_is_refused() -> None:
    here, there = agree(run="x"), agree(run="y")
    server, other = serve(here), serve(there)
    server.broadcast(1)
    assert server.judge(1, {0: honest(there)(0, other.broadcast(1))})[1][0].code == "context"


def test_a_reply_made_from_another_state_is_refused() -> None:
    agreed = agree()
    server, ahead = serve(agreed), serve(agreed, state=START + np.float32(1))
    server.broadcast(1)
    assert server.judge(1, {0: honest(agreed)(0, ahead.broadcast(1))})[1][0].code == "context"


def test_a_refusal_says_whose_it_is_and_why() -> None:
    agreed = agree()
    server = serve(agreed)
    good = honest(agreed)(12, server.broadcast(1))
    failure = server.judge(1, {12: forge(good, body=NAN)})[1][12]
    assert "client 12" in failure.detail
    assert "NaN" in failure.detail


def test_cat_047_048_too_few_replies_leave_the_state_as_it_was() -> None:
    agreed = agree()
    server = serve(agreed, min_replies=2)
    message = server.broadcast(1)
    accepted, _ = server.judge(1, {0: honest(agreed)(0, message)})
    assert not server.update(accepted)
    assert not server.update([])
    assert server.state.tobytes() == START.tobytes()
    accepted, _ = server.judge(1, {c: honest(agreed)(c, message) for c in (0, 1)})
    assert server.update(accepted)


@given(st.permutations(range(6)), st.sampled_from(SENDS), st.sampled_from([32, 8, 4]))
def test_cat_062_the_order_of_arrival_changes_no_bit(order: list[int], send: str, bits: int) -> None:
    agreed = agree(send=send, bits=bits)
    states = []
    for clients in (range(6), order):
        server = serve(agreed)
        message = server.broadcast(1)
        accepted, _ = server.judge(1, {c: honest(agreed)(c, message) for c in clients})
        assert server.update([next(r for r in accepted if r.client == c) for c in clients])
        states.append(server.state.tobytes())
    assert states[0] == states[1]


@pytest.mark.parametrize("send", SENDS)
def test_cat_032_false_weights_move_the_mean_by_their_capped_share_and_overflow_nothing(send: str) -> None:
    # As in a real run: a client may claim all items that there are. Fifty that all do so exceed the sum planned for.
    agreed = agree(limits=Limits(max_examples=100), send=send)
    server = serve(agreed, total_weight=100)
    message = server.broadcast(1)
    liar = np.full(LAYOUT.size, 9_900, np.float32)
    replies = {c: answer(agreed, message, c, liar, examples=100) for c in range(50)}
    replies[50] = answer(agreed, message, 50, -liar, examples=1)
    accepted, refused = server.judge(1, replies)
    assert not refused
    assert server.update(accepted)
    np.testing.assert_allclose(server.state, START + 9_900 * (5_000 - 1) / 5_001, rtol=1e-6)


def test_cat_031_035_numbers_that_add_up_beyond_the_limits_are_never_sent() -> None:
    agreed = agree(limits=Limits(max_examples=100, max_abs=1e4, max_norm=20.0))
    zeros = np.zeros(LAYOUT.size, np.float32)
    server = serve(agreed, state=zeros)
    push = np.full(LAYOUT.size, 4.0, np.float32)  # norm 13.3: two of them are too much
    used = []
    for number in range(1, 5):
        message = server.broadcast(number)  # must not raise: what is broadcast is judged by clients as well
        accepted, refused = server.judge(number, {0: answer(agreed, message, 0, push)})
        assert not refused
        used.append(server.update(accepted))
    assert used == [True, False, False, False]
    assert server.state.tobytes() == push.tobytes()


def test_cat_031_no_step_is_larger_than_the_limit() -> None:
    agreed = agree(limits=Limits(max_examples=100, max_abs=100.0))
    server = serve(agreed, state=np.zeros(LAYOUT.size, np.float32), max_abs=100.0)
    for number in itertools.count(1):
        message = server.broadcast(number)
        accepted, _ = server.judge(number, {0: answer(agreed, message, 0, np.full(LAYOUT.size, 60.0, np.float32))})
        if not server.update(accepted):
            break
    assert np.abs(server.state).max() == 60.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2e4])
def test_a_mean_that_cannot_be_sent_is_not_taken(bad: float) -> None:
    agreed = agree(send="state")
    server = serve(agreed)
    server.broadcast(1)
    vector = np.full(LAYOUT.size, bad, np.float32)
    with np.errstate(invalid="ignore"):
        assert not server.update([Reply(0, vector, vector, 1)])
    assert state_digest(server.state) == state_digest(START)


# The server's rule.


def after(server: Server, agreed, number: int, client: int = 1) -> np.ndarray:
    accepted, _ = server.judge(number, {client: honest(agreed)(client, server.broadcast(number))})
    assert server.update(accepted)
    return server.state


def test_a_rule_steps_from_the_state_to_the_mean_and_remembers() -> None:
    agreed = agree()
    mean, ruled = serve(agreed), serve(agreed, rule="nesterov", lr=0.5, momentum=0.8)
    change = (after(mean, agreed, 1) - START).astype(np.float64)
    assert mean.memory == {}
    np.testing.assert_allclose(after(ruled, agreed, 1), START + 0.5 * 1.8 * change, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ruled.memory["momentum"], -change, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rule", "lr"), [("nesterov", 0.7), ("adam", 0.01), ("yogi", 0.01)])
def test_a_rule_left_alone_takes_steps_of_its_own_size(rule: str, lr: float) -> None:
    agreed = agree()
    left, set_ = serve(agreed, rule=rule), serve(agreed, rule=rule, lr=lr)
    assert after(left, agreed, 1).tobytes() == after(set_, agreed, 1).tobytes() != START.tobytes()
    assert serve(agreed, lr=0.3)._step(START)[0] is START  # mean has no rate


DOWN = [{"down_bits": 16}, {"down_bits": 4}, {"down_kind": "rotated", "down_bits": 4}]


@pytest.mark.parametrize("codec", [{}, *DOWN])
def test_what_clients_would_receive_is_what_they_receive_next(codec: dict) -> None:
    agreed = agree(**codec)
    server = serve(agreed)
    for number in (1, 2, 3):
        known = server.received
        assert (known.tobytes() == server.state.tobytes()) == (not codec)
        assert known.tobytes() == received(agreed, server.broadcast(number)).tobytes()
        if number != 2:  # a round may be abandoned
            after(server, agreed, number)


@pytest.mark.parametrize("rule", ["nesterov", "adam", "yogi"])
def test_a_lossy_broadcast_and_a_rule_go_together(rule: str) -> None:
    """Differences count from the server's own state: who trains nothing moves nothing."""
    agreed = agree(down_bits=4)
    server = serve(agreed, rule=rule)
    for number in (1, 2):
        message = server.broadcast(number)
        accepted, _ = server.judge(number, {0: answer(agreed, message, 0, np.zeros(LAYOUT.size, np.float32))})
        assert server.update(accepted)
    assert server.state.tobytes() == START.tobytes()


def test_a_step_beyond_the_limits_is_not_taken_and_not_remembered() -> None:
    agreed = agree(limits=Limits(max_examples=100, max_abs=10.0))
    server = serve(agreed, rule="nesterov", lr=5.0, momentum=0.9, max_abs=10.0)
    message = server.broadcast(1)
    accepted, refused = server.judge(1, {0: answer(agreed, message, 0, np.full(LAYOUT.size, 4.0, np.float32))})
    assert not refused
    assert not server.update(accepted)
    assert server.state.tobytes() == START.tobytes()
    assert server.memory == {}


def test_cat_016_garbage_leaves_neither_memory_nor_state_behind() -> None:
    agreed = agree()
    server = serve(agreed)
    server.broadcast(1)
    size = HEADER_SIZE + 4 * LAYOUT.size
    rng = np.random.default_rng(0)

    def garbage(count: int) -> None:
        for _ in range(count // 500):
            lengths = rng.integers(0, 2 * size, 500)
            data = rng.bytes(2 * size)
            accepted, refused = server.judge(1, {c: data[: int(n)] for c, n in enumerate(lengths)})
            assert accepted == []
            assert len(refused) == 500
            assert all(len(f.detail) < 300 and not f.trace for f in refused.values())

    garbage(1000)
    gc.collect()
    tracemalloc.start()
    garbage(5000)
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000  # of 5,000 messages
    assert peak < 2_000_000
    assert server.state.tobytes() == START.tobytes()


# Outliers, and robust rules in the place of the mean.


def unit(seed: int) -> np.ndarray:
    vector = target(seed)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def judged(
    server: Server, agreed, changes: dict[int, np.ndarray], examples: dict[int, int] | None = None
) -> list[Reply]:
    message = server.broadcast(1)
    weights = examples or dict.fromkeys(changes, 10)
    replies = {c: answer(agreed, message, c, change, examples=weights[c]) for c, change in changes.items()}
    accepted, refused = server.judge(1, replies)
    assert not refused
    return accepted


@pytest.mark.parametrize("send", SENDS)
def test_cat_031_an_outlier_is_cut_to_a_multiple_of_the_median_and_the_others_are_left_alone(send: str) -> None:
    agreed = agree(send=send)
    server = serve(agreed)
    accepted = judged(server, agreed, {0: unit(0), 1: 2 * unit(1), 2: 3 * unit(2), 3: 3000 * unit(3), 4: unit(4)})
    bounded, cut = server.bound(accepted)
    assert cut == [3]
    assert [a is b for a, b in zip(accepted, bounded, strict=True)] == [True, True, True, False, True]
    change = bounded[3].state.astype(np.float64) - START
    np.testing.assert_allclose(change, 20 * unit(3), rtol=0, atol=1e-4)
    assert server.update(bounded)
    moved = np.linalg.norm(server.state.astype(np.float64) - START)
    assert moved <= (1 + 2 + 3 + 20 + 1) / 5


def test_cat_032_a_claimed_number_of_examples_is_cut_too() -> None:
    agreed = agree()
    server = serve(agreed)
    accepted = judged(server, agreed, {c: unit(c) for c in range(3)}, {0: 2, 1: 3, 2: 100})
    bounded, cut = server.bound(accepted)
    assert (cut, [r.weight for r in bounded]) == ([2], [2, 3, 30])
    assert bounded[2].vector.tobytes() == accepted[2].vector.tobytes()


def test_outliers_can_be_left_alone_and_none_is_no_error() -> None:
    agreed = agree()
    server = serve(agreed, outlier=0.0)
    accepted = judged(server, agreed, {0: unit(0), 1: 1000 * unit(1), 2: unit(2)})
    assert server.bound(accepted) == (accepted, [])
    assert serve(agreed).bound([]) == ([], [])


@pytest.mark.parametrize("send", SENDS)
def test_cat_036_zero_changes_are_no_outliers_and_divide_by_nothing(send: str) -> None:
    agreed = agree(send=send)
    server = serve(agreed)
    bounded, cut = server.bound(judged(server, agreed, {c: np.zeros(11, np.float32) for c in range(4)}))
    assert cut == []
    assert server.update(bounded)
    np.testing.assert_allclose(server.state, START, rtol=0, atol=1e-7)


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "rfa", "clipping"])
def test_cat_033_a_robust_rule_is_hardly_moved_by_a_fifth_of_the_clients(rule: str, send: str) -> None:
    agreed = agree(send=send)
    shared = 5 * unit(99)
    honest_ones = {c: shared + unit(c) for c in range(8)}
    hostile = {8: -40 * shared, 9: -40 * shared}
    mean = np.mean(list(honest_ones.values()), axis=0)
    settings = {"weighting": "uniform", "outlier": 0.0, "hostile_share": 0.2}

    def reached(aggregate: str) -> np.ndarray:
        server = serve(agreed, asked=10, aggregate=aggregate, **settings)
        assert server.update(judged(server, agreed, honest_ones | hostile))
        return server.state - START

    assert np.linalg.norm(reached("mean") - mean) > 20
    assert np.linalg.norm(reached(rule) - mean) < 1.5


def test_a_robust_rule_abandons_a_round_with_too_few_replies() -> None:
    agreed = agree()
    server = serve(agreed, asked=10, aggregate="krum", weighting="uniform", hostile_share=0.2)  # needs 7
    replies = judged(server, agreed, {c: unit(c) for c in range(7)})
    assert not server.update(replies[:6])
    assert server.state.tobytes() == START.tobytes()
    assert server.update(replies)


def test_a_robust_rule_that_cannot_withstand_its_share_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="krum with 1 hostile needs 5"):
        serve(agree(), asked=4, aggregate="krum", weighting="uniform", hostile_share=0.25)


def test_a_robust_rule_that_would_be_left_too_few_replies_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="leaves 6 replies, krum needs 7 of 10"):
        serve(agree(), asked=10, aggregate="krum", weighting="uniform", hostile_share=0.2, stragglers=4)


def test_buckets_are_drawn_anew_each_round_and_the_same_on_every_machine() -> None:
    agreed = agree()
    changes = {c: unit(c) * (c + 1) for c in range(8)}

    def reached(number: int) -> bytes:
        server = serve(agreed, asked=8, aggregate="clipping", weighting="uniform", hostile_share=0.1, outlier=0.0)
        message = server.broadcast(number)
        accepted, _ = server.judge(number, {c: answer(agreed, message, c, x) for c, x in changes.items()})
        assert server.update(accepted)
        return server.state.tobytes()

    assert reached(1) == reached(1)
    assert len({reached(number) for number in range(1, 6)}) > 1


# Privacy.


def private(agreed, folder, *, asked: int = 10, **settings) -> Server:
    config = ServerConfig(weighting="uniform", rule=settings.pop("rule", "mean"), outlier=10.0)
    server = Server(START, agreed, config, total_weight=100, asked=asked, privacy=PrivacyConfig(**settings))
    server.ledger = Ledger(folder)
    return server


def test_a_private_round_is_the_clipped_mean_over_the_planned_cohort_with_noise(tmp_path) -> None:
    agreed = agree()
    server = private(agreed, tmp_path, noise=1e-4, clip=0.5)
    accepted = judged(server, agreed, {c: unit(c) * (c + 1) for c in range(5)})
    assert server.bound(accepted) == (accepted, [])
    assert server.update(accepted)
    wanted = sum(0.5 * unit(c).astype(np.float64) for c in range(5)) / 10  # 10 were asked, 5 came
    apart = server.state - START - wanted
    assert 0 < np.abs(apart).max() < 6 * 1e-4 * 0.5 / 10 + 1e-6
    again = private(agreed, tmp_path, noise=1e-4, clip=0.5)
    assert again.update(judged(again, agreed, {c: unit(c) * (c + 1) for c in range(5)}))
    assert again.state.tobytes() != server.state.tobytes()  # no seed


def test_cat_094_a_round_is_charged_before_and_whatever_comes_of_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = agree()
    server = private(agreed, tmp_path, noise=2.0, clip=0.5)
    judged(server, agreed, {0: unit(0)})
    assert not server.update([])  # abandoned

    def killed(*args: object, **named: object) -> None:
        assert len(read_charges(tmp_path)) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr("nestling.federation.server.noised_mean", killed)
    with pytest.raises(KeyboardInterrupt):
        server.update(judged(server, agreed, {0: unit(0)}))
    charges = read_charges(tmp_path)
    assert [(c.round, c.noise_multiplier, c.clip, c.cohort, c.sampling_rate) for c in charges] == [
        (1, 2.0, 0.5, 10, 1)
    ] * 2
    assert server.state.tobytes() == START.tobytes()


def secret(agreed, folder, **settings) -> Server:
    """Ten of forty clients on average."""
    config = ServerConfig(weighting="uniform")
    privacy = PrivacyConfig(sampling="poisson", **settings)
    server = Server(START, agreed, config, total_weight=100, asked=10, privacy=privacy, sampling_rate=0.25)
    server.ledger = Ledger(folder)
    return server


@pytest.mark.parametrize("quantile", [0.0, 0.5])
def test_of_a_secret_draw_a_round_of_nobody_is_noise_and_is_charged(tmp_path, quantile: float) -> None:
    agreed = agree()
    server = secret(agreed, tmp_path, noise=0.4, clip=1.0, quantile=quantile)
    states = [server.state]
    for number in range(1, 201):
        server.broadcast(number)
        assert server.update([])
        states.append(server.state)
    charges = read_charges(tmp_path)
    assert [charge.round for charge in charges] == list(range(1, 201))
    assert {(charge.mechanism, charge.cohort) for charge in charges} == {((0.4, 0.25), 10)}
    assert (len({charge.clip for charge in charges}) > 1) == (quantile > 0)
    # 2,200 numbers of z C / m each: five standard deviations. The count, of noise 10 / 20, has its part of z.
    z = 0.4 if not quantile else (0.4**-2 - 1) ** -0.5
    steps = np.diff(states, axis=0) / np.array([charge.clip for charge in charges])[:, None]
    assert abs(steps.std() / (z / 10) - 1) < 5 / np.sqrt(2 * steps.size)


def test_of_a_secret_draw_the_planned_cohort_is_the_denominator(tmp_path) -> None:
    agreed = agree()
    server = secret(agreed, tmp_path, noise=1e-4, clip=0.5)
    assert server.update(judged(server, agreed, {c: unit(c) for c in range(3)}))
    wanted = sum(0.5 * unit(c).astype(np.float64) for c in range(3)) / 10
    assert np.abs(server.state - START - wanted).max() < 6 * 1e-4 * 0.5 / 10 + 1e-6


def test_of_a_secret_draw_refusals_name_nobody(tmp_path) -> None:
    agreed = agree()
    server = secret(agreed, tmp_path, noise=1.0)
    message = server.broadcast(1)
    spoilt = forge(answer(agreed, message, 31, unit(0)), body=np.full(11, np.nan, "<f4").tobytes())
    failed = Failure("client_error", "client 32: out of memory", 'File "client-32.py"')
    accepted, refused = server.judge(1, {30: answer(agreed, message, 30, unit(0)), 31: spoilt, 32: failed})
    assert [reply.client for reply in accepted] == [30]
    assert {client: failure.code for client, failure in refused.items()} == {31: "non_finite", 32: "client_error"}
    assert not any(character.isdigit() for f in refused.values() for character in f.detail + f.trace)


def test_a_private_server_without_a_ledger_releases_nothing(tmp_path) -> None:
    agreed = agree()
    server = private(agreed, tmp_path, noise=1.0)
    server.ledger = None
    with pytest.raises(ContextError, match="ledger"):
        server.update(judged(server, agreed, {0: unit(0)}))


@pytest.mark.parametrize("rule", ["mean", "adam"])
def test_a_clip_follows_its_quantile_beside_what_the_rule_keeps(rule: str, tmp_path) -> None:
    agreed = agree()
    server = private(agreed, tmp_path, asked=100, noise=0.5, clip=0.02, quantile=0.5, rule=rule)
    changes = [unit(c) * np.float32(0.01 * (1 + c)) for c in range(100)]
    for _ in range(80):
        assert server.update([Reply(c, change, change, 1) for c, change in enumerate(changes)])
    clips = [charge.clip for charge in read_charges(tmp_path)]
    assert clips[0] == 0.02
    assert 0.3 < np.median(clips[50:]) < 0.75  # the changes are 0.01 to 1 long
    assert ("m" in "".join(server.memory)) == (rule == "adam")


def test_cat_038_changes_of_no_length_under_privacy(tmp_path) -> None:
    agreed = agree()
    server = private(agreed, tmp_path, noise=1.0, clip=1.0)
    assert server.update(judged(server, agreed, {c: np.zeros(11, np.float32) for c in range(4)}))
    assert np.isfinite(server.state).all()


def test_too_few_clients_for_a_private_quantile_are_refused_at_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match="too little noise on the count"):
        private(agree(), tmp_path, asked=8, noise=1.0, quantile=0.5)


# After a restart, and what is no message at all.


def test_cat_028_a_reply_of_the_round_that_was_interrupted_counts_after_a_restart() -> None:
    """The rule: it counts if state and round are those it was made for, and so does one made anew, to the bit."""
    agreed = agree()
    before = serve(agreed)
    assert before.update(before.judge(1, {c: honest(agreed)(c, before.broadcast(1)) for c in (0, 1)})[0])
    state, early = before.state, honest(agreed)(0, before.broadcast(2))
    again, other = serve(agreed), serve(agreed)
    again.restore(state, {}, round=1)
    assert honest(agreed)(0, again.broadcast(2)) == early
    accepted, refused = again.judge(2, {0: early})
    assert ([r.client for r in accepted], refused) == ([0], {})
    other.restore(START, {}, round=0)  # the checkpoint of round 1 was lost as well
    other.broadcast(1)
    assert other.judge(1, {0: early})[1][0].code == "context"


@pytest.mark.parametrize(
    "what", ["text", None, 7, 1.5j, [1, 2], {"vector": [0.0]}, np.ones(11, np.complex64)], ids=repr
)
def test_cat_037_what_is_no_bytes_is_dropped_whatever_it_is(what: object) -> None:
    agreed = agree()
    server = serve(agreed)
    good = honest(agreed)(0, server.broadcast(1))
    accepted, refused = server.judge(1, {0: good, 1: what})
    assert ([r.client for r in accepted], refused[1].code) == ([0], "type")


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a push within honest norms is not prevented, nor claimed to be",
)
@pytest.mark.parametrize("rule", ["mean", "median", "trimmed", "krum", "rfa", "clipping"])
def test_cat_039_a_backdoor_within_the_norm_goes_unnoticed(rule: str) -> None:
    """One of ten says the same as the others, and a little of its own where they say nothing: after twenty rounds it is
    in the state."""
    agreed = agree()

    def reached(push: float) -> np.ndarray:
        server = serve(agreed, asked=10, aggregate=rule, weighting="uniform", hostile_share=0.1)
        for number in range(1, 21):
            message = server.broadcast(number)
            changes = np.random.default_rng(number).normal(0, 0.1, (10, LAYOUT.size)).astype(np.float32)
            changes[9, -1] += push
            accepted, _ = server.judge(number, {c: answer(agreed, message, c, x) for c, x in enumerate(changes)})
            bounded, cut = server.bound(accepted)
            if cut or not server.update(bounded):
                pytest.fail("it was noticed")  # no AssertionError: what is expected to fail is the line below
        return server.state

    assert abs(reached(0.3)[-1] - reached(0.0)[-1]) < 0.1
