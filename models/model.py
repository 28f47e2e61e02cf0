"""What the engine asks of a model, whatever its kind: `Model`, and `ModelInputs`, one step's view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pagoda.hal.kv import LayerCache, LayerPages, StatePages
from pagoda.models.media import Encoder, MediaFacts

if TYPE_CHECKING:
    import torch
    from pagoda.models.adapters.slots import AdapterSlots
    from pagoda.models.encoding import EncoderBatch, EncoderFacts
    from pagoda.models.loaded import Loaded
    from pagoda.models.pooling import Pooler
    from pagoda.ops.attention import PagedBatch, Spans
    from pagoda.ops.segment_attention import Segments


@dataclass(frozen=True)
class LengthEpochs:
    """Of models whose angles follow a request's length: what was cached at one length cannot be used at another.

    Attributes:
        first: up to so many tokens nothing changes.
        every: beyond, each length is an epoch of its own; otherwise all of them are one.
    """

    first: int
    every: bool

    def of(self, length: int) -> int:
        """The epoch of a request of `length` tokens; keys and values may be kept within one."""
        if length <= self.first:
            return 0
        return length if self.every else 1


@dataclass(frozen=True)
class ModelInputs:
    """One step, on the device. T tokens are padded to the step's bucket.

    Attributes:
        token_ids: `[T]` int64 or int32.
        positions: `[T]` int64, or `[axes, T]`.
        groups: a `PagedBatch` per cache group.
        plans: what `Model.plan` returned for these groups.
        embeddings: (rows `[E]` int64, values `[E, row_width]`) that replace looked-up embeddings (`MediaFacts`), or None.
        spans: which of those tokens see each other in both directions (`MediaFacts.whole`), or None.
        taps: layers whose hidden states are wanted. routed: so are the experts that each layer chooses.
        adapters: `[T]` int32, adapter slot of each token or −1; None: no token has one.
        lengths: `[T]` int64, any length within the epoch (`LengthEpochs`) of each token's request; None: the lengths in `groups` are.
        segments: where each row's tokens lie; needed by models that attend in both directions, whose rows are whole prompts.
        types: `[T]` int64, token types, for models that know them; None: all are 0.
        states: `[T, width]`, what comes with each token where the way in joins both (`Embed.joins`).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[PagedBatch, ...]
    plans: tuple[Any, ...] = ()
    embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    spans: Spans | None = None
    taps: tuple[int, ...] = ()
    routed: bool = False
    adapters: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    segments: Segments | None = None
    types: torch.Tensor | None = None
    states: torch.Tensor | None = None


class ModelOutput:
    """Hidden states after the last norm `[T, width]`, those of tapped layers, and the experts `[T, k]` that each layer with any chose."""

    __slots__ = ("hidden", "routed", "taps")

    def __init__(self, hidden: torch.Tensor, taps: tuple[torch.Tensor, ...] = (), routed: tuple[torch.Tensor, ...] = ()) -> None:
        self.hidden = hidden
        self.taps = taps
        self.routed = routed


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights load.

    Attributes:
        architecture: name from config.json, or GGUF's.
        vocab_size: rows of the logits.
        max_positions: longest sequence that its positions allow.
        caches: what each layer stores per token on one rank; None for layers that store nothing.
        weight_bytes: bytes of the packed weights of one rank; work_bytes_per_token: activations per token of a step.
        eos_ids: end tokens from config and generation config.
        length_epochs: set where a request that grows must be computed anew.
        pooler: how it answers, where that is not by tokens.
        whole_prompts: a prompt must be run in one step. types: token types that it knows.
        media: what else than tokens it takes, or None. dtype: that it computes in.
        encoder: what its layers attend to beside the text, where that has an encoder of its own.
        replayable: whether steps of the same shapes do the same, so that one can be captured.
    """

    architecture: str
    vocab_size: int
    width: int
    max_positions: int
    caches: tuple[LayerCache | None, ...]
    weight_bytes: int
    work_bytes_per_token: int
    eos_ids: tuple[int, ...] = ()
    parameters: int = 0
    tasks: tuple[str, ...] = field(default=("generate",))
    length_epochs: LengthEpochs | None = None
    pooler: Pooler | None = None
    whole_prompts: bool = False
    types: int = 0
    media: MediaFacts | None = None
    dtype: str = "float32"
    encoder: EncoderFacts | None = None
    replayable: bool = True


class Model(Protocol):
    """A loaded model on one rank."""

    facts: ModelFacts
    adapters: AdapterSlots
    loaded: Loaded
    encoder: Encoder | None

    def page_sizes(self) -> tuple[int, ...]:
        """Tokens per page that the resolved attention kernels allow, preferred first."""
        ...

    def bind(self, pages: Sequence[LayerPages | StatePages | None], group_of_layer: Sequence[int], page_sizes: Sequence[int]) -> None:
        """Give each layer its pages, its cache group's index and tokens per page. May be called again (sleep and wake)."""
        ...

    def plan(self, groups: tuple[PagedBatch, ...], buffers: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """Attention metadata of a step on the host, one per group, into stable `buffers` where given."""
        ...

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        """Run the layers; writes this step's K and V. Collective over the ranks."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[S, width]` → `[S, vocab_size]` on every rank, in float32 or in the dtype that the model computes in."""
        ...

    def encode(self, batch: EncoderBatch) -> None:
        """Of a model with an encoder: run it, and write what the decoder's layers make of its output into their pages."""
        ...

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of a model with a pooler: chosen hidden states `[S, width]` → `[S, outputs]` float32, neither normalised nor activated."""
        ...
