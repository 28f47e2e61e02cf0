"""Prompts of pooling requests: texts, ids and pairs to `EngineRequest`s, and how two answers are compared."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.messages import EngineFacts, EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.pooling import PoolingFacts, PoolingParams, check_pooling
from pagoda.serving.engine.token_ids import check_ids
from pagoda.serving.frontend.text import TextFrontend

NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
"""Of requests that are pooled: nothing is generated."""


@dataclass(frozen=True)
class PooledPrompts:
    """Makes requests for one engine.

    Args:
        text: tokenizer and templates.
        facts: of the engine.
    """

    text: TextFrontend
    facts: EngineFacts

    @property
    def pooling(self) -> PoolingFacts:
        """Of the model. Raises `RequestError` where it generates."""
        check_pooling(PoolingParams(), self.facts.pooling)
        assert self.facts.pooling is not None
        return self.facts.pooling

    def ids(self, prompt: str | Sequence[int], special: bool = True) -> list[int]:
        """Of a text, or the ids that were given."""
        return self.text.tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else list(prompt)

    def truncated(self, ids: list[int], most: int | None, side: str | None = None) -> list[int]:
        """At most `most` ids (−1: what the model takes), the special ones at the ends of the prompt kept; cut on the right by default."""
        if most is None:
            return ids
        if most < -1 or most == 0:
            raise RequestError(f"truncate_prompt_tokens={most} must be −1 or at least 1", param="truncate_prompt_tokens")
        longest = self.facts.max_model_len
        if most > longest:
            raise RequestError(
                f"truncate_prompt_tokens={most} exceeds the model's length of {longest}; send −1 for that", param="truncate_prompt_tokens"
            )
        most = longest if most == -1 else most
        if len(ids) <= most:
            return ids
        if side == "left":
            head = _specials(ids, self.text.tokenizer.special_ids) if most > 1 else 0
            return ids[:head] + ids[len(ids) - most + head :]
        tail = _specials(ids[::-1], self.text.tokenizer.special_ids) if most > 1 else 0
        return ids[: most - tail] + ids[len(ids) - tail :]

    def request(self, ids: Sequence[int], params: PoolingParams, **fields: Any) -> EngineRequest:
        """A request that the engine can take. Raises `RequestError` for what cannot be answered."""
        check_pooling(params, self.facts.pooling)
        longest = self.facts.max_model_len
        if not ids:
            raise RequestError("the prompt has no tokens; it needs at least one", param="prompt")
        if len(ids) > longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the model's length is {longest}: shorten it, or truncate it",
                param="prompt",
                code="context_length_exceeded",
            )
        request = EngineRequest(
            request_id=fields.pop("request_id", None) or uuid.uuid4().hex,
            prompt=tuple(ids),
            params=NO_SAMPLING,
            pooling=params,
            arrival=time.time(),
            **fields,
        )
        check_ids(request, self.facts.vocab_size)
        return request

    def pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Ids of two texts together, as the tokenizer joins them, and where the second one's type begins (None: it has no types)."""
        return self.text.tokenizer.encode_pair(first, second)


def _specials(ids: Sequence[int], special: frozenset[int]) -> int:
    """How many ids at the beginning are special ones, one at most."""
    return int(bool(ids) and ids[0] in special)


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Of two vectors of any length."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    return float(first @ second / max(float(np.linalg.norm(first) * np.linalg.norm(second)), 1e-12))


def late_interaction(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Each query token's best match in the document, summed (arXiv:2004.12832)."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(1).sum())
