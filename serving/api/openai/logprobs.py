"""Logprobs in the protocol's three shapes: completions, chat, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.serving.api.openai.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from pagoda.serving.engine.messages import TokenLogprobs
from pagoda.serving.frontend.text import Tokenizer

LOWEST = -9999.0
"""JSON has no minus infinity; vLLM's stand-in for it."""


class TokenNames:
    """How tokens are spelled in replies: by their text, or as `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def raw(self, token_id: int) -> bytes:
        # logits are often padded beyond the vocabulary
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.raw(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


class CompletionLogprobsBuilder:
    """Builds one choice's lists, over the whole reply or chunk by chunk; offsets count the characters of the token texts."""

    def __init__(self, names: TokenNames, top: int, offset: int = 0) -> None:
        self._names, self._top, self._offset = names, top, offset

    def add(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        out = CompletionLogprobs()
        for entry in entries:
            self._append(out, entry.token_id, _finite(entry.logprob), self._top_of(entry))
        return out

    def add_prompt(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        out = CompletionLogprobs()
        if prompt:
            self._append(out, prompt[0], None, None)
        for entry in entries:
            self._append(out, entry.token_id, _finite(entry.logprob), self._top_of(entry))
        return out

    def _append(self, out: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        name = self._names(token_id)
        out.tokens.append(name)
        out.token_logprobs.append(logprob)
        out.top_logprobs.append(top)
        out.text_offset.append(self._offset)
        self._offset += len(self._names.raw(token_id).decode(errors="replace"))

    def _top_of(self, entry: TokenLogprobs) -> dict[str, float]:
        # the token's own always; two tokens with one text keep the likelier
        pairs = list(zip(entry.top_ids[: self._top], entry.top_logprobs))
        if entry.token_id not in entry.top_ids[: self._top]:
            pairs.append((entry.token_id, entry.logprob))
        out: dict[str, float] = {}
        for token_id, logprob in pairs:
            out.setdefault(self._names(token_id), _finite(logprob))
        return out


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of both, in order."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
    """The chat shape; `bytes` let a client put characters together that span tokens."""
    return ChatLogprobs([_chat_entry(names, entry, top) for entry in entries])


def _chat_entry(names: TokenNames, entry: TokenLogprobs, top: int) -> ChatLogprob:
    others = [TopLogprob(names(i), _finite(p), list(names.raw(i))) for i, p in zip(entry.top_ids[:top], entry.top_logprobs)]
    return ChatLogprob(names(entry.token_id), _finite(entry.logprob), list(names.raw(entry.token_id)), others)


def prompt_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> list[dict[int, Any] | None]:
    """vLLM's shape: for each prompt position None (the first) or token id → logprob, rank and text."""
    out: list[dict[int, Any] | None] = [None]
    for entry in entries:
        ranked = {i: (p, rank) for rank, (i, p) in enumerate(zip(entry.top_ids, entry.top_logprobs), 1)}
        ranked[entry.token_id] = (entry.logprob, entry.rank)
        out.append({i: {"logprob": _finite(p), "rank": rank, "decoded_token": names(i)} for i, (p, rank) in ranked.items()})
    return out
