"""From what a step's encoder has to do to tensors on the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from pagoda.hal.kv import CacheGroup, CacheKind
from pagoda.models.encoding import EncoderBatch
from pagoda.ops.segment_attention import Segments
from pagoda.serving.engine.plan import Encode, IntArray, LongArray


def encoder_batch(encodes: tuple[Encode, ...], groups: tuple[CacheGroup, ...], there: torch.device) -> EncoderBatch:
    """All inputs one after another."""
    lengths = [encode.tokens for encode in encodes]
    bounds = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    ids = [token for encode in encodes for token in encode.given.token_ids]
    return EncoderBatch(
        token_ids=torch.tensor(ids, dtype=torch.int64).to(there) if ids else None,
        features=tuple(_features(encode).to(there) for encode in encodes if encode.given.shape),
        positions=torch.from_numpy(positions).to(there),
        segments=Segments(torch.from_numpy(bounds).to(there), bounds),
        slots=tuple(None if slots is None else torch.from_numpy(slots).to(there) for slots in _slots(encodes, groups)),
    )


def _features(encode: Encode) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(encode.given.features, "<f4").reshape(encode.given.shape).copy())


def _slots(encodes: tuple[Encode, ...], groups: tuple[CacheGroup, ...]) -> Iterable[LongArray | None]:
    number = 0
    for group in groups:
        if group.kind is not CacheKind.CROSS:
            yield None
            continue
        yield np.concatenate([_places(encode.pages[number], encode.tokens, group.tokens_per_page) for encode in encodes])
        number += 1


def _places(pages: IntArray, tokens: int, size: int) -> LongArray:
    at = np.arange(tokens, dtype=np.int64)
    places: LongArray = pages[at // size].astype(np.int64) * size + at % size
    return places
