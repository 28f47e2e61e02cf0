"""What a library's kernel for prompts wants besides lengths, in one launch: where rows of q and out begin, and zeros behind values.

Such kernels multiply whole tiles of values, what nobody sees by weights of 0; and 0 · NaN, of whoever had a page before, would be NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last


def prompt_inputs(v_pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, q_row: int, out_row: int) -> torch.Tensor:
    """int64 `[2, R + 1]`: where each request's query tokens begin, in numbers of a tensor whose tokens are `q_row` or `out_row` apart.

    Values behind a request's last key in its last page become zeros: what is written there next is written before anybody sees it. So does
    page 0, which is nobody's and stands where tables end.

    v_pages: `[P, page_size, Hk, D]`. table: `[R, W]` int32. lengths: `[3, R + 1]` int32: first query token of each, and the end; number of
    query tokens; number of keys, 0 of rows that are left alone.
    """
    _, page, heads, dim = v_pages.shape
    starts = torch.empty(2, table.shape[0] + 1, dtype=torch.int64, device=table.device)
    _prompt_inputs[(table.shape[0] + 1, heads)](
        v_pages, table, lengths, starts, table.stride(0), lengths.stride(0), starts.stride(0), q_row, out_row, *v_pages.stride()[:3],
        PAGE=page, BLOCK_T=triton.next_power_of_2(page), D=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=4, **early(table.device),
    )  # fmt: skip
    return starts


@triton.jit
def _prompt_inputs(v_pages, table, lengths, starts, t_r, l_r, s_r, q_row, out_row, vp_p, vp_t, vp_h, PAGE: tl.constexpr,
                   BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """A program has one head of one page: of page 0, then of each row's last one."""
    let_next_start(EARLY)
    first, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.maximum(first - 1, 0)
    start = tl.load(lengths + first).to(tl.int64)
    length = tl.load(lengths + 2 * l_r + row)
    last = tl.maximum(length - 1, 0)
    page = tl.load(table + row * t_r + last // PAGE).to(tl.int64)
    wait_for_last(EARLY)
    if head == 0:
        tl.store(starts + first, start * q_row)
        tl.store(starts + s_r + first, start * out_row)
    page, used = tl.where(first == 0, 0, page), tl.where(first == 0, 0, last % PAGE + 1)
    if (first == 0) | (length > 0):
        t, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
        unused = ((t >= used) & (t < PAGE))[:, None] & (d < D)[None, :]
        to = v_pages + page * vp_p + t[:, None] * vp_t + head * vp_h + d[None, :]
        tl.store(to, tl.zeros((BLOCK_T, BLOCK_D), v_pages.dtype.element_ty), mask=unused)
