"""One seed gives one set of bytes: whatever the number of workers, the order of clients, or the process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small import Answers, config, finished, toml

from nestling.build import Parts, build
from nestling.codec.message import state_digest
from nestling.config.schema import CodecConfig, FullConfig, RunConfig
from nestling.federation.loop import run_rounds


def traffic(parts: Parts, settings: RunConfig, engine=None) -> tuple[list[bytes], str]:
    """Every message of a run, and the digest of its last state."""
    messages: list[bytes] = []
    for done in run_rounds(
        parts.server, engine or parts.engine, parts.task.clients(), lambda state: 0.0, rounds=settings.rounds,
        per_round=settings.server.clients_per_round, patience=3, seed=settings.seed,
    ):  # fmt: skip
        assert not done.refused
        messages += [done.broadcast, *(reply for reply in done.replies.values() if isinstance(reply, bytes))]
    return messages, state_digest(parts.server.state)


def run(settings: RunConfig, engine=None) -> tuple[list[bytes], str]:
    parts = build(settings)
    return traffic(parts, settings, engine and engine(parts))


VARIANTS = {
    "flite": {},
    "flite-augmented": {"task": replace(config("").task, augment="crop-flip")},
    "flite-int4": {"codec": CodecConfig(bits=4, down_bits=8)},
    "fedavg": {"adapter": FullConfig()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_cat_060_workers_and_the_order_of_clients_change_no_byte(variant: str, tmp_path: Path) -> None:
    settings = config(tmp_path, **VARIANTS[variant])
    one = run(settings)
    assert len(one[0]) == 2 * (1 + 3)
    assert one == run(replace(settings, machine=replace(settings.machine, workers=2)))

    def backwards(parts: Parts) -> Answers:
        handle = parts.workers[0].handle
        return Answers(lambda messages: {client: handle(client, messages[client]) for client in reversed(messages)})

    assert one == run(settings, backwards)


def test_cat_100_another_seed_is_another_run(tmp_path: Path) -> None:
    settings = config(tmp_path)
    messages, state = run(settings)
    others, other_state = run(replace(settings, seed=1))
    assert state != other_state
    assert not set(messages) & set(others)


def test_cat_021_the_largest_seeds_work_from_end_to_end(tmp_path: Path) -> None:
    small = config(tmp_path, rounds=1)
    base = replace(small.base, pretrain_on="none", seed=2**64 - 1)
    states = {run(replace(small, base=base, seed=seed))[1] for seed in (2**63, 2**64 - 1)}
    assert len(states) == 2


def test_cat_100_another_process_with_its_own_base_gives_the_same_bytes(tmp_path: Path) -> None:
    """The second process trains its base afresh, has another hash seed and, if the machine has it, other threads."""
    settings, result, _ = finished()
    path = tmp_path / "small.toml"
    path.write_text(toml(tmp_path / "runs"))
    flags = ["--json", "--machine.no-references", "--machine.workers", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "nestling", "run", str(path), *flags],
        env={**os.environ, "NESTLING_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "5", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["state_digest"] == result.state_digest
    assert again["base_hash"] == result.base_hash
    assert again["accuracy"] == result.accuracy
    for name in ("last-up.msg", "last-down.msg"):
        here, there = Path(result.run_dir) / "messages" / name, Path(again["run_dir"]) / "messages" / name
        assert here.read_bytes() == there.read_bytes()
    assert settings.machine.workers == 1


STEP = """
import multiprocessing, sys

import nestling, torch
from nestling.models.resnet import make_resnet

def step(given):
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork, whoever began them
    model = make_resnet("resnet8", width=8, channels=1, classes=10, seed=0)
    adapter = nestling.attach(model, nestling.LatentConfig(seed=7, dim=4, targets=("*conv*",)))
    torch.nn.functional.cross_entropy(model(torch.ones(4, 1, 28, 28)), torch.tensor([3, 1, 4, 1])).backward()
    torch.optim.SGD(adapter.trainable(), lr=0.1).step()
    return adapter.vector().tobytes()

if __name__ == "__main__":
    found = [step(0)]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found.append(pool.map_async(step, [0]).get(timeout=200)[0])
    print(len(found[0]), len(set(found)))
"""


def test_cat_079_processes_that_are_forked_or_spawned_train_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP)
    done = subprocess.run([sys.executable, str(tmp_path / "step.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, kinds = map(int, done.stdout.split())
    assert size > 100
    assert kinds == 1
