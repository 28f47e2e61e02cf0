"""Pages of a list of items, as `GET /v1/responses/{id}/input_items` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.responses_protocol import Item
from pagoda.serving.api.openai.responses_replies import ItemList

LONGEST = 100


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> ItemList:
    """`limit` items (20) in `order` (newest first) from the one behind `after` on. Raises `RequestError` naming what is wrong."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order={order[:20]!r} must be asc or desc", param="order")
    rest = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        rest = rest[_place(rest, after) + 1 :]
    page = rest[: _limit(query.get("limit", "20"))]
    ids = [str(item["id"]) for item in page] or [""]
    return ItemList(data=page, first_id=ids[0], last_id=ids[-1], has_more=len(page) < len(rest))


def _limit(given: str) -> int:
    limit = int(given) if given.isdecimal() else 0
    if not 1 <= limit <= LONGEST:
        raise RequestError(f"limit={given[:20]} is out of range: it must be from 1 to {LONGEST}", param="limit")
    return limit


def _place(items: Sequence[Item], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise RequestError(f"after={item_id[:100]!r} is no item of this response", param="after")
