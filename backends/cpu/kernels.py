"""Records of the kernels that CPUs have beyond the references; nothing is imported before one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pagoda.hal.kernel import Kernel, Needs, Reason
from pagoda.hal.kv import DTYPE_BYTES
from pagoda.ops.native.library import BLOCK_KINDS, PAGE_TYPES, QUANT_KINDS, SUPER_KINDS, TYPES, available

if TYPE_CHECKING:
    from pagoda.ops.moe import RouteFacts

_NATIVE = "pagoda.backends.cpu.kernels_native:"
_MORE = "pagoda.backends.cpu.kernels_more:"
_TABLES = "pagoda.backends.cpu.kernels_tables:"
_EXPERTS = "pagoda.backends.cpu.kernels_moe_gguf:"
_PROMPT_ARCHS = frozenset({"x86-64-avx512vnni", "x86-64-avx512bf16", "x86-64-amx"})
"""Architectures with the integer dot products of AVX-512."""

_DOT_ARCHS = _PROMPT_ARCHS | {"aarch64-dotprod", "aarch64-bf16", "aarch64-sve-bf16"}
"""Architectures with a dot product of bytes."""

_WIDE_ARCHS = _DOT_ARCHS | {"x86-64-avx2", "x86-64-avx512"}
"""Architectures whose vectors the products were written for; elsewhere torch's own are better."""

_Question = Callable[[Any], Reason | None]
_CLAIMS = frozenset({"batch_invariant", "capturable"})


def cpu_kernels() -> tuple[Kernel, ...]:
    """All of them; those that need the native library say so where it is absent."""
    return (
        replace(
            _native("gemm", "NativeGemm", _pairs("in_features")), needs=_needs(_WIDE_ARCHS), packed_bytes=_gemm_bytes, layout="columns"
        ),
        _prompt_kernel(),
        *_table_kernels(),
        _blocks_kernel(),
        _super_blocks_kernel(),
        *_block_prompt_kernels(),
        _decoded_kernel(),
        _float8_kernel(),
        _experts_kernel(),
        _float8_experts_kernel(),
        _head_kernel(),
        replace(_native("lora_delta", ""), implementation=f"{_MORE}NativeLoraDelta"),
        # The reference, where it is told to be: below it, so that a choice changes for batch invariance alone.
        Kernel("route", "torch", "pagoda.ops.moe:RouteReference", _needs(), _by_row, -2.0, _CLAIMS),
        *_expert_block_kernels(),
        _native("rms_norm", "NativeRmsNorm"),
        _native("add_rms_norm", "NativeAddRmsNorm"),
        _native("gated_norm", "NativeGatedNorm"),
        _native("activation", "NativeActivation"),
        _native("gated_activation", "NativeGatedActivation"),
        _native("rope", "NativeRope"),
        _native("write_kv", "NativeWriteKv", _kv_dtype),
        _native("paged_attention", "NativeAttention", _kv_dtype, _no_bias, _pairs("head_dim")),
        _prompt_attention_kernel(),
        _native("sample", "NativeSample"),
        _native("masked_sample", "NativeMaskedSample"),
        _native("apply_token_bitmask", "NativeTokenBitmask"),
    )


def _needs(archs: frozenset[str] = frozenset()) -> Needs:
    return Needs(archs=archs, dtypes=frozenset(TYPES))


def _native(op: str, implementation: str, *questions: _Question) -> Kernel:
    def accepts(facts: Any) -> Reason | None:
        return next((reason for ask in (lambda _: available(), *questions) if (reason := ask(facts))), None)

    return Kernel(op, "native", _NATIVE + implementation, _needs(), accepts, rank=10.0, claims=_CLAIMS)


def _by_row(facts: RouteFacts) -> Reason | None:
    """What torch computes in place has other bits in a vector's last numbers; softmax goes row by row."""
    if facts.groups > 1 or facts.score not in ("softmax", "softmax_after"):
        return f"rows by themselves for softmax without groups, not {facts.score} with {facts.groups}"
    return None


def _prompt_kernel() -> Kernel:
    needs = Needs(archs=_PROMPT_ARCHS, dtypes=frozenset({"bfloat16"}))
    kernel = _native("gemm", "NativeGemmPrompt", _pairs("in_features"))
    claims = _CLAIMS - {"batch_invariant"}
    return replace(kernel, name="native_prompt", needs=needs, packed_bytes=_gemm_bytes, rank=15.0, claims=claims, layout="columns")


