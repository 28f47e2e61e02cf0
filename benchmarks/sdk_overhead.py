"""What the SDK's side of a token costs: `python benchmarks/sdk_overhead.py`.

An engine that only counts feeds the real streams, text side and outputs. Printed are microseconds of CPU time a token, for a batch
that is read at its end and for streams that are read as they grow.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, FinishReason, RequestDelta, SequenceDelta, StepDeltas
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.streams import Streams
from pagoda.serving.frontend.load import text_of
from pagoda.serving.frontend.outputs import RequestOutput
from pagoda.serving.frontend.processor import Processor
from pagoda.serving.frontend.session import Session

REQUESTS, TOKENS = 256, 128


class CountingEngine:
    """As much of `EngineClient` as a session needs; `step` gives every request its next token."""

    facts = EngineFacts(max_model_len=4096, num_pages=1, tokens_per_page=16, vocab_size=1000, device="none")

    def __init__(self) -> None:
        self._streams = Streams()
        self._ids: list[str] = []

    async def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        async for delta in self._streams.generate(request, lambda r: self._ids.append(r.request_id), lambda _: None, patience):
            yield delta

    def step(self, number: int) -> None:
        reason = FinishReason.LENGTH if number == TOKENS - 1 else None
        if number == 0 or reason is not None:
            part = SequenceDelta(0, (5,), finish_reason=reason)
            self._streams.deliver(StepDeltas(others=[RequestDelta(i, (part,), finished=reason is not None) for i in self._ids]))
        else:
            self._streams.deliver(StepDeltas(self._ids, [300 + number] * len(self._ids)))


async def grown(session: Session, request: EngineRequest) -> RequestOutput:
    return [output async for output in session.run(request)][-1]


async def measure(batch: bool) -> float:
    """Microseconds of CPU time a token."""
    engine = CountingEngine()
    session = Session(engine, Processor(text_of(EngineConfig()), engine.facts))  # type: ignore[arg-type]
    requests = [session.of_prompt([5, 6, 7], SamplingParams(max_tokens=TOKENS))[0] for _ in range(REQUESTS)]
    tasks = [asyncio.create_task(session.complete(r) if batch else grown(session, r)) for r in requests]
    await asyncio.sleep(0)
    began = time.process_time()
    for number in range(TOKENS):
        engine.step(number)
        for _ in range(3):  # readers run between steps, as they do while a device works
            await asyncio.sleep(0)
    outputs = await asyncio.gather(*tasks)
    spent = time.process_time() - began
    assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
    return spent / (REQUESTS * TOKENS) * 1e6


def main() -> None:
    result = {name: min(asyncio.run(measure(batch)) for _ in range(3)) for name, batch in (("batch", True), ("streams", False))}
    print(json.dumps({"benchmark": "sdk_overhead", "us_per_token": result, "requests": REQUESTS, "tokens": TOKENS}))


if __name__ == "__main__":
    main()
