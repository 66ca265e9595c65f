"""Who sends nothing new is named, with counts; who trains is not; nobody is punished, nor named in private."""

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from small import LAYOUT, agree, answer, config, finished, received, target

from nestling.api import resume, run
from nestling.codec.codecs import decode_body, encode_body
from nestling.codec.form import Limits
from nestling.codec.message import message_key
from nestling.config.schema import PrivacyConfig, RunConfig, ServerConfig
from nestling.core.vectors import Layout
from nestling.federation.client import Worker
from nestling.federation.riders import ECHO as NEAR
from nestling.federation.riders import Measured, measure, riders
from nestling.federation.server import Server
from nestling.report.compare import compare
from nestling.report.html import render
from nestling.report.riders import rider_lines
from nestling.runs.checkpoint import newest_checkpoint
from nestling.runs.recorder import read_rows, read_run
from nestling.runs.result import Result

ROUNDS, CLIENTS, ZERO, ECHO = 5, 5, 3, 4
KEY = message_key(bytes(16), 1, 0)


def rows(rounds: list[dict[int, tuple[float, float | None, int]]]) -> list[dict[str, object]]:
    """Rows as in `bytes.jsonl`: (norm, cosine, examples) of each client, round by round."""
    return [
        {"round": n, "client": client, "norm": norm, "cosine": cosine, "examples": examples}
        for n, replies in enumerate(rounds, 1)
        for client, (norm, cosine, examples) in replies.items()
    ]


USUAL = {0: (1.0, 0.3, 10), 1: (1.5, -0.1, 10), 2: (0.5, 0.5, 10)}


# What is measured.


def test_a_change_is_measured_as_the_definition_says() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1.0, 1e30):
        change, step = (rng.normal(size=1000).astype(np.float32) for _ in range(2))
        change *= np.float32(scale)
        a, b = change.astype(np.float64), step.astype(np.float64)
        got = measure(change, step, examples=7)
        assert got.norm == pytest.approx(np.sqrt((a * a).sum()), rel=1e-5)
        assert got.cosine == pytest.approx((a / np.linalg.norm(a) * b).sum() / np.linalg.norm(b), abs=1e-5)
        assert got.examples == 7


def test_what_has_no_direction_has_no_cosine() -> None:
    one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
    assert measure(zero, one, examples=1) == Measured(0.0, None, 1)
    assert measure(one, zero, examples=1).cosine is None
    assert measure(one, None, examples=1).cosine is None
    assert measure(np.float32([1e-45, 0, 0]), one, examples=1).norm > 0  # the smallest there is is not nothing


@pytest.mark.parametrize("send", ["delta", "state"])
@pytest.mark.parametrize("down_bits", [32, 8])
def test_an_echo_of_what_a_client_was_sent_has_cosine_one(send: str, down_bits: int) -> None:
    agreed = agree(send=send, down_bits=down_bits)
    server = Server(np.zeros(LAYOUT.size, np.float32), agreed, ServerConfig(), total_weight=100)
    sent = []
    for n in (1, 2):
        message = server.broadcast(n)
        sent.append(received(agreed, message))
        own = target(0) if n == 1 else sent[1] - sent[0]
        accepted, _ = server.judge(n, {0: answer(agreed, message, 0, own), 1: answer(agreed, message, 1, target(n))})
        measured = server.measure(accepted)
        assert server.update(accepted)
    assert measured[0].cosine == pytest.approx(1, abs=1e-5)
    assert abs(measured[1].cosine or 1) < 0.95
    assert server.measure(accepted[:1]).keys() == {0}


@pytest.mark.parametrize("codec", ["float16", "int8-message", "int4-message"])
def test_an_echo_through_a_codec_is_within_the_bound(codec: str) -> None:
    layout = Layout.of([("z", (1280,))])
    step = np.random.default_rng(0).normal(size=1280).astype(np.float32)
    body = encode_body(codec, layout, step, key=KEY)
    apart = 1 - (measure(decode_body(codec, layout, body, Limits(), key=KEY), step, examples=1).cosine or 0)
    assert apart < NEAR


# Who is named.


def test_half_of_the_rounds_name_nobody_and_more_than_half_do() -> None:
    silent, awake = USUAL | {3: (0.0, None, 10)}, USUAL | {3: (1.0, 0.1, 10)}
    assert riders(rows([silent, awake])) == {}
    assert riders(rows([silent])) == {}  # one round alone
    assert riders(rows([silent, awake, silent])) == {"3": {"rounds": 3, "zero": 2, "small": 0, "echo": 0}}


def test_rounds_in_which_it_had_no_reply_do_not_count() -> None:
    absent, silent = USUAL, USUAL | {12: (0.0, None, 10)}
    assert riders(rows([absent, silent, absent, absent, silent, absent])) == {
        "12": {"rounds": 2, "zero": 2, "small": 0, "echo": 0}
    }


def test_kinds_add_up() -> None:
    made = [USUAL | {3: (0.0, None, 10)}, USUAL | {3: (1.0, 0.9999, 10)}, USUAL | {3: (1e-6, 0.2, 10)}]
    assert riders(rows(made)) == {"3": {"rounds": 3, "zero": 1, "small": 1, "echo": 1}}


def test_a_client_of_few_examples_may_send_little_and_one_that_claims_many_may_not() -> None:
    little = 5e-4
    assert riders(rows([USUAL | {3: (little, 0.2, 1)}] * 3)) == {}
    assert riders(rows([USUAL | {3: (little, 0.2, 10_000)}] * 3)).keys() == {"3"}


def test_where_every_round_is_the_same_step_nobody_is_an_echo() -> None:
    assert riders(rows([dict.fromkeys(range(4), (1.0, 0.995, 10))] * 5)) == {}


