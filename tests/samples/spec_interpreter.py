"""The meaning of a `DecoderSpec` in plain torch: a whole sequence at once, no cache or kernels, float64; written apart from the decoder."""

from __future__ import annotations

import math

import torch
from pagoda.models.rope import Rope, frequencies, frequencies_by_length
from pagoda.models.spec import MLA, Alibi, Attention, ClampedSwiglu, DecoderSpec, Layer, Mlp, Moe, Norm, Residual, Xielu

Weights = dict[str, torch.Tensor]


def interpret(spec: DecoderSpec, weights: Weights, ids: list[int]) -> torch.Tensor:
    """Logits after each token, `[T, vocab]` float64. `weights`: by parameter path."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["embed.weight"][ids] * spec.embed.scale
    if spec.embed.positions is not None:
        x = x + w["embed.positions"][torch.arange(len(ids)) + spec.embed.positions.offset]
    x = norm(w, "embed.norm", spec.embed.norm, x)
    for index, layer in enumerate(spec.layers):
        x = run_layer(w, f"layers.{index}", layer, x)
    x = norm(w, "norm", spec.norm, x)
    logits = x @ w["embed.weight" if spec.head.tied else "head.weight"].T
    if spec.head.bias and not spec.head.tied:
        logits = logits + w["head.bias"]
    logits = logits * spec.head.scale
    return cap(logits, spec.head.softcap)


def run_layer(w: Weights, path: str, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    mixed = norm(w, f"{path}.mixer_in", layer.mixer_in, x)
    if layer.residual is Residual.PARALLEL:
        fed = norm(w, f"{path}.ff_in", layer.ff_in, x) if layer.ff_in else mixed
        both = attention(w, f"{path}.mixer", layer.mixer, mixed) + feed_forward(w, f"{path}.ff", layer.feed_forward, fed)
        return x + layer.scale * norm(w, f"{path}.mixer_out", layer.mixer_out, both)
    if layer.mixer is not None:
        out = attention(w, f"{path}.mixer", layer.mixer, mixed)
        x = x + layer.scale * norm(w, f"{path}.mixer_out", layer.mixer_out, out)
    if layer.feed_forward is not None:
        out = feed_forward(w, f"{path}.ff", layer.feed_forward, norm(w, f"{path}.ff_in", layer.ff_in, x))
        x = x + layer.scale * norm(w, f"{path}.ff_out", layer.ff_out, out)
    return x


def norm(w: Weights, path: str, spec: Norm | None, x: torch.Tensor) -> torch.Tensor:
    if spec is None:
        return x
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt()
    if spec.weight:
        x = x * (w[f"{path}.weight"] + spec.offset)
    return x + w[f"{path}.bias"] if spec.bias else x


def linear(w: Weights, path: str, x: torch.Tensor) -> torch.Tensor:
    out = x @ w[f"{path}.weight"].T
    return out + w[f"{path}.bias"] if f"{path}.bias" in w else out


def attention(w: Weights, path: str, spec: Attention | MLA, x: torch.Tensor) -> torch.Tensor:
    if isinstance(spec, MLA):
        return latent_attention(w, path, spec, x)
    parts = {name: linear(w, f"{path}.{name}", x) for name in "qkv"}
    if spec.clip is not None:
        parts = {name: part.clamp(-spec.clip, spec.clip) for name, part in parts.items()}
    q, k = (parts[name].unflatten(-1, (-1, spec.head_dim)) for name in "qk")
    v = parts["v"].unflatten(-1, (spec.kv_heads, -1)) * spec.v_scale
    if spec.qk_norm and not spec.qk_norm.after_rope:
        q, k = qk_norm(w, path, spec, q, k)
    q, k = rotate(spec.position, q), rotate(spec.position, k)
    if spec.qk_norm and spec.qk_norm.after_rope:
        q, k = qk_norm(w, path, spec, q, k)
    if spec.temper is not None:
        far = (torch.arange(len(x)).double() + spec.temper.offset).div(spec.temper.every).floor()
        q = q * (1 + spec.temper.beta * torch.log(1 + far))[:, None, None]
    group = spec.heads // spec.kv_heads
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * spec.scale
    scores = cap(scores, spec.softcap)
    behind = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    if isinstance(spec.position, Alibi):
        scores = scores - slopes(spec)[:, None, None] * behind
    scores = scores.masked_fill(~visible(spec, behind), -math.inf)
    if spec.sinks:
        sinks = w[f"{path}.sinks"][:, None, None].expand(-1, len(x), 1)
        probabilities = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", probabilities, v.repeat_interleave(group, 1))
    return linear(w, f"{path}.o", mixed.flatten(1))


def latent_attention(w: Weights, path: str, spec: MLA, x: torch.Tensor) -> torch.Tensor:
    q = x if spec.q_rank is None else norm(w, f"{path}.q_norm", spec.norm, linear(w, f"{path}.q_down", x))
    q = linear(w, f"{path}.q", q).unflatten(-1, (spec.heads, -1))
    down = linear(w, f"{path}.kv_down", x)
    kv = linear(w, f"{path}.kv", norm(w, f"{path}.kv_norm", spec.norm, down[:, : spec.kv_rank])).unflatten(-1, (spec.heads, -1))
    turned_q, turned_k = rotate(spec.position, q[..., spec.nope_dim :]), rotate(spec.position, down[:, None, spec.kv_rank :])
    scores = torch.einsum("qhd,khd->hqk", q[..., : spec.nope_dim], kv[..., : spec.nope_dim])
    scores = (scores + torch.einsum("qhd,kd->hqk", turned_q, turned_k[:, 0])) * spec.scale
    ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -math.inf).softmax(-1), kv[..., spec.nope_dim :])
    return linear(w, f"{path}.o", mixed.flatten(1))


def qk_norm(w: Weights, path: str, spec: Attention, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    full = spec.qk_norm.extent == "full"  # otherwise weights are [dim] or [heads, dim], which multiply alike
    return tuple(
        norm(w, f"{path}.{name}_norm", spec.qk_norm.norm, x.flatten(1) if full else x).reshape(x.shape) for name, x in (("q", q), ("k", k))
    )


def rotate(position: object, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(position, Rope):
        return x
    tokens, dims = torch.arange(len(x)), position.dims
    if position.by_length:
        per_position = frequencies_by_length(position, torch.full((len(x),), len(x)))
    else:
        per_position = frequencies(position).expand(len(x), -1)
    turn = torch.polar(torch.full((len(x), dims // 2), position.factor, dtype=torch.float64), (tokens[:, None] * per_position).double())
    turned, kept = x[..., :dims], x[..., dims:]
    if position.style == "neox":
        turned = torch.stack(turned.chunk(2, -1), -1)
    else:
        turned = turned.unflatten(-1, (-1, 2))
    turned = torch.view_as_real(torch.view_as_complex(turned.clone(memory_format=torch.contiguous_format)) * turn[:, None])
    turned = torch.cat(turned.unbind(-1), -1) if position.style == "neox" else turned.flatten(-2)
    return torch.cat([turned, kept], -1)


def slopes(spec: Attention) -> torch.Tensor:
    below = 2 ** int(math.log2(spec.heads))
    first = [2 ** (-spec.position.max_bias * (i + 1) / below) for i in range(below)]
    rest = [2 ** (-spec.position.max_bias * (2 * i + 1) / (2 * below)) for i in range(spec.heads - below)]
    return torch.tensor(first + rest, dtype=torch.float64) * spec.position.scale


def visible(spec: Attention, behind: torch.Tensor) -> torch.Tensor:
    seen = behind >= 0
    if spec.window is None:
        return seen
    if spec.window.kind == "sliding":
        return seen & (behind < spec.window.size)
    chunk = torch.arange(len(behind)) // spec.window.size
    return seen & (chunk[:, None] == chunk[None, :])


def cap(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    return x if limit is None else limit * torch.tanh(x / limit)


def act(name: str, x: torch.Tensor) -> torch.Tensor:
    match name:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu2":
            return x.clamp(min=0) ** 2
        case _:
            raise AssertionError(name)


def feed_forward(w: Weights, path: str, spec: Mlp | Moe, x: torch.Tensor) -> torch.Tensor:
    return mlp(w, path, spec, x) if isinstance(spec, Mlp) else moe(w, path, spec, x)


def xielu(w: Weights, path: str, x: torch.Tensor) -> torch.Tensor:
    above, below = (torch.log(1 + torch.exp(w[f"{path}.alpha_{side}"])) for side in "pn")
    beta, eps = w[f"{path}.beta"], w[f"{path}.eps"]
    negative = (below + beta) * (torch.exp(torch.minimum(x, eps)) - 1 - x)
    return torch.where(x > 0, above * x**2, negative) + beta * x


def mlp(w: Weights, path: str, spec: Mlp, x: torch.Tensor) -> torch.Tensor:
    up = linear(w, f"{path}.up", x)
    if isinstance(spec.activation, Xielu):
        return linear(w, f"{path}.down", xielu(w, f"{path}.act", up))
    if not spec.gated:
        return linear(w, f"{path}.down", act(spec.activation, up))
    gate = linear(w, f"{path}.gate", x)
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return linear(w, f"{path}.down", act(spec.activation, gate) * up)


def moe(w: Weights, path: str, spec: Moe, x: torch.Tensor) -> torch.Tensor:
    rows = [moe_token(w, path, spec, token) for token in x]
    out = torch.stack(rows)
    if spec.shared is None:
        return out
    shared = mlp(w, f"{path}.shared", spec.shared, x)
    return out + (shared * torch.sigmoid(linear(w, f"{path}.shared_gate", x)) if spec.shared_gate else shared)


def moe_token(w: Weights, path: str, spec: Moe, token: torch.Tensor) -> torch.Tensor:
    router, logits = spec.router, linear(w, f"{path}.router", token)
    if router.score == "sparsemixer":
        return sum(weight * expert(w, f"{path}.experts", spec, e, token) for e, weight in mixed(spec, logits))
    scores = {"softmax": logits.softmax(-1), "sigmoid": torch.sigmoid(logits), "softmax_after": logits}[router.score]
    choice = scores + (w[f"{path}.correction"] if router.correction else 0)
    chosen = sorted(range(spec.experts), key=lambda e: -float(choice[e]))[: spec.top_k]
    weights = scores[chosen].softmax(-1) if router.score == "softmax_after" else scores[chosen]
    weights = weights / weights.sum() * router.scale if router.renormalize else weights * router.scale
    out = torch.zeros_like(token)
    for weight, e in zip(weights, chosen, strict=True):
        out = out + weight * expert(w, f"{path}.experts", spec, e, token)
    return out


def mixed(spec: Moe, logits: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    left, chosen = dict(enumerate(logits)), []
    for _ in range(spec.top_k):
        best = max(left, key=lambda e: float(left[e]))
        near = [x for x in left.values() if (left[best] - x) / max(abs(x), left[best]) <= 2 * spec.router.jitter]
        chosen.append((best, torch.exp(left.pop(best)) / torch.stack(near).exp().sum() * spec.router.scale))
    return chosen


def expert(w: Weights, path: str, spec: Moe, e: int, token: torch.Tensor) -> torch.Tensor:
    def part(name: str, x: torch.Tensor) -> torch.Tensor:
        out = w[f"{path}.{name}.weight"][e] @ x
        return out + w[f"{path}.{name}.bias"][e] if spec.bias else out

    gate, up = part("gate", token), part("up", token)
    if isinstance(spec.activation, ClampedSwiglu):
        gate, up = gate.clamp(max=spec.activation.limit), up.clamp(-spec.activation.limit, spec.activation.limit)
        return part("down", gate * torch.sigmoid(spec.activation.alpha * gate) * (up + 1))
    return part("down", act(spec.activation, gate) * up)
