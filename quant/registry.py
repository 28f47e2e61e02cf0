"""Every number format by name, and which one a checkpoint is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.hal.errors import ConfigError, ModelError
from pagoda.quant.format import Format, StoredTensor
from pagoda.quant.fp8 import Fp8Format
from pagoda.quant.gguf import GgufFormat
from pagoda.quant.none import PlainFormat

FORMATS: tuple[Format, ...] = (PlainFormat(), GgufFormat(), Fp8Format())


def format_for(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], asked: str | None = None) -> Format:
    """The format called `asked`, or the one that claims the checkpoint.

    Raises `ConfigError` for a name that is not here, `ModelError` for a checkpoint that nothing here reads.
    """
    known = ", ".join(format.name for format in FORMATS)
    if asked is not None:
        found = [format for format in FORMATS if format.name == asked]
        if not found:
            raise ConfigError(f"quantization={asked!r} is not a known format; known: {known}")
        return found[0].bound(config, tensors)
    claiming = [format for format in FORMATS if format.claims(config, tensors)]
    if not claiming:
        raise ModelError(
            f"no number format reads this checkpoint (quantization_config {config.get('quantization_config')}); known: {known}"
        )
    return claiming[0].bound(config, tensors)
