"""Rows of a needle run as plain values, and what a memory adds, item by item."""

import json

import pytest

from nestling.federation.recalls import drops, entries, gains
from nestling.tasks.recall import Recall, paired_difference


def recall(client: int, hits: list[bool], choices: list[bool]) -> Recall:
    return Recall(client, "mk", len(hits), sum(hits), sum(choices), 0.25, {0.1: (1, 2), 0.7: (0, 1)}, hits, choices)


ON = [recall(0, [True, True, False], [True, True, True]), recall(1, [True, False, False], [True, False, True])]
OFF = [recall(0, [False, False, False], [False, True, False]), recall(1, [True, False, False], [False, False, True])]


def test_entries_are_json_and_lose_nothing() -> None:
    [first, second] = json.loads(json.dumps(entries({"trained": ON})))["trained"]
    assert first == {
        "client": 0, "template": "mk", "items": 3, "exact": 2, "chosen": 3, "loss": 0.25,
        "by_depth": {"0.1": [1, 2], "0.7": [0, 1]}, "hits": "110", "choices": "111",
    }  # fmt: skip
    assert (second["client"], second["hits"], second["choices"]) == (1, "100", "101")


def test_a_gain_pairs_the_items_of_all_clients() -> None:
    found = gains({"trained": ON, "memory off": OFF})
    on, off = [True, True, False, True, False, False], [False, False, False, True, False, False]
    assert found["exact"] == list(paired_difference(on, off))
    assert found["exact"][0] == pytest.approx(2 / 6)
    assert found["choice"][0] == pytest.approx(3 / 6)


def test_without_a_memory_there_is_no_gain() -> None:
    assert gains({"trained": ON, "full attention": ON}) == {}


def test_a_drop_pairs_each_client_that_was_trained_alone_with_the_federated_state() -> None:
    found = drops({"trained": ON, "local only": [OFF[1]]}, "choices")
    assert list(found) == ["1 mk", "all"]
    assert found["all"] == found["1 mk"] == list(paired_difference(OFF[1].choices, ON[1].choices))
    assert drops({"trained": ON, "local only": OFF}, "hits")["all"][0] == pytest.approx(-2 / 6)
    assert drops({"trained": ON}, "hits") == drops({"local only": ON}, "hits") == {}
