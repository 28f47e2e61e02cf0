"""Records of the kernels for NVIDIA GPUs: Triton's, and those of libraries where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.hal.info import Feature
from pagoda.hal.kernel import Kernel, Needs, Reason
from pagoda.ops.triton.kernels import CLAIMS, NEEDS, fp8_act_gemm, fp8_experts, fp8_norm_gemm, fp8_squares, plain_norm_gemm, triton_kernels

if TYPE_CHECKING:
    from pagoda.ops.attention import AttentionFacts

NAMES = {"bfloat16": "bf16", "float16": "f16"}
"""FlashInfer's names of dtypes."""

MEASURED = replace(NEEDS, archs=frozenset({"sm90"}))
"""Whose table of ways was measured on this architecture."""

FLOAT8 = replace(MEASURED, features=NEEDS.features | {Feature.FP8}, dtypes=frozenset({"bfloat16", "float16"}))
"""Whose rows become float8 where they are many: hence the coarser `eps` of these kernels."""

FLASHINFER = Needs(
    archs=frozenset({"sm90"}),
    features=frozenset({Feature.TRITON}),
    dtypes=frozenset({"bfloat16", "float16"}),
    packages=("flashinfer", "triton"),
)


CUDNN = replace(FLASHINFER, packages=("cudnn", "triton"))


def _plain(facts: AttentionFacts, *lacking: str) -> Reason | None:
    """What a library's kernel for prompts cannot do. lacking: facts that it has no way with."""
    if facts.dtype != facts.kv_dtype:
        return f"KV in the model's {facts.dtype}, not {facts.kv_dtype}"
    if facts.head_dim != facts.v_dim or facts.head_dim not in (64, 128, 256):
        return f"head sizes 64, 128 and 256, not {facts.head_dim} with values of {facts.v_dim}"
    asked = [name for name in ("chunk", "sinks", "alibi", "bias", *lacking) if getattr(facts, name)]
    return f"no {' or '.join(asked) or 'bidirectional attention'}" if asked or not facts.causal else None


def _cudnn_fits(facts: AttentionFacts) -> Reason | None:
    return _plain(facts, "softcap")


def _fa3_fits(facts: AttentionFacts) -> Reason | None:
    """What fa3 cannot do, or that its library is not here."""
    if reason := _plain(facts):
        return reason
    return None if _prebuilt(fa3_library(facts)) else f"{fa3_library(facts)} is not compiled: pip install flashinfer-jit-cache"


def fa3_library(facts: AttentionFacts) -> str:
    """FlashInfer's name of the library for these facts."""
    dtype, dim = NAMES[facts.dtype], facts.head_dim
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_head_dim_qk_{dim}_head_dim_vo_{dim}"
        f"_posenc_0_use_swa_{facts.window is not None}_use_logits_cap_{facts.softcap is not None}_f16qk_False_sm90"
    )


def _prebuilt(name: str) -> bool:
    """Whether a library lies where FlashInfer looks; otherwise it would compile at the first call, for minutes."""
    specs = [(find_spec("flashinfer"), "data/aot"), (find_spec("flashinfer_jit_cache"), "jit_cache")]
    folders = [Path(where) / rest for spec, rest in specs if spec for where in spec.submodule_search_locations or ()]
    if any((folder / name / f"{name}.so").exists() for folder in folders):
        return True
    return any(Path.home().glob(f".cache/flashinfer/*/*/cached_ops/{name}/{name}.so"))


def cuda_kernels() -> tuple[Kernel, ...]:
    return (
        *triton_kernels(),
        Kernel("gemm", "triton", "pagoda.ops.triton.gemm:Gemm", MEASURED, None, 1.0, CLAIMS),
        Kernel("act_gemm", "triton", "pagoda.ops.triton.act_gemm:ActGemm", FLOAT8, fp8_act_gemm, 1.0, CLAIMS, eps=2.0**-3),
        Kernel("gemm_fp8", "triton", "pagoda.ops.triton.gemm_fp8:GemmFp8", FLOAT8, fp8_squares, 1.0, CLAIMS, eps=2.0**-3),
        Kernel("moe_mlp_fp8", "triton", "pagoda.ops.triton.moe_fp8:MoeMlpFp8", FLOAT8, fp8_experts, 1.0, CLAIMS, eps=2.0**-3),
        Kernel("norm_gemm", "triton_fp8", "pagoda.ops.triton.norm_gemm_fp8:NormGemmFp8", FLOAT8, fp8_norm_gemm, 1.0, CLAIMS, eps=2.0**-3),
        Kernel("norm_gemm", "triton", "pagoda.ops.triton.norm_gemm:NormGemm", MEASURED, plain_norm_gemm, 1.0, CLAIMS),
        # Faster than Triton's by a third; where tokens differ, the two best are within 0.03 nats (docs/perf/log.md).
        _prompts("flashinfer", "flashinfer_attention:FlashInferAttention", FLASHINFER, _fa3_fits, 2.0),
        # To compare: with contexts in pages alone, and laid as rows however small they are.
        _prompts("flashinfer_pages", "flashinfer_attention:FlashInferPages", FLASHINFER, _fa3_fits, 1.9),
        _prompts("flashinfer_rows", "flashinfer_attention:FlashInferRows", FLASHINFER, _fa3_fits, 1.8),
        # Where FlashInfer is not. Then, to compare: however few tokens prompts have.
        _prompts("cudnn", "cudnn_attention:CudnnAttention", CUDNN, _cudnn_fits, 1.5),
        _prompts("cudnn_always", "cudnn_attention:CudnnAlways", CUDNN, _cudnn_fits, 0.9),
    )


def _prompts(name: str, where: str, needs: Needs, fits: Callable[[AttentionFacts], Reason | None], rank: float) -> Kernel:
    """Attention whose prompts are a library's."""
    where = f"pagoda.backends.cuda.{where}"
    return Kernel("paged_attention", name, where, needs, fits, rank, frozenset({"capturable"}), needs_host_lengths=True)
