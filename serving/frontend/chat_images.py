"""Images of a conversation: taken out of its parts, in their order, with a mark left where each stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.chat_messages import IMAGE_PART

KINDS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that are an image: by its address, or as an object in this process."""

DETAILS = (None, "auto", "low", "high", "original")
"""What OpenAI's protocol lets a part ask for; a model's processor has one way to look at images, so they are all the same."""


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], list[Any]]:
    """Messages for a template, and their images as the parts bring them: addresses or objects. Raises `RequestError` for a part that
    brings none."""
    images: list[Any] = []
    return [_without(message, images) for message in messages], images


def _without(message: Mapping[str, Any], images: list[Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(_is_image, content)):
        return message
    parts = []
    for part in content:
        if _is_image(part):
            images.append(_image(part))
        parts.append(IMAGE_PART if _is_image(part) else part)
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _image(part: Mapping[str, Any]) -> Any:
    given = part.get(part["type"], part.get("image_url"))
    detail = part.get("detail")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if detail not in DETAILS:
        raise RequestError(f"detail={detail!r} of an image must be auto, low or high", param="messages")
    if given is None:
        raise RequestError(f"a part of type {part['type']!r} brings no image", param="messages")
    return given
