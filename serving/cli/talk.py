"""Somebody to talk to: a model in this process, or a running server; `generate` and `chat` see only this."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pagoda.serving.cli.remote import Remote
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.outputs import RequestOutput

if TYPE_CHECKING:
    from pagoda import AsyncLLM

Settings = Mapping[str, Any]
"""Sampling settings by `SamplingParams`' names; what is not there is the model's default."""


@dataclass
class Answer:
    """One answer as it comes; `text` grows."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    finish_reason: str | None = None

    def note(self, text: str, tokens: int) -> None:
        """`text` and `tokens` are of the whole answer so far."""
        now = time.perf_counter()
        if tokens and self.first is None:
            self.first = now
        self.text, self.tokens, self.last = text, tokens, now

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first one."""
        if self.tokens < 2 or self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)

    def line(self) -> str:
        """What there is to say about its speed."""
        parts = [f"{self.tokens} token{'s' * (self.tokens != 1)}"]
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first after {(self.first - self.started) * 1000:.0f} ms")
        if self.finish_reason == "length":
            parts.append("cut at its limit")
        return ", ".join(parts)


class Talker(Protocol):
    """Yields the same growing `Answer`; leaving early stops the model."""

    name: str

    def complete(self, prompt: str, settings: Settings) -> AsyncGenerator[Answer, None]: ...

    def chat(self, messages: Sequence[Mapping[str, str]], settings: Settings) -> AsyncGenerator[Answer, None]: ...


class LocalTalker:
    """The model in this process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.name = llm.config.model

    async def complete(self, prompt: str, settings: Settings) -> AsyncGenerator[Answer, None]:
        async with aclosing(_answers(self._llm.generate(prompt, self._params(settings)))) as answers:
            async for answer in answers:
                yield answer

    async def chat(self, messages: Sequence[Mapping[str, str]], settings: Settings) -> AsyncGenerator[Answer, None]:
        async with aclosing(_answers(self._llm.chat(messages, self._params(settings)))) as answers:
            async for answer in answers:
                yield answer

    def _params(self, settings: Settings) -> SamplingParams:
        return self._llm.default_params(**settings)


async def _answers(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Answer, None]:
    answer = Answer()
    async with aclosing(outputs) as closing:
        async for output in closing:
            completion = output.outputs[0]
            answer.prompt_tokens, answer.finish_reason = len(output.prompt_token_ids), completion.finish_reason
            answer.note(completion.text, len(completion.token_ids))
            yield answer


class RemoteTalker:
    """A model on a running server."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote = remote
        self.name = name

    async def complete(self, prompt: str, settings: Settings) -> AsyncGenerator[Answer, None]:
        async with aclosing(self._stream("/v1/completions", {"prompt": prompt}, settings)) as answers:
            async for answer in answers:
                yield answer

    async def chat(self, messages: Sequence[Mapping[str, str]], settings: Settings) -> AsyncGenerator[Answer, None]:
        async with aclosing(self._stream("/v1/chat/completions", {"messages": list(messages)}, settings)) as answers:
            async for answer in answers:
                yield answer

    async def _stream(self, path: str, request: dict[str, Any], settings: Settings) -> AsyncGenerator[Answer, None]:
        body = {"model": self.name, **request, **settings, "stream_options": {"include_usage": True}}
        answer, text, chunks, thought = Answer(), "", 0, False
        async with aclosing(self._remote.stream(path, body)) as events:
            async for event in events:
                for choice in event.get("choices") or []:
                    piece, thought = _spoken(choice, thought)
                    text, chunks = text + piece, chunks + bool(piece)
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                usage = event.get("usage") or {}
                answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
                last = answer.last
                answer.note(text, usage.get("completion_tokens", chunks))
                answer.last = last if usage else answer.last  # the usage record is no token
                yield answer


def _spoken(choice: Mapping[str, Any], thought: bool) -> tuple[str, bool]:
    """Text of a chunk, reasoning between the tags that a local model writes; whether reasoning is open after it."""
    if "delta" not in choice:
        return choice.get("text") or "", False
    piece, content = choice["delta"].get("reasoning") or "", choice["delta"].get("content") or ""
    if piece and not thought:
        piece, thought = f"<think>\n{piece}", True
    if content and thought:
        piece, thought = f"{piece}\n</think>\n\n", False
    return piece + content, thought
