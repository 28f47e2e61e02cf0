"""Records of the Triton kernels, for any backend whose devices run Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagoda.hal.info import Feature
from pagoda.hal.kernel import Kernel, Needs, Reason

if TYPE_CHECKING:
    from pagoda.ops.act_gemm import ActGemmFacts
    from pagoda.ops.activation import ActivationFacts
    from pagoda.ops.attention import AttentionFacts
    from pagoda.ops.conv import ConvFacts
    from pagoda.ops.delta import DeltaFacts
    from pagoda.ops.moe import MoeMlpFacts, RouteFacts
    from pagoda.ops.moe_fp8 import MoeMlpFp8Facts
    from pagoda.ops.norm_gemm import NormGemmFacts
    from pagoda.ops.rope_write import RopeWriteFacts
    from pagoda.ops.scan import SelectiveScanFacts, SsdFacts
    from pagoda.ops.segment_attention import SegmentAttentionFacts
    from pagoda.ops.sparse_attention import ChooseFacts, SparseAttentionFacts

FLOATS = frozenset({"float32", "bfloat16", "float16"})
PAGES = FLOATS | {"float8_e4m3fn"}
FLOAT8 = Needs(features=frozenset({Feature.TRITON, Feature.FP8}), dtypes=frozenset({"bfloat16", "float16"}), packages=("triton",))
NEEDS = Needs(features=frozenset({Feature.TRITON}), dtypes=FLOATS, packages=("triton",))
LATENTS = replace(NEEDS, facts_on={"gfx1100": {"kv_dtype": tuple(sorted(FLOATS))}})
"""No float8 on RDNA 3, whose waves of 32 hold numbers of a product twice: those of a latent keep LLVM's register allocator busy for seven
minutes a program (of 16 bits: one second)."""
HALVES = replace(LATENTS, dtypes=frozenset({"bfloat16", "float16"}))
HERE = "pagoda.ops.triton"
CLAIMS = frozenset({"capturable"})
INVARIANT = CLAIMS | {"batch_invariant"}
FIXED = -2.0
"""Rank of kernels whose order of additions is fixed, at a price: below the references, for those who ask for batch invariance."""


def _attention_fits(facts: AttentionFacts) -> Reason | None:
    if facts.head_dim > 256 or facts.v_dim > 256:
        return f"head sizes up to 256, not {max(facts.head_dim, facts.v_dim)}"
    return None if facts.kv_dtype in PAGES else f"KV in {', '.join(sorted(PAGES))}, not {facts.kv_dtype}"


def _latent_fits(facts: AttentionFacts) -> Reason | None:
    if not facts.latent:
        return "attention over latents only"
    asked = [name for name in ("window", "chunk", "softcap", "sinks", "alibi", "bias") if getattr(facts, name)]
    if asked or not facts.causal:
        return f"no {' or '.join(asked) or 'bidirectional attention'}"
    return _latent_sizes(facts)


def _latent_sizes(facts: AttentionFacts | SparseAttentionFacts) -> Reason | None:
    if facts.head_dim - facts.v_dim > 128 or facts.v_dim > 512:
        return f"latents of up to 512 numbers and 128 rotated ones, not {facts.v_dim} and {facts.head_dim - facts.v_dim}"
    return None if facts.kv_dtype in PAGES else f"KV in {', '.join(sorted(PAGES))}, not {facts.kv_dtype}"


def _sparse_fits(facts: SparseAttentionFacts) -> Reason | None:
    if facts.dtype == "float32" and facts.v_dim > 128:
        return f"in float32, which matrix units do not multiply, latents of up to 128 numbers, not {facts.v_dim}"
    return _latent_sizes(facts)


def _choice_fits(facts: ChooseFacts) -> Reason | None:
    if facts.dim > 256 or facts.heads > 128:
        return f"up to 128 heads of up to 256 numbers, not {facts.heads} of {facts.dim}"
    return None if facts.kv_dtype in PAGES else f"keys in {', '.join(sorted(PAGES))}, not {facts.kv_dtype}"


def _segments_fit(facts: SegmentAttentionFacts) -> Reason | None:
    return f"head sizes up to 256, not {facts.head_dim}" if facts.head_dim > 256 else None


def _writable(facts: AttentionFacts) -> Reason | None:
    if max(facts.head_dim, facts.v_dim) > 1024:
        return f"head sizes up to 1,024, not {max(facts.head_dim, facts.v_dim)}"
    return None if facts.kv_dtype in PAGES else f"KV in {', '.join(sorted(PAGES))}, not {facts.kv_dtype}"


def _float_pages(facts: RopeWriteFacts) -> Reason | None:
    return None if facts.kv_dtype in PAGES else f"KV in {', '.join(sorted(PAGES))}, not {facts.kv_dtype}"


def _plain_silu(facts: ActivationFacts) -> Reason | None:
    return None if facts.kind == "silu" and facts.limit is None else f"plain SiLU only, not {facts.kind} with limit {facts.limit}"


def fp8_norm_gemm(facts: NormGemmFacts) -> Reason | None:
    if not hasattr(facts.gemm, "block"):
        return "products with float8 weights only"
    return _joins(facts) or fp8_squares(facts.gemm)


def fp8_act_gemm(facts: ActGemmFacts) -> Reason | None:
    return _plain_silu(facts.activation) or fp8_squares(facts.gemm)


def fp8_squares(facts: Any) -> Reason | None:
    return None if facts.block in (0, 128) else f"scales of outputs or of squares of 128, not of {facts.block}"


def plain_norm_gemm(facts: NormGemmFacts) -> Reason | None:
    if hasattr(facts.gemm, "block"):
        return "products of plain numbers only"
    if facts.dtype == "float16":
        return "a weighted row is not normed before the product, which float16 may not hold"
    return _joins(facts)


def _joins(facts: NormGemmFacts) -> Reason | None:
    if facts.norm.bias or not facts.norm.weight:
        return "norms with weights and no bias only"
    return _plain_silu(facts.activation) if facts.activation is not None else None


def _ungrouped(facts: RouteFacts) -> Reason | None:
    return "no groups of experts" if facts.groups > 1 else "no sparse mixer" if facts.score == "sparsemixer" else None


def _gated_silu(facts: MoeMlpFacts) -> Reason | None:
    return None if facts.gated and facts.activation == "silu" else f"gated SiLU only, not {facts.activation}"


def fp8_experts(facts: MoeMlpFp8Facts) -> Reason | None:
    return _gated_silu(facts.plain) or fp8_squares(facts)


def _few_taps(facts: ConvFacts) -> Reason | None:
    return None if 2 <= facts.taps <= 33 else f"two to 33 taps, not {facts.taps}"


def _ssd_fits(facts: SsdFacts) -> Reason | None:
    return None if facts.state <= 256 else f"states of up to 256 numbers a value, not {facts.state}"


def _delta_fits(facts: DeltaFacts) -> Reason | None:
    return None if facts.k_dim <= 256 else f"keys of up to 256 numbers, not {facts.k_dim}"


def _selective_fits(facts: SelectiveScanFacts) -> Reason | None:
    return None if facts.state <= 128 else f"states of up to 128 numbers a channel, not {facts.state}"


def triton_kernels() -> tuple[Kernel, ...]:
    return (
        Kernel("paged_attention", "triton", f"{HERE}.paged_attention:PagedAttention", NEEDS, _attention_fits, 1.0, CLAIMS),
        Kernel("paged_attention", "triton_latent", f"{HERE}.latent_attention:LatentAttention", HALVES, _latent_fits, 3.0, CLAIMS),
        Kernel("segment_attention", "triton", f"{HERE}.segment_attention:SegmentAttention", NEEDS, _segments_fit, 1.0, CLAIMS),
        Kernel("choose_keys", "triton", f"{HERE}.choose_keys:ChooseKeys", NEEDS, _choice_fits, 1.0, CLAIMS),
        Kernel("sparse_attention", "triton", f"{HERE}.sparse_attention:SparseAttention", LATENTS, _sparse_fits, 1.0, CLAIMS),
        Kernel("write_kv", "triton", f"{HERE}.attention:WriteKv", NEEDS, _writable, 1.0, INVARIANT),
        Kernel("rms_norm", "triton", f"{HERE}.pointwise:RmsNorm", NEEDS, None, 1.0, INVARIANT),
        Kernel("add_rms_norm", "triton", f"{HERE}.pointwise:AddRmsNorm", NEEDS, None, 1.0, INVARIANT),
        Kernel("gated_norm", "triton", f"{HERE}.pointwise:GatedNorm", NEEDS, None, 1.0, INVARIANT),
        Kernel("rope", "triton", f"{HERE}.pointwise:Rope", NEEDS, None, 1.0, INVARIANT),
        Kernel("rope_write", "triton", f"{HERE}.rope_write:RopeWrite", NEEDS, _float_pages, 1.0, CLAIMS),
        Kernel("rope_write", "triton_fixed", f"{HERE}.rope_write:RopeWriteFixed", NEEDS, _float_pages, FIXED, INVARIANT),
        Kernel("route", "triton", f"{HERE}.moe:Route", NEEDS, _ungrouped, 1.0, INVARIANT),
        Kernel("lora_delta", "triton", f"{HERE}.lora:LoraDelta", NEEDS, None, 1.0, CLAIMS),
        Kernel("moe_mlp", "triton", f"{HERE}.moe:MoeMlp", NEEDS, _gated_silu, 1.0, CLAIMS),
        Kernel("sample", "triton", f"{HERE}.sampling:Sample", NEEDS, None, 1.0, INVARIANT),
        Kernel("gated_activation", "triton", f"{HERE}.pointwise:SiluAndMul", NEEDS, _plain_silu, 1.0, INVARIANT),
        Kernel("gemm", "triton_fixed", f"{HERE}.fixed_gemm:GemmFixed", NEEDS, None, FIXED, INVARIANT),
        Kernel("gemm_fp8", "triton_fixed", f"{HERE}.fixed_gemm:GemmFixed", FLOAT8, fp8_squares, FIXED, INVARIANT),
        Kernel("paged_attention", "triton_fixed", f"{HERE}.fixed_attention:FixedAttention", NEEDS, _attention_fits, FIXED, INVARIANT),
        Kernel("moe_mlp", "triton_fixed", f"{HERE}.moe:MoeMlpFixed", NEEDS, _gated_silu, FIXED, INVARIANT),
        Kernel("causal_conv1d", "triton", f"{HERE}.conv:CausalConv", NEEDS, _few_taps, 1.0, INVARIANT),
        Kernel("ssd_scan", "triton", f"{HERE}.ssd:SsdScan", NEEDS, _ssd_fits, 1.0, CLAIMS),
        Kernel("ssd_scan", "triton_fixed", f"{HERE}.ssd:SsdScanFixed", NEEDS, _ssd_fits, FIXED, INVARIANT),
        Kernel("gated_delta_rule", "triton", f"{HERE}.delta:GatedDelta", NEEDS, _delta_fits, 1.0, CLAIMS),
        Kernel("gated_delta_rule", "triton_fixed", f"{HERE}.delta:GatedDeltaFixed", NEEDS, _delta_fits, FIXED, INVARIANT),
        Kernel("selective_scan", "triton", f"{HERE}.selective:SelectiveScan", NEEDS, _selective_fits, 1.0, CLAIMS),
        Kernel("selective_scan", "triton_fixed", f"{HERE}.selective:SelectiveScanFixed", NEEDS, _selective_fits, FIXED, INVARIANT),
        Kernel("wkv", "triton", f"{HERE}.wkv:Wkv", NEEDS, None, 1.0, INVARIANT),
    )
