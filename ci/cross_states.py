"""Uses of the recurrences by served models, on meta tensors, as in `cross_shapes.py`: Mamba and Mamba 2, delta rules, RWKV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from pagoda.ops.conv import ConvFacts
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.norm import GatedNormFacts
from pagoda.ops.op import Case
from pagoda.ops.scan import SelectiveScanFacts, SsdFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.wkv import WkvFacts

STEPS = {"prompts and decodes": (4096, 300, 5, 1, 1, 1, 1, 1), "decodes of 64": (1,) * 64, "a decode": (1,)}
CONVS = (
    ConvFacts("", 10240, 4, bias=True),
    ConvFacts("", 8192, 4),
    ConvFacts("", 5120, 4, bias=True),
    ConvFacts("", 2048, 3, activation="none"),
)
"""Nemotron-H, Qwen3-Next, Mamba 2.8B, LFM2."""
SSDS = (
    SsdFacts("", 128, 64, 8, 128), SsdFacts("", 48, 64, 1, 128), SsdFacts("", 24, 128, 1, 256), SsdFacts("", 64, 128, 64, 128),
)  # fmt: skip
"""Nemotron-H, Granite 4, Falcon-H1, lightning attention."""
DELTAS = (DeltaFacts("", 16, 32, 128, 128), DeltaFacts("", 32, 32, 128, 128, by_channel=True))
"""Qwen3-Next, Kimi Linear."""

NORMS = {
    "Nemotron-H": GatedNormFacts("", 1024, 8, 1e-5, "silu", True, "own"), "Qwen3-Next": GatedNormFacts("", 128, 32, 1e-6),
    "Kimi Linear": GatedNormFacts("", 128, 32, 1e-5, "sigmoid"), "MiniMax": GatedNormFacts("", 8192, 1, 1e-6, "sigmoid", False, "own"),
}  # fmt: skip


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _batches() -> Iterator[tuple[str, StateBatch, int]]:
    for label, queries in STEPS.items():
        rows, many = len(queries), sum(length > 1 for length in queries)
        pages = _empty("int64", rows, 4)
        batch = StateBatch(_empty("int32", rows + 1), _empty("bool", rows), pages[:, 1], pages[:, 3], many, max(queries))
        yield label, batch, sum(queries)


def conv_cases(dtype: str) -> Iterator[Case]:
    for facts in CONVS:
        facts, size = replace(facts, dtype=dtype), facts.channels
        weights = {"weight": _empty(dtype, size, facts.taps)} | ({"bias": _empty(dtype, size)} if facts.bias else {})
        for label, batch, tokens in _batches():
            pages = _empty(dtype, 100, facts.taps - 1, size).transpose(1, 2)  # as models keep them
            args = (_empty(dtype, tokens, 2 * size)[:, :size], pages, batch)
            yield Case(f"{label}, {size} channels", facts, args, weights)


def ssd_cases(dtype: str) -> Iterator[Case]:
    for facts in SSDS:
        heads, dim, groups, size = facts.heads, facts.head_dim, facts.groups, facts.state
        for label, batch, tokens in _batches():
            mixed = _empty(dtype, tokens, heads * dim + 2 * groups * size)
            x, b, c = mixed.split([heads * dim, groups * size, groups * size], dim=-1)
            steps = (_empty(dtype, tokens, heads), _empty("float32", heads)) if groups < heads else (None, None)
            args = (
                x.unflatten(-1, (heads, dim)), *steps,
                _empty("float32", heads), b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size)), _empty("float32", heads),
                _empty("float32", 100, heads, dim, size), batch,
            )  # fmt: skip
            yield Case(f"{label}, {heads} heads", replace(facts, dtype=dtype), args)


def delta_cases(dtype: str) -> Iterator[Case]:
    for facts in DELTAS:
        heads, size = facts.heads, facts.k_dim
        decay = (heads, size) if facts.by_channel else (heads,)
        for label, batch, tokens in _batches():
            keys = facts.k_heads * size
            q, k, v = _empty(dtype, tokens, 2 * keys + heads * facts.v_dim).split([keys, keys, heads * facts.v_dim], dim=-1)
            args = (
                q.unflatten(-1, (-1, size)), k.unflatten(-1, (-1, size)), v.unflatten(-1, (heads, -1)), _empty(dtype, tokens, *decay),
                _empty(dtype, tokens, heads), _empty("float32", *decay), _empty("float32", heads),
                _empty("float32", 100, heads, size, facts.v_dim), batch,
            )  # fmt: skip
            yield Case(f"{label}, {heads} heads", replace(facts, dtype=dtype), args)


def gated_norm_cases(dtype: str) -> Iterator[Case]:
    for label, facts in NORMS.items():
        facts, width = replace(facts, dtype=dtype), facts.groups * facts.width
        weights = {"weight": _empty(dtype, facts.width if facts.weight == "shared" else width)}
        for rows in (1, 64, 4096):
            yield Case(f"{label}, {rows} rows", facts, (_empty(dtype, rows, width), _empty(dtype, rows, 2 * width)[:, width:]), weights)


def selective_cases(dtype: str) -> Iterator[Case]:
    facts = SelectiveScanFacts(dtype, 5120, 16)
    for label, batch, tokens in _batches():
        args = (
            _empty(dtype, tokens, 5120), _empty("float32", tokens, 5120), _empty("float32", 5120, 16), _empty(dtype, tokens, 16),
            _empty(dtype, tokens, 16), _empty("float32", 5120), _empty("float32", 100, 5120, 16), batch,
        )  # fmt: skip
        yield Case(label, facts, args)


def wkv_cases(dtype: str) -> Iterator[Case]:
    for label, batch, tokens in _batches():
        floats = (_empty("float32", 4096), _empty("float32", 4096), _empty("float32", 100, 3, 4096))
        yield Case(label, WkvFacts(dtype, 4096), (_empty(dtype, tokens, 4096), _empty(dtype, tokens, 4096), *floats, batch))
