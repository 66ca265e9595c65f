"""Attention in constant space: a frozen transformer that sees its last `window` tokens and its first few.

    query t attends to tokens t − window + 1 … t, and to the first `sinks` tokens as if they stood right before those

The first tokens take the attention that heads have no other use for; a window alone breaks a model (StreamingLLM, arXiv
2309.17453). Their distance is capped, so nothing depends on how long the stream already is. While a stream is no longer
than window + sinks, this is the model's own attention. `models/attend.py` holds the function itself.

No model code is forked: the model is told to use an attention function of ours (transformers' attention interface), and
a hook hands it the stream's state. Other adapters of attention build on the same two seams: `Layer.memory` is asked to
mix its own output into that of the window, and `Layer.seen` holds what the projections gave before the rotation.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from nestling.core.errors import ConfigError, ContextError
from nestling.models.attend import Next, attend, attend_one, next_token
from nestling.models.padding import Rows, positions, rows_of
from nestling.models.streams import StreamCache, StreamLayer, cache_argument

WINDOWED, FULL = "nestling-window", "nestling-full"
"""Names of our attention functions in transformers' table: with a window, and (as a beginning) without one."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models that attend exactly as is computed here. Others look the same and differ: they cap scores (Gemma2),
have sinks of their own (GptOss), turn pairs of neighbours (Cohere), or do not rotate in some layers (SmolLM3)."""

_REPLACED: WeakSet[Any] = WeakSet()
"""Ordinary caches in whose place a stream was put."""


@runtime_checkable
class Memory(Protocol):
    """What an adapter of attention puts beside the static path."""

    def mix(self, static: Tensor, seen: "Seen", stream: StreamLayer | None, mask: Tensor | None) -> Tensor:
        """The output of attention before its last projection, [B, T, Hq, d]; `stream.memory` is read and replaced."""
        ...


@dataclass
class Seen:
    """What one attention layer is given and projects, before the rotation: x [B, T, h], q, k, v [B, T, heads, d]; and
    the tokens' numbers, ids [B, T], None where the model was given embeddings."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor | None = None


class Layer:
    """The state of one attention layer during a forward pass; hangs on its module, so that copies have their own."""

    def __init__(self, reader: "Reader", index: int) -> None:
        self.reader, self.index = reader, index
        self.memory: Memory | None = None
        self.kept: dict[str, Tensor] = {}

    def take_seen(self, head_dim: int) -> Seen:
        """What the hooks kept of this pass, which is then forgotten."""
        x = self.kept.pop("x")
        q, k, v = (self.kept.pop(name).reshape(*x.shape[:2], -1, head_dim) for name in "qkv")
        self.kept.clear()
        return Seen(x, q, k, v)


