"""Connections for fetching what clients name: the addresses that a name resolves to are checked, and the same ones are connected to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


class Forbidden(Exception):
    """A host has an address that nobody outside may lead this server to."""


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Resolves a host once and connects to what was checked, so that a name cannot mean another machine a moment later.

    Args:
        trusted: hosts that may have any address.
    """

    def __init__(self, trusted: frozenset[str]) -> None:
        self._trusted = trusted
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises `Forbidden` where any of the host's addresses is not public."""
        found = await _resolved(host, port)
        if host not in self._trusted and not all(map(is_public, found)):
            raise Forbidden(f"{host} is no public host; --allowed-media-domains may name it, or send the image as a data URI")
        for address in found[:-1]:
            try:
                return await self._backend.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._backend.connect_tcp(str(found[-1]), port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, path: str, timeout: float | None = None, socket_options: Any = None) -> httpcore.AsyncNetworkStream:
        raise Forbidden("images are not fetched from sockets")

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


def is_public(address: Address) -> bool:
    """Whether it is a machine of the internet, whatever form the address has."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not is_public(inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified


async def _resolved(host: str, port: int) -> list[Address]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found))
