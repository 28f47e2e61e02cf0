"""Images, videos and sounds of a conversation: taken out of its parts, in their order, with a mark left where each stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.hal.errors import RequestError

KINDS = {
    "image_url": "image", "input_image": "image", "image": "image", "image_pil": "image",
    "video_url": "video", "video": "video", "input_audio": "audio", "audio_url": "audio", "audio": "audio",
}  # fmt: skip
"""Types of parts that are no text, and what they bring: by its address, or as an object in this process."""

DETAILS = (None, "auto", "low", "high", "original")
"""What OpenAI's protocol lets a part ask for; a model's processor has one way to look at images, so they are all the same."""

Media = dict[str, list[Any]]
"""By modality, in the order of the conversation: addresses or objects; a video may be a list of frames."""


def take_media(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Media]:
    """Messages for a template, and their media as the parts bring them. Raises `RequestError` for a part that brings none."""
    media: Media = {}
    return [_without(message, media) for message in messages], media


def _without(message: Mapping[str, Any], media: Media) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(_kind, content)):
        return message
    parts = []
    for part in content:
        kind = _kind(part)
        if kind is not None:
            media.setdefault(kind, []).append(_brought(part, kind))
        parts.append(part if kind is None else {"type": kind})
    return {**message, "content": parts}


def _kind(part: Any) -> str | None:
    return KINDS.get(part["type"]) if isinstance(part, Mapping) and isinstance(part.get("type"), str) else None


def _brought(part: Mapping[str, Any], kind: str) -> Any:
    given, detail = part.get(part["type"], part.get("image_url")), part.get("detail")
    if isinstance(given, Mapping) and part["type"] == "input_audio":
        given = _of_base64(given)
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if detail not in DETAILS:
        raise RequestError(f"detail={detail!r} of an image must be auto, low or high", param="messages")
    if given is None:
        raise RequestError(f"a part of type {part['type']!r} brings no {kind}", param="messages")
    return given


def _of_base64(given: Mapping[str, Any]) -> str:
    """OpenAI's form of a sound, as an address."""
    data, form = given.get("data"), given.get("format", "wav")
    if not isinstance(data, str) or not isinstance(form, str):
        raise RequestError('a part of type "input_audio" must be like {"data": base64, "format": "wav"}', param="messages")
    return f"data:audio/{form};base64,{data}"
