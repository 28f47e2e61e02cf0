"""A server process over the toy engine: start, listening addresses, TLS, drain, abort, and the engine's death."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading

import httpx
import pytest
from patience import LIMIT_S, until
from toy_process import ServerProcess
from toy_server import events

LONG = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}


class Running:
    """A request in a thread. `begun`: something of its answer is here."""

    def __init__(self, url, body, path="/v1/completions"):
        self.response = None
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(url + path, body), daemon=True)
        self._thread.start()

    def _send(self, url, body):
        with httpx.stream("POST", url, json=body, timeout=LIMIT_S) as response:
            parts = []
            for part in response.iter_raw():
                parts.append(part)
                self.begun.set()
        self.response = httpx.Response(response.status_code, content=b"".join(parts))

    def join(self):
        self._thread.join(LIMIT_S)
        return self.response


def loaded(url):
    until(lambda: httpx.get(f"{url}/load").json()["server_load"] > 0)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones():
    with ServerProcess.toy(held=9, shutdown_timeout=LIMIT_S) as server:
        running = Running(server.where, LONG)
        loaded(server.where)
        server.signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.where}/health").status_code == 503)
        refused = httpx.post(f"{server.where}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        server.go_on()
        chunks = events(running.join().text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 45
        assert server.wait() == 0


def test_requests_that_outlast_the_drain_are_aborted():
    with ServerProcess.toy(held=9, shutdown_timeout=0.3) as server:
        streamed = Running(server.where, {**LONG, "max_tokens": 4000})
        whole = Running(server.where, {**LONG, "max_tokens": 4000, "stream": False})
        until(streamed.begun.is_set)
        until(lambda: httpx.get(f"{server.where}/load").json()["server_load"] == 2)
        server.signal(signal.SIGTERM)
        assert events(streamed.join().text)[-1]["choices"][0]["finish_reason"] == "abort"
        assert whole.join().json()["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


def test_a_second_signal_cuts_the_drain_short():
    with ServerProcess.toy(held=9, shutdown_timeout=10 * LIMIT_S) as server:
        running = Running(server.where, {**LONG, "max_tokens": 4000})
        loaded(server.where)
        server.signal(signal.SIGINT)
        until(lambda: httpx.get(f"{server.where}/health").status_code == 503)
        server.signal(signal.SIGINT)
        assert events(running.join().text)[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


def test_an_idle_server_ends_at_once():
    with ServerProcess.toy(shutdown_timeout=10 * LIMIT_S) as server, httpx.Client() as kept_alive:
        assert kept_alive.get(f"{server.where}/health").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_dead_engine_ends_the_server_with_an_error():
    with ServerProcess.toy(held=9) as server:
        streamed = Running(server.where, LONG)
        whole = Running(server.where, {**LONG, "stream": False})
        until(streamed.begun.is_set)
        until(lambda: httpx.get(f"{server.where}/load").json()["server_load"] == 2)
        server.signal(signal.SIGUSR1)
        assert events(streamed.join().text)[-1]["error"]["code"] == "engine_dead"
        assert whole.join().status_code == 503
        assert server.wait() == 1
        assert any("killed by a test" in line for line in server.errors)


def test_an_idle_server_notices_its_engine_die():
    with ServerProcess.toy() as server:
        server.signal(signal.SIGUSR1)
        assert server.wait() == 1


def test_unix_socket(tmp_path):
    path = str(tmp_path / "pagoda.sock")
    with ServerProcess.toy(uds=path) as server:
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://localhost") as http:
            assert http.post("/v1/completions", json={"prompt": "ab"}).json()["choices"][0]["text"] == "ab"
        assert pasted(server.lines[1])
        assert pasted(server.lines[2])
        with pytest.raises(RuntimeError, match="another server listens"):
            ServerProcess.toy(uds=path)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not os.path.exists(path)


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match="cannot listen on 127"):
            ServerProcess.toy(port=taken.getsockname()[1])


def pasted(line):
    """The answer's text when a printed line is given to a shell."""
    line = line.strip().replace("python -c", f"{sys.executable} -W ignore -c", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return "user:Say hello." in done.stdout


def test_the_printed_lines_work_as_pasted():
    with ServerProcess.toy() as server:
        assert server.lines[1].startswith("  curl ")
        assert server.lines[2].startswith("  python -c ")
        assert pasted(server.lines[1])
        assert pasted(server.lines[2])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


def test_tls(certificate):
    key, cert = certificate
    with ServerProcess.toy(ssl_keyfile=key, ssl_certfile=cert, ssl_ciphers="ECDHE+AESGCM") as server:
        assert server.where.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{server.where}/health", verify=context).status_code == 200
        assert pasted(server.lines[1])


def test_client_certificates(certificate):
    key, cert = certificate
    with ServerProcess.toy(ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=cert, ssl_cert_reqs=2) as server:
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.where}/health", verify=context)
        context.load_cert_chain(cert, key)
        assert httpx.get(f"{server.where}/health", verify=context).status_code == 200


def test_the_access_log_can_be_switched_off():
    for off in (False, True):
        with ServerProcess.toy(disable_access_log=off) as server:
            httpx.get(f"{server.where}/version")
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            assert any("GET /version" in line for line in server.errors) is not off


def test_a_log_of_json_tells_which_request_a_line_is_about():
    with ServerProcess.toy(log_format="json", enable_log_requests=True) as server:
        for name in ("one", "two"):
            answer = httpx.post(f"{server.where}/v1/completions", json={"prompt": 'a "b"\nc'}, headers={"x-request-id": name})
            assert answer.headers["x-request-id"] == name
        httpx.get(f"{server.where}/nothing", headers={"x-request-id": "three"})
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        records = [json.loads(line) for line in server.errors]
    assert all({"time", "level", "logger", "message", "process"} <= record.keys() for record in records)
    for name, path, status in (("one", "/v1/completions", 200), ("two", "/v1/completions", 200), ("three", "/nothing", 404)):
        about = [record for record in records if record.get("request_id") == name]
        (access,) = [record for record in about if record["logger"] == "uvicorn.access"]
        assert (access["method"], access["path"], access["status"]) == ("POST" if status == 200 else "GET", path, status)
        assert len([record for record in about if record["message"].startswith("received request cmpl-" + name)]) == (status == 200)


def test_an_error_in_a_log_of_json_has_its_traceback_in_the_line():
    with ServerProcess.toy(log_format="json", middleware=["middleware_that_fails.Fails"]) as server:
        assert httpx.get(f"{server.where}/version").status_code == 500
        server.signal(signal.SIGTERM)
        server.wait()
        (failed,) = [record for line in server.errors if "error" in (record := json.loads(line))]
    assert "Traceback" in failed["error"] and "broken on purpose" in failed["error"]