def _prompt_attention_kernel() -> Kernel:
    def narrow(facts: Any) -> Reason | None:
        return "float32 models attend in float32" if facts.dtype == "float32" and not facts.coarse else None

    kernel = _native("paged_attention", "NativeAttentionPrompt", _kv_dtype, _no_bias, narrow, _pairs("head_dim"))
    claims, needs = _CLAIMS - {"batch_invariant"}, replace(kernel.needs, archs=_PROMPT_ARCHS)
    return replace(kernel, name="native_prompt", needs=needs, rank=15.0, claims=claims, eps=_PANEL_EPS)


def _table_kernels() -> tuple[Kernel, Kernel]:
    """Rows of tables that lie as a head multiplies by them, so that there is one of each."""

    def tied(facts: Any) -> Reason | None:
        return None if facts.tied and not facts.partial else "for whole tables that a head multiplies by too"

    def width(facts: Any) -> int:
        return _packed(facts.dtype, facts.width, facts.rows, False)

    def blocks(facts: Any) -> int:
        return _block_bytes(_Product(facts.dtype, facts.kind, facts.width, facts.rows, False))

    dense = replace(_native("embedding", "", tied, _pairs("width")), implementation=f"{_TABLES}NativeEmbedding", needs=_needs(_WIDE_ARCHS))
    needs = Needs(archs=_DOT_ARCHS, dtypes=frozenset(TYPES), facts={"kind": tuple(QUANT_KINDS)})
    quant = replace(_native("embedding_gguf", "", tied), implementation=f"{_TABLES}NativeEmbeddingGguf", needs=needs)
    return replace(dense, packed_bytes=width, layout="columns"), replace(quant, packed_bytes=blocks, layout="blocks")


_INPUT_EPS = 2.0**-14
"""Inputs of the block products are integers of 15 bits."""


_PANEL_EPS = 2.0**-12
"""Weights of their panels are integers of 13 bits with one scale for 64."""


def _blocks_kernel() -> Kernel:
    needs = Needs(archs=_DOT_ARCHS, dtypes=frozenset(TYPES), facts={"kind": tuple(QUANT_KINDS)})
    path = _MORE + "NativeGemmGguf"
    kernel = replace(_native("gemm_gguf", ""), implementation=path, needs=needs, rank=20.0, layout="blocks")
    return replace(kernel, packed_bytes=_block_bytes, eps=_INPUT_EPS)


def _super_blocks_kernel() -> Kernel:
    def accepts(facts: Any) -> Reason | None:
        if facts.kind.startswith(("IQ1", "IQ2", "IQ3")) and find_spec("gguf") is None:
            return f"the look-up table of {facts.kind} is the package gguf's, which is not installed"
        return available()

    needs = Needs(archs=_WIDE_ARCHS, dtypes=frozenset(TYPES), facts={"kind": tuple(SUPER_KINDS)})
    return replace(_blocks_kernel(), name="native_super", needs=needs, accepts=accepts, layout=None)


def _block_prompt_kernels() -> tuple[Kernel, Kernel]:
    """Blocks of either size with many rows; with few they are the kernels above."""
    path, claims = _MORE + "NativeGemmGgufPrompt", _CLAIMS - {"batch_invariant"}

    def panels(kernel: Kernel, name: str) -> Kernel:
        needs = replace(kernel.needs, archs=_PROMPT_ARCHS)
        return replace(kernel, implementation=path, name=name, rank=25.0, claims=claims, eps=_PANEL_EPS, needs=needs)

    return panels(_blocks_kernel(), "native_prompt"), panels(_super_blocks_kernel(), "native_super_prompt")


def _decoded_kernel() -> Kernel:
    kernel = _native("gemm_gguf", "", _pairs("in_features"))
    path = _MORE + "NativeGemmGgufDecoded"
    return replace(kernel, name="native_decoded", implementation=path, needs=_needs(_WIDE_ARCHS), packed_bytes=_gemm_bytes)


def _float8_kernel() -> Kernel:
    kernel = _native("gemm_fp8", "", _pairs("in_features"))
    path = "pagoda.backends.cpu.kernels_fp8:NativeGemmFp8Decoded"
    return replace(kernel, name="native_decoded", implementation=path, needs=_needs(_WIDE_ARCHS), packed_bytes=_gemm_bytes)


def _experts_kernel() -> Kernel:
    kernel = _native("moe_mlp", "", _pairs("width"), _pairs("hidden"))
    # It looks at which experts were chosen, so it cannot be captured.
    claims = frozenset({"batch_invariant"})
    return replace(kernel, name="native_grouped", implementation=_MORE + "NativeMoeMlp", packed_bytes=_moe_bytes, claims=claims)


