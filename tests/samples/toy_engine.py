"""A deterministic engine and text side: answers repeat the prompt, tokens are bytes. For tests of what stands above an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagoda.hal.errors import EngineDeadError, RequestError
from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import (
    EngineFacts,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestDelta,
    SequenceDelta,
    TokenLogprobs,
)
from pagoda.serving.frontend.text import TextFrontend

EOS, BOS = 256, 257
VOCAB = 258
MAX_LEN = 4096


class ToyDetokenizer:
    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        for token in token_ids:
            if token < 256:
                self._held += bytes([token])
            elif not self._skip:
                self._held += NAMES[token]
        for cut in range(len(self._held), max(len(self._held) - 4, -1), -1):
            try:
                text = self._held[:cut].decode()
            except UnicodeDecodeError:
                continue
            self._held = self._held[cut:]
            return text
        return ""

    def flush(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


NAMES = {EOS: b"<eos>", BOS: b"<bos>"}


class ToyTokenizer:
    vocab_size = VOCAB
    eos_ids = (EOS,)
    special_ids = frozenset(NAMES)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        ids = [*self.encode(first), *self.encode(second)]
        return ids, len(self.encode(first))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = ToyDetokenizer(skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return NAMES.get(token_id) or bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> ToyDetokenizer:
        return ToyDetokenizer(skip_special_tokens)


class ToyTemplate:
    """`role:content` lines; an open line for the answer."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        tools: Any = None,
        documents: Any = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if not messages:
            raise RequestError("messages is empty: send at least one", param="messages")
        lines = [f"{message['role']}:{message['content']}" for message in messages]
        suffix = "" if continue_final_message else "\n"
        return (template or "") + "\n".join(lines) + suffix + ("assistant:" if add_generation_prompt else "")


def toy_text() -> TextFrontend:
    return TextFrontend(ToyTokenizer(), ToyTemplate())


class ToyEngine:
    """Implements `EngineClient`: sequence s answers with the prompt's tokens from its s-th on, then the end token.

    Attributes:
        delay: seconds a step.
        live: ids of requests that run, most_live: how many ran at a time; aborted: ids that were ended early; requests: all that came.
        burst: tokens a step.
        held: after so many steps each request stands still until this is set to None, in whatever thread, or it is ended.
    """

    def __init__(self, delay: float = 0.0, burst: int = 1, held: int | None = None) -> None:
        self.facts = EngineFacts(MAX_LEN, num_pages=1024, tokens_per_page=16, vocab_size=VOCAB, device="toy", kernels={"gemm": "toy"})
        self.delay, self.burst, self.held = delay, burst, held
        self.live: dict[str, asyncio.Event] = {}
        self.most_live = 0
        self.aborted: list[str] = []
        self.requests: list[EngineRequest] = []
        self.dead: str | None = None
        self._stats = EngineStats(pages_total=1024)

    async def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        self._check_alive()
        self.requests.append(request)
        stop = self.live[request.request_id] = asyncio.Event()
        self.most_live = max(self.most_live, len(self.live))
        finished = False
        try:
            steps = self._steps(request)
            for step, sequences in enumerate(steps):
                await self._until_due(step, stop)
                self._check_alive()
                if stop.is_set():
                    finished = True
                    ends = tuple(SequenceDelta(i, (), finish_reason=FinishReason.ABORT) for i in range(request.params.n))
                    yield RequestDelta(request.request_id, ends, finished=True)
                    return
                last = step == len(steps) - 1
                finished = finished or last
                self._count(len(request.prompt) if step == 0 else 0, sum(len(part.token_ids) for part in sequences))
                first = {"cached_tokens": 3, "prompt_logprobs": _prompt_logprobs(request), "queued": 0.005} if step == 0 else {}
                if plain is not None and step and _is_plain(sequences) and plain(_offered(request, sequences)):
                    continue
                yield RequestDelta(request.request_id, sequences, finished=last, **first)
                if last:
                    return
        finally:
            self.live.pop(request.request_id, None)
            if not finished:
                self.aborted.append(request.request_id)

    async def _until_due(self, step: int, stop: asyncio.Event) -> None:
        await asyncio.sleep(self.delay)
        while self.held is not None and step >= self.held and self.dead is None and not stop.is_set():
            await asyncio.sleep(0.002)

    def _steps(self, request: EngineRequest) -> list[tuple[SequenceDelta, ...]]:
        answers = [_answer(request, sequence) for sequence in range(request.params.n)]
        length = max(len(tokens) for tokens, _ in answers)
        return [
            tuple(part for i, answer in enumerate(answers) if (part := _part(request, i, answer, start, self.burst)))
            for start in range(0, length, self.burst)
        ]

    def _count(self, prompt: int, generated: int) -> None:
        s = self._stats
        self._stats = replace(
            s, prompt_tokens=s.prompt_tokens + prompt, generation_tokens=s.generation_tokens + generated, steps=s.steps + 1
        )

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    async def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        for request_id in request_ids:
            if request_id in self.live and sequence is None:  # one sequence of several goes on, unread
                self.live[request_id].set()

    def hurry(self) -> None:
        """Nothing is held any longer, nor delayed."""
        self.held, self.delay = None, 0.0

    @property
    def generated(self) -> int:
        """Tokens of all requests so far."""
        return self._stats.generation_tokens

    async def stats(self) -> EngineStats:
        self._check_alive()
        return replace(self._stats, running=len(self.live), pages_used=len(self.live))

    async def health(self) -> None:
        self._check_alive()

    async def call(self, method: str, **arguments: object) -> object:
        if method == "reset_prefix_cache":
            return True
        raise RequestError(f"the toy engine has no {method}")

    async def close(self) -> None:
        await self.abort(list(self.live))


