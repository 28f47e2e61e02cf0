"""What a server needs of the machine before anything loads: its listening address and its TLS certificate."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat

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
        context.load_verify_locations(config.ssl_ca_certs) if config.ssl_ca_certs else None
    except OSError as error:
        raise ConfigError(f"ssl_ca_certs={config.ssl_ca_certs} cannot be read ({_reason(error)}); give a PEM file") from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def bind(config: ServerConfig) -> socket.socket:
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
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --host or --port") from None
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
