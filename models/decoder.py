"""Builds and runs any `DecoderSpec`: the one decoder of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from pagoda.hal.comm import Communicator
from pagoda.hal.errors import ModelError
from pagoda.hal.kv import LayerCache
from pagoda.models.blocks.entry import Entry, entry_of
from pagoda.models.blocks.feed_forward import MlpBlock, MoeBlock
from pagoda.models.blocks.join import JoinBlock
from pagoda.models.blocks.linear import Embedding
from pagoda.models.blocks.mixer import BothBlock, MixerBlock, mixer_block
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.blocks.paged import PagedMixer, Step
from pagoda.models.blocks.pooler import PoolerBlock
from pagoda.models.blocks.positions import position_table
from pagoda.models.blocks.shared import SharedBlock
from pagoda.models.blocks.stack import OnPages
from pagoda.models.blocks.state import StateMixer
from pagoda.models.builder import Builder
from pagoda.models.encoding import EncoderBatch
from pagoda.models.fusion import chains_of, find
from pagoda.models.media import Encoder
from pagoda.models.model import ModelFacts, ModelInputs, ModelOutput
from pagoda.models.parallel.shard import Span, summed
from pagoda.models.rope import Rope, RopeTable
from pagoda.models.spec import MLA, Attention, Bidirectional, Both, DecoderSpec, Embed, Head, Layer, Mlp, Moe, Normed, Residual, Shared
from pagoda.ops.attention import PagedBatch


class Stream:
    """The residual stream: what was added last stays apart until it is read, so that addition and norm can be one kernel."""

    __slots__ = ("_pending", "_ranks", "_total")

    def __init__(self, x: torch.Tensor) -> None:
        self._total = x
        self._pending: torch.Tensor | None = None
        self._ranks: Communicator | None = None

    def read(self, norm: NormBlock | None) -> torch.Tensor:
        """The stream, normed."""
        if self._pending is None:
            return self._total if norm is None else norm(self._total)
        if norm is None:
            self._total = self._total + self._take()
            return self._total
        normed, total = norm.add(self._pending, self._total, self._ranks)
        self.restart(total)
        return normed

    @property
    def pending(self) -> bool:
        """Whether something was added since the stream was read."""
        return self._pending is not None

    def enter(self, entry: Entry) -> torch.Tensor:
        """The first product of a sublayer, from what is pending on."""
        product, self._total = entry(self._take(), self._total)
        return product

    def add(self, x: torch.Tensor, ranks: Communicator | None = None) -> None:
        """`ranks`: over which x is still to be summed, which the next norm may do."""
        if self._pending is not None:
            x, ranks = self._take() + summed(x, ranks), None
        self._pending, self._ranks = x, ranks

    def restart(self, x: torch.Tensor) -> None:
        """The stream is `x` from here on."""
        self._total, self._pending, self._ranks = x, None, None

    def add_rows(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """The same for some tokens."""
        pending = torch.zeros_like(self._total) if self._pending is None else self._take()
        self._pending = pending.index_add(0, rows, x.to(pending.dtype))

    def tap(self) -> torch.Tensor:
        """A copy of the stream as it is now: what the next norm reads, which is not joined with the addition before it then."""
        return self.read(None).clone()

    def peek(self) -> torch.Tensor:
        """The stream as it is now, while what is pending stays pending: the kernels that run are the same."""
        if self._pending is None:
            return self._total
        self._pending = self._take()
        return self._total + self._pending

    def _take(self) -> torch.Tensor:
        assert self._pending is not None
        taken, self._pending, self._ranks = summed(self._pending, self._ranks), None, None
        return taken


class LayerWatch(Protocol):
    """Is shown the stream before the first layer and after each, as it would be without."""

    def begins(self, index: int, stream: Stream) -> None: ...

    def ends(self, index: int, stream: Stream) -> None: ...


class _Watched:
    """A layer that is looked at."""

    def __init__(self, index: int, layer: Callable[[Stream, Step], None], watch: LayerWatch) -> None:
        self._index, self._layer, self._watch = index, layer, watch

    def __call__(self, stream: Stream, step: Step) -> None:
        self._watch.begins(self._index, stream)
        self._layer(stream, step)
        self._watch.ends(self._index, stream)


class LayerBlock:
    """Two sublayers with their norms, joined to the stream by the layer's residual rule."""

    def __init__(self, build: Builder, path: str, spec: Layer, width: int) -> None:
        self._scale = spec.scale
        self._residual = spec.residual
        self._communicator = build.communicator
        self.mixer = mixer_block(build, f"{path}.mixer", spec.mixer, width)
        self.feed_forward = _feed_forward(build, f"{path}.ff", spec.feed_forward, width)
        self._mixer_in, self._mixer_out, self._ff_in, self._ff_out = (
            build.norm(f"{path}.{name}", getattr(spec, name), width) for name in ("mixer_in", "mixer_out", "ff_in", "ff_out")
        )
        self._mixer_entry = entry_of(build, f"{path}.mixer", self.mixer, self._mixer_in)
        self._ff_entry = entry_of(build, f"{path}.ff", self.feed_forward, self._ff_in)

    def __call__(self, stream: Stream, step: Step) -> None:
        if self._residual is not Residual.SEQUENTIAL:
            self._otherwise(stream, step)
            return
        if self.mixer is not None:
            self._add(stream, _through(stream, self.mixer, self._mixer_in, self._mixer_entry, step), self._mixer_out)
        if self.feed_forward is not None:
            self._add(stream, _through(stream, self.feed_forward, self._ff_in, self._ff_entry, step), self._ff_out)

    def _otherwise(self, stream: Stream, step: Step) -> None:
        if not isinstance(self._residual, Normed):
            self._side_by_side(stream, step)
            return
        sublayers = ((self.mixer, self._mixer_in, self._residual.mixer), (self.feed_forward, self._ff_in, self._residual.feed_forward))
        for block, norm, (keep, add) in sublayers:
            if block is None:
                continue
            x = stream.read(norm)
            out = self._finish(block(x, step), None)
            stream.restart(x if keep == 1.0 else x * keep)
            stream.add(out if add == 1.0 else out * add)

    def _side_by_side(self, stream: Stream, step: Step) -> None:
        x = stream.read(self._mixer_in)
        y = x if self._ff_in is None else stream.read(self._ff_in)
        assert self.mixer is not None and self.feed_forward is not None
        stream.add(self._finish(self.mixer(x, step) + self.feed_forward(y, step), self._mixer_out))

    def _add(self, stream: Stream, x: torch.Tensor, norm: NormBlock | None) -> None:
        if norm is None and self._scale == 1.0:
            stream.add(x, self._communicator)
        else:
            stream.add(self._finish(x, norm))

    def _finish(self, x: torch.Tensor, norm: NormBlock | None) -> torch.Tensor:
        x = summed(x, self._communicator)
        x = x if norm is None else norm(x)
        return x if self._scale == 1.0 else x * self._scale


