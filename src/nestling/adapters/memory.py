"""FedNL: beside the attention of a frozen model, a memory that learns while it reads; trained are its rules.

    S_t = a_t S_{t−1} + k_t (β_t (v_t − (a_t S_{t−1})ᵀ k_t))ᵀ      o = (1 − α) · o_static + α · S_tᵀ q_t

q, k, v are the model's own projections before the rotation, plus low-rank corrections B A x, q and k of unit length;
β_t = σ(w·x_t + b) per memory head; α = tanh(gate) per query head or channel. One S per key/value head, read by each of
its query heads. S starts at 0 with each stream, belongs to it, and is never in a message or a file. FedNL, arXiv
2605.16350; its published code builds on a kernel that is not the delta rule, ours is (`kernels/delta_rule`).

Where we differ: corrections act on the memory alone, so a gate of 0 without a window is the base model; the rules may
ride the latent channel (`dim`), θ = θ_init + s · U z; q and k may come of the tokens before (`address`, in address.py),
which is what ties a value to its key; and the memory may be added to attention, o_static + gate · S_tᵀ q_t (`mix`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.adapters.address import AddressHead, first_centres, token_signs
from nestling.adapters.frozen import AdapterHook, Frozen, refuse_second_adapter
from nestling.adapters.layers import layer_numbers
from nestling.adapters.rules import first_rule, head_sizes, heads_of, memory_layout, rule_layouts, rule_map
from nestling.adapters.store import check_vector, save_adapter
from nestling.config.schema import MemoryConfig
from nestling.core.errors import ConfigError
from nestling.core.seeds import SCHEME, Stream
from nestling.core.vectors import Layout, Vector
from nestling.kernels.delta_rule import delta_rule, delta_rule_step
from nestling.kernels.signs.dispatch import digest, sign_map
from nestling.models.backbones import base_hash as hash_of
from nestling.models.streams import StreamLayer
from nestling.models.window import Reader, Seen, attention_layers

LOW_RANK = (".q.A", ".q.B", ".k.A", ".k.B", ".v.A", ".v.B")


class MemoryAdapter:
    """See the module's docstring; made by `nestling.attach(model, MemoryConfig(...))`.

    One forward pass at a time: threads need a copy of the model each (`copy.deepcopy((model, adapter))`).
    Raises `ConfigError` for a model that is not of the Llama family, or that carries an adapter already.
    """

    averages_exactly = False
    """A mean of rules is another rule: B A, σ and tanh are not linear."""

    def __init__(self, model: nn.Module, config: MemoryConfig, *, base_hash: str | None = None) -> None:
        self.config = config = replace(config, seed=config.seed or 0)
        refuse_second_adapter(model)
        shape = attention_layers(model)[0].config
        self._numbers = layer_numbers(config.layers, shape.num_hidden_layers)
        rules, local = rule_layouts(config, shape)
        self.base_hash = base_hash or hash_of(model)
        device = next(model.parameters()).device
        self._heads = heads_of(config, shape)
        self._start = {name: first_rule(name, size, config).to(device) for name, size in [*rules, *local]}
        if self._heads:
            self._start["address.centre"] = first_centres(model, self._heads, config.seed or 0).to(device)
        self._maps = [rule_map(name, size, config) for name, size in rules] if config.dim else []
        self.layout, self.local_layout = memory_layout(config, shape)
        trained = {name: torch.zeros(size) for name, size in self.layout} if config.dim else self._start
        own = {name: trained[name] for name, _ in self.layout} | {name: self._start[name] for name, _ in local}
        self._parameters = {name: nn.Parameter(value.clone().to(device)) for name, value in own.items()}
        self._rules: dict[str, Tensor] = dict(self._parameters)
        signs = token_signs(config.seed or 0, shape.vocab_size, head_sizes(shape)[3]) if config.bind else None
        self._signs = None if signs is None else signs.to(device)
        self._memory_on = True
        self._passes = 0  # training passes since the state was set: they number the draws of `window_dropout`
        self._drops_window = False
        self._reader = Reader(model, window=config.window, sinks=config.sinks)  # the last that may refuse the model
        self.frozen = Frozen(model)
        memories = {number: _LayerMemory(self, number) for number in self._numbers}
        for index, head in enumerate(self._heads):
            memories[head.layer] = _Addresses(self, index, memories.get(head.layer))  # type: ignore[assignment]
        for number, memory in memories.items():
            self._reader.watch(number, memory)
        self._hooks = [
            self._reader.body.register_forward_pre_hook(_Regenerate(self)),
            self._reader.body.register_forward_hook(_Drop(self), always_call=True),
        ]

    @property
    def spec(self) -> dict[str, Any]:
        """What both sides must agree on."""
        c, address = self.config, ",".join(f"{head.layer}.{head.head}" for head in self._heads) or "own"
        spec = {"kind": c.kind, "seed": f"{c.seed:016x}", "scheme": SCHEME, "rank": c.rank, "layers": self._numbers}
        spec |= {"gate": c.gate, "mix": c.mix, "address": address, "bind": c.bind}
        spec |= {"update": c.update, "forget": c.forget}
        spec |= {
            "window": c.window,
            "sinks": c.sinks,
            "window_dropout": c.window_dropout,
            "low_rank": c.low_rank,
            "share": c.share,
            "write_bias": c.write_bias,
            "dim": c.dim,
        }
        return spec | ({"maps": digest(self._maps).hex()} if self._maps else {})

    def vector(self) -> Vector:
        """The rules that are shared (or, with `dim`, their latents), a copy: float32[layout.size]."""
        return self._pack(self.layout)

    def load_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set them. Raises `ContextError` if the length differs, `WireError` if a number is not finite."""
        self._unpack(vector, self.layout)
        self._passes = 0

    def local_vector(self) -> Vector:
        """What stays with the client, a copy: the low-rank parts with `share="gates"`, otherwise nothing."""
        return self._pack(self.local_layout)

    def load_local_vector(self, vector: np.ndarray | Tensor) -> None:
        """Set it; errors as `load_vector`."""
        self._unpack(vector, self.local_layout)

    def trainable(self) -> list[nn.Parameter]:
        """Everything that is trained, shared or not, for an optimiser."""
        return list(self._parameters.values())

    def gates(self) -> list[nn.Parameter]:
        """Of these, the gates and write strengths, which need a higher rate and no decay: else they do not move."""
        return [p for name, p in self._parameters.items() if not name.endswith(LOW_RANK)]

    def weights(self) -> dict[str, Tensor]:
        """The rules by name, as the model uses them; gradients flow to `trainable()`."""
        if self._maps:
            z = torch.cat([self._parameters[name] for name in self.layout.names])
            made = sign_map(z, self._maps, [self._start[name] for name in self.layout.names])
            return self._parameters | dict(zip(self.layout.names, made, strict=True))
        return dict(self._parameters)

    @contextmanager
    def switch(self, *, memory: bool = True, window: bool = True) -> Iterator[None]:
        """For a while, read without the memory (the window alone), or with the memory in place of the window (α = 1).

        Layers that carry no memory keep their window.
        """
        if not memory and not window:
            raise ConfigError("leaves nothing to read with", where="switch", remedy="Turn off one of the two.")
        self._memory_on, self._reader.static = memory, window
        try:
            yield
        finally:
            self._memory_on = self._reader.static = True

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the rules, the settings, the base's hash and a model card into `folder`; no stream's memory."""
        if self.local_layout.size:
            raise ConfigError(
                "has parts that stay with a client", where="save_pretrained", remedy='Save one with share = "rules".'
            )
        save_adapter(self, folder)

    def detach(self, *, merge: bool = False) -> None:
        """Take it off: the model is the base again. Twice does nothing more; `merge` is refused: no weight holds it."""
        if merge:
            raise ConfigError("cannot be merged into weights", where="detach", remedy="Keep the adapter on.")
        for hook in self._hooks:
            hook.remove()
        self._reader.remove()
        self.frozen.release()

    def _without_window(self, rows: int) -> Tensor:
        """bool [rows]: which rows of this training pass read with the memory alone; the same in all layers."""
        drawn = Stream(self.config.seed or 0, "window-dropout", str(self._passes)).integers(rows, 1 << 16)
        return torch.from_numpy(drawn < self.config.window_dropout * (1 << 16))

    def _kept(self, head: AddressHead) -> dict[str, Tensor]:
        """Holds the addresses of a pass: a place that the reader forgets, also where an interrupt ended the pass."""
        kept: dict[str, Tensor] = self._reader.layers[head.layer].nestling.kept  # type: ignore[union-attr, assignment]
        return kept

    def _pack(self, layout: Layout) -> Vector:
        return layout.pack({n: self._parameters[n].detach().cpu().numpy() for n in layout.names})

    def _unpack(self, vector: np.ndarray | Tensor, layout: Layout) -> None:
        arrays = layout.unpack(check_vector(vector, layout))
        with torch.no_grad():
            for name, array in arrays.items():
                self._parameters[name].copy_(torch.from_numpy(array))


class _Regenerate(AdapterHook):
    """Before a pass of the model's body: latents become rules, once for all layers. Marks the model as adapted, too."""

    def __init__(self, adapter: MemoryAdapter) -> None:
        self.adapter = adapter

    def __call__(self, body: nn.Module, args: object) -> None:
        adapter = self.adapter
        if adapter._signs is not None and body.get_input_embeddings().weight.shape[0] > len(adapter._signs):  # type: ignore[operator]
            raise ConfigError(
                "has more tokens than when the adapter was put on",
                where="model",
                remedy="Resize its embeddings first, then attach.",
            )
        adapter._rules = adapter.weights()
        adapter._drops_window = bool(adapter.config.window_dropout) and body.training and torch.is_grad_enabled()
        adapter._passes += adapter._drops_window


