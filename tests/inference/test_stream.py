"""Sessions: the tokens of a loop without a cache, in constant memory, and nothing of a stream anywhere else."""

import copy
import gc
import io
import pickle
import threading
import traceback
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import tiny_llama
from torch import nn

from nestling.adapters.memory import MemoryAdapter
from nestling.config.schema import MemoryConfig
from nestling.core.errors import ConfigError, ContextError, PrivateStateError
from nestling.inference.stream import Session
from nestling.models.window import reader_of, use_window

transformers = pytest.importorskip("transformers")
TEXT = "Ein Küken, 日本 & tabs\t. "
WAYS = ["plain", "window", "memory", "memory alone", "address", "bound"]


def byte_tokenizer() -> object:
    """A token for each byte, 1 … 256, and 0 for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={"<end>": 0} | {c: i for i, c in enumerate(letters, 1)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>")


TOKENIZER = byte_tokenizer()


def adapted(way: str) -> nn.Module:
    model = tiny_llama(vocab_size=257)
    if way == "window":
        use_window(model, window=8, sinks=2)
    elif way != "plain":
        window, address = 0 if way == "memory alone" else 8, "0.1" if way in ("address", "bound") else "own"
        config = MemoryConfig(window=window, sinks=2, layers="all", forget=True, address=address, bind=way == "bound")
        adapter = MemoryAdapter(model, config)
        adapter.load_vector(0.3 * torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="module", params=WAYS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return adapted(request.param)


@pytest.fixture(scope="module")
def windowed() -> nn.Module:
    return adapted("memory")


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def whole_text(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@torch.no_grad()
def without_cache(model: nn.Module, ids: list[int], count: int) -> list[int]:
    """The likeliest continuation, each token from a pass over all that came before."""
    ids, start = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == 0:
            break
    return ids[start:]


def logits(session: Session) -> torch.Tensor:
    return session._logits.clone()


def test_the_tokens_are_those_of_a_loop_without_a_cache(model: nn.Module) -> None:
    ids = ids_of(TEXT)
    expected = without_cache(model, ids, 30)
    session = Session(model, TOKENIZER)
    assert list(session.stream_ids(ids, max_new_tokens=30)) == expected
    assert len(set(expected)) > 3  # a model that says one thing would prove little
    assert session.tokens == len(ids) + len(expected)


def test_a_stream_goes_on_where_it_ended(model: nn.Module) -> None:
    session = Session(model, TOKENIZER)
    first = list(session.stream_ids(TEXT, max_new_tokens=5))
    then = list(session.stream_ids("and", max_new_tokens=5))
    more = list(session.stream_ids("", max_new_tokens=5))
    ids = ids_of(TEXT) + first + ids_of("and")
    assert then + more == without_cache(model, ids, 10)


@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=8), piece=st.integers(1, 40))
@settings(max_examples=10)
def test_any_cut_of_the_ids_reads_the_same(cuts: list[int], piece: int) -> None:
    ids, model = ids_of(TEXT * 3), _shared("memory")
    once, cut = Session(model, TOKENIZER), Session(model, TOKENIZER)
    once.feed(ids)
    rest = ids
    for size in cuts:
        cut.feed(rest[:size], piece=piece)
        rest = rest[size:]
    cut.feed(torch.tensor(rest, dtype=torch.int32), piece=piece)
    assert cut.tokens == once.tokens == len(ids)
    torch.testing.assert_close(logits(cut), logits(once), rtol=1e-4, atol=1e-4)


_MODELS: dict[str, nn.Module] = {}


def _shared(way: str) -> nn.Module:
    return _MODELS.setdefault(way, adapted(way))


@pytest.mark.parametrize(
    ("way", "is_constant"), [("window", True), ("memory", True), ("address", True), ("plain", False)]
)
def test_what_is_held_is_constant_with_a_window(way: str, is_constant: bool) -> None:
    session = Session(adapted(way), TOKENIZER)
    assert session.nbytes == 0
    session.feed([5])
    held = session.nbytes
    sizes = set()
    for _ in range(5):
        session.feed(TEXT)
        sizes.add(session.nbytes)
    sizes.update(session.nbytes for _ in session.stream("", max_new_tokens=20))
    assert (sizes == {held}) == is_constant
    assert max(sizes) < 100_000


def test_held_bytes_are_those_of_the_state_and_the_logits(windowed: nn.Module) -> None:
    session = Session(windowed)
    session.feed([1, 2, 3])
    window, memory = 3 * 2 * (8 + 2) * 2 * 8 * 4, 3 * 2 * 8 * 8 * 4
    assert session.nbytes == window + memory + 3 * 8 + 257 * 4  # 8: the count of each layer


def test_reset_forgets_and_overwrites(model: nn.Module) -> None:
    session = Session(model, TOKENIZER)
    fresh = list(session.stream_ids(TEXT, max_new_tokens=8))
    held = session._held()
    assert any(bool(t.any()) for t in held)
    session.reset()
    assert not any(bool(t.any()) for t in held)
    assert (session.tokens, session.nbytes) == (0, 0)
    assert list(session.stream_ids(TEXT, max_new_tokens=8)) == fresh


def test_the_end_of_the_with_block_resets_also_after_an_error(windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)

    def failing() -> None:
        with session:
            session.feed(TEXT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert session.nbytes == session.tokens == 0


def test_cat_086_interleaved_sessions_are_alone_bit_for_bit(model: nn.Module) -> None:
    texts = [TEXT, "something quite different, and longer. " * 2, "x"]

    def alone(text: str) -> tuple[list[int], torch.Tensor]:
        session = Session(model, TOKENIZER)
        return list(session.stream_ids(text, max_new_tokens=12)), logits(session)

    expected = [alone(text) for text in texts]
    sessions = [Session(model, TOKENIZER) for _ in texts]
    running = [s.stream_ids(text, max_new_tokens=12) for s, text in zip(sessions, texts, strict=True)]
    got = [list(turn) for turn in zip(*zip(*running, strict=True), strict=True)]
    for (tokens, last), mine, session in zip(expected, got, sessions, strict=True):
        assert mine == tokens
        assert torch.equal(logits(session), last)


def test_threads_on_one_model_take_turns(windowed: nn.Module) -> None:
    texts = [f"{n} is the number of this one. " * 2 for n in range(4)]
    expected = [list(Session(windowed, TOKENIZER).stream_ids(text, max_new_tokens=25)) for text in texts]
    got: dict[int, list[int]] = {}
    inside, most = 0, 0

    def enter(*args: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)

    def leave(*args: object) -> None:
        nonlocal inside
        inside -= 1

    handles = [windowed.register_forward_pre_hook(enter), windowed.register_forward_hook(leave)]
    run = lambda n: got.update({n: list(Session(windowed, TOKENIZER).stream_ids(texts[n], max_new_tokens=25))})  # noqa: E731
    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.remove()
    assert [got[n] for n in range(4)] == expected
    assert most == 1


@pytest.mark.parametrize(
    "way_out",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda s: torch.save(s, io.BytesIO()), lambda s: copy.deepcopy([s])],
    ids=["copy", "deepcopy", "pickle", "torch.save", "inside a list"],
)
def test_cat_085_a_session_leaves_in_no_way(way_out, windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    session.feed(TEXT)
    with pytest.raises(PrivateStateError, match="Session: is private"):
        way_out(session)


def test_nothing_of_a_stream_stays_in_the_model(windowed: nn.Module) -> None:
    before = {k: v.clone() for k, v in windowed.state_dict().items()}
    session = Session(windowed, TOKENIZER)
    list(session.stream(TEXT, max_new_tokens=3))
    assert all(torch.equal(v, before[k]) for k, v in windowed.state_dict().items())
    held = [weakref.ref(tensor) for tensor in session._held()]
    assert len(held) > 6
    del session
    gc.collect()
    assert [each for each in held if each() is not None] == []


def test_the_repr_says_sizes_alone(windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    session.feed("secret")
    assert repr(session) == f"Session(6 tokens, {session.nbytes:,} bytes)"


# Text.


def test_text_comes_as_it_is_decoded_and_adds_up(model: nn.Module) -> None:
    pieces = list(Session(model, TOKENIZER).stream(TEXT, max_new_tokens=60))
    ids = list(Session(model, TOKENIZER).stream_ids(TEXT, max_new_tokens=60))
    assert "".join(pieces) == whole_text(ids).removesuffix("\N{REPLACEMENT CHARACTER}")
    assert len(pieces) > 1


def says(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Whatever the logits are, these are the tokens chosen."""
    left = iter(ids)
    monkeypatch.setattr("nestling.inference.stream.Sampler.choose", lambda self, logits: next(left))


