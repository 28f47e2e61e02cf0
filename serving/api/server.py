"""The server process once its engine runs: listens, says when it is ready, drains on SIGTERM, and ends when the engine does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from pagoda.hal.errors import EngineDeadError
from pagoda.serving.api.app import build_app
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.connection import StreamProtocol
from pagoda.serving.api.ready import ready_text
from pagoda.serving.api.service import Service
from pagoda.serving.api.statlog import log_stats
from pagoda.serving.engine.turns import take_short_turns
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pagoda.serving.api.fronts import Fronts
    from pagoda.serving.api.grpc.server import GrpcServer

log = logging.getLogger("pagoda.api")
HEALTH_PERIOD = 1.0
DEAD_LINGER = 1.0
ABORT_GRACE = 5.0
GC_THRESHOLDS = (20_000, 10, 10)
"""A request makes hundreds of objects and few cycles: looking for those every 700 objects takes a tenth of a request's time."""


class UvicornServer(uvicorn.Server):
    """uvicorn, with signals left to us and a call when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


class Addresses(NamedTuple):
    """Taken before anything loads: of HTTP, and of gRPC where it is served."""

    http: socket.socket
    grpc: socket.socket | None = None


class Server:
    """Runs one service until a signal or the engine's death."""

    def __init__(
        self,
        service: Service,
        addresses: Addresses,
        settings: dict[str, Any] | None = None,
        *,
        stats: bool = True,
        started: float | None = None,
        on_ready: Callable[[], None] | None = None,
        fronts: Fronts | None = None,
    ) -> None:
        """`started` (of `time.monotonic`): when the start began that the ready line tells the length of; `on_ready` is called instead of
        telling it. `fronts`: further API processes, which stop with this one."""
        self._service, self._addresses, self._stats = service, addresses, stats
        self._started = time.monotonic() if started is None else started
        self._http = UvicornServer(uvicorn_config(service.config, build_app(service, settings)), on_ready or self._say_ready)
        self._grpc = _grpc_server(service, addresses.grpc) if addresses.grpc is not None else None
        self._fronts = fronts
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serve; returns the exit code: 0 after a drain, 1 when the engine died."""
        self._catch_signals()
        # the loop need not know each generator: all are closed by who reads them, and at its end none matters
        sys.set_asyncgen_hooks(firstiter=None)
        gc.freeze()  # what has been loaded stays; looking through it for garbage would hold up every stream
        gc.set_threshold(*GC_THRESHOLDS)
        if self._grpc is not None:
            await self._grpc.start()
        tasks = [asyncio.ensure_future(self._http.serve([self._addresses.http])), asyncio.ensure_future(self._watch_engine())]
        if self._stats:
            tasks.append(asyncio.ensure_future(log_stats(self._service)))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({*tasks[:2], stop}, return_when=asyncio.FIRST_COMPLETED)
            await self._wind_down(tasks[0])
        finally:
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.gather(*tasks, stop, return_exceptions=True)
            if self._fronts is not None:
                await self._fronts.close(ABORT_GRACE)
            await self._service.client.close()
            self._service.close()
            if self._service.config.uds:
                Path(self._service.config.uds).unlink(missing_ok=True)
        return 1 if self._service.dead is not None else 0

    async def _wind_down(self, http: asyncio.Future[None]) -> None:
        self._service.draining = self._service.draining or self._service.dead is None
        if self._grpc is not None:
            await self._grpc.refuse()
        if self._fronts is not None:
            self._fronts.stop() if self._service.dead is None else self._fronts.engine_died(self._service.dead)
        if self._service.dead is not None:
            log.error("the engine died: %s", self._service.dead)
            await self._until_idle(ABORT_GRACE)
            await asyncio.sleep(DEAD_LINGER)
        else:
            await self._drain()
        self._http.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(ABORT_GRACE)
        await http

    async def _drain(self) -> None:
        timeout = self._service.config.shutdown_timeout
        if self._load:
            log.info("draining: %d requests may run on for %g s; new ones get 503", self._load, timeout)
            await self._until_idle(timeout)
        if self._load:
            log.warning("aborting %d requests that did not finish in time", self._load)
            await self._service.abort_all()
            self._hurry.clear()
            await self._until_idle(ABORT_GRACE)

    @property
    def _load(self) -> int:
        """What has to end before the engine may."""
        return self._service.load if self._fronts is None else self._service.server_load

    async def _until_idle(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._load and time.monotonic() < end and not self._hurry.is_set():
            await asyncio.sleep(0.02)

    async def _watch_engine(self) -> None:
        while self._service.dead is None:
            try:
                await self._service.client.health()
            except EngineDeadError as error:
                self._service.engine_died(str(error))
            await asyncio.sleep(HEALTH_PERIOD if self._service.dead is None else 0)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Drain and end; called again, hurry."""
        if self._stop.is_set():
            self._hurry.set()
            if self._fronts is not None:
                self._fronts.stop()
        self._stop.set()

    def _say_ready(self) -> None:
        print(ready_text(self._service, self._addresses.http, self._addresses.grpc, time.monotonic() - self._started), flush=True)


def _grpc_server(service: Service, sock: socket.socket) -> GrpcServer:
    module: Any = import_module("pagoda.serving.api.grpc.server")  # its packages are optional
    made: GrpcServer = module.GrpcServer(service, sock)
    return made


def uvicorn_config(config: ServerConfig, app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpToolsProtocol if config.middleware else StreamProtocol,  # which sends past middlewares
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=not config.disable_access_log,
        root_path=config.root_path,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(ABORT_GRACE),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers,
    )


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a coroutine function in a fresh event loop, the fast one where there is one; returns what it returns."""
    take_short_turns()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())


new_event_loop = uvloop.new_event_loop if uvloop else asyncio.new_event_loop
