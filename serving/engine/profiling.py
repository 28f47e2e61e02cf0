"""A trace of what a rank does between two control calls, by torch's profiler: a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.errors import PagodaError, RequestError
from pagoda.serving.engine.profile_config import ProfilerConfig


class Profiler:
    """Of one rank, in the thread that runs its steps. Errors are returned, since what a rank raises ends it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._running: torch.profiler.profile | None = None
        self._config: ProfilerConfig

    def start_profile(self, config: Mapping[str, Any]) -> PagodaError | None:
        """`config`: of a `ProfilerConfig`."""
        if self._running is not None:
            return RequestError("a profile is being taken already; stop it first")
        self._config = ProfilerConfig(**config)
        try:
            Path(self._config.torch_profiler_dir).mkdir(parents=True, exist_ok=True)
            self._running = torch.profiler.profile(
                activities=torch.profiler.supported_activities(),
                record_shapes=self._config.torch_profiler_record_shapes,
                profile_memory=self._config.torch_profiler_with_memory,
                with_stack=self._config.torch_profiler_with_stack,
            )
            self._running.start()
        except (OSError, RuntimeError) as error:
            self._running = None
            return PagodaError(f"no profile can be taken: {error}")
        return None

    def stop_profile(self) -> str | PagodaError:
        """The file that was written."""
        if self._running is None:
            return RequestError("no profile is being taken; start one first")
        running, self._running = self._running, None
        name = f"rank{self._rank}.{time.strftime('%Y%m%d-%H%M%S')}.{os.getpid()}.{time.monotonic_ns()}.pt.trace.json"
        path = Path(self._config.torch_profiler_dir) / (name + ".gz" * self._config.torch_profiler_use_gzip)
        try:
            running.stop()
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return PagodaError(f"the profile cannot be written: {error}")
        return str(path)

    def step(self, rows: int, tokens: int) -> AbstractContextManager[Any]:
        """Around one step, which then has a name in the trace: steps that are replayed show little else."""
        return nullcontext() if self._running is None else torch.profiler.record_function(f"step of {rows} requests, {tokens} tokens")
