"""A decoder with an encoder before it, which reads a request's input once; the decoder's cross layers keep what they make of it."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.models.blocks.cross import CrossBlock
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.sound import SoundBlock
from pagoda.models.builder import Builder
from pagoda.models.decoder import Decoder, EmbedBlock, LayerBlock, Stream, rope_tables
from pagoda.models.encoding import EncoderBatch
from pagoda.models.model import ModelFacts, ModelInputs
from pagoda.models.sound import Sound
from pagoda.models.spec import DecoderSpec, Encoder


class EncoderBlock:
    """The encoder on one rank."""

    def __init__(self, build: Builder, spec: Encoder, embed: EmbedBlock) -> None:
        self._entry: Any = _entry(build, spec, embed)
        self._layers = [LayerBlock(build, f"encoder.layers.{i}", layer, spec.width) for i, layer in enumerate(spec.layers)]
        self._norm = build.norm("encoder.norm", spec.norm, spec.width)
        self._ropes = rope_tables(build, spec.layers, [layer.mixer for layer in self._layers], spec.longest)

    def __call__(self, batch: EncoderBatch) -> torch.Tensor:
        """Hidden states `[T, width]` of all inputs, one after another."""
        x = self._entry(batch)
        ropes = tuple(table.at(batch.positions, None) for table in self._ropes)
        stream, step = Stream(x), Step((), (), ropes, batch.positions, segments=batch.segments)
        for layer in self._layers:
            layer(stream, step)
        return stream.read(self._norm)


def _entry(build: Builder, spec: Encoder, embed: EmbedBlock) -> Any:
    if isinstance(spec.entry, Sound):
        return SoundBlock(build, "encoder.embed", spec.entry, spec.width)
    table = embed.table if spec.shared else None
    block = EmbedBlock(build, spec.entry, build.shard.vocab(spec.vocab), spec.width, False, "encoder.embed", table)

    def entry(batch: EncoderBatch) -> torch.Tensor:
        assert batch.token_ids is not None
        return block(ModelInputs(batch.token_ids, batch.positions, ()))

    return entry


class EncoderDecoder(Decoder):
    """Both on one rank; implements `models.model.Model`."""

    def __init__(self, spec: DecoderSpec, build: Builder, facts: ModelFacts | None = None) -> None:
        super().__init__(spec, build, facts)
        assert spec.encoder is not None
        self._encoder = EncoderBlock(build, spec.encoder, self._embed)

    def encode(self, batch: EncoderBatch) -> None:
        hidden = self._encoder(batch)
        for mixer in self._mixers:
            if isinstance(mixer, CrossBlock):
                mixer.store(hidden, batch.slots)


def built(spec: DecoderSpec, build: Builder, facts: ModelFacts | None = None) -> Decoder:
    """The spec's model, with its encoder where it has one."""
    return Decoder(spec, build, facts) if spec.encoder is None else EncoderDecoder(spec, build, facts)
