"""Contexts of requests laid one after another: keys and values out of their pages, for kernels that are faster with whole tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.triton.float8 import as_stored, numbers
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last


def lay_out(
    k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, parts: torch.Tensor, facts: AttentionFacts
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as `[M · page_size, Hk, D]` in the dtype of q.

    table: `[R, P]` int32. parts: `[M, 2]` int32, of each page of rows its entry of the table, counted in memory, and how many of its tokens
    are copied; the rows behind these become zeros, and so do those of page 0, which is nobody's. Where the number is negative
    rows are left as they are.
    """
    rows, heads, dim = parts.shape[0] * facts.page_size, facts.num_kv_heads, facts.head_dim
    k, v = (torch.empty(rows, heads, dim, dtype=getattr(torch, facts.dtype), device=table.device) for _ in range(2))
    if rows:
        block = max(triton.next_power_of_2(dim), 16)
        _lay_out[(parts.shape[0], heads)](
            as_stored(k_pages), as_stored(v_pages), k, v, table, parts, *k_pages.stride()[:3], *v_pages.stride()[:3],
            HEADS=heads, PAGE=facts.page_size, BLOCK_T=triton.next_power_of_2(facts.page_size), D=dim, BLOCK_D=block,
            num_warps=4, **early(table.device),
        )  # fmt: skip
    return k, v


@triton.jit
def _lay_out(k_pages, v_pages, k_rows, v_rows, table, parts, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, HEADS: tl.constexpr, PAGE: tl.constexpr,
             BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """A program copies one head of one page."""
    let_next_start(EARLY)
    part, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Of the step, and there before.
    entry = tl.load(parts + 2 * part)
    count = tl.load(parts + 2 * part + 1)
    page = tl.load(table + tl.maximum(entry, 0)).to(tl.int64)
    wait_for_last(EARLY)
    if count >= 0:
        i, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
        inside = (i < PAGE)[:, None] & (d < D)[None, :]
        key = inside & ((i < count) & (page > 0))[:, None]
        to = (part * PAGE + i)[:, None] * HEADS * D + head * D + d[None, :]
        k = tl.load(k_pages + page * kp_p + i[:, None] * kp_t + head * kp_h + d[None, :], mask=key, other=0.0)
        v = tl.load(v_pages + page * vp_p + i[:, None] * vp_t + head * vp_h + d[None, :], mask=key, other=0.0)
        tl.store(k_rows + to, numbers(k, k_rows.dtype.element_ty), mask=inside)
        tl.store(v_rows + to, numbers(v, v_rows.dtype.element_ty), mask=inside)
