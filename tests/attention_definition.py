"""A model of the Llama family that reads through a window beside a memory, as it is defined: one token after another,
one head after another, in float64, from the weights alone. Nothing of ours is used; gradients are autograd's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Rules = Mapping[str, Tensor]


class ExactRotation(nn.Module):
    """In the place of transformers' rotation, which is float32 whatever the model is."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].to(torch.float64) * self.inv_freq
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()


class ExactNorm(nn.Module):
    """In the place of transformers' RMSNorm, likewise."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.eps)


def exact(model: nn.Module) -> nn.Module:
    """The model in float64, and nothing in it shorter."""
    model = model.double()
    model.model.rotary_emb = ExactRotation(model.model.rotary_emb.inv_freq.double())
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child.weight, child.variance_epsilon))
    return model


def logits(
    model: nn.Module, ids: Sequence[int], *, window: int = 0, sinks: int = 0, rules: Rules | None = None,
    address: str = "own", signs: Tensor | None = None, **kind: object
) -> Tensor:  # fmt: skip
    """float64[tokens, words] of one stream. `signs` [words, d] bind addresses to tokens. `kind`: gate, mix, update and
    forget of the memory, without (memory=False) or alone (static=False)."""
    weights = {name: w.detach().double() for name, w in model.state_dict().items()}
    rules = {name: rule.double() for name, rule in (rules or {}).items()}
    shape = model.config
    h = [weights["model.embed_tokens.weight"][i] for i in ids]
    addresses = None
    for number in range(shape.num_hidden_layers):
        at = f"model.layers.{number}"
        x = [_norm(t, weights[f"{at}.input_layernorm.weight"], shape.rms_norm_eps) for t in h]
        own = {name.removeprefix(f"{at}.self_attn."): w for name, w in weights.items() if f"{at}.self_attn." in name}
        mine = {name.removeprefix(f"layers.{number}."): r for name, r in rules.items() if f"layers.{number}." in name}
        freq = model.model.rotary_emb.inv_freq.double()
        for i, part in enumerate(sorted(address.split(","))):
            if part.startswith(f"{number}."):
                head = int(part.rpartition(".")[2])
                keys = [_project(token, own, "k", shape.head_dim, shape)[head] for token in x]
                bound = None if signs is None or i else [signs[token].double() for token in ids]
                made = addresses_of(keys, rules["address.centre"][i], rules["address.taps"][i], bound)
                addresses = made if addresses is None else _product(addresses, made)
        a = _attention(x, own, mine, shape, freq, window=window, sinks=sinks, addresses=addresses, **kind)
        h = [t + own["o_proj.weight"] @ o for t, o in zip(h, a, strict=True)]
        for t, token in enumerate(h):
            y = _norm(token, weights[f"{at}.post_attention_layernorm.weight"], shape.rms_norm_eps)
            up = weights[f"{at}.mlp.up_proj.weight"] @ y
            gate = weights[f"{at}.mlp.gate_proj.weight"] @ y
            h[t] = token + weights[f"{at}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    last = [_norm(t, weights["model.norm.weight"], shape.rms_norm_eps) for t in h]
    return torch.stack([weights["lm_head.weight"] @ t for t in last])


def _product(one: tuple[list[Tensor], ...], other: tuple[list[Tensor], ...]) -> tuple[list[Tensor], list[Tensor]]:
    read, write = ([_unit(a * b) for a, b in zip(*both, strict=True)] for both in zip(one, other, strict=True))
    return read, write


def addresses_of(
    keys: list[Tensor], centre: Tensor, taps: Tensor, bound: list[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each token of a stream from its beginning, where it reads and where it writes: [d] each. `bound`: the signs of
    the tokens themselves."""
    made = []
    for t in range(-1, len(keys)):  # -1: what stands behind nothing
        f = torch.zeros_like(centre)
        for j, tap in enumerate(taps):
            if t - j >= 0:
                f = f + tap * (_unit(keys[t - j]) - centre)
        if bound is not None and t >= 0:
            f = f * bound[t]
        made.append(_unit(f))
    return made[1:], made[:-1]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _attention(
    x: list[Tensor],
    own: Rules,
    rules: Rules,
    shape: object,
    freq: Tensor,
    *,
    window: int,
    sinks: int,
    addresses: tuple[list[Tensor], list[Tensor]] | None = None,
    gate: str = "head",
    mix: str = "blend",
    update: str = "delta",
    memory: bool = True,
    static: bool = True,
) -> list[Tensor]:
    heads, groups, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    q, k, v = ([_project(token, own, name, size, shape) for token in x] for name in "qkv")
    states = [torch.zeros(size, size, dtype=torch.float64) for _ in range(groups)]
    outputs = []
    for t, token in enumerate(x):
        attended = []
        for head in range(heads):
            group = head // (heads // groups)
            seen = [(s, t - s) for s in range(t + 1) if not window or s > t - window]
            if window:  # the first tokens that are out of the window, as if they stood right before it
                seen += [(s, min(t, window + sinks - 1) - s) for s in range(sinks) if s <= t - window]
            scores = [_turn(q[t][head], distance, freq) @ k[s][group] / size**0.5 for s, distance in seen]
            shares = torch.stack(scores).softmax(0)
            attended.append(sum(share * v[s][group] for share, (s, _) in zip(shares, seen, strict=True)))
        if not rules or not memory:
            outputs.append(torch.cat(attended))
            continue
        corrected = {}
        for name, given in zip("qkv", (q[t], k[t], v[t]), strict=True):
            corrected[name] = given
            if f"{name}.A" in rules:
                corrected[name] = given + (rules[f"{name}.B"] @ (rules[f"{name}.A"] @ token)).view(-1, size)
        if addresses is not None:  # the same for all heads
            corrected["q"] = addresses[0][t].expand(heads, size)
            corrected["k"] = addresses[1][t].expand(groups, size)
        for group in range(groups):
            key, value = _unit(corrected["k"][group]), corrected["v"][group]
            beta = torch.sigmoid(rules["write.weight"][group] @ token + rules["write.bias"][group])
            if "forget" in rules:
                states[group] = torch.sigmoid(rules["forget"][group]) * states[group]
            held = states[group].T @ key if update == "delta" else torch.zeros_like(value)
            states[group] = states[group] + torch.outer(key, beta * (value - held))
        mixed = []
        for head in range(heads):
            read = states[head // (heads // groups)].T @ _unit(corrected["q"][head])
            if not static:
                mixed.append(read)
                continue
            open_by = rules["gate"].view(heads, -1)[head] if gate != "none" else None
            if mix == "add":
                mixed.append(attended[head] + (0.5 if open_by is None else open_by) * read)
            else:
                alpha = 0.5 if open_by is None else torch.tanh(open_by)
                mixed.append((1 - alpha) * attended[head] + alpha * read)
        outputs.append(torch.cat(mixed))
    return outputs


def _project(x: Tensor, own: Rules, name: str, size: int, shape: object) -> Tensor:
    """[heads, size], before the rotation."""
    out = own[f"{name}_proj.weight"] @ x
    if f"{name}_proj.bias" in own:
        out = out + own[f"{name}_proj.bias"]
    out = out.view(-1, size)
    return _norm(out, own[f"{name}_norm.weight"], shape.rms_norm_eps) if f"{name}_norm.weight" in own else out


def _turn(x: Tensor, by: int, freq: Tensor) -> Tensor:
    """x as pairs (i, i + d/2), each turned by its own angle."""
    half = len(x) // 2
    a, b = x[:half], x[half:]
    return torch.cat(
        [a * torch.cos(by * freq) - b * torch.sin(by * freq), b * torch.cos(by * freq) + a * torch.sin(by * freq)]
    )


def _unit(x: Tensor) -> Tensor:
    return x / x.norm().clamp(min=1e-12)