class Reader:
    """How a model reads: its window, its sinks, and for the time of one forward pass the stream and the padding."""

    def __init__(self, model: nn.Module, *, window: int, sinks: int) -> None:
        if reader_of(model) is not None:
            raise ConfigError("reads through a window already", where="model", remedy="Take that adapter off first.")
        self.window, self.sinks = window, sinks if window else 0
        self.static = True
        """Whether the static path takes part; memories may be read alone, to see what they hold."""
        self.body, self.layers = body, _ = attention_layers(model)
        check_window(body.config, window=window, sinks=self.sinks)
        self.stream: StreamCache | None = None
        self.rows: Rows | None = None
        self.ids: Tensor | None = None
        """The tokens of the pass."""
        self.after: Next | None = None
        """What the layers of a pass over one further token share."""
        self.embedded: Tensor | None = None
        """Of which tokens the embeddings are that the next pass is given, where that is known; for that pass alone."""
        self._own = body.config
        self.config = copy.copy(self._own)  # another model may share the original, and goes on attending as it did
        self.config._attn_implementation = _register(WINDOWED if window else FULL, self._own._attn_implementation)
        self._users = [m for m in model.modules() if m.__dict__.get("config") is self._own]
        for module in self._users:
            module.config = self.config
        before, after = _Begin(self), _End(self)
        self._handles = [
            body.register_forward_pre_hook(before, with_kwargs=True),
            body.register_forward_hook(after, always_call=True),
        ]
        for index, attention in enumerate(self.layers):
            attention.nestling = Layer(self, index)

    @property
    def inverse_frequencies(self) -> Tensor:
        """Of the rotation, [d/2]; asked for each time, since `.to()` replaces it."""
        return self.body.rotary_emb.inv_freq  # type: ignore[return-value, union-attr]

    def watch(self, index: int, memory: Memory) -> None:
        """Put a memory beside the static path of one layer."""
        attention = self.layers[index]
        layer: Layer = attention.nestling  # type: ignore[assignment]
        layer.memory = memory
        self._handles.append(attention.register_forward_pre_hook(_KeepInput(layer), with_kwargs=True))
        for name in "qkv":
            source = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")  # Qwen3 has norms
            self._handles.append(source.register_forward_hook(_Keep(layer, name)))

    def forget(self) -> None:
        """Nothing of the last pass is left here. A pass does this itself, unless an interrupt ends it."""
        self.stream = self.rows = self.ids = self.after = None
        for attention in self.layers:
            attention.nestling.kept.clear()  # type: ignore[union-attr, operator]

    def remove(self) -> None:
        """The model attends as it did. Twice does nothing more."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for module in self._users:
                module.config = self._own
            for attention in self.layers:
                del attention.nestling
        self._handles = []


def use_window(model: nn.Module, *, window: int, sinks: int = 4) -> Reader:
    """Let a frozen causal language model of transformers read through a window, until `.remove()`.

    Args:
        model: of `FAMILIES` (Llama, SmolLM2, Qwen2, Qwen2.5, Qwen3, Mistral).
        window: tokens in sight; 0 leaves attention as it is.
        sinks: first tokens that stay in sight.

    Raises `ConfigError` for another kind of model, one that already reads through a window, or a window that shows more
    tokens than the model knows.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> reader = use_window(model, window=4)
    >>> model(torch.arange(20)[None]).logits.shape
    torch.Size([1, 20, 64])
    >>> reader.remove()
    """
    return Reader(model, window=window, sinks=sinks)


def reader_of(model: nn.Module) -> Reader | None:
    """The reader that is on a model, if any."""
    found = {id(m.nestling.reader): m.nestling.reader for m in model.modules() if isinstance(_layer(m), Layer)}
    return next(iter(found.values()), None)


def _layer(module: nn.Module) -> object:
    return module.__dict__.get("nestling")


def attention_layers(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The body of a causal language model, and its attention layers; `ConfigError` for one of another family."""
    body = getattr(model, "base_model", model)
    layers = [getattr(layer, "self_attn", None) for layer in getattr(body, "layers", ())]
    wanted = ("q_proj", "k_proj", "v_proj", "o_proj")
    fits = layers and all(a is not None and all(hasattr(a, name) for name in wanted) for a in layers)
    fits = fits and getattr(getattr(body, "config", None), "model_type", None) in FAMILIES
    if not fits or not hasattr(getattr(body, "rotary_emb", None), "inv_freq"):
        raise ConfigError(
            f"{type(model).__name__} has no attention layers of the Llama family",
            where="model",
            remedy="Give a causal language model such as Llama, SmolLM2, Qwen2.5 or Qwen3.",
        )
    return body, layers


def check_window(shape: Any, *, window: int, sinks: int) -> None:
    """Refuse to keep more tokens in sight than the model itself would; `shape`: its configuration in transformers."""
    if not window:
        return
    most, sliding = shape.max_position_embeddings, getattr(shape, "sliding_window", None)
    if sliding and "sliding_attention" in (getattr(shape, "layer_types", None) or ("sliding_attention",)):
        most = min(most, sliding)
    if window + sinks > most:
        raise ConfigError(
            f"{window + sinks:,} tokens in sight, first ones included, are more than the model's {most:,}",
            where="adapter.window",
            remedy="Give a shorter window, or 0 for the model's own attention.",
        )


def _register(name: str, own: str) -> str:
    """Put our function into transformers' tables; without a window it wraps the model's own, and has its masks.

    Returns its name there, of which that own function's is a part: models that attend differently do not meet.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == WINDOWED:
        AttentionInterface.register(WINDOWED, _attend_window)
        return WINDOWED
    if own not in ALL_ATTENTION_FUNCTIONS or own not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ConfigError(
            f"attends by {own!r}", where="model", remedy='Load it with attn_implementation="sdpa", or give a window.'
        )
    name = f"{FULL}-{own}"
    AttentionInterface.register(name, _Full(ALL_ATTENTION_FUNCTIONS[own]))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


class _Begin:
    """Before a forward pass of the body: which stream it continues, and where its padding is."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __call__(self, body: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if body.training and getattr(body, "gradient_checkpointing", False):
            raise ConfigError(
                "recomputes layers, which a stream cannot",
                where="model",
                remedy="Turn activation checkpointing off.",
            )
        reader, names = self.reader, list(signature(body.forward).parameters)
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        name = cache_argument(body.forward)
        if name not in kwargs and "past_key_values" in kwargs:
            name = "past_key_values"  # the older name, which newer versions still take
        given = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        if given.shape[1] == 0:
            raise ConfigError("has no tokens", where="input_ids", remedy="Give one or more.")
        mask = kwargs.get("attention_mask")
        rows = rows_of(mask, given.shape[1])
        stream = self._stream(body, kwargs, name)
        if stream is None:
            kwargs["use_cache"] = False
        else:
            _check_stream(stream, reader, name)
            _check_padding(stream, mask, given.shape[1])
            kwargs[name] = stream
        padded = rows is not None or (stream is not None and stream.padded)
        if padded and reader.window and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions(given, rows, stream)
        if stream is not None:
            stream.reading = True
        reader.ids = reader.embedded if kwargs.get("input_ids") is None else kwargs["input_ids"]
        reader.stream, reader.rows, reader.after = stream, rows, None
        return (), kwargs

    def _stream(self, body: Any, kwargs: dict[str, Any], name: str) -> StreamCache | None:
        """The given stream, a new one where transformers would make a cache, or none."""
        cache = kwargs.get(name)
        if isinstance(cache, StreamCache):
            return cache
        if cache is None:
            asked = kwargs.get("use_cache")
            asked = body.config.use_cache if asked is None else asked
            if not asked or body.training or torch.is_grad_enabled():
                return None
        else:
            _replace_once(cache, name)
        return StreamCache(len(self.reader.layers), window=self.reader.window, sinks=self.reader.sinks)


