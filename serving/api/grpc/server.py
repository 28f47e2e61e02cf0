"""The gRPC server beside the HTTP one: its address and certificate, health and reflection, and its end."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.grpc import pagoda_pb2
from pagoda.serving.api.grpc.inference import Inference
from pagoda.serving.api.grpc.pagoda_pb2_grpc import add_InferenceServicer_to_server
from pagoda.serving.api.service import Service

INFERENCE = pagoda_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Serves one service in the running event loop. `sock` holds the port until the end: gRPC takes it beside that."""

    def __init__(self, service: Service, sock: socket.socket) -> None:
        config = service.config
        self._sock = sock
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=(("grpc.max_receive_message_length", config.max_request_bytes), ("grpc.max_send_message_length", -1))
        )
        add_InferenceServicer_to_server(Inference(service), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        if config.ssl_certfile:
            self._server.add_secure_port(_where(config, sock), _credentials(config))
        else:
            self._server.add_insecure_port(_where(config, sock))

    async def start(self) -> None:
        await self._server.start()
        await self._tell(SERVING)

    async def refuse(self) -> None:
        """Tell probes and balancers that no new calls are wanted; the service refuses them."""
        await self._tell(NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Calls that still run get so many seconds."""
        await self._server.stop(grace)
        self._sock.close()

    async def _tell(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", INFERENCE):
            await self._health.set(name, status)


def _where(config: ServerConfig, sock: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{host}:{sock.getsockname()[1]}"


def _credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """The certificate of HTTPS."""
    assert config.ssl_certfile is not None
    pair = (Path(config.ssl_keyfile or config.ssl_certfile).read_bytes(), Path(config.ssl_certfile).read_bytes())
    clients = Path(config.ssl_ca_certs).read_bytes() if config.ssl_ca_certs else None
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=config.ssl_cert_reqs == 2)
