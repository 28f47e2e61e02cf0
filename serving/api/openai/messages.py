"""From chat messages to token ids, through the model's chat template, and the media that they bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagoda.hal.errors import RequestError
from pagoda.serving.api.service import Service
from pagoda.serving.frontend.chat_media import take_media
from pagoda.serving.frontend.processor import Encoded
from pagoda.serving.frontend.text import ChatTemplate


class TemplateFields(Protocol):
    """Fields of a request that decide how messages become a prompt."""

    messages: Any
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    add_special_tokens: bool | None


async def chat_prompt(
    service: Service,
    request: TemplateFields,
    *,
    extra: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Encoded:
    """Token ids of a conversation, and its media. Long ones are rendered and encoded off the event loop."""
    template = _template(service, request)
    generation, final = request.add_generation_prompt is not False, bool(request.continue_final_message)
    if generation and final:
        raise RequestError("continue_final_message needs add_generation_prompt=false", param="continue_final_message")

    messages, media = take_media(request.messages)
    service.check_media(media)

    def text() -> str:
        return template.render(
            messages,
            add_generation_prompt=generation,
            continue_final_message=final,
            template=request.chat_template,
            tools=tools,
            documents=documents,
            variables={**(extra or {}), **(request.chat_template_kwargs or {})},
        )

    def encoded() -> Encoded:
        return Encoded(service.text.tokenizer.encode(text(), add_special_tokens=bool(request.add_special_tokens)), None)

    size = sum(len(content_text(message)) for message in request.messages) + (len(str(tools)) if tools else 0)
    if getattr(request, "truncate_prompt_tokens", None) is None:
        service.check_size(size)
    if media:
        return await service.see(await service.off_loop(size, text), media)
    return await service.off_loop(size, encoded)


def _template(service: Service, request: TemplateFields) -> ChatTemplate:
    if service.text.template is None:
        raise RequestError(
            "the served model has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    if request.chat_template is not None and not service.config.trust_request_chat_template:
        raise RequestError(
            "chat_template in requests is turned off; the server's flag is --trust-request-chat-template", param="chat_template"
        )
    return service.text.template


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message, whether its content is a text or a list of parts; what is neither counts as none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