def _float8_experts_kernel() -> Kernel:
    def pairs(facts: Any) -> Reason | None:
        return _pairs("width")(facts.plain) or _pairs("hidden")(facts.plain)

    path = "pagoda.backends.cpu.kernels_fp8:NativeMoeMlpFp8Decoded"
    kernel, claims = _native("moe_mlp_fp8", "", pairs), frozenset({"batch_invariant"})
    count = lambda facts: _moe_bytes(facts.plain)  # noqa: E731
    return replace(kernel, name="native_decoded", implementation=path, packed_bytes=count, claims=claims)


def _head_kernel() -> Kernel:
    def count(facts: Any) -> int:
        return int(facts.heads) * _gemm_bytes(_Product(facts.dtype, "", facts.in_features, facts.out_features, False))

    kernel = _native("head_gemm", "", _pairs("in_features"))
    return replace(kernel, implementation=_MORE + "NativeHeadGemm", needs=_needs(_WIDE_ARCHS), packed_bytes=count)


def _expert_block_kernels() -> tuple[Kernel, Kernel]:
    """Experts in blocks: a product of `gemm_gguf` for each matrix of each expert."""

    def accepts(facts: Any) -> Reason | None:
        foreign = sorted({facts.up_kind, facts.down_kind} - set(BLOCK_KINDS))
        return available() or (f"multiplies blocks of {', '.join(BLOCK_KINDS)}, not {', '.join(foreign)}" if foreign else None)

    path, claims = f"{_EXPERTS}NativeMoeMlpGguf", frozenset({"batch_invariant"})
    kernel = replace(_native("moe_mlp_gguf", ""), implementation=path, packed_bytes=_expert_bytes(_block_bytes), claims=claims)
    decoded = replace(kernel, name="native_decoded", implementation=f"{path}Decoded", packed_bytes=_expert_bytes(_gemm_bytes))
    return replace(kernel, needs=_needs(_DOT_ARCHS), accepts=accepts, rank=20.0, eps=_INPUT_EPS), decoded


class _Product(NamedTuple):
    """As `GemmGgufFacts`, which would bring torch."""

    dtype: str
    kind: str
    in_features: int
    out_features: int
    bias: bool


def _expert_bytes(of_product: Callable[[Any], int]) -> Callable[[Any], int]:
    def count(facts: Any) -> int:
        products = (
            _Product(facts.dtype, facts.kind(name).name, facts.shape(name)[2], facts.shape(name)[1], facts.plain.bias)
            for name in ("up", "down")
        )
        return facts.experts_here * sum(map(of_product, products))

    return count


_SUPER_BYTES = {"Q2_K": 84, "Q3_K": 114, "Q4_K": 148, "Q5_K": 180, "Q6_K": 210, "IQ4_XS": 138, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82}
_SUPER_BYTES |= {"IQ3_XXS": 98, "IQ3_S": 110, "IQ1_S": 50, "IQ1_M": 56}
"""Bytes of 256 weights as `quant_super.h` packs them: at most four more than ggml's own."""


def _block_bytes(facts: Any) -> int:
    if facts.kind in SUPER_KINDS:
        return -(-facts.out_features // 32) * 32 * (facts.in_features // 256 * _SUPER_BYTES[facts.kind] + 4 * facts.bias)
    narrow, minimum = facts.kind in ("Q4_0", "Q4_1"), facts.kind in ("Q4_1", "Q5_1")
    groups = -(-facts.out_features // 32)
    return groups * (facts.in_features // 32 * ((512 if narrow else 1024) + 64 * (1 + minimum)) + 128 * facts.bias)


def _packed(dtype: str, inner: int, outer: int, bias: bool) -> int:
    padded = -(-outer // 32) * 32
    return padded * (inner * DTYPE_BYTES[dtype] + 4 * bias)


def _gemm_bytes(facts: Any) -> int:
    return _packed(facts.dtype, facts.in_features, facts.out_features, facts.bias)


def _moe_bytes(facts: Any) -> int:
    up = _packed(facts.dtype, facts.width, facts.hidden * (2 if facts.gated else 1), facts.bias)
    return (facts.local or facts.experts) * (up + _packed(facts.dtype, facts.hidden, facts.width, facts.bias))


def _pairs(name: str) -> Callable[[Any], Reason | None]:
    def ask(facts: Any) -> Reason | None:
        value = getattr(facts, name)
        return f"bfloat16 numbers are multiplied in pairs, {name} {value} is odd" if value % 2 and facts.dtype == "bfloat16" else None

    return ask


def _no_bias(facts: Any) -> Reason | None:
    return "no biases by distance" if facts.bias else None


def _kv_dtype(facts: Any) -> Reason | None:
    return None if facts.kv_dtype in PAGE_TYPES else f"reads pages of {' or '.join(PAGE_TYPES)}, not {facts.kv_dtype}"
