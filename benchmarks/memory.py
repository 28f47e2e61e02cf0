"""What a CPU server takes at rest and at its peak, by proportional set size of its processes: `python benchmarks/memory.py [MODEL] [FLAG]`.

The load: prompts of 128, 1,024 and 4,096 tokens, 16 and 32 requests at once, then random prompts until every page of the pool was used.
Prints one JSON line; `anonymous` leaves out pages of files, which others that run torch here share.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from pagoda.serving.cli.bench.process_tree import PeakMemory, pss_mib, tree

SERVE = (sys.executable, "-m", "pagoda.serving.cli.main", "serve")


def anonymous_mib(root: int) -> dict[str, float]:
    """Of each process, by its id."""
    found = {}
    for pid in tree(root):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found[str(pid)] = round(sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) / 1024, 1)
    return found


def ask(url: str, tokens: int, new: int, seed: int) -> None:
    prompt = random.Random(seed).choices(range(100, 40_000), k=tokens)
    body = {"model": "m", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()


def load(url: str, fill: int) -> None:
    for tokens in (128, 1024, 4096):
        ask(url, tokens, 8, tokens)
    for many in (16, 32):
        with ThreadPoolExecutor(many) as pool:
            list(pool.map(lambda seed, many=many: ask(url, 128, 32, 1000 * many + seed), range(many)))
    for turn in range(fill // 4096 + 1):
        ask(url, 4096, 1, 90_000 + turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=512, help="MiB of KV pages")
    parser.add_argument("--fill", type=int, default=24_000, help="tokens of the prompts that fill the pool")
    options, rest = parser.parse_known_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = (
        "--device",
        "cpu",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "m",
        "--kv-cache-memory-bytes",
        f"{options.pool}M",
    )
    server = subprocess.Popen((*SERVE, *rest, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while server.poll() is None and not _ready(url):
            time.sleep(0.2)
        rest_mib, peak = pss_mib(server.pid), PeakMemory(server.pid)
        peak.start()
        load(url, options.fill)
        figures = {"at_rest": round(rest_mib, 1), "peak": round(peak.end(), 1), "anonymous": anonymous_mib(server.pid)}
        print(json.dumps({"model": rest[:1], "pool": options.pool, **figures}), flush=True)
    finally:
        server.terminate()
        server.wait(20)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
