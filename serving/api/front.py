"""A further API process: serves on the same socket as the first one, as a client of the same engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pagoda.hal.errors import EngineDeadError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.desk_remote import RemoteDesk
from pagoda.serving.api.logs import set_up_logging
from pagoda.serving.api.parts import load_text, made_service
from pagoda.serving.api.server import Addresses, Server, run_loop
from pagoda.serving.api.service import ModelCard
from pagoda.serving.api.tally import Tally
from pagoda.serving.engine.child import Inbox, Outbox
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.messages import EngineFacts
from pagoda.serving.engine.wire_client import WireClient

READY = "ready"


@dataclass(frozen=True)
class Orders:
    """What an API process serves. row, rows: its place among all of them. settings: what `/server_info` shows."""

    engine: EngineConfig
    server: ServerConfig
    card: ModelCard
    listener: int
    tally: Path
    row: int
    rows: int
    settings: dict[str, Any]


class Engine(NamedTuple):
    """An engine that has loaded, and the name under which this process joins it."""

    facts: EngineFacts
    folder: Path
    name: str


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """Messages on the pipe: `Orders`, then `Engine`, then what the desk tells, an `EngineDeadError`, or None to stop, twice to hurry;
    `READY` out, and questions to the desk."""
    orders = inbox.get()
    if orders is None:
        return 0
    set_up_logging(orders.server)
    return run_loop(lambda: _serve(orders, inbox, outbox))


async def _serve(orders: Orders, inbox: Inbox, outbox: Outbox) -> int:
    # the first process takes care of what there is only one of
    config = replace(orders.server, uds=None, grpc_port=None)
    text = await asyncio.to_thread(load_text, orders.engine, config)
    engine = await asyncio.to_thread(inbox.get)
    if engine is None:
        return 0
    client = WireClient(engine.folder, engine.name)
    client.connect(engine.facts)
    desk = RemoteDesk(outbox.send)
    service = made_service(client, text, orders.card, config, Tally(orders.tally, orders.row, orders.rows), desk)
    sock = socket.socket(fileno=os.dup(orders.listener))
    server = Server(service, Addresses(sock), orders.settings, stats=False, on_ready=lambda: outbox.send(READY))
    threading.Thread(target=_obey, args=(inbox, asyncio.get_running_loop(), client, desk, server.stop), daemon=True).start()
    return await server.run()


def _obey(inbox: Inbox, loop: asyncio.AbstractEventLoop, client: WireClient, desk: RemoteDesk, stop: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        while True:
            told = inbox.get()
            if isinstance(told, EngineDeadError):
                loop.call_soon_threadsafe(client.fail, told)
            elif told is not None:
                loop.call_soon_threadsafe(desk.told, told)
            else:
                loop.call_soon_threadsafe(stop)
