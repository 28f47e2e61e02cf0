"""Profiles of all ranks, started and stopped together by the engine's control calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pagoda.hal.errors import NotFoundError, PagodaError
from pagoda.serving.engine.executor import Executor
from pagoda.serving.engine.profile_config import ProfilerConfig


class ProfileDesk:
    """Raises what one of the ranks returns as an error; the others then go on."""

    def __init__(self, executor: Executor, config: ProfilerConfig | None) -> None:
        self._executor, self._config = executor, config

    @property
    def controls(self) -> dict[str, Callable[..., Any]]:
        """By the names of the engine's calls."""
        return {"start_profile": self.start, "stop_profile": self.stop}

    def start(self) -> None:
        self._all("start_profile", config=asdict(self._checked()))

    def stop(self) -> list[str]:
        """The files, a rank each."""
        self._checked()
        return [str(path) for path in self._all("stop_profile")]

    def _checked(self) -> ProfilerConfig:
        if self._config is None:
            raise NotFoundError("""this server takes no profiles; start it with --profiler-config '{"torch_profiler_dir": FOLDER}'""")
        return self._config

    def _all(self, method: str, **arguments: Any) -> list[Any]:
        answers = self._executor.collective(method, **arguments)
        for answer in answers:
            if isinstance(answer, PagodaError):
                raise answer
        return answers
