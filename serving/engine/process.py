"""The engine process: loads an engine, tells its facts or its error, then serves its client, and others that join, until either ends."""

from __future__ import annotations

import gc
import sys
import threading

from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine.child import Inbox, Outbox, log_alike, portable
from pagoda.serving.engine.core import EngineCore
from pagoda.serving.engine.inprocess_client import Engine
from pagoda.serving.engine.listener import Listener
from pagoda.serving.engine.turns import take_short_turns
from pagoda.serving.engine.wire_sink import MAIN, WireSink

SWITCH_SECONDS = 0.0005
"""After so long a thread that has a message to read takes its turn from the loop."""


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """On the pipe: (starter, request address, delta address, log settings) in; ("ready", facts), ("failed", error), ("dead", error) out."""
    told = inbox.get()
    if told is None:  # the parent changed its mind
        return 0
    starter, requests, answers, log = told
    log_alike(log)
    take_short_turns()
    sink = WireSink(answers)
    try:
        engine: Engine = starter(sink)
    except BaseException as error:
        outbox.send(("failed", portable(error, "the engine")))
        return 1
    Listener(engine.core, sink, MAIN).start(requests)
    threading.Thread(target=_stop_when_asked, args=(inbox, engine.core), name="stop", daemon=True).start()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what has been loaded stays; looking through it for garbage would hold up a step
    outbox.send(("ready", engine.core.facts))
    try:
        engine.core.run()
    except EngineDeadError as error:
        print(f"engine: {error}", file=sys.stderr, flush=True)
        outbox.send(("dead", error))
        return 1
    finally:
        engine.executor.stop()
        sink.close()
    return 0


def _stop_when_asked(inbox: Inbox, core: EngineCore) -> None:
    while inbox.get() is not None:
        pass
    core.stop()
