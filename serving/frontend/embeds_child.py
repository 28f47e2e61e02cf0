"""Prompts of embeddings, as clients send them, read in a process of their own."""

from __future__ import annotations

from functools import partial

from pagoda.models.media import Numbers
from pagoda.serving.engine.child import Inbox, Outbox
from pagoda.serving.frontend.prompt_embeds import PARAM, rows_of_text
from pagoda.serving.frontend.reader_child import Reader, ReaderChild, answer_all

_READER = Reader("pagoda.serving.frontend.embeds_child:serve", "the reader of embeddings", "embeddings", ("torch",), PARAM)


class EmbedsChild:
    """`prompt_embeds.rows_of_text` elsewhere, for models of so many numbers a row and so many tokens."""

    def __init__(self, width: int, most: int) -> None:
        self._reader = ReaderChild(_READER, (width, most))

    def __call__(self, text: str) -> Numbers:
        rows: Numbers = self._reader.ask((text,))
        return rows


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """In the child: width and most rows first, then base64."""
    told = inbox.get()
    if told is not None:
        width, most = told
        answer_all(inbox, outbox, partial(rows_of_text, width=width, most=most), "the reader of embeddings failed")
    return 0
