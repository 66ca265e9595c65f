"""The record of a run: what is written is what is read, sizes are lengths, and no NaN gets into a file."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.runs.folder import create, read_status
from nestling.runs.recorder import Recorder, Traffic, read_result, read_rows, read_run
from nestling.runs.result import Result

RESULT = Result(
    name="demo",
    method="flite",
    adapter="latent",
    codec="int4-message",
    task="digits",
    seed=2**64 - 1,
    rounds=2,
    clients=2,
    alpha=0.1,
    accuracy=0.9,
    accuracy_base=0.3,
    accuracy_local_only=None,
    accuracy_centralised=0.95,
    test_items=100,
    classes=10,
    trainable_parameters=1280,
    payload_bytes_up=648,
    payload_bytes_down=5120,
    bytes_up=1424,
    bytes_down=10368,
    seconds=1.5,
    seconds_references=None,
    run_dir="demo",
    averaging_error=1e-7,
    base_hash="ab" * 32,
    state_digest="cd" * 32,
    model_parameters=78042,
    rejected={"not_finite": 1},
)
CLIENT = {
    "client": 0, "template": "mk", "items": 3, "exact": 2, "chosen": 1, "loss": 0.5, "by_depth": {"0.1": [2, 3]},
    "hits": "110", "choices": "010",
}  # fmt: skip
RECALLED = dataclasses.replace(
    RESULT, recalls={"trained": [CLIENT, CLIENT | {"loss": None}]}, gains={"exact": [0.1, -0.05, 0.25]}
)

MESSAGE = (
    '{"round": 1, "direction": "up", "client": 0, "codec": "x", "wire_bytes": 12, "payload_bytes": 4, '
    '"accepted": true, "reason": ""}'
)


@pytest.fixture
def folder(tmp_path):
    with create(tmp_path, "demo", "c0ffee") as made:
        yield made


def start(folder):
    return Recorder.start(folder, config='name = "demo"\n', command=["nestling", "run", "a b\n\x1b[31m"])


def exchange(recorder, number, *, up=b"u" * 12, accepted=True):
    recorder.message(b"d" * 9, round=number, direction="down", client=0, codec="float32", payload_bytes=4)
    recorder.message(
        up,
        round=number,
        direction="up",
        client=0,
        codec="int4-message",
        payload_bytes=5,
        accepted=accepted,
        reason="" if accepted else "\x1b[2Jnot_finite",
    )


def test_a_run_is_read_back_as_written(folder):
    recorder = start(folder)
    exchange(recorder, 1)
    recorder.round(1, {"accuracy": np.float32(0.5), "loss": float("nan"), "per_client": [1, math.inf]})
    exchange(recorder, 2, accepted=False)
    recorder.round(2, {"accuracy": 0.75, "loss": 0.1, "note": "ok", "replies": np.int64(1)})
    recorder.result(RESULT)
    recorder.finish()
    run = read_run(folder.path)
    assert run.status == "done"
    assert run.result == RESULT
    assert run.config == 'name = "demo"\n'
    assert run.command == r"nestling run a b\n\x1b[31m"
    assert run.environment["packages"]["nestling"]
    assert run.metrics[0] == {
        "round": 1,
        "accuracy": 0.5,
        "loss": None,
        "per_client": [1, None],
        "bytes_up": 12,
        "bytes_down": 9,
        "bytes_total": 21,
    }
    assert run.metrics[1]["bytes_total"] == 42
    assert run.traffic == [Traffic("down", "float32", 2, 9, 9, 8, 18), Traffic("up", "int4-message", 2, 12, 12, 10, 24)]
    assert [(row["round"], row["client"], row["reason"]) for row in run.refused] == [(2, 0, r"\x1b[2Jnot_finite")]
    assert run.refusals == {r"\x1b[2Jnot_finite": 1}
    assert (folder.path / "messages" / "last-up.msg").read_bytes() == b"u" * 12
    assert (folder.path / "messages" / "last-down.msg").read_bytes() == b"d" * 9


def test_a_message_of_a_client_that_is_a_secret(folder):
    recorder = start(folder)
    recorder.message(
        b"u" * 12, round=1, direction="up", client=None, codec="float32", payload_bytes=5, accepted=False, reason="late"
    )
    recorder.round(1, {})
    recorder.result(RESULT)
    recorder.finish()
    run = read_run(folder.path)
    assert [(row["client"], row["reason"]) for row in run.refused] == [(None, "late")]
    assert run.traffic == [Traffic("up", "float32", 1, 12, 12, 5, 12)]


def test_only_messages_of_at_most_one_mebibyte_are_kept(folder):
    recorder = start(folder)
    exchange(recorder, 1, up=bytes(2**20 + 1))
    recorder.round(1, {})
    assert not (folder.path / "messages" / "last-up.msg").exists()
    exchange(recorder, 2, up=bytes(2**20))
    recorder.round(2, {})
    assert (folder.path / "messages" / "last-up.msg").stat().st_size == 2**20


def test_a_log_line_cannot_be_forged(folder):
    recorder = start(folder)
    recorder.log("first\nsecond \x1b[31m\r2026-01-01 done")
    recorder.stop("failed", "no replies")
    lines = (folder.path / "log.txt").read_text().split("\n")
    assert len(lines) == 5
    assert lines[1].endswith(r"second \x1b[31m")
    assert lines[3].endswith("failed: no replies")
    assert read_status(folder.path) == "failed"


def test_values_that_are_not_plain_are_refused(folder):
    with pytest.raises(TypeError, match="not a plain value"):
        start(folder).round(1, {"model": object()})


def test_a_run_without_a_result_and_a_folder_without_a_run(folder, tmp_path):
    start(folder).close()
    with pytest.raises(ContextError, match="no result"):
        read_run(folder.path)
    with pytest.raises(ConfigError, match="not a run"):
        read_run(tmp_path / "nowhere")


def test_of_many_refused_messages_the_first_are_kept_and_all_are_counted(folder):
    recorder = start(folder)
    for number in range(1, 31):
        exchange(recorder, number, accepted=False)
    recorder.result(RESULT)
    recorder.finish()
    run = read_run(folder.path)
    assert [row["round"] for row in run.refused] == list(range(1, 21))
    assert sum(run.refusals.values()) == 30


@pytest.mark.parametrize(
    "name", ["status", "result.json", "config.toml", "command.txt", "env.json", "metrics.jsonl", "bytes.jsonl"]
)
def test_no_file_of_a_run_is_followed_waited_for_or_read_without_end(folder, tmp_path, name):
    recorder = start(folder)
    exchange(recorder, 1)
    recorder.round(1, {})
    recorder.result(RESULT)
    recorder.finish()
    path, copy = folder.path / name, tmp_path / "copy"
    path.rename(copy)
    for make in (lambda: path.symlink_to(copy), lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(WireError, match="cannot be read"):
            read_run(folder.path)
        path.unlink()
    with path.open("wb") as file:
        file.truncate(2**29)  # takes no space
    with pytest.raises(WireError, match="at most"):
        read_run(folder.path)
    path.unlink()
    path.mkdir()
    with pytest.raises(WireError, match="directory"):
        read_run(folder.path)


@pytest.mark.parametrize(
    "line",
    [
        '{"round": 1}',
        '{"round": 1, "wire_bytes": "9", "payload_bytes": 4}',
        "[1]",
        '{"round": "1"}',
        '{"round": true}',
        MESSAGE.replace('"client": 0', '"client": {"a": 1}'),
        MESSAGE.replace('"client": 0, ', ""),
        MESSAGE.replace('"up"', '["up"]'),
        MESSAGE.replace("true", "1"),
        MESSAGE.replace('""', "null"),
        MESSAGE.replace("12", str(10**400)),
        MESSAGE.replace("12", "-12"),
    ],
)
def test_a_damaged_row_is_named(folder, line):
    recorder = start(folder)
    recorder.result(RESULT)
    recorder.finish()
    (folder.path / "bytes.jsonl").write_text(line + "\n")
    with pytest.raises(WireError, match=r"bytes\.jsonl"):
        read_run(folder.path)


def test_a_result_survives_json():
    assert Result.from_dict(json.loads(json.dumps(RESULT.to_dict()))) == RESULT


@given(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_an_optional_number_that_is_not_finite_becomes_null(number):
    values = dataclasses.replace(RESULT, averaging_error=number, accuracy_centralised=number).to_dict()
    assert values["averaging_error"] is None
    assert "NaN" not in json.dumps(values)
    assert Result.from_dict(values).accuracy_centralised is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", 2),
        ("schema", None),
        ("accuracy", None),
        ("accuracy", 1.5),
        ("accuracy", "0.5"),
        ("accuracy_base", -0.1),
        ("seed", True),
        ("seed", -1),
        ("seed", 1.0),
        ("seconds", float("inf")),
        ("seconds", 1e300),
        ("clients", 2**64),
        ("model_parameters", -1),
        ("sampling_rate", 0.5),
        ("rejected", {"a": -1}),
        ("rejected", {"a": True}),
        ("rejected", [1]),
        ("riders", []),
        ("riders", {"x": {"rounds": 2, "zero": 2, "small": 0, "echo": 0}}),
        ("riders", {"3": {"rounds": 2}}),
        ("riders", {"3": {"rounds": 2, "zero": 3, "small": 0, "echo": 0}}),
        ("riders", {"3": {"rounds": 2, "zero": 2, "small": 2, "echo": 0}}),
        ("riders", {"3": {"rounds": 2, "zero": True, "small": 0, "echo": 0}}),
        ("name", None),
        ("alpha", "0.1"),
        ("unknown", 1),
    ],
)
def test_a_result_with_a_wrong_entry_is_refused(name, value):
    with pytest.raises(WireError):
        Result.from_dict({**RESULT.to_dict(), name: value})


def test_a_sampling_rate_is_a_share():
    private = dataclasses.replace(RESULT, epsilon=2.0, delta=1e-5, sampling_rate=0.25)
    assert Result.from_dict(json.loads(json.dumps(private.to_dict()))) == private
    with pytest.raises(WireError, match="sampling_rate"):
        Result.from_dict({**private.to_dict(), "sampling_rate": 1.5})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Result)])
def test_a_result_that_lacks_an_entry_is_refused(name):
    values = RESULT.to_dict()
    if name in (
        "recalls",
        "gains",
        "drops",
        "accuracy_personal",
        "accuracy_personal_global",
        "settings",
        "epsilon",
        "delta",
        "sampling_rate",
        "chance",
        "perplexity",
        "perplexity_base",
        "riders",
    ):  # of some
        assert name not in values
        return
    del values[name]
    with pytest.raises(WireError):
        Result.from_dict(values)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema": NaN}', "[" * 100_000])
def test_a_damaged_result_is_a_wire_error(folder, text):
    (folder.path / "result.json").write_text(text)
    with pytest.raises(WireError):
        read_result(folder.path)


def test_rows_of_an_absent_file_and_a_torn_line(tmp_path):
    assert read_rows(tmp_path / "none") == []
    (tmp_path / "rows").write_text('{"round": 1}\n{"rou')
    assert read_rows(tmp_path / "rows") == [{"round": 1}]


def test_a_needle_runs_rows_are_read_back(folder):
    assert Result.from_dict(json.loads(json.dumps(RECALLED.to_dict()))) == RECALLED
    many = [CLIENT | {"items": 50_000, "exact": 50_000, "chosen": 0, "hits": "1" * 50_000, "choices": "0" * 50_000}]
    large = dataclasses.replace(RECALLED, recalls={"trained": many})
    recorder = start(folder)
    recorder.result(large)
    recorder.finish()
    assert read_result(folder.path) == large


@pytest.mark.parametrize(
    "change",
    [
        {"items": 2}, {"exact": 3}, {"chosen": True}, {"hits": "11x"}, {"choices": [0, 1, 0]}, {"loss": "1"},
        {"extra": 1}, {"items": 0, "hits": "", "choices": "", "exact": 0, "chosen": 0}, {"client": None},
        {"loss": float("nan")},
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself_is_refused(change):
    for row in ([CLIENT | change], [CLIENT, None], [], {}):
        values = RESULT.to_dict() | {"recalls": {"trained": row}}
        with pytest.raises(WireError) as caught:
            Result.from_dict(values)
        assert "recalls" in str(caught.value)


@pytest.mark.parametrize("gain", [[0.1, 0.2], [0, 0, 2], [0, 0, "0"], None, [True, 0, 0], [0, 0, float("nan")]])
def test_a_gain_that_is_no_interval_is_refused(gain):
    with pytest.raises(WireError, match="gains"):
        Result.from_dict(RESULT.to_dict() | {"gains": {"exact": gain}})


def test_drops_are_written_where_there_are_any_and_checked_as_gains_are():
    assert "drops" not in RESULT.to_dict()
    result = dataclasses.replace(RECALLED, drops={"0 mk": [0.1, -0.2, 0.4], "all": [0.1, -0.2, 0.4]})
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    with pytest.raises(WireError, match="drops"):
        Result.from_dict(RESULT.to_dict() | {"drops": {"all": [0.1, 0.2]}})


def test_accuracies_of_clients_own_models_are_written_where_there_are_any():
    assert "accuracy_personal" not in RESULT.to_dict()
    result = dataclasses.replace(RESULT, accuracy_personal=0.0, accuracy_personal_global=0.5)
    values = result.to_dict()
    assert (values["accuracy_personal"], values["accuracy_personal_global"]) == (0.0, 0.5)
    assert Result.from_dict(values) == result
    with pytest.raises(WireError):
        Result.from_dict(values | {"accuracy_personal": 1.5})


def test_what_a_text_run_says_more_is_written_where_there_is_any():
    assert not {"chance", "perplexity", "perplexity_base"} & RESULT.to_dict().keys()
    result = dataclasses.replace(RESULT, chance=0.15, perplexity=7.5, perplexity_base=40.0)
    values = json.loads(json.dumps(result.to_dict()))
    assert (values["chance"], values["perplexity"], values["perplexity_base"]) == (0.15, 7.5, 40.0)
    assert Result.from_dict(values) == result
    for bad in ({"chance": 1.5}, {"perplexity": -1.0}, {"perplexity_base": "low"}):
        with pytest.raises(WireError):
            Result.from_dict(values | bad)
    endless = dataclasses.replace(RESULT, perplexity=float("inf")).to_dict()
    assert "perplexity" not in endless


def test_the_digest_of_settings_is_read_back_and_may_be_absent() -> None:
    assert "settings" not in RESULT.to_dict()
    assert Result.from_dict(RESULT.to_dict()).settings == ""
    result = dataclasses.replace(RESULT, settings="ab12cd34")
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    with pytest.raises(WireError):
        Result.from_dict(RESULT.to_dict() | {"settings": 3})
