"""Pagoda serves large language models on any accelerator. The SDK in one screen; everything heavy loads on first use."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.serving.engine.params import SamplingParams
    from pagoda.serving.engine.pooling import PoolingParams
    from pagoda.serving.frontend.lora import LoRARequest
    from pagoda.serving.sdk import LLM, AsyncLLM, devices

# Read once by libgomp, which torch loads later, for torch's own parallel operations: its threads spin for tens of microseconds and then
# sleep. With its own default they spin for milliseconds on the processors that the native kernels' threads want.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "LoRARequest", "PoolingParams", "SamplingParams", "__version__", "devices"]

_HOMES = {
    "LLM": "pagoda.serving.sdk",
    "AsyncLLM": "pagoda.serving.sdk",
    "devices": "pagoda.serving.sdk",
    "LoRARequest": "pagoda.serving.frontend.lora",
    "PoolingParams": "pagoda.serving.engine.pooling",
    "SamplingParams": "pagoda.serving.engine.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
