"""The references of all primitives as candidates for a kernel table, and what beats them in plain torch."""

from __future__ import annotations

from pagoda.hal.kernel import Kernel
from pagoda.ops.linear_fp8 import dequantised_bytes as dequantised_fp8_bytes
from pagoda.ops.linear_gguf import dequantised_bytes
from pagoda.ops.stored_experts import decoded_experts_bytes

REFERENCES = {
    "gemm": "linear:GemmReference",
    "embedding": "linear:EmbeddingReference",
    "gemm_gguf": "linear_gguf:GemmGgufReference",
    "embedding_gguf": "linear_gguf:EmbeddingGgufReference",
    "gemm_fp8": "linear_fp8:GemmFp8Reference",
    "head_gemm": "head_gemm:HeadGemmReference",
    "lora_delta": "lora:LoraDeltaReference",
    "rms_norm": "norm:RmsNormReference",
    "add_rms_norm": "norm:AddRmsNormReference",
    "layer_norm": "norm:LayerNormReference",
    "gated_norm": "norm:GatedNormReference",
    "norm_gemm": "norm_gemm:NormGemmReference",
    "act_gemm": "act_gemm:ActGemmReference",
    "gated_activation": "activation:GatedActivationReference",
    "activation": "activation:ActivationReference",
    "rope": "rope:RopeReference",
    "write_kv": "attention:WriteKvReference",
    "rope_write": "rope_write:RopeWriteReference",
    "paged_attention": "attention:PagedAttentionReference",
    "choose_keys": "sparse_attention:ChooseKeysReference",
    "sparse_attention": "sparse_attention:SparseAttentionReference",
    "segment_attention": "segment_attention:SegmentAttentionReference",
    "route": "moe:RouteReference",
    "moe_mlp": "moe:MoeMlpReference",
    "moe_mlp_gguf": "moe_gguf:MoeMlpGgufReference",
    "moe_mlp_fp8": "moe_fp8:MoeMlpFp8Reference",
    "causal_conv1d": "conv:CausalConvReference",
    "selective_scan": "scan:SelectiveScanReference",
    "ssd_scan": "scan:SsdScanReference",
    "gated_delta_rule": "delta:GatedDeltaReference",
    "wkv": "wkv:WkvReference",
    "penalize": "sampling:PenalizeReference",
    "apply_token_bitmask": "sampling:TokenBitmaskReference",
    "sample": "sampling:SampleReference",
    "masked_sample": "sampling:MaskedSampleReference",
    "top_logprobs": "sampling:TopLogprobsReference",
}
"""Primitive → its reference below `pagoda.ops`, as `registry.py` has it, whose oracles and cases nobody needs who runs a model."""

_INVARIANT = frozenset({"embedding", "embedding_gguf", "rope", "write_kv", "penalize", "apply_token_bitmask", "top_logprobs"})
"""Whose reference gives a row the same bits in every batch on any device: look-ups, copies, single roundings, reductions of one row."""


def reference_kernels() -> tuple[Kernel, ...]:
    """The portable references: with them alone every device runs everything."""
    claims = {True: frozenset({"batch_invariant"}), False: frozenset[str]()}
    return tuple(
        Kernel(op, "reference", f"pagoda.ops.{path}", rank=-1.0, claims=claims[op in _INVARIANT]) for op, path in REFERENCES.items()
    )


def portable_kernels() -> tuple[Kernel, ...]:
    """Implementations in plain torch that beat a reference on any device, at a price that a plan can name."""
    return (
        Kernel("gemm_gguf", "dequantised", "pagoda.ops.linear_gguf:GemmGgufDequantised", rank=0.0, packed_bytes=dequantised_bytes),
        Kernel("gemm_fp8", "dequantised", "pagoda.ops.linear_fp8:GemmFp8Dequantised", rank=0.0, packed_bytes=dequantised_fp8_bytes),
        Kernel("head_gemm", "torch", "pagoda.ops.head_gemm:HeadGemmTorch", rank=0.0, claims=frozenset({"capturable"})),
        Kernel("segment_attention", "torch", "pagoda.ops.segment_attention:SegmentAttentionTorch", rank=0.0),
        Kernel("moe_mlp_gguf", "dequantised", "pagoda.ops.moe_gguf:MoeMlpGgufDequantised", rank=0.0, packed_bytes=decoded_experts_bytes),
        Kernel("moe_mlp_fp8", "dequantised", "pagoda.ops.moe_fp8:MoeMlpFp8Dequantised", rank=0.0, packed_bytes=decoded_experts_bytes),
    )
