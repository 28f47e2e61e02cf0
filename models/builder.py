"""Turns records into running blocks. The same walk, without loading, lists every parameter and primitive that a spec needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.device import Device, Spread
from pagoda.hal.errors import KernelError
from pagoda.hal.kernel import Facts, Kernel, KernelRun
from pagoda.hal.kv import DTYPE_BYTES
from pagoda.hal.memory import MemoryKind
from pagoda.hal.table import KernelTable
from pagoda.models.adapters.slots import AdaptedLinear, AdapterSlots, LoraLimits
from pagoda.models.blocks.linear import Embedding, Linear
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.fusion import RULES, Rule, Site
from pagoda.models.loaded import Loaded
from pagoda.models.parallel.shard import SPREAD, Role, Shard, Span
from pagoda.models.spec import Norm
from pagoda.ops.head_gemm import HeadGemmFacts
from pagoda.ops.linear import EmbeddingFacts
from pagoda.ops.lora import LoraFacts
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.norm import NormFacts
from pagoda.quant.format import EmbeddingUse, ExpertsUse, Format, FormatUse, LinearPart, LinearUse, StoredTensor


@dataclass(frozen=True)
class Parameter:
    """A tensor that the model wants, under our own name and with the whole model's shape.

    Attributes:
        formatted: stored in the checkpoint's number format, possibly as several tensors; otherwise plain numbers.
    """

    path: str
    shape: tuple[int, ...]
    role: Role
    formatted: bool = False


@dataclass(frozen=True)
class Part:
    """A slice of a linear layer that adapters may change: which outputs and inputs this rank holds."""

    rows: Span
    columns: Span


@dataclass(frozen=True)
class Numerics:
    """Dtype names: of computing, and of the KV cache."""

    dtype: str
    kv_dtype: str


class Builder:
    """Makes blocks.

    Args:
        numerics: dtypes of the whole model.
        shard: this rank.
        format: number format of the weights.
        stored: the checkpoint's tensors under our names; empty when only the configuration is known.
        table: where kernels come from; None lists uses without resolving them.
        device: where weights go; None loads nothing (blocks are hollow).
        communicator: of the shard's group; None for one rank.
        lora: room for adapters beside the linear layers; None makes none.
        rules: of fusion.

    Attributes:
        sites: where those rules' sequences begin (`models.fusion`), set by the decoder for its blocks.
        parameters, uses, nbytes: what the blocks made so far want: tensors, primitives with their facts, bytes of weights on this rank.
        coarse: whether a linear layer so far is stored in fewer bits than its dtype's.
        loaded: what the weights loaded so far do take.
        adaptable: slices of linear layers that adapters may change, by path; `adapters`: the room for them, filled while loading.
    """

    def __init__(
        self,
        numerics: Numerics,
        shard: Shard,
        format: Format,
        stored: Mapping[str, StoredTensor] | None = None,
        table: KernelTable | None = None,
        device: Device | None = None,
        communicator: Communicator | None = None,
        lora: LoraLimits | None = None,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self.rules = rules
        self.sites: dict[tuple[str, str], Site] = {}
        self.numerics = numerics
        self.shard = shard
        self.format = format
        self.coarse = False
        self.stored = stored or {}
        self.table = table
        self.device = device
        self.communicator = communicator
        self.lora = lora
        self.adaptable: dict[str, Part] = {}
        self.adapters = AdapterSlots()
        self.shared: dict[str, Any] = {}
        self.parameters: dict[str, Parameter] = {}
        self.uses: list[tuple[str, Facts]] = []
        self.nbytes = 0
        self.loaded = Loaded()
        self._refill: list[Callable[[], object]] = []
        self._table_rows: torch.Tensor | None = None
        self._table_bytes = 0.0
        self._table: tuple[str | None, Any] = (None, None)

    @property
    def loading(self) -> bool:
        return self.device is not None

    def kernel(self, op: str, facts: Facts) -> KernelRun:
        """The kernel of one use, noted; hollow builders give None where a kernel belongs."""
        self.uses.append((op, facts))
        return self.table.resolve(op, facts) if self.table is not None and self.loading else None  # type: ignore[return-value]

    def tensor(
        self,
        path: str,
        spans: Sequence[Span],
        role: Role,
        dtype: str | None = None,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """This rank's part of a plain tensor, on the device; `change` makes what is kept of what is stored."""
        return self.stack({path: spans}, role, dtype, change)

    def stack(
        self,
        parts: Mapping[str, Sequence[Span]],
        role: Role,
        dtype: str | None = None,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """This rank's parts of several plain tensors by path, one after another along their first dimension."""
        dtype = dtype or self.numerics.dtype
        for path, spans in parts.items():
            self._want(path, tuple(span.total for span in spans), role)
            self.nbytes += DTYPE_BYTES[dtype] * prod(len(span) for span in spans)
        if not self.loading:
            return None

        def read() -> torch.Tensor:
            pieces = [self.format.plain(self.stored[path], dtype, tuple(span.index for span in spans)) for path, spans in parts.items()]
            whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            return whole if change is None else change(whole)

        tensor = self._place(read(), role)
        self.loaded.add(tensor)
        self._refill.append(lambda: tensor.copy_(read()))
        return tensor

    def refill(self) -> None:
        """Read all weights again into the places that they have (after their memory was released, or the source changed)."""
        for fill in self._refill:
            fill()

    def linear(self, path: str, parts: Mapping[str, Span], columns: Span, role: Role, bias: bool = False) -> Linear | AdaptedLinear:
        """`path.q`, `path.k`, … stacked along their outputs, in order; an empty `path` means the root."""
        prefix = f"{path}." if path else ""
        for name, rows in parts.items():
            self._want(f"{prefix}{name}.weight", (rows.total, columns.total), role, formatted=True)
            if bias:
                self._want(f"{prefix}{name}.bias", (rows.total,), "replicated" if role == "row" else role)
        adds = bias and (role != "row" or self.shard.rank == 0)
        made = tuple(LinearPart(name, rows.part, self._tensors_of(f"{prefix}{name}", adds)) for name, rows in parts.items())
        use = LinearUse(f"{prefix}{'_'.join(parts)}", self.numerics.dtype, columns.part, made, adds)
        uses = self.format.linear(use)
        self.coarse |= any(piece.op != "gemm" for piece in uses)
        plain = uses[0].facts if len(uses) == 1 and self._chosen_bytes(uses[0]) is None else None
        linear = Linear([self._piece(piece, role) for piece in uses], plain)
        if role == "vocab":
            return linear
        self.adaptable.update({f"{prefix}{name}": Part(rows, columns) for name, rows in parts.items()})
        return linear if self.lora is None else self._with_adapters(self.lora, linear, path, parts, columns)

    def _with_adapters(
        self, lora: LoraLimits, linear: Linear, path: str, parts: Mapping[str, Span], columns: Span
    ) -> Linear | AdaptedLinear:
        """Room beside the layer; a row-parallel one adds its share before the ranks sum theirs."""
        facts = LoraFacts(self.numerics.dtype, len(columns), tuple(map(len, parts.values())), lora.slots, lora.rank)
        kernel = self.kernel("lora_delta", facts)
        self.nbytes += DTYPE_BYTES[facts.dtype] * (prod(facts.down_shape) + prod(facts.up_shape))
        if not self.loading:
            return linear
        assert self.device is not None
        dtype, alloc = getattr(torch, facts.dtype), self.device.memory.alloc
        down, up = (alloc(MemoryKind.WEIGHTS, shape, dtype) for shape in (facts.down_shape, facts.up_shape))
        self.loaded.add([down, up])
        adapted = AdaptedLinear(linear, kernel.run, facts, tuple(parts), down, up)
        self.adapters.add(path, tuple(parts), adapted)
        return adapted

    def head_product(
        self, path: str, facts: HeadGemmFacts, rows: Span, columns: Span, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A product for each head with what `pick` makes of this rank's part of the weight at `path`, in plain numbers; None in a hollow
        builder."""
        self._want(f"{path}.weight", (rows.total, columns.total), "column", formatted=True)
        part = LinearPart(path.rpartition(".")[2], rows.part, self._tensors_of(path, False))
        whole = self.format.decoded(LinearUse(path, facts.dtype, columns.part, (part,)))
        nbytes = DTYPE_BYTES[facts.dtype] * facts.heads * facts.in_features * facts.out_features
        use = FormatUse("head_gemm", facts, whole.parts, lambda: {"weight": pick(whole.load()["weight"])}, nbytes)
        kernel, packed = self._piece(use, "column")
        return partial(kernel.run, packed) if self.loading else None

    def experts(self, path: str, facts: MoeMlpFacts, experts: Span, hidden: Span) -> tuple[KernelRun, Any]:
        wide = dict.fromkeys(("gate", "up") if facts.gated else ("up",), (hidden.total, facts.width))
        sizes = {**wide, "down": (facts.width, hidden.total)}
        for name, shape in sizes.items():
            self._want(f"{path}.{name}.weight", (experts.total, *shape), "expert", formatted=True)
            if facts.bias:
                self._want(f"{path}.{name}.bias", (experts.total, shape[0]), "expert")
        tensors = {name: self._tensors_of(f"{path}.{name}", facts.bias) for name in sizes}
        return self._piece(self.format.experts(ExpertsUse(path, facts, experts.part, hidden.part, tensors)), "expert")

    def embedding(self, path: str, vocab: Span, width: int, tied: bool = False) -> Embedding:
        """`tied`: `tied_head` will ask for the same table."""
        self._want(f"{path}.weight", (vocab.total, width), "vocab", formatted=True)
        rows = -(-vocab.total // self.shard.world)
        facts = EmbeddingFacts(self.numerics.dtype, rows, width, self.shard.rank * rows, self.shard.world > 1, tied)
        use = self.format.embedding(EmbeddingUse(path, facts, vocab.part, self._tensors_of(path, False)))
        tensors = self._load(use, "vocab")
        self._table_bytes, self._table_rows = use.nbytes / rows, tensors.get("weight") if tied else None
        kernel, packed = self._packed(use, tensors)
        chosen = self._chosen(use)
        self._table = (chosen.layout if chosen is not None else None, packed)
        return Embedding(kernel, packed)

    def tied_head(self, path: str, vocab: Span, width: int) -> Linear:
        """A head that multiplies by the embedding's table at `path`: the same tensor, or the same packed weight, where both are alike."""
        part = LinearPart("head", vocab.part, self._tensors_of(path, False))
        uses = self.format.linear(LinearUse("head", self.numerics.dtype, range(width), (part,)))
        layout, packed = self._table
        stored, self._table_rows = self._table_rows, None  # a mapped file's pages, once both uses have packed them
        chosen = self._chosen(uses[0])
        if len(uses) == 1 and layout is not None and chosen is not None and chosen.layout == layout:
            kernel: Any = self.kernel(uses[0].op, uses[0].facts)
            return Linear([(kernel, kernel.share(packed) if self.loading else None)])
        if len(uses) > 1 or layout is not None or uses[0].nbytes != self._table_bytes * len(vocab):
            return Linear([self._piece(use, "vocab") for use in uses])
        shared = {"weight": stored[: len(vocab)]} if stored is not None else {}
        return Linear([self._packed(uses[0], shared, shared=True)])

    def norm(self, path: str, norm: Norm | None, width: int, role: Role = "replicated") -> NormBlock | None:
        if norm is None:
            return None
        facts = NormFacts(self.numerics.dtype, width, norm.eps, norm.offset, norm.weight, norm.bias)
        tensors = {name: self.tensor(f"{path}.{name}", (Span.whole(width),), role) for name in ("weight", "bias") if getattr(norm, name)}
        plain = self.kernel("rms_norm" if norm.kind == "rms" else "layer_norm", facts)
        joined = self.fusion("add_rms_norm", path)
        fused = self.kernel("add_rms_norm", joined.facts) if joined is not None and joined.facts is not None else None
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return NormBlock(plain, fused, present, norm) if self.loading else NormBlock.hollow()

    def pack(self, kernel: KernelRun, weights: Callable[[], Mapping[str, torch.Tensor]]) -> Any:
        """What `kernel` makes of tensors of this builder, and once more when they are read again."""
        packed = kernel.pack(weights())
        self._refill.append(lambda: kernel.pack(weights(), packed))
        return packed

    def fusion(self, op: str, path: str, page_size: int | None = None) -> Site | None:
        """What became on this device of the rule that puts `op` at `path`; None where its sequence does not begin there."""
        site = self.sites.get((op, path))
        return site.on(self.table, page_size) if site is not None else None

    def _piece(self, use: FormatUse, role: Role) -> tuple[KernelRun, Any]:
        return self._packed(use, self._load(use, role))

    def _load(self, use: FormatUse, role: Role) -> dict[str, torch.Tensor]:
        self.nbytes += use.nbytes
        if not self.loading:
            return {}
        # What a kernel repacks goes straight into its layout; the rest stays where it is put.
        place = partial(self._place, role=role) if self._chosen_bytes(use) is None else self._move
        return {name: place(tensor) for name, tensor in self._read(use).items()}

    def _read(self, use: FormatUse) -> Mapping[str, torch.Tensor]:
        """What a use loads, converted on the device where it says so."""
        return use.load() if use.convert is None else use.convert({name: self._move(tensor) for name, tensor in use.load().items()})

    def _packed(self, use: FormatUse, tensors: Mapping[str, torch.Tensor], shared: bool = False) -> tuple[KernelRun, Any]:
        """`shared`: `tensors` belong to another use, which is refilled before this one."""
        kernel, packed_bytes = self.kernel(use.op, use.facts), self._chosen_bytes(use)
        if packed_bytes is not None:
            self.nbytes += packed_bytes(use.facts) - (0 if shared else use.nbytes)
        if not self.loading:
            return kernel, None
        packed = kernel.pack(tensors)
        self.loaded.add(packed)
        if not shared:
            self._refill.append(lambda: kernel.pack({name: self._move(tensor) for name, tensor in self._read(use).items()}, packed))
        elif packed_bytes is not None:
            self._refill.append(lambda: kernel.pack(tensors, packed))
        return kernel, packed

    def _chosen_bytes(self, use: FormatUse) -> Callable[[Facts], int] | None:
        chosen = self._chosen(use)
        return chosen.packed_bytes if chosen is not None else None

    def _chosen(self, use: FormatUse) -> Kernel | None:
        if self.table is None:
            return None
        try:
            return self.table.choose(use.op, use.facts).chosen
        except KernelError:
            return None  # the support check names it, with all others

    @property
    def torch_device(self) -> torch.device:
        assert self.device is not None
        return self.device.torch_device

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device)

    def _place(self, tensor: torch.Tensor, role: Role) -> torch.Tensor:
        assert self.device is not None
        placed = self.device.memory.alloc(MemoryKind.WEIGHTS, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        spread = self.device.extension(Spread)  # type: ignore[type-abstract]
        if spread is not None:
            spread.lay(placed, SPREAD[role])
        return placed

    def _tensors_of(self, path: str, bias: bool) -> dict[str, StoredTensor]:
        names = (*self.format.names_of(path), *self.format.optional_names, *(("bias",) if bias else ()))
        return {name: self.stored[f"{path}.{name}"] for name in names if f"{path}.{name}" in self.stored}

    def kv_scales(self, path: str) -> tuple[float, float] | None:
        """What the checkpoint says that k and v of a float8 cache are divided by; None where it says nothing, or one."""
        layer = path.split(".")[1]
        scales = []
        for name in ("k", "v"):
            spellings = (f"{path}.{name}.{name}_scale", f"{path}.{name}.output_scale")
            spellings += tuple(f"{root}layers.{layer}.self_attn.{inner}{name}_scale" for root in ("", "model.") for inner in ("", "attn."))
            found = next((self.stored[spelling] for spelling in spellings if spelling in self.stored), None)
            scales.append(float(found.read().float().max()) if found is not None else 1.0)
        return (scales[0], scales[1]) if scales != [1.0, 1.0] else None

    def _want(self, path: str, shape: tuple[int, ...], role: Role, formatted: bool = False) -> None:
        self.parameters[path] = Parameter(path, shape, role, formatted)
