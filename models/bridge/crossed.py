"""Encoder-decoders of transformers, text by text: pages keep a text's ids, as `texts.py` has it, and what the encoder gave for it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.hal.kv import CacheKind, LayerCache, LayerPages, StatePages
from pagoda.models.bridge.module import Module, Output
from pagoda.models.bridge.probe import longest_of
from pagoda.models.bridge.spec import BridgeSpec, Crossing
from pagoda.models.bridge.texts import RecomputedTexts, first_of
from pagoda.models.encoding import Cut, EncoderBatch, EncoderFacts
from pagoda.models.model import ModelInputs

LONGEST = 4096
"""Tokens of an encoder whose configuration sets no limit."""
SHOWN = 7
"""Tokens of an encoder that stand for any where a decoder is tried."""


def is_crossed(kind: Any) -> bool:
    """Whether a class reads its input by an encoder beside the text that it writes."""
    return "decoder_input_ids" in inspect.signature(kind.forward).parameters


def crossing_of(module: Module) -> Crossing:
    """What the encoder of a module reads and gives. Raises `ModelError` for inputs that a request cannot bring to one."""
    encoder, taken = module.get_encoder(), inspect.signature(module.forward).parameters
    settings = getattr(encoder.config, "text_config", encoder.config)
    width, longest = int(settings.hidden_size), longest_of(settings) or LONGEST
    if "input_ids" in taken:
        return Crossing("input_ids", width, EncoderFacts("text", longest, vocab=int(settings.vocab_size)))
    if "input_features" in taken and not getattr(settings, "num_mel_bins", None):
        return Crossing("inputs_embeds", width, EncoderFacts("frames", longest, bins=width))
    if "input_values" in taken:
        cuts = tuple(map(Cut, settings.conv_kernel, settings.conv_stride))
        return Crossing("input_values", width, EncoderFacts("samples", longest, cuts=cuts))
    raise ModelError(
        f"the encoder of transformers' {type(module).__name__} reads {next(iter(taken))}, and requests bring one only text and sounds"
    )


def states_of(spec: BridgeSpec) -> tuple[LayerCache, ...]:
    """What lies on pages of an encoder's tokens."""
    if spec.crossing is None:
        return ()
    return (LayerCache(CacheKind.CROSS, 1, spec.crossing.width, 0, "float32", longest=spec.crossing.facts.longest),)


class CrossedTexts(RecomputedTexts):
    """Of models whose decoder attends to an encoder: every step runs the whole of what the decoder wrote."""

    _states: torch.Tensor

    def bind(self, pages: Sequence[LayerPages | StatePages | None], group_of_layer: Sequence[int], page_sizes: Sequence[int]) -> None:
        super().bind(pages, group_of_layer, page_sizes)
        own = pages[1]
        if isinstance(own, LayerPages):
            self._states = own.k
        self._group = group_of_layer[1]
        self._rows_a_page = page_sizes[self._group]

    def encode(self, batch: EncoderBatch) -> None:
        """See `Model.encode`."""
        slots = batch.slots[self._group]
        assert slots is not None and batch.segments.bounds is not None and self.spec.crossing is not None
        ids = batch.token_ids
        given = batch.features if ids is None else tuple(ids[first:end] for first, end in pairwise(batch.segments.bounds.tolist()))
        encoder, reads = self._module.get_encoder(), self.spec.crossing.reads
        inputs = [one.t() if reads == "inputs_embeds" else one for one in given]
        found = [first_of(encoder(**{reads: one[None]}), "last_hidden_state")[0] for one in inputs]
        self._states[slots // self._rows_a_page, slots % self._rows_a_page, 0] = torch.cat(found).float()

    def of_text(self, ids: torch.Tensor, last: int) -> torch.Tensor:
        """As `RecomputedTexts.of_text`, after some input."""
        states = torch.linspace(-1, 1, SHOWN * states_of(self.spec)[0].k_dim, device=ids.device)
        return self._after(states.unflatten(0, (SHOWN, -1)), ids, last)

    def _of_row(self, inputs: ModelInputs, row: int, numbers: torch.Tensor, last: int) -> torch.Tensor:
        batch = inputs.groups[self._group]
        states = self._states[batch.block_table[row].long()][..., 0, :].flatten(0, 1)[: int(batch.seq_lens[row])]
        return self._after(states, numbers[:, 0].long(), last)

    def _after(self, states: torch.Tensor, ids: torch.Tensor, last: int) -> torch.Tensor:
        given = Output((states.to(self._module.dtype)[None],))
        logits: torch.Tensor = first_of(self._module(encoder_outputs=given, decoder_input_ids=ids[None], **self._options), "logits")[0]
        return logits[-last:]
