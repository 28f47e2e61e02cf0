"""What a server needs of the machine before anything loads: its listening addresses and its TLS certificate."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from dataclasses import replace
from importlib.util import find_spec

from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig


def check_tls(config: ServerConfig) -> None:
    """Raises `ConfigError` when the certificate, its key or the clients' certificates cannot be read."""
    if not config.ssl_certfile:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:
        files = f"ssl_certfile={config.ssl_certfile}, ssl_keyfile={config.ssl_keyfile}"
        raise ConfigError(f"{files}: no certificate with its key can be read there ({_reason(error)}); give two PEM files") from None
    try:
        context.set_ciphers(config.ssl_ciphers) if config.ssl_ciphers else None
    except OSError as error:
        raise ConfigError(f"ssl_ciphers={config.ssl_ciphers!r} names no cipher of OpenSSL; `openssl ciphers` lists them") from error
    try:
        context.load_verify_locations(config.ssl_ca_certs) if config.ssl_ca_certs else None
    except OSError as error:
        raise ConfigError(f"ssl_ca_certs={config.ssl_ca_certs} cannot be read ({_reason(error)}); give a PEM file") from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def bind(config: ServerConfig, flag: str = "--port") -> socket.socket:
    """The listening address, taken before anything loads. Raises `ConfigError` when it cannot be had."""
    if config.uds:
        return _bind_uds(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --host or {flag}") from None
    return sock


def bind_grpc(config: ServerConfig) -> socket.socket | None:
    """The port of the gRPC service, held for it until it listens there too; None: there is none.

    Raises `ConfigError` when it cannot be had, or the packages are missing.
    """
    if config.grpc_port is None:
        return None
    if not all(map(find_spec, ("grpc", "grpc_health", "grpc_reflection"))):
        raise ConfigError(f'grpc_port={config.grpc_port} needs the gRPC packages: pip install "pagoda-llm[grpc]"')
    # gRPC binds by itself and shares ports: the first bind finds who else is there, the second one keeps the port meanwhile
    with bind(replace(config, uds=None, port=config.grpc_port), "--grpc-port") as found:
        address = found.getsockname()
    sock = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(address)
    return sock


def _bind_uds(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            _remove_stale(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on the Unix socket {path}: {error.strerror}; choose another --uds") from None
    return sock


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ConfigError(f"--uds {path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(path)
        raise ConfigError(f"another server listens on the Unix socket {path}; choose another --uds")
    os.unlink(path)
