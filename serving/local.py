"""An engine in this process for a configuration: what `LLM`, `AsyncLLM` and the commands open."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any, get_type_hints

from pagoda.hal.errors import ConfigError
from pagoda.models.loading.reference import resolve
from pagoda.serving.engine.config import EngineConfig, Flag
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.frontend.generation_config import sampling_defaults
from pagoda.serving.frontend.load import text_of
from pagoda.serving.frontend.media import MediaProcessor
from pagoda.serving.frontend.processor import Processor
from pagoda.serving.frontend.session import Session
from pagoda.serving.frontend.structured.starter import structured_starter


def config_of(model: str | None, given: dict[str, Any]) -> EngineConfig:
    """The configuration from keyword arguments; flags' other names work too, such as `gpu_memory_utilization`.

    Raises `ConfigError` for an unknown one, naming the nearest.
    """
    names = _names()
    fields = {} if model is None else {"model": model}
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EngineConfig.__dataclass_fields__)}"
            raise ConfigError(f"unknown engine setting {name}; {hint}")
        fields[names[name]] = value
    return EngineConfig(**fields)


def _names() -> dict[str, str]:
    names = {}
    for name, hint in get_type_hints(EngineConfig, include_extras=True).items():
        aliases = (alias for extra in hint.__metadata__ if isinstance(extra, Flag) for alias in extra.aliases)
        names |= {name: name} | {alias[2:].replace("-", "_"): name for alias in aliases if alias.startswith("--")}
    return names


async def open_local(config: EngineConfig) -> Session:
    """Load the model and start its loop in this process. Raises `PagodaError`s, those of the configuration before weights load."""
    path = resolve(config.model, config.revision, cache=config.download_dir)
    text = text_of(config)
    client = await InProcessClient.start(structured_starter(replace(config, model=str(path))))
    media = MediaProcessor(path) if client.facts.modalities else None
    return Session(client, Processor(text, client.facts, sampling_defaults(path), media))
