"""Images by their address: what a client may lead a server to, and servers that misbehave."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from pagoda.hal.errors import RequestError
from pagoda.serving.api import fetching
from pagoda.serving.api.fetching import Fetcher
from pagoda.serving.api.pinned import Forbidden, PinnedBackend, is_public

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def said(status: str, *headers: str, body: bytes = b"") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "Connection: close", "", ""]).encode() + body)

    return answer


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(100):
        writer.write(bytes(100_000))
        await writer.drain()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def fetch(
    path: str,
    answers: dict[str, Answer],
    host: str = "127.0.0.1",
    fetcher: Fetcher | None = None,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """What a client gets of a server at `host` that answers by path; `{port}` in answers and paths is its own."""

    async def run() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            try:
                await answers[asked](writer)
                await writer.drain()
            except (ConnectionError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        try:
            (got,) = await (fetcher or Fetcher(("127.0.0.1",))).fetch([f"http{'s' * bool(tls)}://{host}:{port}{path}"])
        finally:
            server.close()
        return got

    return asyncio.run(run())


def test_an_image_is_fetched_and_redirects_are_followed() -> None:
    answers = {"/a": said("302 Found", "Location: /b"), "/b": said("200 OK", "Content-Length: 3", body=b"abc")}
    assert fetch("/a", answers) == b"abc"


MISBEHAVIOUR: dict[str, tuple[Answer, str]] = {
    "a large one announced": (said("200 OK", "Content-Length: 99999999999"), "at most"),
    "a loop": (said("302 Found", "Location: /x"), "more than 5 times"),
    "an error": (said("404 Not Found", "Content-Length: 0"), "answered 404"),
    "a short one": (said("200 OK", "Content-Length: 10", body=b"abc"), "cannot be fetched"),
    "no protocol": (said("what?"), "cannot be fetched"),
    "a silent one": (silent, "within 0.5 s"),
    "another machine": (said("302 Found", "Location: http://localhost/x"), "not fetched from localhost"),
    "the cloud's own data": (said("302 Found", "Location: http://169.254.169.254/x"), "not fetched from"),
    "a file": (said("302 Found", "Location: file:///etc/passwd"), "must begin with"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_servers_that_misbehave_are_refused(name: str) -> None:
    answer, why = MISBEHAVIOUR[name]
    with pytest.raises(RequestError, match=why):
        fetch("/x", {"/x": answer}, fetcher=Fetcher(("127.0.0.1",), seconds=0.5 if answer is silent else 100))


def test_an_endless_body_ends_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 300_000)
    with pytest.raises(RequestError, match="at most"):
        fetch("/x", {"/x": endless})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_no_spelling_of_the_own_network_is_public(host: str) -> None:
    with pytest.raises(RequestError, match=r"no public host|cannot be fetched"):
        fetch("/x", {"/x": said("200 OK", "Content-Length: 3", body=b"abc")}, host, Fetcher())


@pytest.mark.parametrize(
    "text", ["10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "127.9.9.9", "0.0.0.0",
             "100.64.0.1", "224.0.0.1", "255.255.255.255",
             "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1", "2001:db8::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_that_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


def names(*answers: list[str]) -> Callable[..., Awaitable[list[object]]]:
    """A resolver that gives these in turn, as one does that rebinds."""
    turns = iter(answers)

    async def getaddrinfo(*_: object, **__: object) -> list[object]:
        return [(0, 0, 0, "", (address, 0)) for address in next(turns)]

    return getaddrinfo


def test_a_name_is_resolved_once_and_every_address_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []

    async def run(trusted: frozenset[str], *answers: list[str]) -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names(*answers))
        backend = PinnedBackend(trusted)

        async def connect(host: str, *_: object) -> None:
            connected.append(host)

        monkeypatch.setattr(backend._backend, "connect_tcp", connect)
        await backend.connect_tcp("pictures.test", 80)

    asyncio.run(run(frozenset(), ["1.1.1.1"], ["127.0.0.1"]))
    assert connected == ["1.1.1.1"]
    with pytest.raises(Forbidden, match=r"pictures\.test is no public host"):
        asyncio.run(run(frozenset(), ["1.1.1.1", "127.0.0.1"]))
    asyncio.run(run(frozenset({"pictures.test"}), ["10.0.0.7"]))
    assert connected == ["1.1.1.1", "10.0.0.7"]


def of(address: str, folder: Path | None) -> bytes:
    return asyncio.run(Fetcher(folder=str(folder) if folder else None).fetch([address]))[0]


def test_files_are_read_from_the_allowed_folder_only(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "a b.png").write_bytes(b"abc")
    (tmp_path / "secret").write_bytes(b"no")
    (inside / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(inside / "pipe")
    assert of(f"file://{inside}/a%20b.png", inside) == b"abc"
    for path in ("../secret", "%2e%2e/secret", "link", "pipe", ".", "none", "a%00b"):
        with pytest.raises(RequestError, match="allowed-local-media-path"):
            of(f"file://{inside}/{path}", inside)
    with pytest.raises(RequestError, match="allowed-local-media-path"):
        of(f"file://elsewhere{inside}/a%20b.png", inside)
    with pytest.raises(RequestError, match="flag is --allowed-local-media-path"):
        of(f"file://{inside}/a%20b.png", None)


@pytest.mark.parametrize(
    "address", ["ftp://a/b", "gopher://a", "//a/b", "a.png", "http://", "http://u:p@example.org/", "http://[::1", "http://a:99999/",
                "data:text/plain,x",
                "data:image/png,x", "data:image/png;base64,%%%"],
)  # fmt: skip
def test_addresses_that_are_none(address: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        of(address, tmp_path)


def certified(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A new authority's certificate, and what a server needs that it knows by this name."""

    def openssl(command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)

    openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem")
    openssl(f"req -newkey rsa:2048 -nodes -subj /CN=server -addext subjectAltName=DNS:{name} -keyout server.key -out server.csr")
    openssl("x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -copy_extensions copy -out server.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return folder / "ca.pem", context


def test_certificates_are_checked_against_the_name_that_the_client_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, context = certified(tmp_path, "localhost")
    answers = {"/x": said("200 OK", body=b"picture")}

    def get(host: str) -> bytes:
        return fetch("/x", answers, host, Fetcher((host,)), context)

    with pytest.raises(RequestError):
        get("localhost")  # nobody here knows the authority
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    assert get("localhost") == b"picture"
    with pytest.raises(RequestError):
        get("127.0.0.1")  # which the certificate does not name
