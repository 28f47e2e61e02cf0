"""The shared accelerator workloads against this engine in process: `python benchmarks/gpu_workloads.py --bench DIR --model NAME …`.

DIR holds `workloads.py`, `workloads.json` and `models/`. NAME is one of its models, or the file of a configuration, such as
`benchmarks/shapes/nemotron-h-8b.json`. Weights are dummy; prompts are random; nothing of the server is needed.
Writes engine, model, versions and the workloads' results as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar

import torch
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.mailbox import PATIENCE
from pagoda.serving.engine.messages import EngineRequest, RequestDelta
from pagoda.serving.engine.params import SamplingParams

T = TypeVar("T")


class DummyEngine:
    """An engine with dummy weights of a plain configuration, and the one callable that the workloads need."""

    def __init__(self, config: dict[str, Any], **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "config.json").write_text(json.dumps(config))
        self._config = EngineConfig(model=self._folder.name, load_format="dummy", **settings)
        self._loop = asyncio.new_event_loop()
        self._count = 0

    def __enter__(self) -> Self:
        self._client = self._loop.run_until_complete(InProcessClient.start(engine_starter(self._config)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
        self._folder.cleanup()

    @property
    def facts(self) -> Any:
        return self._client.facts

    @property
    def client(self) -> InProcessClient:
        return self._client

    def captured(self) -> int:
        """How many steps are captured now."""
        return self.run(self._client.stats()).steps_captured

    def settle(self) -> int:
        """Wait for the captures that are made in idle moments, which would lie between measured rounds. Returns how many there are."""
        while self.run(self._client.stats()).steps_to_capture:
            self.run(asyncio.sleep(0.05))
        return self.captured()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Something else that speaks to the client."""
        return self._loop.run_until_complete(work)

    def tokens(self, prompts: list[list[int]], output_len: int, temperature: float = 1.0) -> list[list[int]]:
        """Run all prompts to exactly `output_len` new tokens each."""
        return self._loop.run_until_complete(self._all(prompts, output_len, temperature))

    def generate(self, prompts: list[list[int]], output_len: int) -> list[int]:
        return [len(tokens) for tokens in self.tokens(prompts, output_len)]

    def leads(self, prompt: list[int], output_len: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of one prompt, and how far each is ahead of the second best, in nats."""
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False, logprobs=2)
        deltas = self._loop.run_until_complete(self._collect(prompt, params))
        entries = [entry for delta in deltas for sequence in delta.sequences for entry in sequence.logprobs or ()]
        return [entry.token_id for entry in entries], [entry.top_logprobs[0] - entry.top_logprobs[1] for entry in entries]

    async def _all(self, prompts: list[list[int]], output_len: int, temperature: float) -> list[list[int]]:
        return await asyncio.gather(*(self._one(prompt, output_len, temperature) for prompt in prompts))

    async def _one(self, prompt: list[int], output_len: int, temperature: float) -> list[int]:
        params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
        return [token for delta in await self._collect(prompt, params) for sequence in delta.sequences for token in sequence.token_ids]

    async def _collect(self, prompt: list[int], params: SamplingParams) -> list[RequestDelta]:
        self._count += 1
        request = EngineRequest(f"request-{self._count}", tuple(prompt), params)
        return [delta async for delta in self._client.generate(request, PATIENCE)]


def load_workloads(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("workloads", folder / "workloads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


def load_spec(folder: Path, model: str) -> tuple[ModuleType, dict[str, Any], str]:
    """The workloads, what they are measured on, and the model's name there: a file's is its stem."""
    workloads = load_workloads(folder)
    spec, path = workloads.load_spec(folder / "workloads.json"), Path(model)
    if model in spec["models"] or not path.is_file():
        return workloads, spec, model
    dtype = json.loads(path.read_text())["torch_dtype"]
    # An absolute path stays what it is below the folder's models.
    spec["models"][path.stem] = {"config": str(path.absolute()), "dtype": dtype, "quantization": None}
    return workloads, spec, path.stem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-0.6b-bf16")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kernel", action="append", default=[], metavar="OP=NAME", help="as the server's; repeatable")
    parser.add_argument("--graphs", default="full", choices=("full", "piecewise", "none"), help="as the server's")
    parser.add_argument("--model-impl", default="auto", help="as the server's")
    parser.add_argument("--torch-compile", action="store_true", help="as the server's")
    parser.add_argument("--deadline", type=float, help="seconds after which workloads are skipped")
    parser.add_argument("--out", type=Path, default=Path("gpu-workloads.json"))
    options = parser.parse_args()
    workloads, spec, name = load_spec(options.bench, options.model)
    start = time.perf_counter()
    result: dict[str, Any] = {
        "engine": "pagoda", "model": name, "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "workloads": {},
    }  # fmt: skip

    def save(name: str, value: Any) -> None:
        result["workloads"][name] = value
        options.out.write_text(json.dumps(result, indent=1))

    config = workloads.model_config(spec, name)
    model = spec["models"][name]
    settings = {"device": options.device, "dtype": model["dtype"], "quantization": model["quantization"], **spec["engine"]}
    settings["graphs"] = result["graphs"] = options.graphs
    settings["kv_cache_dtype"] = result["kv_cache_dtype"] = options.kv_cache_dtype
    settings["model_impl"], settings["torch_compile"] = options.model_impl, options.torch_compile
    result |= {"model_impl": options.model_impl, "torch_compile": options.torch_compile}
    settings["kernel"] = result["kernel"] = dict(one.split("=") for one in options.kernel)
    with DummyEngine(config, max_num_batched_tokens=8192, **settings) as engine:
        result["device"], result["start_s"] = engine.facts.device, time.perf_counter() - start
        began, first = time.perf_counter(), engine.captured()
        result["captures"] = {"at_start": first, "later": engine.settle() - first, "later_s": time.perf_counter() - began}
        deadline = None if options.deadline is None else start + options.deadline
        names = options.workloads.split(",")
        workloads.run_all(spec, name, names, engine.generate, lambda line: print(line, flush=True), save, deadline)


if __name__ == "__main__":
    main()