def test_no_half_character_is_ever_given(windowed: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "日本 🐣 é!"
    says(monkeypatch, ids_of(said))
    session = Session(windowed, TOKENIZER)
    assert list(session.stream("x", max_new_tokens=len(ids_of(said)))) == list(said)
    says(monkeypatch, ids_of(said)[:4])
    assert list(session.stream("", max_new_tokens=4)) == ["日"]  # the beginning of the next is left out


def test_a_stop_text_ends_it_and_is_not_given(windowed: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "one, two. END. more"
    says(monkeypatch, ids_of(said))
    session = Session(windowed, TOKENIZER)
    assert "".join(session.stream("x", max_new_tokens=50, stop=[". E..", "END"])) == "one, two. "
    assert session.tokens == 1 + said.index("END") + 3


@pytest.mark.parametrize("where", ["config", "generation_config", "tokenizer"])
def test_it_stops_at_the_end_token_which_is_read_but_not_given(where: str, windowed: nn.Module) -> None:
    usual = list(Session(windowed, TOKENIZER).stream_ids(TEXT, max_new_tokens=10))
    end = usual[4]
    model, tokenizer = windowed, byte_tokenizer()
    owner = tokenizer if where == "tokenizer" else getattr(model, where)
    before = owner.eos_token_id
    try:
        owner.eos_token_id = [end, 0] if where == "generation_config" else end
        session = Session(model, tokenizer)
        assert list(session.stream_ids(TEXT, max_new_tokens=10)) == usual[: usual.index(end)]
    finally:
        owner.eos_token_id = before
    assert session.tokens == len(ids_of(TEXT)) + usual.index(end) + 1


def test_what_was_yielded_has_been_read_also_when_it_is_given_up(windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    running = session.stream_ids(TEXT, max_new_tokens=20)
    got = [next(running), next(running)]
    running.close()
    assert session.tokens == len(ids_of(TEXT)) + 2
    more = list(session.stream_ids("", max_new_tokens=3))
    assert got + more == without_cache(windowed, ids_of(TEXT), 5)


def test_draws_follow_the_seed_alone(windowed: nn.Module) -> None:
    def drawn(seed: int) -> str:
        torch.rand(3)  # the global generator has no say
        return "".join(Session(windowed, TOKENIZER).stream(TEXT, temperature=1.5, seed=seed, max_new_tokens=30))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_no_new_tokens_only_reads(windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    assert list(session.stream(TEXT, max_new_tokens=0)) == []
    assert session.tokens == len(ids_of(TEXT))


# Errors.


def test_an_empty_text_is_nothing_and_at_the_start_no_stream(windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    for empty in ("", [], torch.empty(0, dtype=torch.int64)):
        session.feed(empty)
        with pytest.raises(ConfigError, match="has read nothing yet"):
            session.stream(empty)
    assert session.tokens == 0


@pytest.mark.parametrize("ids", [[257], [-1], [1, 2, 10**6], torch.tensor([300])])
def test_ids_outside_the_vocabulary_are_refused_before_anything_is_read(ids, windowed: nn.Module) -> None:
    session = Session(windowed)
    session.feed([1])
    with pytest.raises(ConfigError, match=r"1 of \d lie outside the vocabulary, 0 … 256"):
        session.feed(ids)
    assert session.tokens == 1


@pytest.mark.parametrize("ids", [torch.tensor([[1]]), torch.tensor([1.0]), torch.tensor([True]), [10**30], [[1], [2]]])
def test_other_things_than_ids_are_refused(ids, windowed: nn.Module) -> None:
    with pytest.raises(Exception, match=r"are not whole numbers|type|hint") as caught:
        Session(windowed).feed(ids)
    assert isinstance(caught.value, ConfigError) or "jaxtyping" in type(caught.value).__module__


def test_without_a_tokenizer_text_is_refused(windowed: nn.Module) -> None:
    session = Session(windowed)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        session.feed("text")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        session.stream([1])


@pytest.mark.parametrize(
    "setting",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1},
     {"max_new_tokens": -1}, {"stop": ""}],
    ids=str,
)  # fmt: skip
def test_a_bad_setting_is_refused_before_anything_is_read(setting: dict, windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    with pytest.raises(ConfigError, match=next(iter(setting))):
        session.stream(TEXT, **setting)
    assert session.tokens == 0


@pytest.fixture
def breakable() -> nn.Module:
    return adapted("memory")


def everything(error: BaseException) -> str:
    """What could be printed or sent of an error: its text, its traceback, and those it was raised from."""
    assert error.__cause__ is None
    assert error.__context__ is None
    return "".join(traceback.format_exception(error)) + repr(error.args)


def test_cat_087_an_error_inside_the_model_says_nothing_of_the_stream(breakable: nn.Module) -> None:
    def broken(module: nn.Module, args: object) -> None:
        raise RuntimeError("cannot go on after the secret word")

    session = Session(breakable, TOKENIZER)
    session.feed(TEXT)
    handle = breakable.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(ContextError, match=r"failed \(RuntimeError\), and the session was reset") as caught:
        session.feed("more")
    assert "secret word" not in everything(caught.value)
    assert (session.tokens, session.nbytes) == (0, 0)  # the first layer had read on, the second had not
    handle.remove()
    fresh = Session(breakable, TOKENIZER)
    assert list(session.stream_ids(TEXT, max_new_tokens=4)) == list(fresh.stream_ids(TEXT, max_new_tokens=4))


def test_an_interrupt_leaves_no_half_read_stream(breakable: nn.Module) -> None:
    def interrupt(module: nn.Module, args: object) -> None:
        raise KeyboardInterrupt

    session = Session(breakable, TOKENIZER)
    session.feed(TEXT)
    breakable.model.layers[1].self_attn.k_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.feed("more")
    assert session.tokens == 0
    reader = reader_of(breakable)
    assert reader is not None
    assert reader.stream is None
    assert not any(attention.nestling.kept for attention in reader.layers)


def test_logits_that_are_not_finite_are_an_error_not_a_token(breakable: nn.Module) -> None:
    session = Session(breakable, TOKENIZER)
    session.feed(TEXT)
    with torch.no_grad():
        breakable.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ContextError, match="not finite"):
        list(session.stream(""))
    assert session.tokens == 0


def test_text_that_is_no_utf8_is_refused_unrepeated(windowed: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no UTF-8") as caught:
        Session(windowed, TOKENIZER).feed("secret\udcff")
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_an_iterator_does_not_outlive_a_reset(windowed: nn.Module) -> None:
    session = Session(windowed, TOKENIZER)
    running = session.stream(TEXT)
    next(running)
    session.reset()
    session.feed("another stream")
    with pytest.raises(ConfigError, match="has been reset"):
        list(running)
    assert session.tokens == len("another stream")


def test_a_model_in_training_or_with_another_adapter_is_refused() -> None:
    model = adapted("plain")
    session = Session(model, TOKENIZER)
    session.feed(TEXT)
    reader = use_window(model, window=8)
    with pytest.raises(ConfigError, match="another adapter"):
        session.feed("more")
    reader.remove()
    model.train()
    with pytest.raises(ConfigError, match="being trained"):
        session.feed("more")
    model.eval()
    session.feed("more")
    assert session.tokens == len(ids_of(TEXT)) + 4