def test_who_holds_most_of_the_data_is_no_echo_of_itself() -> None:
    """Its own last change is most of the step; the others, who differ, are far from it."""
    far = {1: (1.0, 0.3, 250), 2: (1.0, 0.2, 150), 3: (1.0, -0.1, 100)}
    assert riders(rows([far | {0: (1.0, 0.9999, 500)}] * 5)) == {}
    assert riders(rows([far | {0: (1.0, 0.9999, 150)}] * 5)).keys() == {"0"}


def test_of_two_replies_only_one_of_zeros_can_be_told() -> None:
    assert riders(rows([{0: (1.0, 0.1, 10), 1: (1e-6, 0.99999, 10)}] * 3)) == {}
    assert riders(rows([{0: (1.0, 0.1, 10), 1: (0.0, None, 10)}] * 3)).keys() == {"1"}


def test_rows_without_a_norm_name_nobody() -> None:
    assert riders([{"round": n, "client": None, "direction": "up"} for n in range(5)]) == {}


# In real runs.


def real(out: Path, seed: int, **changes: object) -> RunConfig:
    """Five clients, on a base that is made once."""
    settings, result, _ = finished()
    made = config(out, rounds=ROUNDS, seed=seed)
    base = dataclasses.replace(settings.base, weights=str(Path(result.run_dir) / "base.safetensors"))
    task = dataclasses.replace(made.task, clients=CLIENTS)
    return dataclasses.replace(made, **{"base": base, "task": task, **changes})


def riding() -> Callable:
    """`Worker.handle` where one client sends zeros, and one, once it has seen a step, that step."""
    train, seen = Worker.handle, dict[int, np.ndarray]()

    def handle(self: Worker, client: int, message: bytes) -> bytes:
        if client not in (ZERO, ECHO):
            return train(self, client, message)
        state = received(self.agreement, message)
        before = seen.get(client)
        seen[client] = state
        if client == ECHO and before is None:
            return train(self, client, message)
        change = np.zeros_like(state) if client == ZERO or before is None else state - before
        return answer(self.agreement, message, client, change, examples=self.task.examples(client))

    return handle


@cache
def ridden(seed: int) -> Result:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "handle", riding())
        return run(real(Path(mkdtemp(prefix="nestling-tests-")), seed))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cat_036_zeros_and_an_echo_are_named_and_clients_that_train_are_not(seed: int) -> None:
    result = ridden(seed)
    assert result.riders == {
        str(ZERO): {"rounds": ROUNDS, "zero": ROUNDS, "small": 0, "echo": 0},
        str(ECHO): {"rounds": ROUNDS, "zero": 0, "small": 0, "echo": ROUNDS - 1},
    }
    assert result.rejected == {}
    record = read_run(Path(result.run_dir))
    assert all(row["accepted"] == CLIENTS and row["bounded"] == 0 for row in record.metrics)  # nobody is punished
    assert record.result == result
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_cat_036_where_all_train_nobody_is_named(seed: int, alpha: float, tmp_path: Path) -> None:
    made = real(tmp_path, seed)
    result = run(dataclasses.replace(made, task=dataclasses.replace(made.task, alpha=alpha)))
    assert result.riders == {}
    assert "riders" not in result.to_dict()
    up = [row for row in read_rows(Path(result.run_dir) / "bytes.jsonl") if row["direction"] == "up"]
    assert all(row["norm"] > 0 for row in up)
    assert [row["cosine"] is None for row in up] == [row["round"] == 1 for row in up]


def test_cat_036_the_report_says_so_on_the_page_and_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from nestling.cli.run import show

    result = ridden(0)
    lines = rider_lines(result)
    assert lines[0] == (
        f"client {ZERO} sent no change in {ROUNDS} of {ROUNDS} rounds: it may not train (free rider); it was not "
        "punished"
    )
    found = compare([Path(result.run_dir)])
    assert found.warnings == lines
    page = render(found)
    assert all(line in page.replace("&#39;", "'") for line in lines)
    show(result, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(line in shown for line in lines)


def test_many_are_told_in_few_lines() -> None:
    counts = {"rounds": 4, "zero": 3, "small": 0, "echo": 1}
    lines = rider_lines(dataclasses.replace(ridden(0), riders={str(n): counts for n in range(50)}))
    assert len(lines) == 11
    assert lines[-1] == "and 40 more clients like these: see result.json"


def test_cat_036_a_resumed_run_names_whom_the_whole_one_does(tmp_path: Path) -> None:
    def stop(step: object) -> None:
        if getattr(step, "round", 0) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "handle", riding())
        with pytest.raises(KeyboardInterrupt):
            run(real(tmp_path, 0), progress=stop)
        (folder,) = tmp_path.iterdir()
        result = resume(folder)
    whole = Path(ridden(0).run_dir)
    assert (folder / "bytes.jsonl").read_text() == (whole / "bytes.jsonl").read_text()
    assert result.riders == ridden(0).riders
    assert result.state_digest == ridden(0).state_digest


@pytest.mark.filterwarnings("ignore::nestling.private.PrivacyWarning")
def test_cat_036_a_private_run_names_nobody_and_measures_nobody(tmp_path: Path) -> None:
    made = real(tmp_path, 0, privacy=PrivacyConfig(noise=1.0), server=ServerConfig(weighting="uniform"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "handle", riding())
        result = run(made)
    assert result.riders == {}
    folder = Path(result.run_dir)
    assert not {"norm", "cosine", "examples"} & {key for row in read_rows(folder / "bytes.jsonl") for key in row}
    found = newest_checkpoint(folder)
    assert found is not None
    assert "sent" not in found.server
    assert "free rider" not in (folder / "report.html").read_text()
