"""CANN's fused operators behind the contract, called as torch-npu documents them; imports torch-npu when a kernel first runs.

Signatures are those that torch-npu's wheel registers (`tests/samples/ascend_operators.json`), formulas those of its docstrings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.attention import AttentionFacts, HostLengths, PagedBatch
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.norm import NormFacts

MASK = 2048
"""Rows and columns of the one triangle that the attention operator wants, however long sequences are."""
ALIGNED_BELOW = 3
"""`sparse_mode`: causal, the last query beside the last key."""
ONE_TENSOR, BY_ROWS = 2, 0
"""`split_item` and `group_type` of a grouped product: one result, groups of rows."""


def _npu() -> Any:
    return import_module("torch_npu")


class RmsNorm(PlainKernel):
    """`run(packed, x)`, as in `ops.norm.RmsNormReference`."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _npu().npu_rms_norm(x.contiguous(), packed["weight"], self.facts.eps)[0]
        return out


class AddRmsNorm(PlainKernel):
    """`run(packed, x, residual)`, as in `ops.norm.AddRmsNormReference`."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, _, total = _npu().npu_add_rms_norm(x.contiguous(), residual.contiguous(), packed["weight"], self.facts.eps)
        return out, total


class GatedActivation(PlainKernel):
    """`run(x)`, as in `ops.activation.GatedActivationReference` with SiLU."""

    facts: ActivationFacts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _npu().npu_swiglu(x.contiguous(), -1)
        return out


class MoeMlp(PlainKernel):
    """`run(packed, x, weights, ids)`, as in `ops.moe.MoeMlpReference`: choices sorted by expert, two grouped products, and the sum over
    choices. Packs `up` `[E, width, 2·hidden]` and `down` `[E, hidden, width]`."""

    facts: MoeMlpFacts

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        turned = {name: weights[name].transpose(1, 2) for name in ("up", "down")}
        return super().pack({name: tensor if out else tensor.contiguous() for name, tensor in turned.items()}, out)

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        facts, experts = self.facts, self.facts.local or self.facts.experts
        if not ids.numel():
            return torch.empty_like(x)
        expert = ids.flatten() - facts.first
        here = (expert >= 0) & (expert < experts)
        expert = torch.where(here, expert, experts)  # other ranks' choices come last, in no group
        order = expert.argsort(stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=x.device).scatter_add_(0, expert, torch.ones_like(expert))
        ends = counts[:experts].cumsum(0)
        rows = x[order // facts.top_k]
        if facts.scale_input:
            rows = rows * weights.flatten()[order, None].to(x.dtype)
        hidden = _npu().npu_swiglu(_grouped(rows, packed["up"], ends), -1)
        result = torch.empty_like(rows).index_copy_(0, order, _grouped(hidden, packed["down"], ends))
        shares = torch.ones_like(weights) if facts.scale_input else weights
        parts = torch.where(here[:, None], result.float() * shares.flatten()[:, None], 0.0)
        return parts.unflatten(0, ids.shape).sum(1).to(x.dtype)


def _grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows `[N, K]` by the matrix of their group, `[E, K, M]`; `ends`: `[E]`, where each group of rows ends."""
    results = _npu().npu_grouped_matmul([rows], [weight], group_list=ends, split_item=ONE_TENSOR, group_type=BY_ROWS)
    out: torch.Tensor = results[0]
    return out


class PagedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan)`, as in `ops.attention.PagedAttentionReference`.

    The operator reads contiguous keys, and pages of our pools hold all layers, so a request's pages are gathered first. It takes lengths
    as numbers of the host, so it is not captured. Decodes and prompts go in a launch each.
    """

    facts: AttentionFacts

    def plan(self, batch: PagedBatch, buffers: Any | None = None) -> HostLengths:
        if batch.lengths is not None:
            return batch.lengths
        return HostLengths(batch.query_start.cpu().numpy(), batch.seq_lens.cpu().numpy())

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, plan: HostLengths | None = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        starts, lengths = plan or self.plan(batch)
        out = torch.zeros(q.shape[0], self.facts.num_heads, self.facts.v_dim, dtype=q.dtype, device=q.device)
        counts = np.diff(starts)
        for rows in (np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)):  # those without queries are padding
            if not len(rows):
                continue
            several, longest = counts[rows], int(counts[rows].max())
            owner = np.repeat(np.arange(len(rows)), several)
            within = np.arange(len(owner)) - (np.cumsum(several) - several)[owner]
            tokens, place, chosen = (
                torch.from_numpy(index).to(q.device) for index in (starts[rows][owner] + within, owner * longest + within, rows)
            )
            queries = q.new_zeros(len(rows) * longest, *q.shape[1:]).index_copy_(0, place, q[tokens])
            queries = queries.unflatten(0, (len(rows), longest))
            answers = self._fused(queries, k_pages, v_pages, batch.block_table[chosen], lengths[rows], several if longest > 1 else None)
            out[tokens] = answers.flatten(0, 1)[place]
        return out

    def _fused(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, lengths: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
    ) -> torch.Tensor:  # fmt: skip
        """q `[R, Q, H, D]`, the first `counts` of each row's queries; None: one each."""
        facts, longest = self.facts, int(lengths.max())
        pages = table[:, : -(-longest // facts.page_size)].long()
        keys, values = (pool[pages].flatten(1, 2)[:, :longest].contiguous() for pool in (k_pages, v_pages))
        causal = counts is not None and facts.causal
        out: torch.Tensor = _npu().npu_fused_infer_attention_score(
            q, keys, values, num_heads=facts.num_heads, num_key_value_heads=facts.num_kv_heads, scale=facts.scale, input_layout="BSND",
            atten_mask=_triangle(q.device) if causal else None, sparse_mode=ALIGNED_BELOW if causal else 0,
            actual_seq_lengths=None if counts is None else counts.tolist(), actual_seq_lengths_kv=lengths.tolist(),
        )[0]  # fmt: skip
        return out


@cache
def _triangle(device: torch.device) -> torch.Tensor:
    """What a query may not see: keys behind it."""
    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)
