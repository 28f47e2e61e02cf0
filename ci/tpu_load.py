"""A warm engine compiles nothing, whatever it is asked: random load on `--device tpu`, held against torch-xla's own count of compilations.

`PJRT_DEVICE=CPU python ci/tpu_load.py [--requests N]`; `make test-tpu` runs it. Exits with 1 where a program was compiled under load.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.discovery import choose
from pagoda.serving.conformance.check import Target
from pagoda.serving.conformance.engines import ask, running
from pagoda.serving.conformance.level5_engine import PLAIN, mixed_load

PAGES = 14
"""Room for a request and a half of the longest: requests compete, are preempted and copied."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    asked = parser.parse_args().requests
    backend = choose("tpu").backend
    device = backend.open()
    runtime = device.extension(Runtime)
    assert runtime is not None
    warm, after, tokens = asyncio.run(_under_load(Target(backend, device), runtime, asked))
    print(f"{warm} programs were compiled at start, {after - warm} under a load of {asked} requests and {tokens} tokens")
    print(f"operators that ran on the host: {runtime.host_trips() or 'none'}")
    sys.exit(after > warm or not warm)


async def _under_load(target: Target, runtime: Runtime, count: int) -> tuple[int, int, int]:
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": PAGES}
    async with running(target, PLAIN, **settings) as run:
        warm = runtime.compilations()
        answers = await asyncio.gather(*(ask(run, one) for one in mixed_load(5, count)))
        given = sum(len(part.token_ids) for deltas in answers for delta in deltas for part in delta.sequences)
        return warm, runtime.compilations(), given


if __name__ == "__main__":
    main()