class _Drop:
    """After it: they are dropped, since with their graph they could not be copied."""

    def __init__(self, adapter: MemoryAdapter) -> None:
        self.adapter = adapter

    def __call__(self, body: nn.Module, args: object, output: object) -> None:
        self.adapter._rules = dict(self.adapter._parameters)


class _Addresses:
    """A layer whose key head makes the addresses of all memories, or above another such layer a factor of them; its own
    memory, if it has one, comes after."""

    def __init__(self, adapter: MemoryAdapter, index: int, memory: "_LayerMemory | None") -> None:
        self.adapter, self.index, self.memory = adapter, index, memory

    def mix(self, static: Tensor, seen: Seen, stream: StreamLayer | None, mask: Tensor | None) -> Tensor:
        """As of `_LayerMemory`."""
        adapter, i = self.adapter, self.index
        if adapter._memory_on:
            head, rules = adapter._heads[i], adapter._rules
            signs = adapter._signs if head is adapter._heads[-1] else None  # one factor of the product is enough
            made = head.make(seen, rules["address.centre"][i], rules["address.taps"][i], stream, mask, signs)
            if i:
                below = adapter._kept(adapter._heads[i - 1])
                made = tuple(
                    F.normalize(m * below[at], dim=-1) for m, at in zip(made, ("read at", "write at"), strict=True)
                )
            adapter._kept(head)["read at"], adapter._kept(head)["write at"] = made
        return self.memory.mix(static, seen, stream, mask) if self.memory is not None else static


