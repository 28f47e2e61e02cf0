"""Hostile HTTP below the bodies: broken framing, forms, and clients that hang up in the middle."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from random import Random

from hostile import JUNK

BODY = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def _with_length(length: bytes) -> bytes:
    return HEAD + b"Content-Length: " + length + b"\r\n\r\n" + BODY


FRAMES: tuple[bytes, ...] = (
    b"\r\n\r\n",
    b"\0" * 100,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/0.9\r\n\r\n",
    b"GET /",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\n\r\n" + BODY,
    b"G@T / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%00%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    b"GET / HTTP/1.1\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: \0\x01\r\n\r\n",
    b"GET /v1/models/%2e%2e%2f%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/responses/" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    _with_length(b"-1"),
    _with_length(b"99999999999999999999"),
    _with_length(b"1e3"),
    _with_length(b"5"),
    _with_length(b"1000"),
    _with_length(b""),
    _with_length(b"+34"),
    _with_length(b"34, 34"),
    HEAD + b"Content-Length: 3\r\nContent-Length: 34\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 34\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhe",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 50_000 + b"\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 34\r\n\r\n",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 34\r\n\r\n" + BODY,
    HEAD + b"Upgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n",
    _with_length(b"37") * 30,
    HEAD.replace(b"x\r\n", b"x\r\nX-Request-Id: " + b"r" * 5000 + b"\r\n", 1) + b"Content-Length: 37\r\n\r\n" + BODY,
    HEAD + b"Authorization: \xff\xfe\r\nContent-Length: 37\r\n\r\n" + BODY,
    HEAD + b"traceparent: 00-zz-zz-zz\r\nContent-Length: 37\r\n\r\n" + BODY,
    b"GET /v1/responses/x?stream=true&starting_after=%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /v1/responses/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/responses/x/input_items?limit=%ff&order=%00&after= HTTP/1.1\r\nHost: x\r\n\r\n",
)


def frame(rng: Random) -> bytes:
    """A broken request as it goes on the wire; half of the time broken once more."""
    text = bytearray(rng.choice(FRAMES))
    if rng.random() < 0.5:
        at = rng.randrange(min(len(text), 400))
        text[at : at + rng.randrange(3)] = rng.choice((b"", b"\r\n", b"\0", b"\xff", b" ", b":", b"\t", b"HTTP"))
    return bytes(text)


async def send_frame(host: str, port: int, text: bytes, patience: float = 0.4) -> str:
    """The status that the server answers with, `none` where it says nothing in time, `closed` where it closes without a word."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(text)
        line = await asyncio.wait_for(reader.readline(), patience)
        return line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "closed"
    except TimeoutError:
        return "none"
    except (ConnectionError, ValueError):
        return "closed"
    finally:
        writer.transport.abort()


async def hang_up(rng: Random, host: str, port: int, path: str, body: bytes) -> str:
    """Begin a request, read some of the answer or none, and go without a word."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        whole = head.encode() + body
        sent = whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole
        writer.write(sent)
        if rng.random() < 0.7:
            await asyncio.wait_for(reader.read(rng.choice((1, 20, 500, 5000))), 0.3)
        await asyncio.sleep(rng.choice((0, 0, 0.01, 0.05)))
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if rng.random() < 0.5:  # a reset instead of an orderly end
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    return "left"


def form(rng: Random, sound: bytes) -> tuple[bytes, str]:
    """A multipart form that is wrong somewhere, and how it is declared."""
    names = (
        "model",
        "language",
        "prompt",
        "response_format",
        "temperature",
        "timestamp_granularities[]",
        "stream",
        "top_p",
        "seed",
        "max_completion_tokens",
        "x",
    )
    parts = [
        (name, str(rng.choice((*JUNK[:-1], "json", "srt", "verbose_json", "en", "segment", "0.5"))))
        for name in rng.sample(names, rng.randrange(4))
    ]
    file = rng.choice(
        (
            sound,
            sound,
            sound,
            b"",
            sound[:20],
            sound[:44],
            sound[:500],
            b"\0" * 5000,
            b"RIFF\xff\xff\xff\xffWAVEfmt ",
            b"OggS" + b"\xff" * 300,
            b"fLaC" + b"\0" * 100,
            b"ID3\x03" + b"\xff" * 200,
        )
    )
    if rng.random() < 0.4 and file:
        file = bytearray(file)  # type: ignore[assignment]
        for _ in range(6):
            file[rng.randrange(min(len(file), 60))] = rng.randrange(256)  # type: ignore[index]
    out = b"".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode("utf-8", "surrogatepass") for name, value in parts
    )
    if rng.random() < 0.9:
        out += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + bytes(file) + b"\r\n"
    out += b"--b--\r\n"
    if rng.random() < 0.2:
        out = out[: rng.randrange(len(out))]
    return out, rng.choices(
        (
            "multipart/form-data; boundary=b",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "application/json",
            "multipart/form-data; boundary=" + "b" * 500,
        ),
        (20, 1, 1, 1, 1),
    )[0]
