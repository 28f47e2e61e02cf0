"""From a mixer's record to the block that runs it; two side by side are a block too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from pagoda.models.blocks.attention import AttentionBlock
from pagoda.models.blocks.bidirectional import BidirectionalBlock
from pagoda.models.blocks.cross import CrossBlock
from pagoda.models.blocks.delta import GatedDeltaBlock, KimiDeltaBlock
from pagoda.models.blocks.lightning import LightningBlock
from pagoda.models.blocks.mamba import SelectiveBlock, SsdBlock
from pagoda.models.blocks.mla import MlaBlock
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.rwkv import ChannelMixBlock, TimeMixBlock
from pagoda.models.blocks.shared import SharedBlock
from pagoda.models.blocks.short_conv import ShortConvBlock
from pagoda.models.blocks.sparse_mla import SparseMlaBlock
from pagoda.models.builder import Builder
from pagoda.models.recurrent import ChannelMix, GatedDelta, KimiDelta, Lightning, Recurrent, Selective, ShortConv, Ssd, TimeMix
from pagoda.models.spec import MLA, Attention, Bidirectional, Both, Cross, Mixer, Shared

RecurrentBlock = (
    SelectiveBlock | SsdBlock | GatedDeltaBlock | KimiDeltaBlock | LightningBlock | ShortConvBlock | TimeMixBlock | ChannelMixBlock
)


class BothBlock:
    """Attention and a recurrent mixer over the same input."""

    def __init__(self, build: Builder, path: str, spec: Both, width: int) -> None:
        self._scales = spec.scales
        self.attention = AttentionBlock(build, f"{path}.attention", spec.attention, width)
        self.recurrent = recurrent_block(build, f"{path}.recurrent", spec.recurrent, width)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        first, second = self._scales
        return self.attention(x, step) * first + self.recurrent(x, step) * second


MixerBlock = AttentionBlock | CrossBlock | MlaBlock | RecurrentBlock | BothBlock | SharedBlock


def mixer_block(build: Builder, path: str, spec: Mixer | None, width: int) -> MixerBlock | None:
    match spec:
        case None:
            return None
        case Attention():
            return AttentionBlock(build, path, spec, width)
        case Bidirectional():
            return BidirectionalBlock(build, path, spec, width)
        case Cross():
            return CrossBlock(build, path, spec, width)
        case MLA():
            return MlaBlock(build, path, spec, width) if spec.index is None else SparseMlaBlock(build, path, spec, width)
        case Both():
            return BothBlock(build, path, spec, width)
        case Shared():
            return SharedBlock(build, path, spec, width, recurrent_block)
        case _:
            return recurrent_block(build, path, spec, width)


RECURRENT: Mapping[type, Callable[..., RecurrentBlock]] = {
    Selective: SelectiveBlock, Ssd: SsdBlock, GatedDelta: GatedDeltaBlock, KimiDelta: KimiDeltaBlock, Lightning: LightningBlock,
    ShortConv: ShortConvBlock, TimeMix: TimeMixBlock, ChannelMix: ChannelMixBlock,
}  # fmt: skip


def recurrent_block(build: Builder, path: str, spec: Recurrent, width: int) -> RecurrentBlock:
    return RECURRENT[type(spec)](build, path, spec, width)