class EmbedBlock:
    """Token ids to the first hidden states."""

    def __init__(
        self,
        build: Builder,
        spec: Embed,
        vocab: Span,
        width: int,
        tied: bool,
        path: str = "embed",
        table: Embedding | None = None,
    ) -> None:
        self.table = table or build.embedding(path, vocab, spec.width or width, tied and spec.width is None)
        self._widen = None
        if spec.width is not None:
            self._widen = build.linear(path, {"widen": Span.whole(width)}, Span.whole(spec.width), "replicated", True)
            width = spec.width
        self._scale = _rounded(spec.scale, build.numerics.dtype) if spec.round_scale else spec.scale
        self._scales_table = spec.round_scale
        self._offset = spec.positions.offset if spec.positions else 0
        self._positions = position_table(build, f"{path}.positions", spec.positions, width)
        self._types = build.tensor(f"{path}.types", (Span.whole(spec.types), Span.whole(width)), "replicated") if spec.types else None
        self._norm = build.norm(f"{path}.norm", spec.norm, width)
        self._join = JoinBlock(build, path, spec.joins, width) if spec.joins is not None else None
        self._communicator = build.communicator

    def __call__(self, inputs: ModelInputs) -> torch.Tensor:
        x = summed(self.table(inputs.token_ids), self._communicator)
        if self._scales_table:
            x = x * self._scale
        if inputs.embeddings is not None:
            rows, values = inputs.embeddings
            x = x.index_copy(0, rows, values[:, : x.shape[1]].to(x.dtype))
        if self._scale != 1.0 and not self._scales_table:
            x = x * self._scale
        if self._positions is not None:
            x = x + F.embedding(inputs.positions + self._offset, self._positions)
        if self._types is not None:
            x = x + (self._types[0] if inputs.types is None else F.embedding(inputs.types, self._types))
        x = x if self._norm is None else self._norm(x)
        if self._join is not None:
            x = self._join(x, inputs.states)
        return x if self._widen is None else self._widen(x)