def _is_plain(sequences: tuple[SequenceDelta, ...]) -> bool:
    return all(part == SequenceDelta(part.index, part.token_ids) for part in sequences)


def _offered(request: EngineRequest, sequences: tuple[SequenceDelta, ...]) -> Sequence[int] | RequestDelta:
    return sequences[0].token_ids if request.params.n == 1 else RequestDelta(request.request_id, sequences)


def _answer(request: EngineRequest, sequence: int) -> tuple[list[int], FinishReason]:
    params, prompt = request.params, request.prompt
    tokens = [prompt[(sequence + k) % len(prompt)] for k in range(max(len(prompt), params.max_tokens or 0))]
    if not params.ignore_eos:
        tokens = [*tokens[: len(prompt)], EOS]
    stops = (set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))) or {-1}
    for k, token in enumerate(tokens[: params.max_tokens]):
        if token in stops and k + 1 > params.min_tokens:
            return tokens[: k + 1], FinishReason.STOP
    return tokens[: params.max_tokens], FinishReason.LENGTH


def _part(request: EngineRequest, index: int, answer: tuple[list[int], FinishReason], start: int, burst: int) -> SequenceDelta | None:
    tokens, reason = answer
    new = tuple(tokens[start : start + burst])
    if not new:
        return None
    top = request.params.logprobs
    logprobs = None if top is None else tuple(_logprob(token, top) for token in new)
    last = start + burst >= len(tokens)
    stop = new[-1] if last and reason is FinishReason.STOP and new[-1] not in request.eos_ids else None
    return SequenceDelta(index, new, logprobs, reason if last else None, stop)


def _logprob(token: int, top: int) -> TokenLogprobs:
    ids = tuple((token + k) % VOCAB for k in range(top))
    return TokenLogprobs(token, -0.5 - token / 1000, 1, ids, tuple(-0.5 - token / 1000 - k for k in range(top)))


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs, ...] | None:
    top = request.params.prompt_logprobs
    return None if top is None else tuple(_logprob(token, top) for token in request.prompt[1:])
