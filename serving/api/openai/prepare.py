"""From a chat request to what the engine runs and how the answer will be read; every chat-like protocol goes through here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagoda.serving.api.openai.messages import chat_prompt
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.openai.sampling import chat_settings, engine_request
from pagoda.serving.api.openai.tools import call_forced, chat_structure, offered_tools
from pagoda.serving.api.service import Service
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.structured import StructuredOutputsParams
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.events import PROMPT_END, Context
from pagoda.serving.frontend.processor import Encoded


@dataclass(frozen=True)
class Question:
    """A conversation as token ids with its images; how its answer is read: the parsers, what they may know of the request; and its form."""

    encoded: Encoded
    answers: AnswerFormat
    context: Context
    structure: StructuredOutputsParams | None = None

    @property
    def prompt(self) -> list[int]:
        return self.encoded.ids


async def question(service: Service, body: ChatRequest) -> Question:
    """Raises `RequestError` for tools, formats and messages that cannot be served."""
    answers = service.text.answers
    schemas = offered_tools(body, answers)
    asked = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}  # which some templates know
    variables = {name: value for name, value in asked.items() if value is not None}
    encoded = await chat_prompt(service, body, extra=variables, documents=body.documents, tools=body.tools if schemas else None)
    end = _prompt_end(service, encoded.ids)
    structure = chat_structure(body, schemas, answers, service.text.tokenizer, end)
    return Question(encoded, answers, Context(schemas, end, call_forced(body)), structure)


def chat_engine_request(service: Service, body: ChatRequest, asked: Question, reply_id: str) -> EngineRequest:
    """The checked request for the engine. Raises `RequestError` for what can never be answered."""
    return engine_request(service, body, chat_settings_of(service, body, asked), asked.encoded, reply_id)


def chat_settings_of(service: Service, body: ChatRequest, asked: Question) -> dict[str, Any]:
    """Under the engine's names."""
    special = _special(service, asked.answers.marks(bool(asked.context.tools)))
    return {**special, **chat_settings(body), "structured_outputs": asked.structure}


def _special(service: Service, marks: tuple[str, ...]) -> dict[str, bool]:
    """Parsers cannot see marks that are special tokens unless these are in the text."""
    tokenizer = service.text.tokenizer
    special = (tokenizer.special_ids.intersection(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks)
    return {"skip_special_tokens": False} if any(special) else {}


def _prompt_end(service: Service, prompt: list[int]) -> str:
    if service.text.answers.reasoning is None:
        return ""
    return service.text.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
