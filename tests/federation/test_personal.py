"""A client's own model is judged by its own classes, against a count item by item."""

from pathlib import Path

import numpy as np
import pytest
from small import config

from nestling.build import build
from nestling.config.schema import LocalConfig
from nestling.federation.personal import personal_accuracies, weighted_accuracy


def test_weights_by_hand() -> None:
    """Client 0 holds class 0 alone, all of which is right; client 1 has thirds, one of a class not held out."""
    right, items = [np.array([4, 0, 0]), np.array([2, 1, 0])], np.array([4, 2, 0])
    counts = [np.array([10, 0, 0]), np.array([10, 10, 10])]
    assert weighted_accuracy(right, counts, items) == pytest.approx((10 * 1.0 + 30 * 0.5) / 40)
    assert np.isnan(weighted_accuracy(right, [np.zeros(3, int)] * 2, items))


def test_each_client_is_judged_with_its_own_blend_and_its_own_classes(tmp_path: Path) -> None:
    settings = config(tmp_path, local=LocalConfig(lr=3e-2, rule="ala", ala_layers=0))
    parts = build(settings)
    [worker] = parts.workers
    assert parts.task.right_by_class(worker.model).sum() == parts.task.evaluate(worker.model).right
    assert parts.task.held_out_by_class.tolist() == [6] * 10
    accepted, _ = parts.server.judge(1, parts.engine.exchange(dict.fromkeys([0, 1, 2], parts.server.broadcast(1))))
    parts.server.update(accepted)
    state, task = parts.server.state, parts.task
    own, of_all = personal_accuracies(parts.workers, task, state)
    assert own == of_all  # no weights have been learnt, so all clients hold the server's state
    rng = np.random.default_rng(0)
    for client in (0, 1, 2):
        worker.kept[client]["rule.weights"] = rng.integers(0, 2, state.size).astype(np.float32)
        worker.kept[client]["rule.local"] = (state + 0.3 * rng.normal(size=state.size)).astype(np.float32)
    own, of_all = personal_accuracies(parts.workers, task, state)
    wanted = {True: 0.0, False: 0.0}
    for client in (0, 1, 2):
        memory, shares = worker.kept[client], task.class_counts(client) / task.examples(client)
        mine = np.where(memory["rule.weights"] == 1, state, memory["rule.local"])
        for personal, vector in ((True, mine), (False, state)):
            worker.adapter.load_vector(vector)
            by_class = task.right_by_class(worker.model) / task.held_out_by_class
            wanted[personal] += task.examples(client) / task.examples(None) * float(shares @ by_class)
    assert (own, of_all) == (pytest.approx(wanted[True]), pytest.approx(wanted[False]))
    assert own != of_all
