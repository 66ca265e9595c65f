"""A session: one private stream through a causal language model, in constant memory where the model has a window.

    state, logits ← model(tokens, state)      state: of each layer the window, the first tokens, and the memory

The stream is what a user said, so it lives in this object alone: it is neither copied nor stored, errors do not repeat
it, and `reset` overwrites it with zeros. A frozen model can serve many sessions, since nothing of a stream stays in it.

Threads that use one model take turns, a forward pass at a time: during a pass the model's hooks hold the stream that is
read, so two at once would mix streams. They are not refused, because a turn is short, and each user of a server would
have to write the same queue. The lock knows sessions only; a model that is being trained is not to be read.
"""

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nestling.config.checks import is_count
from nestling.core.errors import ConfigError, ContextError, NestlingError
from nestling.inference.cache import new_cache
from nestling.inference.generate import Sampler, TextDecoder
from nestling.models.streams import Private, StreamCache, cache_argument
from nestling.models.window import Reader, reader_of

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class Session(Private):
    """One stream through `model`; used as a context manager, it is forgotten at the end.

    Args:
        model: a causal language model of transformers in `eval()`, with an adapter on it or not. Without a window it
            reads too, but what it holds grows with every token.
        tokenizer: its tokenizer; without one the session takes and gives ids.

    Raises `ConfigError` for a model with a recurrent state, `PrivateStateError` where it is copied or pickled. An error
    in the midst of a forward pass, an interrupt included, leaves half a stream: the session is then reset.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from nestling.models.window import use_window
    >>> sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> reader = use_window(model, window=8)
    >>> with Session(model) as session:
    ...     session.feed([1, 2, 3])
    ...     held = session.nbytes
    ...     session.feed(list(range(60)), piece=16)
    ...     answer = list(session.stream_ids([5], max_new_tokens=4))
    ...     session.tokens, session.nbytes == held
    (68, True)
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None) -> None:
        if new_cache(model) is None:
            raise ConfigError(
                "has a recurrent state, of which no stream is made here",
                where=type(model).__name__,
                remedy="Give a model with attention alone.",
            )
        self.model, self.tokenizer = model, tokenizer
        with _LOCKS_LOCK:
            self._lock = _LOCKS.setdefault(model, threading.RLock())
        self._argument = cache_argument(model.forward)
        self._cache: Any = None
        self._reader: Reader | None = None
        self._logits: Tensor | None = None
        self._tokens = 0

    def __repr__(self) -> str:
        return f"Session({self.tokens:,} tokens, {self.nbytes:,} bytes)"

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reset()

    @property
    def tokens(self) -> int:
        """Tokens read since the start, generated ones included."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes held now: the stream's state and the logits of the next token. Constant from the first token on, where
        the model has a window."""
        return sum(t.numel() * t.element_size() for t in self._held())

    def feed(self, text: str | Sequence[int] | Tensor, *, piece: int = 512) -> None:
        """Read on. Where ids are cut makes no difference but rounding; a text's tokens may depend on its cuts.

        Args:
            text: a text, to which no special tokens are added, or ids [T]; an empty one changes nothing.
            piece: most tokens of one forward pass; it bounds the memory of reading.

        Raises `ConfigError` for ids outside the vocabulary or a text without a tokenizer, `ContextError` if the forward
        pass fails or gives logits that are not finite. None of them holds the stream's content.
        """
        is_count("piece", piece, 1)
        ids = self._ids(text)
        for part in ids.split(piece) if len(ids) else ():
            self._read(part)

    def stream(
        self,
        text: str | Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
    ) -> Iterator[str]:
        """Read `text`, then generate: yields what is decided with each token, whole characters only.

        The text is read at once. Each token is read before its text is yielded, so the session can go on from there,
        also if the iterator is given up; the end token is read as well, and not yielded.

        Args:
            text: as of `feed`; empty to go on from what has been read.
            max_new_tokens: the generation ends after so many, or at an end token of the model or tokenizer.
            temperature, top_p, seed: as of `Sampler`; greedy by default.
            stop: texts at which the generation ends; they are read, and not yielded.

        Raises `ConfigError` as `feed`, for a setting that is not allowed, if nothing has been read yet, and, from the
        iterator, if the session has been reset meanwhile; `ContextError` as `feed`.
        """
        if self.tokenizer is None:
            raise ConfigError("has no tokenizer", where="Session", remedy="Give one, or use stream_ids.")
        decoder = TextDecoder(self.tokenizer, stop)
        sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
        return _decoded(self._start(text, max_new_tokens, sampler), decoder)

    def stream_ids(
        self,
        text: str | Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """As `stream`, but yields the tokens themselves."""
        return self._start(text, max_new_tokens, Sampler(temperature=temperature, top_p=top_p, seed=seed))

    def reset(self) -> None:
        """Forget the stream; what is held is overwritten with zeros first."""
        with self._lock, torch.no_grad():
            for tensor in self._held():
                tensor.zero_()
            self._cache = self._logits = self._reader = None
            self._tokens = 0

    def _start(self, text: str | Sequence[int] | Tensor, max_new_tokens: int, sampler: Sampler) -> Iterator[int]:
        is_count("max_new_tokens", max_new_tokens, 0)
        self.feed(text)
        if self._logits is None:
            raise ConfigError("has read nothing yet", where="Session", remedy="Give a text that is not empty.")
        return self._generate(self._cache, sampler, max_new_tokens)

    def _generate(self, cache: object, sampler: Sampler, max_new_tokens: int) -> Iterator[int]:
        ends = self._end_tokens()
        for _ in range(max_new_tokens):
            with self._lock:
                if self._cache is not cache or self._logits is None:
                    raise ConfigError("has been reset", where="Session", remedy="Call stream again.")
                token = sampler.choose(self._logits)
                self._read(torch.tensor([token]))
            if token in ends:
                return
            yield token

    def _ids(self, text: str | Sequence[int] | Tensor) -> Tensor:
        """int64[T] on the CPU. No error is chained, since the tokenizer's or torch's may repeat what it was given."""
        if isinstance(text, str):
            if not text:
                return torch.empty(0, dtype=torch.int64)
            if self.tokenizer is None:
                raise ConfigError("has no tokenizer", where="Session", remedy="Give one, or give ids.")
            if text != text.encode("utf-8", "ignore").decode():
                raise ConfigError("holds characters that are no UTF-8", where="text", remedy="Mend its encoding.")
            text = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        try:
            ids = torch.as_tensor(text, device="cpu") if len(text) else torch.empty(0, dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError, OverflowError):
            ids = torch.empty(0)  # of floating-point type, which is refused below
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ConfigError("are not whole numbers [tokens]", where="ids", remedy="Give one stream of token ids.")
        size = self.model.get_input_embeddings().weight.shape[0]
        if wrong := int(((ids < 0) | (ids >= size)).sum()):
            raise ConfigError(
                f"{wrong} of {len(ids)} lie outside the vocabulary, 0 … {size - 1}",
                where="ids",
                remedy="Use the tokenizer that belongs to the model.",
            )
        return ids.to(torch.int64)

    def _check_model(self) -> None:
        """The model reads as it did when the stream began; at its beginning, make the cache."""
        if self.model.training:
            raise ConfigError("is being trained", where="model", remedy="Call model.eval().")
        reader = reader_of(self.model)
        if self._cache is None:
            self._cache, self._reader = new_cache(self.model), reader
        elif reader is not self._reader:
            raise ConfigError(
                "carries another adapter than when the stream began", where="model", remedy="Reset the session."
            )

    def _read(self, ids: Tensor) -> None:
        """One forward pass."""
        with self._lock:
            self._check_model()
            whole, problem = False, ""
            try:
                logits = self._forward(ids)
                problem = "" if bool(torch.isfinite(logits).all()) else "gave logits that are not finite"
                whole = not problem
            except NestlingError:
                raise
            except Exception as error:  # its text, its cause and its frames may hold the stream: its kind has to do
                problem = f"failed ({type(error).__name__})"
            finally:
                if not whole:
                    if self._reader is not None:
                        self._reader.forget()  # an interrupt ends a pass without this
                    self.reset()
            if problem:
                raise ContextError(
                    f"a forward pass {problem}, and the session was reset",
                    where="model",
                    remedy="Check the weights and the adapter, then read the stream again.",
                )
            self._logits, self._tokens = logits, self._tokens + len(ids)

    @torch.no_grad()
    def _forward(self, ids: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        state = {self._argument: self._cache}
        out = self.model(input_ids=ids.to(device)[None], use_cache=True, logits_to_keep=1, **state)
        logits = out.logits[0, -1]
        assert isinstance(logits, Tensor)
        return logits

    def _held(self) -> list[Tensor]:
        held = [] if self._logits is None else [self._logits]
        for layer in self._cache.layers if self._cache is not None else ():
            if isinstance(self._cache, StreamCache):
                held += layer.tensors().values()
            else:
                held += [t for t in (layer.keys, layer.values) if isinstance(t, Tensor)]
        return held

    def _end_tokens(self) -> set[int]:
        ends: set[int] = set()
        for owner in (self.model.config, getattr(self.model, "generation_config", None), self.tokenizer):
            found = getattr(owner, "eos_token_id", None)
            ends |= set() if found is None else {found} if isinstance(found, int) else set(found)
        return ends


def _decoded(tokens: Iterator[int], decoder: TextDecoder) -> Iterator[str]:
    for token in tokens:
        if text := decoder.add(token):
            yield text
        if decoder.stopped:
            return
    if text := decoder.rest():
        yield text
