"""The C++ kernels of `ops/native` bound to the primitives: dense products, attention, norms, activations, rotation, sampling.

A call costs a few microseconds of Python, so what is static is prepared: packed weights and layer facts are structures whose
address is passed, a step's lengths and tables are one structure for all layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.linear import GemmFacts
from pagoda.ops.native.arena import arena
from pagoda.ops.native.library import PAGE_TYPES, TYPES, AttentionArgs, BatchArgs, GemmArgs, Native, PagesArgs, load
from pagoda.ops.norm import GatedNormFacts, NormFacts
from pagoda.ops.rope import RopeFacts
from pagoda.ops.sampling import SamplingFacts, SamplingRows

_GROUP = 32
_threads = torch.get_num_threads


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, width]` with a contiguous last dimension: a view wherever one exists."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


class PackedWeight:
    """A weight in groups of 32 columns, and the structure that describes it; `tensors` keeps the memory."""

    __slots__ = ("args", "handle", "outer", "tensors")

    def __init__(self, facts: GemmFacts, bias: bool, any_order: bool = False) -> None:
        padded = -(-facts.out_features // _GROUP) * _GROUP
        dtype = getattr(torch, facts.dtype)
        weight = arena().take(padded * facts.in_features * dtype.itemsize).view(dtype)
        self.tensors = (weight, torch.zeros(padded, dtype=torch.float32) if bias else None)
        self.outer = facts.out_features
        address = self.tensors[1].data_ptr() if self.tensors[1] is not None else None
        self.args = GemmArgs(facts.in_features, facts.out_features, TYPES[facts.dtype], any_order, weight.data_ptr(), address)
        self.handle = ctypes.addressof(self.args)

    def shared(self, any_order: bool) -> PackedWeight:
        """The same memory, for a product that may add up in another order."""
        other = copy(self)
        a = self.args
        other.args = GemmArgs(a.inner, a.outer, a.type, any_order, a.weight, a.bias)
        other.handle = ctypes.addressof(other.args)
        return other


class NativeGemm(PlainKernel):
    """`gemm` with weights repacked once; results do not depend on the number of rows."""

    facts: GemmFacts
    any_order = False

    def __init__(self, facts: GemmFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._native = native or load()
        self._gemm = self._native.gemm

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> PackedWeight:
        weight, bias = weights["weight"], weights.get("bias")
        packed = out or PackedWeight(self.facts, bias is not None, self.any_order)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._native.pack(packed.handle, weight.data_ptr(), weight.stride(0), packed.args.weight)
        if bias is not None:
            packed.tensors[1][: self.facts.out_features].copy_(bias)
        return packed

    def share(self, packed: PackedWeight) -> PackedWeight:
        return packed.shared(self.any_order)

    def run(self, packed: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, outer = x.shape[0], packed.outer
        out = torch.empty((rows, outer), dtype=x.dtype)
        self._gemm(packed.handle, x.data_ptr(), x.stride(0), rows, out.data_ptr(), outer, _threads())
        return out


class NativeGemmPrompt(NativeGemm):
    """The same, by sums of integers where rows are many and the processor is faster at those."""

    any_order = True


class NativeRmsNorm(PlainKernel):
    """`rms_norm`, rounded once."""

    facts: NormFacts

    def __init__(self, facts: NormFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._norm = (native or load()).rms_norm
        self._static = (facts.offset, facts.eps, TYPES[facts.dtype])

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        if not self.facts.weight:
            return None
        return weights["weight"].contiguous() if out is None else out.copy_(weights["weight"])

    def run(self, packed: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        flat = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        weight = packed.data_ptr() if packed is not None else None
        self._norm(
            flat.data_ptr(), flat.stride(0), None, 0, weight, *self._static, flat.shape[0], flat.shape[1], out.data_ptr(), None, _threads()
        )
        return out


class NativeAddRmsNorm(NativeRmsNorm):
    """`add_rms_norm`; the sum takes the residual's place."""

    def run(self, packed: torch.Tensor | None, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        flat = _rows(x)
        total = residual if residual.is_contiguous() else residual.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        weight, width, where = packed.data_ptr() if packed is not None else None, flat.shape[1], total.data_ptr()
        self._norm(
            flat.data_ptr(), flat.stride(0), where, width, weight, *self._static, flat.shape[0], width, out.data_ptr(), where, _threads()
        )
        return out, total


class NativeGatedNorm(PlainKernel):
    """`gated_norm`."""

    facts: GatedNormFacts

    def __init__(self, facts: GatedNormFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._norm = (native or load()).gated_norm
        step = facts.width if facts.weight == "own" else 0
        self._static = (step, facts.eps, TYPES[facts.dtype], int(facts.gate == "silu"), int(facts.gate_first))

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        return weights["weight"].contiguous() if out is None else out.copy_(weights["weight"])

    def run(self, packed: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        facts, x, gate = self.facts, _rows(x), _rows(gate)
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = (x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0))
        sizes = (x.shape[0], facts.groups, facts.width)
        self._norm(*rows, packed.data_ptr(), *self._static, *sizes, out.data_ptr(), _threads())
        return out


ACTIVATION_CODES = {
    name: code for code, name in enumerate(("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh", "alpha"))
}  # fmt: skip
"""`enum Activation` of `pointwise.h`; the last is x · σ(alpha · x)."""


class NativeActivation(PlainKernel):
    """`activation`."""

    facts: ActivationFacts
    gated = 0

    def __init__(self, facts: ActivationFacts, native: Native | None = None, alpha: float = 0.0, shift: float = 0.0) -> None:
        super().__init__(facts)
        self._activation = (native or load()).activation
        limit = (facts.limit or 0.0) if self.gated else 0.0
        self._static = (TYPES[facts.dtype], ACTIVATION_CODES[facts.kind], self.gated, limit, alpha, shift)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        flat = _rows(x)
        width = flat.shape[1] >> self.gated
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
        self._activation(flat.data_ptr(), flat.stride(0), *self._static, flat.shape[0], width, out.data_ptr(), _threads())
        return out


class NativeGatedActivation(NativeActivation):
    """`gated_activation`, rounded once. `alpha` and `shift`: the clamped SwiGLU, `gate · σ(alpha · gate) · (up + shift)`."""

    gated = 1


class NativeRope(PlainKernel):
    """`rope` in place."""

    facts: RopeFacts

    def __init__(self, facts: RopeFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._rope = (native or load()).rope
        self._type = TYPES[facts.dtype]
        self._static = (facts.rotary_dim, int(facts.style == "interleaved"))

    def run(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        token, head, one = x.stride()
        if one != 1:
            x = x.contiguous()
            token, head, one = x.stride()
        tokens, heads, _ = x.shape
        angles = (cos.data_ptr(), sin.data_ptr(), cos.stride(0))
        self._rope(x.data_ptr(), self._type, token, head, tokens, heads, *self._static, *angles, _threads())
        return x


class _PagedKernel(PlainKernel):
    """What `write_kv` and `paged_attention` share: the layer's facts, and its pages as a structure."""

    facts: AttentionFacts
    any_order = False

    def __init__(self, facts: AttentionFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._native = native or load()
        self._args = AttentionArgs(
            TYPES[facts.dtype], PAGE_TYPES[facts.kv_dtype], facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.v_dim,
            facts.page_size, int(facts.causal), self.any_order, facts.window or 0, facts.chunk or 0, facts.scale, facts.softcap or 0.0,
        )  # fmt: skip
        self._handle = ctypes.addressof(self._args)
        self._pages: dict[Any, PagesArgs] = {}

    def _pages_of(self, k: torch.Tensor, v: torch.Tensor) -> int:
        key = (k.data_ptr(), v.data_ptr(), k.stride(), v.stride())
        pages = self._pages.get(key)
        if pages is None:
            if key[2][3] != 1 or key[3][3] != 1:
                raise ValueError(f"pages of strides {key[2]} and {key[3]}: numbers of a head must be adjacent")
            pages = self._pages[key] = PagesArgs(key[0], key[1], *key[2][:3], *key[3][:3])
        return ctypes.addressof(pages)


class NativeWriteKv(_PagedKernel):
    """`write_kv`."""

    def run(self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
        if k.stride(2) != 1:
            k = k.contiguous()
        if v.stride(2) != 1:
            v = v.contiguous()
        (k_token, k_head, _), (v_token, v_head, _) = k.stride(), v.stride()
        pages = self._pages_of(k_pages, v_pages)
        self._native.write_kv(
            self._handle, pages, k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head, slots.data_ptr(), k.shape[0], _threads()
        )


class StepArgs:
    """A step's lengths and tables as one structure; `batch` keeps the memory of what it points to."""

    __slots__ = ("args", "batch", "handle", "memory")

    def __init__(self) -> None:
        # torch's memory, so that a recorded step keeps it as it keeps all tensors that were made in it.
        self.memory = torch.empty(ctypes.sizeof(BatchArgs), dtype=torch.uint8)
        self.handle = self.memory.data_ptr()
        self.args = BatchArgs.from_address(self.handle)

    def set(self, batch: PagedBatch) -> StepArgs:
        self.batch = batch
        args, table = self.args, batch.block_table
        args.query_start, args.seq_lens = batch.query_start.data_ptr(), batch.seq_lens.data_ptr()
        args.table, args.table_stride, args.rows = table.data_ptr(), table.stride(0), table.shape[0]
        return self


class NativeAttention(_PagedKernel):
    """`paged_attention`: K and V are read once per group of heads; no two requests influence each other's numbers."""

    def __init__(self, facts: AttentionFacts, native: Native | None = None) -> None:
        super().__init__(facts, native)
        self._attention = self._native.attention
        self._dtype = getattr(torch, facts.dtype)

    def plan(self, batch: PagedBatch, buffers: StepArgs | None = None) -> StepArgs:
        return (buffers or StepArgs()).set(batch)

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: StepArgs | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        token, head, one = q.stride()
        if one != 1:
            q = q.contiguous()
            token, head, one = q.stride()
        facts = self.facts
        out = torch.empty((q.shape[0], facts.num_heads, facts.v_dim), dtype=self._dtype)
        # Named: the address alone would not keep a converted copy alive during the call.
        wide_sinks, wide_slopes = _float32(sinks), _float32(slopes)
        step = plan or self.plan(batch)
        self._attention(
            self._handle, step.handle, self._pages_of(k_pages, v_pages), q.data_ptr(), token, head, q.shape[0], out.data_ptr(),
            None if wide_sinks is None else wide_sinks.data_ptr(), None if wide_slopes is None else wide_slopes.data_ptr(), _threads(),
        )  # fmt: skip
        return out


class NativeAttentionPrompt(NativeAttention):
    """The same, by sums of integers where a request brings many rows."""

    any_order = True


def _float32(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float().contiguous()


class NativeTokenBitmask(PlainKernel):
    """`apply_token_bitmask` in place."""

    facts: SamplingFacts

    def __init__(self, facts: SamplingFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._native = native or load()
        self._type = TYPES[facts.dtype]

    def run(self, logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
        logits, bitmask = _rows(logits), bitmask.contiguous()
        self._native.bitmask(logits.data_ptr(), logits.stride(0), self._type, *logits.shape, bitmask.data_ptr(), _threads())
        return logits


class NativeSample(PlainKernel):
    """`sample` without sorting the vocabulary."""

    facts: SamplingFacts

    def __init__(self, facts: SamplingFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._native = native or load()

    def run(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        return _sampled(self._native, self.facts, logits, None, rows)


class NativeMaskedSample(PlainKernel):
    """`masked_sample`: reads the masks beside the logits, and of the logits only words of 32 of which something is allowed."""

    facts: SamplingFacts

    def __init__(self, facts: SamplingFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._native = native or load()

    def run(self, logits: torch.Tensor, masks: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        return _sampled(self._native, self.facts, logits, masks.contiguous(), rows)


def _sampled(
    native: Native, facts: SamplingFacts, logits: torch.Tensor, masks: torch.Tensor | None, rows: SamplingRows
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = _rows(logits)
    count, vocab = logits.shape
    out, bad = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    results = (out.data_ptr(), bad.data_ptr(), _threads())
    allowed = None if masks is None else masks.data_ptr()
    common = (logits.data_ptr(), logits.stride(0), TYPES[facts.dtype], count, vocab, allowed)
    if rows.all_greedy:
        native.argmax(*common, *results)
        return out, bad
    columns = [c.contiguous() for c in (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position)]
    native.sample(native.table, *common, *(c.data_ptr() for c in columns), *results)
    return out, bad
