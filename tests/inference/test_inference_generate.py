"""Sampling keeps to its distribution, and decoding to whole characters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.inference.generate import LONGEST, Sampler, TextDecoder


class Bytes:
    """A tokenizer of which each token is a byte."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", "replace")


def decoded(data: bytes, stop: tuple[str, ...] = ()) -> list[str]:
    decoder = TextDecoder(Bytes(), stop)
    pieces = []
    for byte in data:
        pieces.append(decoder.add(byte))
        if decoder.stopped:
            return pieces
    return [*pieces, decoder.rest()]


@given(text=st.text(max_size=60))
@settings(max_examples=200)
def test_pieces_of_a_text_are_whole_characters_and_add_up(text: str) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "?")
    pieces = decoded(text.encode())
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


@given(
    data=st.one_of(st.binary(max_size=80), st.lists(st.sampled_from([0x80, 0xE6, 0xF0, 0x41]), max_size=80).map(bytes))
)
@settings(max_examples=300)
def test_bytes_that_are_no_text_add_up_too(data: bytes) -> None:
    assert "".join(decoded(data)) == data.decode("utf-8", "replace").removesuffix("\N{REPLACEMENT CHARACTER}")


def test_endless_rubbish_is_not_held_without_bound() -> None:
    decoder = TextDecoder(Bytes())
    given_out = 0
    for _ in range(1000):
        given_out += len(decoder.add(0x80))
        assert len(decoder._ids) <= 2 * LONGEST
    assert given_out > 900


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200)
def test_the_text_ends_before_the_first_stop_to_be_complete(text: str, stops: list[str]) -> None:
    cut = text
    for end in range(len(text) + 1):
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            cut = text[: min(found)]
            break
    assert "".join(decoded(text.encode(), tuple(stops))) == cut


def test_at_temperature_0_the_likeliest_is_taken() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert Sampler(seed=3).choose(logits) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3])
def test_a_tiny_temperature_is_the_same(temperature: float) -> None:
    assert Sampler(temperature=temperature).choose(torch.tensor([1.0, 300.0, -1e30])) == 1


def test_draws_have_the_probabilities_of_the_model() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    sampler = Sampler(temperature=2.0, seed=5)
    drawn = torch.bincount(torch.tensor([sampler.choose(logits) for _ in range(4000)]), minlength=4) / 4000
    assert (drawn - (logits / 2).softmax(0)).abs().max() < 0.03  # four standard deviations


@pytest.mark.parametrize(("top_p", "expected"), [(0.4, {2}), (0.55, {2, 0}), (0.85, {2, 0, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, expected: set[int]) -> None:
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()
    sampler = Sampler(temperature=1.0, top_p=top_p)
    assert {sampler.choose(logits) for _ in range(400)} == expected
