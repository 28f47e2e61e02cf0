"""Media by their address: data URIs, files of an allowed folder, and the web, where no address leads into the server's own network."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.media_files import MAX_BYTES, data_of, too_large

SECONDS = 10.0
"""For one image, redirects included."""
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Fetcher:
    """What the server's flags allow.

    Args:
        domains: hosts that may be asked, wherever they are; empty: every host with a public address.
        folder: whose files may be read, or None.
    """

    domains: tuple[str, ...] = ()
    folder: str | None = None
    seconds: float = SECONDS

    async def fetch(self, addresses: Sequence[str]) -> list[Any]:
        """Their bytes, in order; those of each frame where a video comes as pictures. Raises `RequestError` for what is not allowed, not
        there, too large or too slow."""
        tasks = [asyncio.ensure_future(self._one(address)) for address in addresses]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, address: str) -> Any:
        if address.startswith("data:"):
            return await asyncio.to_thread(data_of, address)
        url = _split(address)
        if url.scheme == "file":
            return await asyncio.to_thread(self._of_file, url)
        try:
            async with asyncio.timeout(self.seconds):
                return await self._of_web(url)
        except TimeoutError:
            raise _refusal(f"the image at {url.hostname} did not come within {self.seconds:g} s; send it as a data URI") from None

    def _of_file(self, url: SplitResult) -> bytes:
        if self.folder is None:
            raise _refusal("files are not served: the server's flag is --allowed-local-media-path; send the image as a data URI")
        inside = Path(self.folder).resolve()
        try:
            path = Path(unquote(url.path)).resolve(strict=True)
            if url.netloc not in ("", "localhost") or not path.is_relative_to(inside):
                raise _refusal("this file is not in the folder of --allowed-local-media-path")
            return _read(path)
        except (OSError, ValueError):
            raise _refusal("there is no such file in the folder of --allowed-local-media-path") from None

    async def _of_web(self, url: SplitResult) -> bytes:
        http, pinned = import_module("httpcore"), import_module("pagoda.serving.api.pinned")  # needed when the first address comes
        backend = pinned.PinnedBackend(frozenset(self.domains))
        async with http.AsyncConnectionPool(network_backend=backend, max_connections=1) as pool:
            for _ in range(MAX_REDIRECTS + 1):
                self._check(url)
                try:
                    answer = await _get(pool, url)
                except pinned.Forbidden as error:
                    raise _refusal(str(error)) from None
                except (OSError, ValueError, *_errors(http)) as error:
                    raise _refusal(f"the image at {url.hostname} cannot be fetched: {type(error).__name__}") from None
                if isinstance(answer, bytes):
                    return answer
                url = _split(urljoin(url.geturl(), answer))
        raise _refusal(f"the image's address leads on more than {MAX_REDIRECTS} times")

    def _check(self, url: SplitResult) -> None:
        if url.scheme not in ("http", "https") or not url.hostname:
            raise _refusal("an image's address must begin with https://, http://, data: or file://")
        if url.username is not None or url.password is not None:
            raise _refusal("an image's address must not hold a password")
        if self.domains and url.hostname not in self.domains:
            raise _refusal(f"images are not fetched from {url.hostname}; --allowed-media-domains has {', '.join(self.domains)}")


async def _get(pool: Any, url: SplitResult) -> bytes | str:
    """The body, or where a redirect leads."""
    headers = {"Host": url.netloc, "Accept": "image/*, video/*, audio/*", "Accept-Encoding": "identity", "User-Agent": "pagoda"}
    async with pool.stream("GET", url.geturl(), headers=headers) as response:
        fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in fields:
            return str(fields[b"location"])
        if response.status != 200:
            raise _refusal(f"the image at {url.hostname} cannot be fetched: its server answered {response.status}")
        declared = fields.get(b"content-length", "0")
        if declared.isdecimal() and int(declared) > MAX_BYTES:
            raise too_large(int(declared))
        body = bytearray()
        async for part in response.aiter_stream():
            body += part
            if len(body) > MAX_BYTES:
                raise too_large(len(body))
        return bytes(body)


def _errors(http: Any) -> tuple[type[Exception], ...]:
    return (http.NetworkError, http.ProtocolError, http.TimeoutException, http.UnsupportedProtocol, http.ProxyError)


def _read(path: Path) -> bytes:
    """A plain file within the bound: no device, and no link that came meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or path.resolve() != path:
            raise OSError
        if facts.st_size > MAX_BYTES:
            raise too_large(facts.st_size)
        return file.read(MAX_BYTES)


def _split(address: str) -> SplitResult:
    try:
        url = urlsplit(address)
        _ = url.port
    except ValueError as error:
        raise _refusal(f"the image's address is none: {error}") from None
    return url


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_image")
