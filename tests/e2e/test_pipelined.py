"""Several requests sent at once over one connection, whose client goes away: nothing is an error."""

from __future__ import annotations

import json
import signal
import socket
import struct
from urllib.parse import urlsplit

import httpx
from patience import until
from toy_process import ServerProcess

BODY = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def test_a_client_that_leaves_requests_of_which_one_runs_is_no_error() -> None:
    with ServerProcess.toy(delay=0.2, held=0) as server:
        at = urlsplit(server.where)
        with socket.create_connection((str(at.hostname), at.port)) as client:
            client.sendall((HEAD + BODY) * 5)
            until(lambda: httpx.get(f"{server.where}/load").json()["server_load"])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset: the next answer cannot be sent
        server.go_on()
        until(lambda: not httpx.get(f"{server.where}/load").json()["server_load"])
        server.signal(signal.SIGTERM)
        server.wait()
        assert [line for line in server.errors if "Traceback" in line or "without" in line] == []