def _replace_once(cache: object, name: str) -> None:
    """A stream takes the place of an ordinary cache that holds nothing yet, as `generate` makes one; `ContextError` for
    any other, also for one that was replaced before: whoever gives it again believes that it holds tokens."""
    seen = getattr(cache, "get_seq_length", None)
    if seen is None or seen() != 0 or cache in _REPLACED:
        raise ContextError(
            "holds tokens in another form", where=name, remedy="Give nestling.inference.cache.new_cache(model)."
        )
    _REPLACED.add(cache)


def _check_stream(stream: StreamCache, reader: Reader, name: str) -> None:
    held = {(layer.window, layer.sinks) for layer in stream.layers}
    if len(stream.layers) != len(reader.layers) or held != {(reader.window, reader.sinks)}:
        raise ContextError("was made for another window or model", where=name, remedy="Make one with new_cache(model).")
    if stream.reading:
        raise ContextError(
            "is being read, or a pass over it failed midway", where=name, remedy="reset() it, and read from the start."
        )


def _check_padding(stream: StreamCache, mask: Tensor | None, tokens: int) -> None:
    """Without a window the model's own attention has to be told of padding that it read earlier."""
    if stream.layers[0].window or not stream.padded:
        return
    if mask is None or mask.shape[1] < stream.get_seq_length() + tokens:
        raise ConfigError(
            "does not reach back over the padding of earlier pieces",
            where="attention_mask",
            remedy="Give one for all tokens of the stream so far.",
        )


class _End:
    """After it, whether it succeeded or not: nothing of the stream is left here."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __call__(self, body: nn.Module, args: object, output: object) -> None:
        stream, rows = self.reader.stream, self.reader.rows
        self.reader.forget()
        if stream is not None and output is not None:  # there is none after an error
            stream.reading, stream.padded = False, stream.padded or rows is not None


class _KeepInput:
    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.layer.kept["x"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


class _Keep:
    def __init__(self, layer: Layer, name: str) -> None:
        self.layer, self.name = layer, name

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.layer.kept[self.name] = output


class _Full:
    """The model's own attention, with a memory beside it where there is one."""

    def __init__(self, own: Callable[..., tuple[Tensor, Any]]) -> None:
        self.own = own

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        layer: Layer = module.nestling
        static, _ = self.own(module, query, key, value, attention_mask, **kwargs)
        return _with_memory(layer, static, query.shape[-1], already_aligned=False), None


def _attend_window(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one layer; query [B, Hq, T, d], key and value [B, H, T, d] of the new tokens, rotated."""
    layer: Layer = module.nestling
    reader, rows = layer.reader, layer.reader.rows
    stream = reader.stream.layers[layer.index] if reader.stream is not None else None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if rows is not None:
        q, k, v = rows.align(q), rows.align(k), rows.align(v)
    how = {"window": reader.window, "sinks": reader.sinks, "inverse_frequencies": reader.inverse_frequencies}
    if stream is not None and stream.count is not None and q.shape[1] == 1 and rows is None:
        if reader.after is None or reader.after.sight.device != k.device:  # a model may lie on several devices
            reader.after = next_token(stream.count, **how, dtype=k.dtype)
        static = attend_one(q, k, v, after=reader.after, scale=module.scaling, stream=stream)
    else:
        lengths = rows.lengths if rows else None
        static = attend(q, k, v, **how, scale=module.scaling, stream=stream, lengths=lengths)
    out = _with_memory(layer, static, query.shape[-1], already_aligned=True)
    return (rows.restore(out) if rows is not None else out), None


def _with_memory(layer: Layer, static: Tensor, head_dim: int, *, already_aligned: bool) -> Tensor:
    if layer.memory is None:
        return static
    reader, rows = layer.reader, layer.reader.rows
    stream = reader.stream.layers[layer.index] if reader.stream is not None else None
    seen = layer.take_seen(head_dim)
    seen.ids = reader.ids
    if rows is None:
        return layer.memory.mix(static, seen, stream, None)
    ids = None if seen.ids is None else rows.align(seen.ids)
    seen = Seen(*(rows.align(x) for x in (seen.x, seen.q, seen.k, seen.v)), ids)
    if already_aligned:
        return layer.memory.mix(static, seen, stream, rows.mask)
    return rows.restore(layer.memory.mix(rows.align(static), seen, stream, rows.mask))
