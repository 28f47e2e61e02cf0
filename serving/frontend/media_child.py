"""Pictures processed in a process of their own: what decodes them and turns them into tensors is large, slow and fed by strangers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from pagoda.hal.errors import PagodaError, RequestError
from pagoda.serving.engine.child import Child, Inbox, Outbox
from pagoda.serving.frontend.media import MediaProcessor, Read

SECONDS = 120.0
"""For one prompt, imports of the first included."""

_TARGET = "pagoda.serving.frontend.media_child:serve"


class MediaChild:
    """A `MediaProcessor` elsewhere: started when the first picture comes, and again after it had to be killed. Thread-safe; one prompt at
    a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._child: Child | None = None

    def __call__(self, prompt: str | list[int], media: Mapping[str, Any], add_special_tokens: bool = True) -> Read:
        """See `MediaProcessor`; pictures are encoded bytes. Raises `RequestError` also where one takes too long."""
        with self._lock:
            child = self._child or self._start()
            self._child = None
            try:
                child.connection.send((prompt, dict(media), add_special_tokens))
                answer = child.connection.recv() if child.connection.poll(SECONDS) else None
            except (EOFError, OSError):
                raise PagodaError(f"{child.death()}; it read images of this request, others are served") from None
            if answer is None:
                child.kill()
                raise RequestError(f"the images were not read within {SECONDS:.0f} s; send smaller or fewer ones", param="messages")
            self._child = child
        if isinstance(answer, PagodaError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def _start(self) -> Child:
        child = Child(_TARGET, "the reader of images", ("pagoda.models.bridge.prompt",))
        weakref.finalize(self, child.kill)
        child.connection.send(self._folder)
        return child


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """In the child: the model's folder first, then prompts, each answered by what was made of it or by an error."""
    folder = inbox.get()
    process = MediaProcessor(folder) if folder is not None else None
    while process is not None and (asked := inbox.get()) is not None:
        try:
            outbox.send(process(*asked))
        except RequestError as error:
            outbox.send(RequestError(str(error), param=error.param, code=error.code))
        except Exception as error:  # a processor's own
            outbox.send(PagodaError(f"the model's processor failed: {type(error).__name__}: {error}"))
    return 0
