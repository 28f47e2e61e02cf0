"""The write of K and V into their pages, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.triton.float8 import as_stored, stored


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kv(k, v, k_pages, v_pages, slots, k_t, k_h, v_t, v_h, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h,
              PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
              BLOCK_D: tl.constexpr, FLOAT8: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    page, offset = slot // PAGE, slot % PAGE
    d = tl.arange(0, BLOCK_D)
    key = tl.load(k + token * k_t + head * k_h + d, mask=d < D, other=0.0)
    tl.store(k_pages + page * kp_p + offset * kp_t + head * kp_h + d, stored(key, k_pages, FLOAT8), mask=d < D)
    value = tl.load(v + token * v_t + head * v_h + d, mask=d < DV, other=0.0)
    tl.store(v_pages + page * vp_p + offset * vp_t + head * vp_h + d, stored(value, v_pages, FLOAT8), mask=d < DV)


class WriteKv(PlainKernel):
    """`run(k, v, k_pages, v_pages, slots)`, as in `ops.attention.WriteKvReference`."""

    facts: AttentionFacts

    def run(self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
        facts = self.facts
        if k.shape[0] == 0:
            return
        _write_kv[(k.shape[0], facts.num_kv_heads)](
            k, v, as_stored(k_pages), as_stored(v_pages), slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *k_pages.stride()[:3], *v_pages.stride()[:3],
            PAGE=facts.page_size, HEADS=facts.num_kv_heads, D=facts.head_dim, DV=facts.v_dim,
            BLOCK_D=triton.next_power_of_2(max(facts.head_dim, facts.v_dim)), FLOAT8=facts.kv_dtype == "float8_e4m3fn",
        )  # fmt: skip
