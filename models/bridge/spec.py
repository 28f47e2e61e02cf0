"""What is known of a bridged model: how it is run, each attention call of its forward, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagoda.hal.kv import CacheKind, LayerCache, stored_dim
from pagoda.models.encoding import EncoderFacts
from pagoda.models.media import MediaFacts
from pagoda.ops.attention import AttentionFacts

Answers = Literal["tokens", "vectors", "scores", "token_scores"]

Way = Literal["paged", "texts"]
"""How a step is run: tokens of all requests as one row with attention on pages, or each text by itself (`texts.py`)."""


@dataclass(frozen=True)
class Visible:
    """Which keys a causal query sees: all before it, the last `window`, or those of its own `chunk`."""

    window: int | None = None
    chunk: int | None = None

    @property
    def kind(self) -> CacheKind:
        if self.window is not None:
            return CacheKind.SLIDING
        return CacheKind.FULL if self.chunk is None else CacheKind.CHUNKED


@dataclass(frozen=True)
class AttentionCall:
    """One call of transformers' attention interface, by the module (`path`) that makes it.

    Attributes:
        scale, softcap: as the call gives them. sinks: whether it gives a logit per head that joins the softmax.
    """

    path: str
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    visible: Visible = Visible()
    softcap: float | None = None
    sinks: bool = False

    def facts(self, dtype: str, kv_dtype: str) -> AttentionFacts:
        return AttentionFacts(
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.k_dim,
            v_dim=self.v_dim,
            page_size=16,
            scale=self.scale,
            window=self.visible.window,
            chunk=self.visible.chunk,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def cache(self, kv_dtype: str) -> LayerCache:
        window = self.visible.window if self.visible.window is not None else self.visible.chunk
        return LayerCache(
            self.visible.kind, self.kv_heads, stored_dim(self.k_dim, kv_dtype), stored_dim(self.v_dim, kv_dtype), kv_dtype, window
        )


@dataclass(frozen=True)
class Crossing:
    """The encoder of a module whose decoder attends to it: the argument that it `reads`, and the `width` of what it gives."""

    reads: str
    width: int
    facts: EncoderFacts


@dataclass(frozen=True)
class BridgeSpec:
    """A model of transformers, seen from outside.

    Attributes:
        config: config.json. body: path of the module that gives hidden states; the rest of the model makes logits of them.
        top: path of the module that hands them to the head: the body, or what puts media before it.
        calls: attention calls of a forward, in order; each has a cache of its own.
        widest: most outputs of one linear layer but the head.
        media: what else than tokens it takes, or None.
        first_position: what the model calls the position of a text's first token.
        way: how it is run. answers: which of its type's classes it is.
        crossing: what its decoder attends to beside the text, or None.
    """

    config: Mapping[str, Any]
    body: str
    calls: tuple[AttentionCall, ...]
    vocab: int
    width: int
    widest: int
    max_positions: int
    first_position: int = 0
    top: str = ""
    media: MediaFacts | None = None
    way: Way = "paged"
    answers: Answers = "tokens"
    crossing: Crossing | None = None
