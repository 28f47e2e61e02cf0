"""torch-npu's fused operators without an NPU: calls must bind to the signatures of its wheel, and get what its docstrings' formulas give.

What they cannot show is what CANN makes of them: whether a layout or a size is refused that the documentation allows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

RECORDED = json.loads(Path(__file__).with_name("ascend_operators.json").read_text())["operators"]
TRIANGLE = 2048


def stand_in() -> ModuleType:
    """A module `torch_npu` with the recorded operators and nothing else."""
    module = ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    for name, signature in RECORDED.items():
        setattr(module, name, _bound(_declared(signature), globals()[name]))
    return module


def _declared(signature: str) -> inspect.Signature:
    scope: dict[str, Any] = {}
    exec(f"def declared{signature}: ...", scope)
    return inspect.signature(scope["declared"])


def _bound(declared: inspect.Signature, formula: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = declared.bind(*args, **kwargs)
        given.apply_defaults()
        tensors = [one for one in given.arguments.values() if isinstance(one, torch.Tensor)]
        assert all(one.is_contiguous() for one in tensors), "the operators refuse tensors that are not contiguous"
        return formula(**given.arguments)

    return call


def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    assert self.dtype == gamma.dtype and 2 <= self.dim() <= 8
    wide = self.float()
    factor = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * factor * gamma.float()).to(self.dtype), factor


def npu_add_rms_norm(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    total = x1 + x2
    return (*npu_rms_norm(total, gamma, epsilon), total)


def npu_swiglu(x: torch.Tensor, dim: int) -> torch.Tensor:
    a, b = x.float().chunk(2, dim)
    return (a * a.sigmoid() * b).to(x.dtype)


def npu_grouped_matmul(
    x: list[torch.Tensor], weight: list[torch.Tensor], group_list: torch.Tensor, split_item: int, group_type: int, group_list_type: int,
    **unused: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Rows behind the last group are not written."""
    (rows,), (matrices,) = x, weight
    assert split_item == 2 and group_type == 0 and group_list_type == 0 and group_list.dtype == torch.int64
    assert rows.dtype == matrices.dtype and matrices.is_contiguous() and len(group_list) == len(matrices)
    ends = group_list.tolist()
    assert ends == sorted(ends) and ends[-1] <= len(rows)
    out = torch.full((len(rows), matrices.shape[2]), float("nan"), dtype=rows.dtype)
    for matrix, first, end in zip(matrices, [0, *ends], ends, strict=False):
        out[first:end] = rows[first:end] @ matrix
    return [out]


def npu_fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, atten_mask: torch.Tensor | None, actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int], num_heads: int, num_key_value_heads: int, scale: float, input_layout: str, sparse_mode: int,
    block_table: torch.Tensor | None, **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Batch, sequence, heads, numbers. Queries behind their length are not written."""
    assert input_layout == "BSND" and block_table is None and key.shape == value.shape and query.dtype == key.dtype == value.dtype
    batch, queries, heads, dim = query.shape
    assert query.dtype in (torch.float16, torch.bfloat16) and dim % 16 == 0 and heads == num_heads and key.shape[2] == num_key_value_heads
    assert len(actual_seq_lengths_kv) == batch == key.shape[0] and max(actual_seq_lengths_kv) <= key.shape[1]
    if sparse_mode == 3:
        assert atten_mask is not None and atten_mask.shape == (TRIANGLE, TRIANGLE) and atten_mask.dtype == torch.bool
        assert torch.equal(atten_mask, torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool).triu(1))
    else:
        assert sparse_mode == 0 and atten_mask is None
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    for row, keys in enumerate(actual_seq_lengths_kv):
        count = queries if actual_seq_lengths is None else actual_seq_lengths[row]
        q = query[row, :count].float().transpose(0, 1)
        k, v = (one[row, :keys].float().transpose(0, 1).repeat_interleave(heads // num_key_value_heads, 0) for one in (key, value))
        logits = q @ k.transpose(1, 2) * scale
        if sparse_mode == 3:  # the last query beside the last key
            behind = torch.arange(keys) - (keys - count) > torch.arange(count)[:, None]
            logits = logits.masked_fill(behind, float("-inf"))
        out[row, :count] = (logits.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return out, torch.zeros(1)
