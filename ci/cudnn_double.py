"""cuDNN's frontend in plain torch, as far as attention asks it, for machines without a GPU: `install()`, before the kernel is imported.

A graph asks what the real one (1.18 on cuDNN 9.19) asks, and computes from addresses, sizes and strides alone, as that one does. Keys come
in tiles: those past a request's end have weights of 0, but their values take part, so that NaN there shows as it would on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

TILE = 128


class Call(NamedTuple):
    """rows of the graph; requests: query tokens and keys of each one that has any."""

    rows: int
    requests: tuple[tuple[int, int], ...]


CALLS: list[Call] = []
"""What ran since somebody cleared it."""
GRAPHS: list[int] = []
"""Rows of the graphs that were built."""


class Node:
    """A tensor of a graph."""

    def __init__(self, dim: list[int], stride: list[int], data_type: Any = None, uid: int = 0, ragged_offset: Any = None, name: str = ""):
        self.dim, self.stride, self.kind, self.uid, self.ragged = dim, stride, data_type, uid, ragged_offset

    def set_output(self, value: bool) -> Node:
        assert value
        return self

    def set_dim(self, dim: list[int]) -> Node:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Node:
        self.stride = stride
        return self

    def set_data_type(self, kind: Any) -> Node:
        self.kind = kind
        return self

    def set_ragged_offset(self, node: Node) -> Node:
        self.ragged = node
        return self

    def set_uid(self, uid: int) -> Node:
        self.uid = uid
        return self


class pygraph:
    """One attention."""

    def __init__(self, **settings: Any) -> None:
        assert settings["handle"] is not None

    def tensor(self, **of: Any) -> Node:
        return Node(**of)

    def sdpa(self, **asked: Any) -> tuple[Node, None]:
        assert asked["is_inference"] and asked["use_padding_mask"] and asked["diagonal_band_right_bound"] == 0
        assert asked["diagonal_alignment"] == "bottom right"
        (rows, _, _, dim), pages = asked["q"].dim, asked["k"].dim
        table = asked["paged_attention_k_table"]
        assert pages == asked["v"].dim and pages[3] == dim and dim % 8 == 0
        assert table.dim[0] == rows and table.dim[2] * pages[2] == asked["paged_attention_max_seq_len_kv"]
        assert asked["q"].ragged.dim[0] == rows + 1
        self.asked, self.out = asked, Node([], [])
        return self.out, None

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[Any]) -> None: ...

    def check_support(self) -> None: ...

    def build_plans(self) -> None:
        assert self.out.dim == self.asked["q"].dim and self.out.ragged is not None
        GRAPHS.append(self.out.dim[0])

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: Mapping[int, torch.Tensor], workspace: torch.Tensor, handle: Any) -> None:
        asked = self.asked
        queries, keys = (tensors[asked[name].uid].tolist() for name in ("seq_len_q", "seq_len_kv"))
        table, page = tensors[asked["paged_attention_k_table"].uid], asked["k"].dim[2]
        width = asked["paged_attention_k_table"].dim[2]
        assert table.dtype == torch.int32 and table.stride() == (width, 1)
        for row in range(asked["q"].dim[0]):
            assert 0 <= queries[row] <= asked["q"].dim[2] and keys[row] <= width * page
            if queries[row]:
                tiled = min(-(-keys[row] // TILE) * TILE, width * page)
                ids = table[row, : -(-tiled // page)].long()
                k, v = (self._pages(tensors, asked[name])[ids].transpose(1, 2).flatten(0, 1)[:tiled] for name in "kv")
                q, out = (self._rows(tensors, node, row, queries[row]) for node in (asked["q"], self.out))
                out.copy_(self._attend(q, k, v, keys[row]).to(out.dtype))
        CALLS.append(Call(asked["q"].dim[0], tuple((n, m) for n, m in zip(queries, keys, strict=False) if n)))

    def _pages(self, tensors: Mapping[int, torch.Tensor], node: Node) -> torch.Tensor:
        return tensors[node.uid].as_strided(node.dim, node.stride)

    def _rows(self, tensors: Mapping[int, torch.Tensor], node: Node, row: int, count: int) -> torch.Tensor:
        tensor, (_, heads, _, dim), (_, by_head, by_row, _) = tensors[node.uid], node.dim, node.stride
        start = int(tensors[node.ragged.uid][row])
        return tensor.as_strided((count, heads, dim), (by_row, by_head, 1), tensor.storage_offset() + start)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int) -> torch.Tensor:
        group, queries = q.shape[1] // k.shape[1], q.shape[0]
        wide_k, wide_v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q.float(), wide_k) * self.asked["attn_scale"]
        place, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(k.shape[0])[None]
        seen, window = key <= place, self.asked["diagonal_band_left_bound"]
        if window is not None:
            seen &= key > place - window
        weights = torch.softmax(logits.masked_fill(~seen, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, wide_v)


class _Names:
    def __getattr__(self, name: str) -> str:
        return name.lower().replace("_", " ")


def install() -> None:
    """In place of the package."""
    package = ModuleType("cudnn")
    package.pygraph, package.create_handle, package.set_stream = pygraph, object, lambda **of: None  # type: ignore[attr-defined]
    package.data_type = package.heur_mode = package.diagonal_alignment = _Names()  # type: ignore[attr-defined]
    sys.modules["cudnn"] = package