class _LayerMemory:
    """The memory of one layer."""

    def __init__(self, adapter: MemoryAdapter, number: int) -> None:
        self.adapter, self.prefix = adapter, f"layers.{number}"

    def mix(self, static: Tensor, seen: Seen, stream: StreamLayer | None, mask: Tensor | None) -> Tensor:
        """The layer's output before its last projection, [B, T, Hq, d]."""
        adapter = self.adapter
        if not adapter._memory_on:
            return static
        q, k, v, beta, g = self._project(seen)
        state, update = (stream.memory if stream is not None else None), adapter.config.update
        if state is not None and q.shape[1] == 1 and mask is None and not torch.is_grad_enabled():
            if state.is_inference() and not torch.is_inference_mode_enabled():  # only there can it be written to
                state = stream.memory = state.clone()  # type: ignore[union-attr]
            step = (x[:, 0] for x in (q, k, v))
            log_decay = None if g is None else g[:, 0]
            read = delta_rule_step(*step, beta=beta[:, 0], g=log_decay, state=state, update=update)[:, None]
        else:
            read, state = delta_rule(q, k, v, beta=beta, g=g, state=state, mask=mask, update=update)
            if stream is not None:
                stream.memory = state
        if not adapter._reader.static:
            return read.to(static.dtype)
        gate: Tensor | None = None
        if adapter.config.gate != "none":
            gate = self._rule("gate", read).view(static.shape[2], -1)
        if adapter.config.mix == "add":
            mixed = static + (0.5 if gate is None else gate) * read
        else:
            alpha = 0.5 if gate is None else gate.tanh()
            mixed = (1 - alpha) * static + alpha * read
        if adapter._drops_window:
            alone = adapter._without_window(len(static)).to(static.device)
            mixed = torch.where(alone[:, None, None, None], read, mixed)
        return mixed.to(static.dtype)

    def _project(self, seen: Seen) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        x = seen.x.to(torch.promote_types(seen.x.dtype, torch.float32))
        q, k, v = (given.to(x.dtype) for given in (seen.q, seen.k, seen.v))
        trained, heads = self.adapter.config.low_rank == "trained", self.adapter._heads
        if heads:  # both of length 1 already
            read_at, write_at = (self.adapter._kept(heads[-1])[name].to(x.dtype) for name in ("read at", "write at"))
            q, k = (at[:, :, None].expand_as(given).contiguous() for at, given in ((read_at, q), (write_at, k)))
        else:
            q, k = (self._corrected(x, q, "q"), self._corrected(x, k, "k")) if trained else (q, k)
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        v = self._corrected(x, v, "v") if trained else v
        beta = F.linear(x, self._rule("write.weight", x), self._rule("write.bias", x)).sigmoid()
        g = F.logsigmoid(self._rule("forget", x)).expand(beta.shape) if self.adapter.config.forget else None
        return q, k, v, beta, g

    def _corrected(self, x: Tensor, given: Tensor, name: str) -> Tensor:
        correction = F.linear(F.linear(x, self._rule(f"{name}.A", x)), self._rule(f"{name}.B", x))
        return given + correction.view(given.shape)

    def _rule(self, name: str, like: Tensor) -> Tensor:
        return self.adapter._rules[f"{self.prefix}.{name}"].to(like.dtype)
