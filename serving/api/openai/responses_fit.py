"""`truncation` `auto` of the Responses API: what a conversation leaves out from its beginning to fit the model's context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.responses_protocol import Item


async def fitting(items: Sequence[Item], fits: Callable[[Sequence[Item]], Awaitable[bool]]) -> Sequence[Item]:
    """All items, or the most of the last ones that fit, beside what system and developer said; the last item where nothing does.
    `fits` may raise `RequestError` for what is too long for any context."""
    if await _asked(fits, items):
        return items
    few, many = 1, len(items)  # of the last ones: the former may fit, the latter does not
    while many - few > 1:
        count = (few + many) // 2
        few, many = (count, many) if await _asked(fits, _last(items, count)) else (few, count)
    return _last(items, few)


async def _asked(fits: Callable[[Sequence[Item]], Awaitable[bool]], items: Sequence[Item]) -> bool:
    try:
        return await fits(items)
    except RequestError as error:
        if error.code == "context_length_exceeded":
            return False
        raise


def _last(items: Sequence[Item], count: int) -> list[Item]:
    """Without results whose calls are left out."""
    told = [item for item in items[:-count] if item.get("role") in ("system", "developer")]
    rest = items[-count:]
    calls = {item["call_id"] for item in rest if item["type"] == "function_call"}
    return [*told, *(item for item in rest if item["type"] != "function_call_output" or item["call_id"] in calls)]
