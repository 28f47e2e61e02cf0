"""Pictures, films and sounds processed in a process of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.serving.engine.child import Inbox, Outbox
from pagoda.serving.frontend.media import MediaProcessor, Read
from pagoda.serving.frontend.reader_child import Reader, ReaderChild, answer_all

_READER = Reader(
    "pagoda.serving.frontend.media_child:serve", "the reader of images", "images", ("pagoda.models.bridge.prompt",), "messages"
)


class MediaChild:
    """A `MediaProcessor` elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._reader = ReaderChild(_READER, folder)

    def __call__(self, prompt: str | list[int], media: Mapping[str, Any], add_special_tokens: bool = True) -> Read:
        """See `MediaProcessor`; pictures are encoded bytes. Raises `RequestError` also where one takes too long."""
        read: Read = self._reader.ask((prompt, dict(media), add_special_tokens))
        return read


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """In the child: the model's folder first, then prompts."""
    folder = inbox.get()
    if folder is not None:
        answer_all(inbox, outbox, MediaProcessor(folder), "the model's processor failed")
    return 0
