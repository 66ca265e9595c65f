"""The fuzzer's readers without the fuzzer: its corpus, seeded mutants of it, and what fuzzing has found."""

import json

import fuzzing
import numpy as np
import pytest
from fuzzing import GOLDEN, READERS, REPAIRED, corpus, one_input, repaired

from nestling.core.errors import ConfigError


def mutant(data: bytes, random: np.random.Generator) -> bytes:
    """A copy in which one to three stretches were overwritten, one time in eight with more or fewer bytes."""
    damaged = bytearray(data)
    for _ in range(random.integers(1, 4)):
        place, width = random.integers(2, len(damaged)), random.integers(1, 5)
        end = min(place + width, len(damaged))
        damaged[place:end] = random.bytes(end - place if random.integers(8) else width + 1)
    return bytes(damaged)


def test_everything_the_fuzzer_begins_with_is_read():
    assert [one_input(data) for data in corpus()] == ["ok"] * len(corpus())
    assert {data[0] for data in corpus()} == set(range(len(READERS)))
    assert len(list(GOLDEN.glob("*uplink*[!s].hex"))) >= 14


def test_mutants_come_to_a_documented_end():
    random, inputs = np.random.default_rng(5), corpus()
    inputs += inputs[-3:] * 20  # as many of files as of messages
    outcomes = {one_input(mutant(inputs[index % len(inputs)], random)) for index in range(800)}
    reached = "ok length magic version flags context future_round client num_examples scale code_range"
    reached += " json rows checkpoint"
    assert set(reached.split()) <= outcomes


def test_a_repaired_message_passes_its_checksum():
    message = next(data for data in corpus() if data[0] == 0)[2:]
    assert repaired(message) == message
    damaged = message[:-1] + bytes([message[-1] ^ 1])
    assert one_input(bytes([0, 0]) + damaged) == "digest"
    assert one_input(bytes([0, REPAIRED]) + damaged) != "digest"


@pytest.mark.parametrize("wrong", [ValueError("another"), ConfigError("another"), MemoryError()])
def test_another_error_is_a_finding(monkeypatch, wrong):
    def raises(*args, **kwargs):
        raise wrong

    monkeypatch.setattr(fuzzing, "decode", raises)
    with pytest.raises(type(wrong)):
        one_input(corpus()[0])


@pytest.mark.parametrize("value", [np.nan, 2e4])
def test_numbers_beyond_the_limits_are_a_finding(monkeypatch, value):
    def returns(*args, **kwargs):
        header, vector = decode(*args, **kwargs)
        return header, np.full_like(vector, value)

    decode = fuzzing.decode
    monkeypatch.setattr(fuzzing, "decode", returns)
    with pytest.raises(AssertionError):
        one_input(corpus()[0])


def stored(header: dict) -> bytes:
    """A safetensors file of a state of one number and what else `header` says."""
    facts = json.dumps({"schema": 1, "round": 3, "facts": {}})
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"__metadata__": {"nestling": facts}, "state": tensor} | header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


def test_a_client_whose_number_is_no_number_python_reads_is_refused():
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}
    assert one_input(b"\1\0" + stored({"client.12.x": nothing})) == "ok"
    assert one_input(b"\1\0" + stored({"client." + "9" * 5000 + ".x": nothing})) == "checkpoint"
