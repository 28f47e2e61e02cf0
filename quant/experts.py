"""Reads the routed experts of a rank, as plain numbers or in ggml blocks: `up` holds gate, then up."""

from __future__ import annotations

import torch
from pagoda.ops.gguf.types import GgmlType
from pagoda.quant.format import ExpertsUse, Format


class Experts:
    """What `FormatUse.load` calls.

    Args:
        form: turns stored tensors into plain numbers.
        kinds: formats in which up and down stay; None decodes them.
    """

    def __init__(self, form: Format, use: ExpertsUse, kinds: tuple[GgmlType, GgmlType] | None = None) -> None:
        self._form = form
        self._use = use
        self._kinds = kinds

    @property
    def nbytes(self) -> int:
        facts, experts, hidden = self._use.facts, len(self._use.experts), len(self._use.hidden)
        wide = hidden * (2 if facts.gated else 1)
        size: int = getattr(torch, facts.dtype).itemsize
        rows = (facts.width * size, hidden * size)
        if self._kinds is not None:
            rows = (self._kinds[0].row_bytes(facts.width), self._kinds[1].row_bytes(hidden))
        bias = (wide + facts.width) * size if facts.bias else 0
        return experts * (wide * rows[0] + facts.width * rows[1] + bias)

    def __call__(self) -> dict[str, torch.Tensor]:
        hidden = slice(self._use.hidden.start, self._use.hidden.stop)
        parts = [part for part in ("gate", "up") if part in self._use.tensors]
        loaded = {"up": _joined([self._matrix(part, hidden) for part in parts]), "down": self._matrix("down", slice(None), hidden)}
        if self._use.facts.bias:
            loaded |= {"up_bias": _joined([self._plain(part, "bias", hidden) for part in parts]), "down_bias": self._plain("down", "bias")}
        return loaded

    def _matrix(self, part: str, *index: slice) -> torch.Tensor:
        if self._kinds is None:
            return self._plain(part, "weight", *index)
        return self._use.tensors[part]["weight"].read((self._experts, *index))

    def _plain(self, part: str, name: str, *index: slice) -> torch.Tensor:
        return self._form.plain(self._use.tensors[part][name], self._use.facts.dtype, (self._experts, *index))

    @property
    def _experts(self) -> slice:
        return slice(self._use.experts.start, self._use.experts.stop)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
