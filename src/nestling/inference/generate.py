"""From logits to text: which token comes next, and which characters are whole already.

    p = softmax(x / temperature)    of the likeliest tokens, the fewest that have `top_p` of p together; one is drawn

At temperature 0 the likeliest token is taken. Draws are made in float64 on the CPU: equal logits and one seed give one
text on any device. A character of UTF-8 may lie across tokens, and a stop text too: both are held back until decided.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.config.checks import at_least, is_seed
from nestling.core.errors import ConfigError

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not yet one."""
LONGEST = 16
"""Tokens after which what has not become a character is taken for none: it has four bytes at most."""


class Sampler:
    """Chooses tokens, with a generator of its own.

    Args:
        temperature: 0 takes the likeliest token; 1 draws from the model's own probabilities.
        top_p: in (0, 1]; less than 1 leaves out the unlikely tokens that have 1 − top_p of the probability together.
        seed: of the draws.

    Raises `ConfigError` for values outside these.

    >>> Sampler().choose(torch.tensor([0.0, 2.0, 1.0]))
    1
    >>> Sampler(temperature=1.0, top_p=0.5, seed=7).choose(torch.tensor([0.0, 9.0, 1.0]))
    1
    """

    def __init__(self, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        at_least("temperature", temperature, 0)
        if not 0 < top_p <= 1:
            raise ConfigError(f"{top_p!r} is not allowed", where="top_p", remedy="Give more than 0, and at most 1.")
        is_seed("seed", seed)
        self.temperature, self.top_p = temperature, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """The next token, from finite logits [V] of any floating-point type."""
        if self.temperature == 0:
            return int(logits.argmax())
        x = logits.detach().to("cpu", torch.float64)
        p = ((x - x.max()) / self.temperature).softmax(-1)  # the largest becomes 0: no temperature is too small
        if self.top_p < 1:
            ordered, order = p.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            p = torch.zeros_like(p).scatter(0, order, ordered.where(before < self.top_p, 0.0))
        return int(torch.multinomial(p, 1, generator=self._generator))


class TextDecoder:
    """Turns tokens into text as they come; what `add` and `rest` return makes up the text, half a character never.

    Args:
        tokenizer: of transformers.
        stop: texts that end the generation, and are not part of it.

    Raises `ConfigError` for an empty stop text.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in self._stops:
            raise ConfigError("is empty", where="stop", remedy="Give the text at which to end.")
        self.stopped = False
        """Whether a stop text has come; there is then nothing more to return."""
        self._ids: list[
            int
        ] = []  # a few that were decoded before, since a decoder looks at neighbours, and the new ones
        self._before = 0
        self._shown = 0
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is decided with this token; often a word, sometimes empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(HALF) and len(self._ids) - self._before < LONGEST:
            return ""
        new = text.removesuffix(HALF)[self._shown :]
        self._ids = self._ids[self._before :]
        self._before, self._shown = len(self._ids), len(self._decode(self._ids).removesuffix(HALF))
        return self._release(new)

    def rest(self) -> str:
        """What is still held back, at the end; half a character is left out."""
        text = self._release(self._decode(self._ids).removesuffix(HALF)[self._shown :])
        last, self._held, self._ids, self._before, self._shown = self._held, "", [], 0, 0
        return text if self.stopped else text + last

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _release(self, new: str) -> str:
        """Up to a stop text, or to what may become one."""
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        begun = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        keep = len(text) - max(begun, default=0)
        self._held = text[keep:]
        return text[:keep]
