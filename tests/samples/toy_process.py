"""Server processes for tests. As a program, one over the toy engine: `toy_process.py FLAGS_AS_JSON SECONDS_A_STEP [STEPS]`, after
so many of which each request stands still. SIGUSR1 kills it, SIGUSR2 ends all waiting, and with SIGHUP it is as at the start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from patience import LIMIT_S

SERVE = [sys.executable, "-m", "pagoda.serving.cli.main", "serve"]
SMALL_POOL = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--max-model-len", "2048", "--kv-cache-memory-bytes", "256M"]
READY = re.compile(r"Pagoda is ready .*? at (?P<where>.*?)(?: and gRPC at (?P<grpc>\S+))?$")


class ServerProcess:
    """A started server, for tests: its address, what it printed, and its end."""

    def __init__(self, command: list[str], patience: float = 2 * LIMIT_S) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        self.errors: list[str] = []
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        watchdog = threading.Timer(patience, self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            self.where = self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        finally:
            watchdog.cancel()

    @classmethod
    def toy(cls, delay: float = 0.0, held: int | None = None, **flags: Any) -> ServerProcess:
        steps = [] if held is None else [str(held)]
        return cls([sys.executable, __file__, json.dumps({"host": "127.0.0.1", "port": 0, **flags}), str(delay), *steps])

    def go_on(self) -> None:
        """Requests of a toy engine stand still no longer, and their steps take no time."""
        self.signal(signal.SIGUSR2)

    def hold(self) -> None:
        """They are again as at the start."""
        self.signal(signal.SIGHUP)

    def _read_errors(self) -> None:
        assert self.process.stderr
        self.errors.extend(self.process.stderr)

    def _wait_ready(self) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if match := READY.match(line):
                self.grpc = match["grpc"]
                self.lines += [self.process.stdout.readline().rstrip("\n") for _ in range(2)]
                return match["where"]
        self.wait()
        raise RuntimeError(f"the server ended with {self.process.returncode}: {''.join(self.errors)}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = LIMIT_S) -> int:
        code = self.process.wait(timeout)
        self._reader.join(LIMIT_S)
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe
            pipe.close()


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    from pagoda.serving.api.address import bind, bind_grpc
    from pagoda.serving.api.config import ServerConfig
    from pagoda.serving.api.logs import set_up_logging
    from pagoda.serving.api.server import Addresses, Server, run_loop
    from pagoda.serving.api.service import ModelCard, Service
    from toy_engine import ToyEngine, toy_text

    config = ServerConfig(**json.loads(sys.argv[1]))
    set_up_logging(config)
    slow = {"delay": float(sys.argv[2]), "held": int(sys.argv[3]) if sys.argv[3:] else None}
    engine = ToyEngine(**slow)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(engine, "dead", "the engine was killed by a test"))
    signal.signal(signal.SIGUSR2, lambda *_: engine.hurry())
    signal.signal(signal.SIGHUP, lambda *_: vars(engine).update(slow))

    async def serve() -> int:
        service = Service(engine, toy_text(), ModelCard(config.served_model_name or ("toy",), "toy"), config)
        return await Server(service, Addresses(bind(config), bind_grpc(config)), stats=False).run()

    return run_loop(serve)


if __name__ == "__main__":
    sys.exit(main())
