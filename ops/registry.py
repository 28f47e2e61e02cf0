"""All primitives by name, with their oracles and cases; `references.py` has what a kernel table takes of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagoda.ops.cases.act_gemm import ACT_GEMM
from pagoda.ops.cases.activation import ACTIVATION, GATED_ACTIVATION
from pagoda.ops.cases.attention import PAGED_ATTENTION, WRITE_KV
from pagoda.ops.cases.head_gemm import HEAD_GEMM
from pagoda.ops.cases.linear import EMBEDDING, GEMM
from pagoda.ops.cases.linear_fp8 import GEMM_FP8
from pagoda.ops.cases.linear_gguf import EMBEDDING_GGUF, GEMM_GGUF
from pagoda.ops.cases.lora import LORA_DELTA
from pagoda.ops.cases.moe import MOE_MLP, ROUTE
from pagoda.ops.cases.moe_fp8 import MOE_MLP_FP8
from pagoda.ops.cases.moe_gguf import MOE_MLP_GGUF
from pagoda.ops.cases.norm import ADD_RMS_NORM, GATED_NORM, LAYER_NORM, RMS_NORM
from pagoda.ops.cases.norm_gemm import NORM_GEMM
from pagoda.ops.cases.rope import ROPE
from pagoda.ops.cases.rope_write import ROPE_WRITE
from pagoda.ops.cases.sampling import MASKED_SAMPLE, PENALIZE, SAMPLE, TOKEN_BITMASK, TOP_LOGPROBS
from pagoda.ops.cases.segment_attention import SEGMENT_ATTENTION
from pagoda.ops.cases.sparse_attention import CHOOSE_KEYS, SPARSE_ATTENTION
from pagoda.ops.cases.state import CAUSAL_CONV1D, GATED_DELTA_RULE, SELECTIVE_SCAN, SSD_SCAN
from pagoda.ops.cases.wkv import WKV
from pagoda.ops.op import Op

_OPS = (
    GEMM, EMBEDDING, GEMM_GGUF, EMBEDDING_GGUF, GEMM_FP8, HEAD_GEMM, LORA_DELTA,
    RMS_NORM, ADD_RMS_NORM, LAYER_NORM, GATED_NORM, NORM_GEMM, ACT_GEMM,
    GATED_ACTIVATION, ACTIVATION,
    ROPE, WRITE_KV, ROPE_WRITE, PAGED_ATTENTION, CHOOSE_KEYS, SPARSE_ATTENTION, SEGMENT_ATTENTION,
    ROUTE, MOE_MLP, MOE_MLP_GGUF, MOE_MLP_FP8,
    CAUSAL_CONV1D, SELECTIVE_SCAN, SSD_SCAN, GATED_DELTA_RULE, WKV,
    PENALIZE, TOKEN_BITMASK, SAMPLE, MASKED_SAMPLE, TOP_LOGPROBS,
)  # fmt: skip

ALL_OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _OPS})
"""Every primitive, by the name that kernel tables use."""
