"""The short way of a stream's plain text: from an engine's message to the connection in one call, while the reply's own task sleeps.

A reply is a chain of generators that a task pulls. Waking it costs several times what a token's event does, so a chain that waits lends
its `Outlet` to whoever brings tokens: `Service.generate` makes text of them, the outlet an event, and the event goes out at once. What is
more than text (ends, logprobs, errors), and what the connection does not take now, goes through the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from pagoda.serving.api.connection import Connection
from pagoda.serving.frontend.text_deltas import TextDelta

Event = Callable[[str, Sequence[int]], bytes]
"""What a reply sends for new text and its token ids; nothing where it sends nothing."""

MARK = "\u0001"
_encode = msgspec.json.Encoder().encode


_CLOSED = Connection()


class Outlet:
    """Of a stream. May be written to while `connection.writable` and the chain waits for the engine.

    Attributes:
        connection: set when the chain has begun to write there.
        event: of the only sequence; set by the reply before it asks the engine.
        several: of several sequences, set likewise; None where there is one.
    """

    __slots__ = ("connection", "event", "several")
    event: Event
    several: Callable[[Sequence[TextDelta]], bytes] | None

    def __init__(self) -> None:
        self.connection = _CLOSED
        self.several = None


def around(marked: bytes, count: Callable[[int], None]) -> Event:
    """Makes events that differ in one text from one where it is `MARK`. Whatever a client chose stands before it. `count` is told of the
    tokens."""
    head, tail = marked.rsplit(_encode(MARK), 1)

    def event(text: str, token_ids: Sequence[int]) -> bytes:
        count(len(token_ids))
        return b"%b%b%b" % (head, _encode(text), tail) if text else b""

    return event