class HeadBlock:
    """Last hidden states to logits."""

    def __init__(self, build: Builder, spec: Head, vocab: Span, width: int) -> None:
        self._spec = spec
        self._vocab = vocab.total
        self._padding = -(-vocab.total // build.shard.world) - len(vocab)
        self._communicator = build.communicator
        self._bias = build.tensor("head.bias", (Span.whole(vocab.total),), "replicated") if spec.tied and spec.bias else None
        if spec.tied:
            self._linear = build.tied_head("embed", vocab, width)
        else:
            self._linear = build.linear("", {"head": vocab}, Span.whole(width), "vocab", spec.bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[S, width]` → `[S, vocab]`, float32 where something is done to them."""
        logits = self._linear(hidden)
        if self._communicator is not None:
            logits = self._communicator.all_gather(F.pad(logits, (0, self._padding)), dim=-1)[:, : self._vocab]
        if self._bias is not None:
            logits = logits + self._bias
        if self._spec.scale != 1.0:
            logits = logits.float() * self._spec.scale
        if self._spec.softcap is not None:
            logits = torch.tanh(logits.float() / self._spec.softcap) * self._spec.softcap
        return logits


class Decoder(OnPages):
    """A decoder on one rank; implements `models.model.Model`.

    Args:
        build: makes its blocks; a hollow one lists what they want and cannot run.
    """

    def __init__(self, spec: DecoderSpec, build: Builder, facts: ModelFacts | None = None) -> None:
        self.spec = spec
        if facts is not None:
            self.facts = facts
        self.refill = build.refill
        self.loaded = build.loaded
        self.adapters = build.adapters
        self.encoder: Encoder | None = None
        sites = find(chains_of(spec, build.numerics, build.shard, adapters=build.lora is not None, stored=build.format), build.rules)
        build.sites = {(site.rule.op, site.path): site for site in sites}
        vocab = build.shard.vocab(spec.vocab)
        self._embed = EmbedBlock(build, spec.embed, vocab, spec.width, spec.head.tied and spec.pooler is None)
        blocks = [LayerBlock(build, f"layers.{i}", layer, spec.width) for i, layer in enumerate(spec.layers)]
        self._layers: list[Callable[[Stream, Step], None]] = list(blocks)
        super().__init__([mixer for block in blocks for mixer in _parts(block.mixer)], build.table)
        self._norm = build.norm("norm", spec.norm, spec.width)
        self._head = HeadBlock(build, spec.head, vocab, spec.width) if spec.pooler is None else None
        self._pooler = PoolerBlock(build, spec.pooler, spec.width) if spec.pooler is not None else None
        self._ropes = rope_tables(build, spec.layers, self._mixers, spec.max_positions)
        self._keeps_embedded = any(isinstance(layer.mixer, Shared) for layer in spec.layers)

    @property
    def caches(self) -> tuple[LayerCache | None, ...]:
        """What each mixer stores, in the order of the layers: none has one that stores nothing, layers with two have both."""
        return tuple(mixer.cache if mixer is not None else None for mixer in self._mixers)

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        routed: list[torch.Tensor] | None = [] if inputs.routed else None
        step = Step(inputs.groups, inputs.plans, self._rotations(inputs), inputs.positions, inputs.adapters, inputs.segments, routed)
        step.spans = inputs.spans
        stream = Stream(self._embed(inputs))
        if self._keeps_embedded:
            step.embedded = stream.tap()
        taps: dict[int, torch.Tensor] = {}
        rows, deeper = _deeper(inputs.embeddings, self.spec.width)
        for index, layer in enumerate(self._layers):
            layer(stream, step)
            if index < len(deeper):
                stream.add_rows(rows, deeper[index])
            if index in inputs.taps:
                taps[index] = stream.tap()
        return ModelOutput(stream.read(self._norm), tuple(taps[index] for index in inputs.taps), tuple(routed or ()))

    def watch(self, watch: LayerWatch) -> None:
        """From now on `watch` is told of every layer of every step; for eager runs."""
        self._layers = [_Watched(index, layer, watch) for index, layer in enumerate(self._layers)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            raise ModelError("this model answers with vectors or scores and has no logits of tokens")
        return self._head(hidden)

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._pooler is None:
            raise ModelError("this model answers with tokens and has no pooler")
        return self._pooler(hidden)

    def encode(self, batch: EncoderBatch) -> None:
        raise ModelError("this model has no encoder")

    def _rotations(self, inputs: ModelInputs) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        by_length = any(table.by_length for table in self._ropes)
        lengths = inputs.lengths
        if by_length and lengths is None:
            lengths = _token_lengths(inputs.groups[0], inputs.token_ids.shape[0])
        return tuple(table.at(inputs.positions, lengths) for table in self._ropes)


def rope_tables(build: Builder, layers: Sequence[Layer], mixers: Sequence[Any], longest: int) -> tuple[RopeTable, ...]:
    """Those of the layers' ropes; each mixer is told which one is its own."""
    ropes = ropes_in(layers)
    for mixer in mixers:
        if isinstance(mixer, PagedMixer) and isinstance(mixer.spec.position, Rope):
            mixer.rope_index = ropes.index(mixer.spec.position)
    return tuple(RopeTable(rope, longest, build.torch_device) for rope in ropes) if build.loading else ()


def ropes_in(layers: Sequence[Layer]) -> tuple[Rope, ...]:
    """The distinct ropes of some layers, in order of first use."""
    parts = (layer.mixer.attention if isinstance(layer.mixer, Bidirectional | Both | Shared) else layer.mixer for layer in layers)
    positions = (mixer.position for mixer in parts if isinstance(mixer, Attention | MLA))
    return tuple(dict.fromkeys(position for position in positions if isinstance(position, Rope)))


def _parts(mixer: MixerBlock | None) -> Sequence[PagedMixer | StateMixer | None]:
    return (mixer.attention, mixer.recurrent) if isinstance(mixer, BothBlock | SharedBlock) else (mixer,)


def _through(stream: Stream, block: Any, norm: NormBlock | None, entry: Entry | None, step: Step) -> torch.Tensor:
    """A sublayer's output from the stream."""
    if entry is None or not stream.pending:
        return block(stream.read(norm), step)  # type: ignore[no-any-return]
    return block.rest(stream.enter(entry), step, entry.activated)  # type: ignore[no-any-return]


def _feed_forward(build: Builder, path: str, spec: Mlp | Moe | None, width: int) -> MlpBlock | MoeBlock | None:
    match spec:
        case None:
            return None
        case Mlp():
            return MlpBlock(build, path, spec, width)
        case Moe():
            return MoeBlock(build, path, spec, width)


def _deeper(embeddings: tuple[torch.Tensor, torch.Tensor] | None, width: int) -> tuple[Any, Sequence[torch.Tensor]]:
    """Rows of the step, and what is added to them after the first layers (`MediaFacts.row_width`)."""
    return (None, ()) if embeddings is None else (embeddings[0], embeddings[1].split(width, dim=1)[1:])


def _token_lengths(batch: PagedBatch, tokens: int) -> torch.Tensor:
    token = torch.arange(tokens, device=batch.seq_lens.device, dtype=torch.int32)
    request = torch.searchsorted(batch.query_start[1:].contiguous(), token, right=True)
    return batch.seq_lens[request.clamp(max=batch.seq_lens.shape[0] - 1)]


def _rounded(scale: float, dtype: str) -> float:
    return float(torch.tensor(scale, dtype=getattr(torch, dtype)))
