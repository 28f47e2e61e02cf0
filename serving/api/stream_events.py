"""Records as server-sent events."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(record: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(record) + b"\n\n"


def named_event(name: str, record: object) -> bytes:
    """One with its name, for protocols whose clients go by it."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(record) + b"\n\n"
