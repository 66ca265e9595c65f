"""Results and run folders to report on, with numbers made up but of the true shape."""

import dataclasses
from datetime import datetime

import pytest

from nestling.runs.folder import create
from nestling.runs.recorder import Recorder
from nestling.runs.result import Result

BASE = Result(
    name="demo",
    method="flite",
    adapter="latent",
    codec="int4-message",
    task="digits",
    seed=0,
    rounds=3,
    clients=2,
    alpha=0.1,
    accuracy=0.90,
    accuracy_base=0.30,
    accuracy_local_only=0.60,
    accuracy_centralised=0.95,
    test_items=1000,
    classes=10,
    trainable_parameters=1280,
    payload_bytes_up=648,
    payload_bytes_down=5120,
    bytes_up=4272,
    bytes_down=31104,
    seconds=12.0,
    seconds_references=20.0,
    run_dir="demo",
    averaging_error=None,
    base_hash="ab" * 32,
    state_digest="cd" * 32,
    model_parameters=78042,
)
FEDAVG = dataclasses.replace(
    BASE,
    method="fedavg",
    adapter="full",
    codec="float32",
    accuracy=0.94,
    trainable_parameters=78042,
    payload_bytes_up=312168,
    payload_bytes_down=312168,
    bytes_up=1873392,
    bytes_down=1873392,
)


@pytest.fixture
def result():
    """Makes a result that differs from the usual one in what is given."""

    def make(method="flite", **changes):
        return dataclasses.replace(FEDAVG if method == "fedavg" else BASE, **{"method": method, **changes})

    return make


def rows_for(result):
    each = (result.bytes_up // result.rounds, result.bytes_down // result.rounds)
    return [
        {
            "round": n,
            "accuracy": max(0.0, result.accuracy - 0.1 * (result.rounds - n)),
            "bytes_up": each[0],
            "bytes_down": each[1],
        }
        for n in range(1, result.rounds + 1)
    ]


@pytest.fixture
def metrics():
    """The rows of metrics that fit a result."""
    return rows_for


@pytest.fixture
def run_of(tmp_path):
    """Writes a finished run and gives its folder."""
    made = []

    def make(result, *, config="", reason="not_finite", name="demo"):
        folder = create(tmp_path / "runs", name, "c0ffee", now=datetime(2026, 5, 1, 12, 0, len(made)))
        recorder = Recorder.start(folder, config=config, command=["nestling", "run", "demo.toml"])
        for row in rows_for(result):
            for client in range(result.clients):
                up = {"direction": "up", "codec": result.codec, "payload_bytes": result.payload_bytes_up}
                down = {"direction": "down", "codec": "float32", "payload_bytes": result.payload_bytes_down}
                verdict = {"accepted": client > 0 or not reason, "reason": reason if client == 0 else ""}
                recorder.message(bytes(64 + down["payload_bytes"]), round=row["round"], client=client, **down)
                recorder.message(bytes(64 + up["payload_bytes"]), round=row["round"], client=client, **up, **verdict)
            recorder.round(row["round"], {"accuracy": row["accuracy"]})
        recorder.result(result)
        recorder.finish()
        folder.close()
        made.append(folder.path)
        return folder.path

    return make
