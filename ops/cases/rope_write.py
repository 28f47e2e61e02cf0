"""Truth and inputs of `rope_write`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pagoda.ops.cases.common import ROWS, by_rows, draw, dtype_of, strided, tolerance
from pagoda.ops.op import DTYPE_EPS, Case, Op
from pagoda.ops.rope_write import RopeWriteFacts, RopeWriteReference


def _turned(facts: RopeWriteFacts, heads: np.ndarray, weight: np.ndarray | None, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """heads `[T, H, D]`, normed and rotated, a pair at a time."""
    out = heads.copy()
    if weight is not None:
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + facts.eps) * (weight + facts.offset)
    half = facts.rotary_dim // 2
    before = out.copy()
    for i in range(half):
        a, b = (i, i + half) if facts.style == "neox" else (2 * i, 2 * i + 1)
        c, s = cos[:, i : i + 1], sin[:, i : i + 1]
        out[:, :, a] = before[:, :, a] * c - before[:, :, b] * s
        out[:, :, b] = before[:, :, b] * c + before[:, :, a] * s
    return out


def _oracle(case: Case) -> tuple[torch.Tensor, ...]:
    facts, (qkv, cos, sin, k_pages, v_pages, slots) = case.facts, case.args
    heads, kv, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    wide = qkv.double().numpy().reshape(len(slots), heads + 2 * kv, dim)
    weights = {name: weight.double().numpy() for name, weight in case.weights.items()}
    angles = cos.double().numpy(), sin.double().numpy()
    q = _turned(facts, wide[:, :heads], weights.get("q_norm"), *angles)
    k = _turned(facts, wide[:, heads : heads + kv], weights.get("k_norm"), *angles)
    q = q * facts.k_scale
    k_out, v_out = k_pages.double().numpy().copy(), v_pages.double().numpy().copy()
    for token, slot in enumerate(slots.tolist()):
        k_out[slot // facts.page_size, slot % facts.page_size] = k[token] / facts.k_scale
        v_out[slot // facts.page_size, slot % facts.page_size] = wide[token, heads + kv :] / facts.v_scale
    return torch.from_numpy(q), torch.from_numpy(k_out), torch.from_numpy(v_out)


def _case(gen: torch.Generator, facts: RopeWriteFacts, label: str, tokens: int) -> Case:
    width = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    angle = torch.randn(tokens, facts.rotary_dim // 2, generator=gen) * 100
    shape = (4, facts.page_size, facts.num_kv_heads, 2, facts.head_dim)
    pool = draw(gen, *shape).to(dtype_of(facts.kv_dtype))  # K and V of a page side by side, as a device may lay them
    slots = torch.randperm(3 * facts.page_size, generator=gen)[:tokens] + facts.page_size
    both = torch.cat((angle.cos(), angle.sin()), dim=-1)
    cos, sin = both.chunk(2, dim=-1)
    qkv = draw(gen, tokens, width, dtype=facts.dtype)
    names = ("q_norm", "k_norm") if facts.norm else ()
    weights = {name: draw(gen, facts.head_dim, dtype=facts.dtype) for name in names}
    args = (strided(qkv) if tokens % 2 else qkv, cos, sin, pool[..., 0, :], pool[..., 1, :], slots)
    return Case(label, facts, args, weights, mutates=(3, 4), consumes=(0,))


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for heads, kv, dim, rotary in ((4, 2, 64, 64), (16, 8, 128, 128), (5, 1, 80, 32), (3, 3, 6, 2)):
        for norm, offset in ((False, 0.0), (True, 0.0), (True, 1.0)):
            for style in ("neox", "interleaved"):
                facts = RopeWriteFacts(dtype, dtype, heads, kv, dim, rotary, 16, style, norm, 1e-6, offset)  # type: ignore[arg-type]
                for tokens in (ROWS[1], ROWS[4]) if norm else ROWS[:3]:
                    yield _case(gen, facts, f"{style} {tokens}×{heads}+{kv}×{dim}/{rotary}", tokens)
    yield _case(gen, RopeWriteFacts(dtype, "bfloat16", 4, 2, 64, 64, 8, "neox", True, 1e-6), "bfloat16 pages", 5)
    yield _case(gen, RopeWriteFacts(dtype, "float8_e4m3fn", 4, 2, 64, 64, 8, "neox", True, 1e-6), "float8 pages", 5)
    scaled = RopeWriteFacts(dtype, "float8_e4m3fn", 4, 2, 64, 32, 8, "neox", False, k_scale=0.02, v_scale=3.0)
    for tokens in (1, 5, 20):
        yield _case(gen, scaled, "float8 pages with scales", tokens)


def _tolerance(case: Case) -> float:
    coarse = max((case.facts.dtype, case.facts.kv_dtype), key=DTYPE_EPS.__getitem__)
    return tolerance(coarse, case.facts.head_dim, roundings=4)


ROPE_WRITE = Op("rope_write", RopeWriteReference, _oracle, _tolerance, _cases, by_rows())
