"""All primitives by name, and their references as candidates for a kernel table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagoda.hal.kernel import Kernel
from pagoda.ops.cases.act_gemm import ACT_GEMM
from pagoda.ops.cases.activation import ACTIVATION, GATED_ACTIVATION
from pagoda.ops.cases.attention import PAGED_ATTENTION, WRITE_KV
from pagoda.ops.cases.linear import EMBEDDING, GEMM
from pagoda.ops.cases.linear_fp8 import GEMM_FP8
from pagoda.ops.cases.linear_gguf import EMBEDDING_GGUF, GEMM_GGUF
from pagoda.ops.cases.lora import LORA_DELTA
from pagoda.ops.cases.moe import MOE_MLP, ROUTE
from pagoda.ops.cases.moe_gguf import MOE_MLP_GGUF
from pagoda.ops.cases.norm import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from pagoda.ops.cases.norm_gemm import NORM_GEMM
from pagoda.ops.cases.rope import ROPE
from pagoda.ops.cases.rope_write import ROPE_WRITE
from pagoda.ops.cases.sampling import PENALIZE, SAMPLE, TOKEN_BITMASK, TOP_LOGPROBS
from pagoda.ops.cases.segment_attention import SEGMENT_ATTENTION
from pagoda.ops.cases.state import CAUSAL_CONV1D, GATED_DELTA_RULE, SELECTIVE_SCAN, SSD_SCAN
from pagoda.ops.cases.wkv import WKV
from pagoda.ops.linear_fp8 import dequantised_bytes as dequantised_fp8_bytes
from pagoda.ops.linear_gguf import dequantised_bytes
from pagoda.ops.moe_gguf import decoded_experts_bytes
from pagoda.ops.op import Op

_OPS = (
    GEMM, EMBEDDING, GEMM_GGUF, EMBEDDING_GGUF, GEMM_FP8, LORA_DELTA,
    RMS_NORM, ADD_RMS_NORM, LAYER_NORM, NORM_GEMM, ACT_GEMM,
    GATED_ACTIVATION, ACTIVATION,
    ROPE, WRITE_KV, ROPE_WRITE, PAGED_ATTENTION, SEGMENT_ATTENTION,
    ROUTE, MOE_MLP, MOE_MLP_GGUF,
    CAUSAL_CONV1D, SELECTIVE_SCAN, SSD_SCAN, GATED_DELTA_RULE, WKV,
    PENALIZE, TOKEN_BITMASK, SAMPLE, TOP_LOGPROBS,
)  # fmt: skip

ALL_OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _OPS})
"""Every primitive, by the name that kernel tables use."""


_INVARIANT = frozenset({"embedding", "embedding_gguf", "rope", "write_kv", "penalize", "apply_token_bitmask", "top_logprobs"})
"""Whose reference gives a row the same bits in every batch on any device: look-ups, copies, single roundings, reductions of one row."""


def reference_kernels() -> tuple[Kernel, ...]:
    """The portable references: with them alone every device runs everything."""
    claims = {True: frozenset({"batch_invariant"}), False: frozenset[str]()}
    return tuple(replace(op.reference_kernel(), claims=claims[op.name in _INVARIANT]) for op in _OPS)


def portable_kernels() -> tuple[Kernel, ...]:
    """Implementations in plain torch that beat a reference on any device, at a price that a plan can name."""
    return (
        Kernel("gemm_gguf", "dequantised", "pagoda.ops.linear_gguf:GemmGgufDequantised", rank=0.0, packed_bytes=dequantised_bytes),
        Kernel("gemm_fp8", "dequantised", "pagoda.ops.linear_fp8:GemmFp8Dequantised", rank=0.0, packed_bytes=dequantised_fp8_bytes),
        Kernel("segment_attention", "torch", "pagoda.ops.segment_attention:SegmentAttentionTorch", rank=0.0),
        Kernel("moe_mlp_gguf", "dequantised", "pagoda.ops.moe_gguf:MoeMlpGgufDequantised", rank=0.0, packed_bytes=decoded_experts_bytes),
    )
