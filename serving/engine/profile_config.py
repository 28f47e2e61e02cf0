"""`ProfilerConfig`: what `--profiler-config` asks for, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pagoda.hal.errors import ConfigError


@dataclass(frozen=True)
class ProfilerConfig:
    """`--profiler-config`: `torch_profiler_dir`, where traces are written; what they tell beside times: shapes of arguments, memory, the
    Python lines that called; and whether they are compressed."""

    torch_profiler_dir: str
    profiler: Literal["torch"] = "torch"
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_stack: bool = False
    torch_profiler_use_gzip: bool = True

    def __post_init__(self) -> None:
        if self.profiler != "torch":
            raise ConfigError(f"profiler_config: profiler={self.profiler!r} is unknown; there is torch")
        for name in [field.name for field in fields(self) if field.type == "bool"]:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"profiler_config: {name}={getattr(self, name)!r} must be true or false")
        if not isinstance(self.torch_profiler_dir, str) or not self.torch_profiler_dir:
            raise ConfigError(f"profiler_config: torch_profiler_dir={self.torch_profiler_dir!r} must be a folder")


def profiler_of(given: Mapping[str, Any] | None) -> ProfilerConfig | None:
    """The record of a configuration; None without one. Raises `ConfigError` that names the key or value."""
    if not given:
        return None
    known = [field.name for field in fields(ProfilerConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(f"profiler_config has no key {name!r}; it has {', '.join(known)}")
    if "torch_profiler_dir" not in given:
        raise ConfigError("profiler_config needs torch_profiler_dir, the folder that traces are written to")
    return ProfilerConfig(**given)
