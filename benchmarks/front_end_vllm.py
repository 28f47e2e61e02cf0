"""vLLM's API process over an engine that computes nothing, for `front_end.py --url`: its own server and AsyncLLM, with the client of its
engine's process replaced. What that client would have to receive and decode is not counted against it.

    python benchmarks/front_end_vllm.py TOKENS_PER_S --model FOLDER --load-format dummy --served-model-name null --port 8765 …
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

TEXT = "The quick brown fox jumps over the lazy dog, and a pagoda is a tower with many eaves. "


class NullClient:
    """Gives every request the text's tokens, one a step, so many a second of all requests together."""

    def __init__(self, rate: float, ids: list[int]) -> None:
        self._rate, self._ids = rate, ids
        self._left: dict[str, int] = {}
        self._place, self._due = 0, time.monotonic()
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._left or time.monotonic() < self._due:
            await asyncio.sleep(max(0.001, self._due - time.monotonic()))
        self._due = max(self._due + len(self._left) / self._rate, time.monotonic() - 0.05)
        token = self._ids[self._place % len(self._ids)]
        self._place += 1
        outputs = [EngineCoreOutput(name, [token], finish_reason=self._reason(left)) for name, left in self._left.items()]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return EngineCoreOutputs(outputs=outputs)

    def _reason(self, left: int) -> FinishReason | None:
        return FinishReason.LENGTH if left <= 1 else None

    def shutdown(self, timeout: float | None = None) -> None: ...

    def __getattr__(self, name: str) -> Any:
        async def nothing(*arguments: Any, **more: Any) -> None: ...

        if name.endswith("_async"):
            return nothing
        raise AttributeError(name)


def main() -> None:
    rate = float(sys.argv.pop(1))

    def made(*arguments: Any, renderer: Any, **more: Any) -> NullClient:
        return NullClient(rate, renderer.tokenizer.encode(TEXT))

    EngineCoreClient.make_async_mp_client = staticmethod(made)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
