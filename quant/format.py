"""Number formats of weights: what a checkpoint stores (`StoredTensor`), and how a format turns it into inputs of `pack` (`Format`).

    stored tensors ── checkpoint rules ─▶ a layer's parts ── Format ─▶ FormatUse(op, facts, load) ── load(), kernel.pack ─▶ packed weights

Nothing is read before `FormatUse.load`: `op` and `facts` follow from names, shapes and stored dtypes alone, so that the kernel table can be
asked (the support check, `pagoda plan`) before a byte of weights is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pagoda.hal.kernel import Facts
from pagoda.ops.linear import EmbeddingFacts
from pagoda.ops.moe import MoeMlpFacts

if TYPE_CHECKING:
    import torch


class StoredTensor(Protocol):
    """One tensor of a checkpoint, not yet read.

    Attributes:
        name: as in the checkpoint.
        shape: logical numbers, outermost first (`[out_features, in_features]` for a linear weight, whatever the format).
        dtype: name of a torch dtype ("bfloat16"), or of a block type ("Q4_1") whose last dimension is stored in blocks.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """The numbers in `index` (one slice per leading dimension, in logical numbers, step 1; missing ones mean all), on the host.

        Reads only those bytes. The result may share memory with the file and must not be written. Block types give uint8
        `[..., bytes of a row]`; their last slice must lie on block boundaries, else `CheckpointError`.
        """
        ...


@dataclass(frozen=True)
class LinearPart:
    """A named slice of a linear layer: q of the stacked qkv, gate of gate-up, or the only one.

    Attributes:
        name: last word of the part's own path ("q", "gate", "o").
        rows: outputs that this rank holds, as a range over the part's stored rows.
        tensors: stored tensors by the format's own names (`Format.tensor_names`, and "bias" where there is one); empty when only
            the configuration is known.
    """

    name: str
    rows: range
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LinearUse:
    """One linear layer on one rank: its parts are stacked along the outputs, in order.

    Attributes:
        path: parameter path of the layer, such as "layers.0.mixer.qkv".
        dtype: computing dtype.
        columns: inputs that this rank holds, as a range over the stored columns.
        bias: whether this rank adds a bias (of a row-parallel layer, rank 0 alone does).
    """

    path: str
    dtype: str
    columns: range
    parts: tuple[LinearPart, ...]
    bias: bool = False

    @property
    def out_features(self) -> int:
        return sum(len(part.rows) for part in self.parts)


@dataclass(frozen=True)
class ExpertsUse:
    """The routed experts of one layer on one rank.

    Attributes:
        facts: of the plain primitive, sizes of this rank; a format with its own primitive derives its facts from them.
        experts: which experts this rank holds. hidden: which of each expert's hidden numbers it holds.
        tensors: by part ("gate", "up", "down") and the format's name; stacked: shape `[experts, out, in]` (`bias`: `[experts, out]`).
    """

    path: str
    facts: MoeMlpFacts
    experts: range
    hidden: range
    tensors: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddingUse:
    """A table looked up by row. `rows`: those this rank holds; `facts.rows` may exceed them (padding of a split vocabulary: zeros)."""

    path: str
    facts: EmbeddingFacts
    rows: range
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FormatUse:
    """A primitive that computes (part of) a layer.

    Attributes:
        op, facts: what to ask the kernel table.
        parts: names of the parts covered, in output order; a layer's uses cover all its parts in order.
        load: reads this rank's numbers: host tensors under the names that the primitive's `pack` declares. Raises `CheckpointError`.
        nbytes: bytes that stay of what `load` gives.
        convert: makes of the loaded tensors, once they are on the device, what the primitive packs; None: they are that.
    """

    op: str
    facts: Facts
    parts: tuple[str, ...]
    load: Callable[[], Mapping[str, torch.Tensor]]
    nbytes: int
    convert: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None


class Format(Protocol):
    """A number format of weights. One instance serves a whole checkpoint.

    Attributes:
        name: value of `--quantization` ("none", "gguf", "fp8", …).
        tensor_names: what it stores for a quantised linear weight, such as ("weight",) or ("qweight", "scales", "qzeros").
        optional_names: what it may store besides. spare: last words of names of tensors that it has no use for.
    """

    name: str
    tensor_names: tuple[str, ...]
    optional_names: tuple[str, ...]
    spare: tuple[str, ...]

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether a checkpoint with this config.json and these stored tensors is in this format."""
        ...

    def bound(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Format:
        """The format as this checkpoint, or config.json alone, has it."""
        ...

    def product(self, dtype: str, columns: int, inner: int, bias: bool) -> tuple[str, Facts]:
        """Primitive and facts of a linear layer as most layers have it; what fusion looks for."""
        ...

    def names_of(self, path: str) -> tuple[str, ...]:
        """Tensor names (without bias) of the linear part at `path`: `tensor_names`, or ("weight",) where the config leaves it plain."""
        ...

    def linear(self, use: LinearUse) -> tuple[FormatUse, ...]:
        """The layer as one use, or several in order where neighbouring parts are stored differently; the caller joins the outputs.

        Raises `CheckpointError` when shapes, block sizes or stored dtypes do not fit.
        """
        ...

    def decoded(self, use: LinearUse) -> FormatUse:
        """The layer as a product of plain numbers, however it is stored."""
        ...

    def experts(self, use: ExpertsUse) -> FormatUse: ...

    def embedding(self, use: EmbeddingUse) -> FormatUse:
        """Also serves the tied head: its `LinearUse` then gets the same stored tensors."""
        ...

    def plain(self, tensor: StoredTensor, dtype: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """A small tensor (norm, bias, router, table) as numbers of `dtype`, dequantised where stored in blocks."""
        ...
