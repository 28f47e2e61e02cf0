"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType
from pagoda.hal.errors import RequestError
from pagoda.models.encoding import EncoderFacts
from pagoda.serving.api.audio.form import AudioForm, AudioRequest, read_form
from pagoda.serving.api.audio.replies import (
    DurationUsage,
    TextDeltaEvent,
    TextDoneEvent,
    Transcription,
    TranscriptionSegment,
    VerboseTranscription,
    as_srt,
    as_vtt,
    compression_ratio,
)
from pagoda.serving.api.live_names import engine_id, new_id
from pagoda.serving.api.openai.collect import Answer, collect
from pagoda.serving.api.openai.common import request_id
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import EventStream, JsonReply
from pagoda.serving.api.stream_events import event
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.frontend.sound import Piece, decoded, encoder_input, longest_sound, pieces
from pagoda.serving.frontend.spectrum import RATE
from pagoda.serving.frontend.speech import SpeechTokens, SpokenText, Task
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response


class Transcriptions:
    """The endpoints of one task."""

    def __init__(self, service: Service, task: Task) -> None:
        self._service, self._task = service, task

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        facts = self._service.client.facts.encoder
        if facts is None or facts.kind == "text":
            raise RequestError("this model hears nothing: transcriptions need one whose encoder does", param="model")
        form = await read_form(request, self._service.config.max_request_bytes)
        model = self._service.check_model(form.fields.model)
        tokens = SpeechTokens.of(self._service.text.tokenizer)
        reply_id = new_id("trsc", request_id(request))
        reply = await _prepared(self._service, self._task, form, facts, tokens, reply_id, self._service.adapter_of(model))
        if form.fields.stream:
            return EventStream(reply.stream(), keep_alive=self._service.config.sse_keep_alive_interval)
        if form.fields.response_format in ("json", "verbose_json"):
            return JsonReply(reply.whole())
        return PlainTextResponse(await reply.text())


@dataclass(frozen=True)
class Reply:
    """One reply in the making: a request for each piece of the sound; `silences`: likewise, of a token for that nobody speaks, or none."""

    service: Service
    body: AudioRequest
    task: Task
    tokens: SpeechTokens
    language: str
    duration: float
    pieces: list[Piece]
    requests: list[EngineRequest]
    silences: list[EngineRequest] = field(default_factory=list)

    async def whole(self) -> msgspec.Struct:
        segments = await self._segments()
        text = _joined(one.text for one in segments)
        usage = DurationUsage(seconds=-(-int(self.duration * 1000) // 1000))
        if self.body.response_format == "json":
            return Transcription(text=text, usage=usage)
        return VerboseTranscription(
            task=self.task, language=self.language, duration=self.duration, text=text, segments=segments, usage=usage
        )

    async def text(self) -> str:
        segments = await self._segments()
        match self.body.response_format:
            case "srt":
                return as_srt(segments)
            case "vtt":
                return as_vtt(segments)
            case _:
                return _joined(one.text for one in segments) + "\n"

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The pieces one after another."""
        said = ""
        for request in self.requests:
            async with aclosing(self._spoken(request)) as texts:
                async for added in texts:
                    said += added
                    yield event(TextDeltaEvent(delta=added))
        yield event(TextDoneEvent(text=said.strip()))

    async def _spoken(self, request: EngineRequest) -> AsyncGenerator[str, None]:
        text = SpokenText(self.tokens, self.service.text.tokenizer)
        async with aclosing(self.service.generate(request)) as steps:
            async for step in steps:
                if added := "".join(text.push(delta.token_ids) for delta in step.deltas):
                    yield added
        if rest := text.flush():
            yield rest

    async def _segments(self) -> list[TranscriptionSegment]:
        found: list[TranscriptionSegment] = []
        answers = await collect(self.service, [*self.requests, *self.silences])
        count = len(self.requests)
        silent = [math.exp(answer.ordered()[0].logprobs[0].logprob) for answer in answers[count:]]
        for place, (piece, answer) in enumerate(zip(self.pieces, answers[:count], strict=True)):
            found += self._of_piece(piece, answer.ordered()[0], len(found), silent[place] if silent else UNSET)
        return found

    def _of_piece(self, piece: Piece, answer: Answer, before: int, silent: float | UnsetType) -> list[TranscriptionSegment]:
        tokenizer, length = self.service.text.tokenizer, len(piece.samples) / RATE
        parts = self.tokens.segments([token for token in answer.token_ids if token not in tokenizer.eos_ids], length)
        texts = [tokenizer.decode(part.tokens) for part in parts]
        return [
            TranscriptionSegment(
                id=before + number,
                seek=round(piece.begin * 100),
                start=round(piece.begin + part.start, 3),
                end=round(piece.begin + part.end, 3),
                text=text,
                tokens=part.tokens,
                temperature=self.body.temperature,
                avg_logprob=answer.mean_logprob,
                compression_ratio=compression_ratio(text),
                no_speech_prob=silent,
            )
            for number, (part, text) in enumerate(zip(parts, texts, strict=True))
        ]


def _joined(texts: object) -> str:
    return "".join(texts).strip()  # type: ignore[arg-type]


async def _prepared(
    service: Service, task: Task, form: AudioForm, facts: EncoderFacts, tokens: SpeechTokens, reply_id: str, adapter: str | None
) -> Reply:
    """The sound decoded and cut, its language heard where nobody says it, and the requests."""
    body = form.fields
    samples = await service.off_loop(len(form.content), decoded, form.content)
    cut = list(pieces(samples, longest_sound(facts)))
    inputs = [await service.off_loop(len(piece.samples), encoder_input, piece.samples, facts) for piece in cut]
    first = _request(service, body, [tokens.start], reply_id)
    language = body.language or await _language(service, replace(first, encoder=inputs[0]), tokens)
    timed = body.response_format in ("verbose_json", "srt", "vtt")
    text = service.text.tokenizer.encode(" " + body.prompt.strip(), add_special_tokens=False) if body.prompt else []
    prompt = tokens.prompt(language, task, timed, text)
    requests = [
        replace(_request(service, body, prompt, f"{reply_id}-{number}"), encoder=given, adapter=adapter)
        for number, given in enumerate(inputs)
    ]
    silences = []
    if body.response_format == "verbose_json" and tokens.silence is not None and service.client.facts.logprobs == "raw_logprobs":
        alone = replace(first.params, max_tokens=1, temperature=0.0, allowed_token_ids=(tokens.silence,))
        silences = [
            replace(first, request_id=engine_id(f"{reply_id}-{number}"), params=alone, encoder=given, adapter=adapter)
            for number, given in enumerate(inputs, len(inputs))
        ]
    return Reply(service, body, task, tokens, language, len(samples) / RATE, cut, requests, silences)


def _request(service: Service, body: AudioRequest, prompt: list[int], reply_id: str) -> EngineRequest:
    settings = {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed, "max_tokens": body.max_completion_tokens}
    given = {name: value for name, value in settings.items() if value is not None} | {"logprobs": 0}
    params = service.processor.params_for(len(prompt), given)
    return service.processor.request(prompt, params, request_id=engine_id(reply_id))


async def _language(service: Service, request: EngineRequest, tokens: SpeechTokens) -> str:
    """What the model hears: the likeliest of its languages after the start."""
    if not tokens.languages:
        return "en"
    params = replace(request.params, max_tokens=1, temperature=0.0, allowed_token_ids=tuple(tokens.languages.values()))
    asked = replace(request, request_id=engine_id(request.request_id), params=params)
    answers = await collect(service, [asked])
    return tokens.code(answers[0].ordered()[0].token_ids[0])
