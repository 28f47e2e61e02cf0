"""The kernels of kernels.metal behind the contract: compiled by torch.mps for the dtypes of a use, launched on torch's own queue."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.norm import NormFacts
from pagoda.ops.rope import RopeFacts

SOURCE = Path(__file__).with_name("kernels.metal")
SCALARS = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
"""Metal's names of dtypes."""

SIZE = 128
"""Threads of a group, as the source has it."""

KINDS = ("silu", "gelu_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh")
"""Activations by the numbers that the source gives them."""


@cache
def library(scalar: str, stored: str) -> Any:
    """The compiled source for numbers of one dtype and pages of another."""
    source = SOURCE.read_text(encoding="utf-8").replace("SCALAR", SCALARS[scalar]).replace("CACHE", SCALARS[stored])
    return torch.mps.compile_shader(source)


def launch(facts: Any, name: str, groups: tuple[int, ...], *arguments: Any) -> None:
    """Start `groups` groups of SIZE threads. Whole numbers arrive as 64 bits, others as float."""
    kernel = getattr(library(facts.dtype, getattr(facts, "kv_dtype", facts.dtype)), name)
    kernel(*arguments, threads=[groups[0] * SIZE, *groups[1:]], group_size=[SIZE, *[1] * (len(groups) - 1)])


class RmsNorm(PlainKernel):
    """`run(packed, x)`, as in `ops.norm.RmsNormReference`; x may be a view of rows or of heads."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous().view(-1, self.facts.width)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            _norm(self.facts, packed, x, None, out, out)
        return out


class AddRmsNorm(PlainKernel):
    """`run(packed, x, residual)`, as in `ops.norm.AddRmsNormReference`."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        if x.numel():
            _norm(self.facts, packed, x, residual, out, total)
        return out, total


def _norm(facts: NormFacts, packed: Any, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, total: torch.Tensor) -> None:
    inner = x.shape[-2] if x.dim() == 3 else 1
    outer = x.stride(0) if x.dim() > 1 else 0
    weighted = (2 if facts.offset else 1) if facts.weight else 0
    launch(
        facts, "rms_norm", (x.numel() // facts.width,), out, total, x, x if residual is None else residual,
        packed["weight"] if facts.weight else x, inner, outer, x.stride(1) if x.dim() == 3 else 0, facts.width, int(residual is not None),
        weighted, float(facts.eps), float(facts.offset),
    )  # fmt: skip


class GatedActivation(PlainKernel):
    """`run(x)`, as in `ops.activation.GatedActivationReference`."""

    facts: ActivationFacts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1] // 2
        flat = x.reshape(-1, 2 * width)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        out = torch.empty(flat.shape[0], width, dtype=x.dtype, device=x.device)
        count, kind, limit = out.numel(), KINDS.index(self.facts.kind), float(self.facts.limit or 0.0)
        if count:
            launch(self.facts, "gated_activation", (-(-count // SIZE),), out, flat, flat.stride(0), width, count, kind, limit)
        return out.view(*x.shape[:-1], width)


class Rope(PlainKernel):
    """`run(q, k, cos, sin)`, as in `ops.rope.RopeReference`; rotates in place."""

    facts: RopeFacts

    def run(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
        if q.shape[0]:
            launch(
                self.facts, "rope", (q.shape[0], q.shape[1] + k.shape[1]), q, k, cos, sin, q.shape[1], *q.stride()[:2], *k.stride()[:2],
                cos.stride(0), sin.stride(0), self.facts.rotary_dim // 2, int(self.facts.style == "neox"),
            )  # fmt: skip
        return q, k


class WriteKv(PlainKernel):
    """`run(k, v, k_pages, v_pages, slots)`, as in `ops.attention.WriteKvReference`."""

    facts: AttentionFacts

    def run(self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        if k.shape[0]:
            launch(
                self.facts, "write_kv", (k.shape[0], self.facts.num_kv_heads), k_pages, v_pages, k, v, slots.contiguous(),
                *k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
                self.facts.page_size, self.facts.head_dim, self.facts.v_dim,
            )  # fmt: skip


class PagedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks=None, slopes=None, bias=None)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: Any = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        facts, table = self.facts, batch.block_table.contiguous()
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = torch.empty(q.shape[0], facts.num_heads, facts.v_dim, dtype=q.dtype, device=q.device)
        if not out.numel() or not table.shape[0]:
            return out
        per_head = [q if x is None else x.float().contiguous() for x in (sinks, slopes, bias)]
        flags = int(facts.causal) + 2 * (sinks is not None) + 4 * (slopes is not None) + 8 * (0 if bias is None else bias.shape[1])
        launch(
            facts, "paged_attention", (q.shape[0], facts.num_heads), out, q, k_pages, v_pages, batch.query_start, batch.seq_lens, table,
            *per_head, *table.shape, facts.num_heads, facts.num_heads // facts.num_kv_heads, facts.head_dim, facts.v_dim, facts.page_size,
            facts.window or 0, facts.chunk or 0, flags, *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
            float(facts.scale), float(facts.softcap or 0.0),
        )  # fmt: skip
        return out
