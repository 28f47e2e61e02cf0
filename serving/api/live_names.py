"""The names of running requests: the engine's, the reply's, and the one that the client gave."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from secrets import token_hex

TAIL = 12


def hex_tokens(nbytes: int) -> Iterator[str]:
    """As `token_hex`, without asking the system for each."""
    digits = 2 * nbytes
    while True:
        block = os.urandom(nbytes * 256).hex()
        yield from (block[at : at + digits] for at in range(0, len(block), digits))


def new_id(prefix: str, given: str | None = None) -> str:
    """An id for a reply, made of the client's own where there is one."""
    return f"{prefix}-{given or token_hex(16)}"


def engine_id(reply_id: str, tail: str | None = None) -> str:
    """An id that is unique in the engine even when clients repeat theirs. `tail`: of `hex_tokens`, `TAIL` digits."""
    return f"{reply_id}-{tail or token_hex(TAIL // 2)}"


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
