"""From the two configurations to a running server. This process needs no torch: the engine is another one."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, replace
from typing import Any

from pagoda.models.loading.reference import resolve
from pagoda.serving.api.address import bind, bind_grpc, check_tls
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.fronts import Fronts
from pagoda.serving.api.keys import keys_of
from pagoda.serving.api.logs import set_up_logging
from pagoda.serving.api.parts import load_text, made_service
from pagoda.serving.api.server import Addresses, Server, run_loop
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.api.tracing_of import endpoint_of
from pagoda.serving.api.user_middleware import user_middleware
from pagoda.serving.engine.child import Child
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.zmq_client import ZmqClient
from pagoda.serving.frontend.generation_config import server_defaults
from pagoda.serving.frontend.structured.starter import structured_starter
from pagoda.serving.frontend.text import TextFrontend

log = logging.getLogger("pagoda.api")
TERMINATED = 128 + signal.SIGTERM


def run(engine_config: EngineConfig, server_config: ServerConfig, started: float | None = None, child: Child | None = None) -> int:
    """Serve until a signal or the engine's death; returns the exit code. `started` is what the ready line counts from, `child` an
    engine's process that was begun already.

    Raises `PagodaError`s for what cannot work: the address is taken before the model is looked for.
    """
    set_up_logging(server_config)
    check_tls(server_config)
    endpoint_of(server_config)
    user_middleware(server_config.middleware)
    if engine_config.trust_remote_code:
        log.warning(
            "--trust-remote-code has no effect: no code of a checkpoint is run; a model is served by what Pagoda or transformers know"
        )
    keys_of(server_config)  # announced keys that are not there are an error now, not when the model has loaded
    with bind(server_config) as sock, bind_grpc(server_config) or nullcontext() as grpc:
        card = card_of(engine_config, server_config)
        return run_loop(lambda: _serve(engine_config, server_config, card, Addresses(sock, grpc), started, child))


def card_of(engine_config: EngineConfig, server_config: ServerConfig) -> ModelCard:
    """The model that is to be served, found on this machine or fetched."""
    path = resolve(engine_config.model, engine_config.revision, cache=engine_config.download_dir)
    defaults = server_defaults(path, server_config.generation_config, server_config.override_generation_config)
    return ModelCard(server_config.served_model_name or (engine_config.model,), str(path), defaults)


async def open_service(engine_config: EngineConfig, server_config: ServerConfig, card: ModelCard, child: Child | None) -> Service:
    """The model's engine, loaded in a process of its own, and its text side."""
    client, text = await _load(replace(engine_config, model=card.root), server_config, child)
    return made_service(client, text, card, server_config)


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    card: ModelCard,
    addresses: Addresses,
    started: float | None,
    child: Child | None,
) -> int:
    loading = asyncio.current_task()
    assert loading is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loading.cancel)
    settings = shown_settings(engine_config, server_config)
    async with AsyncExitStack() as stack:
        fronts = None
        if server_config.api_server_count > 1:
            fronts = Fronts(replace(engine_config, model=card.root), server_config, card, addresses.http, settings)
            stack.push_async_callback(fronts.close, 0)
        try:
            client, text = await _load(replace(engine_config, model=card.root), server_config, child)
            stack.push_async_callback(client.close)
            if fronts is not None:
                await fronts.join(client)
        except asyncio.CancelledError:
            log.warning("ended while loading")
            return TERMINATED
        shared = (fronts.tally, fronts.desk.at(0)) if fronts is not None else (None, None)
        service = made_service(client, text, card, server_config, *shared)
        stats = not engine_config.disable_log_stats
        return await Server(service, addresses, settings, stats=stats, started=started, fronts=fronts).run()


async def _load(engine_config: EngineConfig, server_config: ServerConfig, child: Child | None) -> tuple[ZmqClient, TextFrontend]:
    """Engine and text side at the same time; an error of either ends the other."""
    engine = asyncio.create_task(ZmqClient.start(structured_starter(engine_config), child))
    try:
        text = await asyncio.to_thread(load_text, engine_config, server_config)
        return await engine, text
    except BaseException:
        engine.cancel()
        await asyncio.wait([engine])
        raise


def shown_settings(engine_config: EngineConfig, server_config: ServerConfig) -> dict[str, Any]:
    """What `/server_info` tells of the configuration; instead of the keys, how many there are."""
    server = asdict(server_config) | {"api_key": len(keys_of(server_config))}
    return {"engine_config": asdict(engine_config), "server_config": server}
