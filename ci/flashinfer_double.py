"""FlashInfer's two fa3 wrappers in plain torch, for machines without a GPU: `install()`, before the kernel is imported.

They ask what the real ones (0.7.2) ask of their arguments, keep the calls, and compute from what was planned last, as replays do: the real
ones write plans into buffers that captured launches read. Keys come in tiles: those past a request's end have weights of 0, but their
values take part, so that NaN there shows as it would on the device.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch

TILE = 128


class Call(NamedTuple):
    """`kind`: "pages" or "rows"; requests: query tokens and keys of each one planned that has any."""

    kind: str
    requests: tuple[tuple[int, int], ...]


CALLS: list[Call] = []
"""What ran since somebody cleared it."""


class Event:
    """Of a stream that is always done."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Wrapper:
    """What both have in common. replaying: a captured launch runs again, without the checks of a call."""

    kind = ""
    replaying = False

    def __init__(
        self, workspace: torch.Tensor, layout: str, *, use_cuda_graph: bool = False, backend: str, **buffers: torch.Tensor
    ) -> None:
        assert backend == "fa3" and workspace.dtype == torch.uint8
        assert layout == {"pages": "HND", "rows": "NHD"}[self.kind]
        self.fixed, self.buffers, self.most, self.room = use_cuda_graph, buffers, -1, 8 << 20

    def reset_workspace_buffer(self, workspace: torch.Tensor, plans: torch.Tensor) -> None:
        assert self.most < 0, "captured launches have the buffer's address"
        assert workspace.dtype == plans.dtype == torch.uint8
        self.room = len(plans)

    def _plan(self, starts: torch.Tensor, heads: tuple[int, int], dim: int, settings: dict[str, Any]) -> None:
        assert starts.device.type == "cpu" and starts.dtype == torch.int32
        assert bool((starts.diff() >= 0).all()) and settings.pop("causal") is True
        assert settings.pop("q_data_type") == settings["kv_data_type"]
        if self.fixed:
            assert len(starts) == len(self.buffers["qo_indptr_buf"]), "the batch size of a captured wrapper is fixed"
            self.most = int(starts[-1]) if self.most < 0 else self.most
            assert int(starts[-1]) <= self.most, "more tokens than the first plan had"
        tiles = -(-max(self.most, int(starts[-1])) // TILE) + len(starts) - 2
        assert 4 * 7 * (heads[0] * tiles + 4) + 4 * 200 <= self.room, "no room for the plan"
        self.starts, self.heads, self.dim, self.settings = starts.clone(), heads, dim, settings

    def _check(self, q: torch.Tensor, out: torch.Tensor) -> None:
        assert q.shape[1:] == (self.heads[0], self.dim) and q.dtype == self.settings["kv_data_type"] and q.stride(-1) == 1
        assert out.shape == q.shape and out.dtype == q.dtype
        assert self.replaying or q.shape[0] == int(self.starts[-1]), "q is not what was planned"

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int, out: torch.Tensor) -> None:
        """k and v `[n, Hk, D]`, n ≥ keys: what tiles bring."""
        group, queries = self.heads[0] // self.heads[1], q.shape[0]
        if queries == 0:
            return
        wide_k, wide_v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q.float(), wide_k) * self.settings["sm_scale"]
        if self.settings["logits_soft_cap"]:
            logits = self.settings["logits_soft_cap"] * torch.tanh(logits / self.settings["logits_soft_cap"])
        place = torch.arange(queries)[:, None] + keys - queries
        seen = torch.arange(k.shape[0])[None] <= place
        if self.settings["window_left"] >= 0:
            seen &= torch.arange(k.shape[0])[None] >= place - self.settings["window_left"]
        weights = torch.softmax(logits.masked_fill(~seen, float("-inf")), -1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, wide_v).to(out.dtype))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    kind = "pages"

    def plan(self, starts: torch.Tensor, first: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, heads: int, kv_heads: int,
             dim: int, page: int, *, seq_lens: torch.Tensor, **settings: Any) -> None:  # fmt: skip
        self._plan(starts, (heads, kv_heads), dim, settings)
        assert len(first) == len(starts) == len(seq_lens) + 1 == len(last) + 1
        if self.fixed:
            assert indices.data_ptr() == self.buffers["paged_kv_indices_buf"].data_ptr()
        self.first, self.indices, self.page, self.lengths = first.tolist(), indices, page, seq_lens.tolist()

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        self._check(q, out)
        assert [x.shape[1:] for x in pages] == [(self.heads[1], self.page, self.dim)] * 2
        starts = self.starts.tolist()
        for row, keys in enumerate(self.lengths):
            mine = slice(starts[row], starts[row + 1])
            ids = self.indices[self.first[row] : self.first[row] + -(-keys // self.page)].long()
            k, v = (x[ids].transpose(1, 2).flatten(0, 1)[:keys] for x in pages)
            window = self.settings["window_left"]
            left = max(0, keys - (starts[row + 1] - starts[row]) - window) if window >= 0 else 0
            v[:left] = 0  # whose pages may be nobody's
            self._attend(q[mine], k, v, keys, out[mine])
        CALLS.append(Call(self.kind, _asked(starts, self.lengths)))


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    kind = "rows"

    def plan(self, starts: torch.Tensor, bounds: torch.Tensor, heads: int, kv_heads: int, dim: int, **settings: Any) -> None:
        self._plan(starts, (heads, kv_heads), dim, settings)
        assert len(bounds) == len(starts) and bounds.dtype == torch.int32 and bool((bounds.diff() >= 0).all())
        self.bounds = bounds.clone()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> None:
        self._check(q, out)
        assert k.shape == v.shape and k.shape[1:] == (self.heads[1], self.dim) and k.shape[0] >= int(self.bounds[-1])
        assert k.dtype == v.dtype == q.dtype
        starts, bounds = self.starts.tolist(), self.bounds.tolist()
        lengths = self.bounds.diff().tolist()
        for row, keys in enumerate(lengths):
            mine = slice(starts[row], starts[row + 1])
            tiles = slice(bounds[row], min(bounds[row] + -(-keys // TILE) * TILE, k.shape[0]))
            self._attend(q[mine], k[tiles], v[tiles], keys, out[mine])
        CALLS.append(Call(self.kind, _asked(starts, lengths)))


def _asked(starts: list[int], lengths: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((end - start, keys) for start, end, keys in zip(starts, starts[1:], lengths, strict=False) if end > start)


def install() -> None:
    """In place of the package, and of the events of a device that is not there."""
    package, prefill = ModuleType("flashinfer"), ModuleType("flashinfer.prefill")
    for one in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        setattr(prefill, one.__name__, one)
    sys.modules.update({"flashinfer": package, "flashinfer.prefill": prefill})
    torch.cuda.Event = Event  # type: ignore[assignment,misc]
