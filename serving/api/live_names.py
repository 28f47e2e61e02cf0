"""The names of running requests: the engine's, the reply's, and the one that the client gave."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from secrets import token_hex

TAIL = 12


def new_id(prefix: str, given: str | None = None) -> str:
    """An id for a reply, made of the client's own where there is one."""
    return f"{prefix}-{given or token_hex(16)}"


def engine_id(reply_id: str) -> str:
    """An id that is unique in the engine even when clients repeat theirs."""
    return f"{reply_id}-{token_hex(TAIL // 2)}"


def names_of(request_id: str) -> tuple[str, str, str]:
    """Of an id from `engine_id`: itself, the reply's and the client's; the last is empty where replies have ids of their own."""
    reply = request_id[: -TAIL - 1]
    if reply.startswith("trsc-"):  # a piece of a sound
        reply = reply.rpartition("-")[0]
    return request_id, reply, reply.partition("-")[2]


def found_among(live: Iterable[str], names: Collection[str] | None) -> dict[str, list[str]]:
    """The engine's ids by those of `names` that they have; without names all, by the ids of their replies."""
    found: dict[str, list[str]] = {}
    wanted = None if names is None else set(names)
    for request_id in live:
        known = names_of(request_id)
        for name in known[1:2] if wanted is None else wanted.intersection(known):
            found.setdefault(name, []).append(request_id)
    return found if names is None else {name: found[name] for name in dict.fromkeys(names) if name in found}
