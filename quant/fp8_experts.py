"""Reads the routed experts of a rank in their float8 codes, with their scales: `up` holds gate, then up."""

from __future__ import annotations

import torch
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts
from pagoda.quant.format import ExpertsUse, Format
from pagoda.quant.fp8_scales import rows_of, scale_of


class Fp8Experts:
    """What `FormatUse.load` calls."""

    def __init__(self, form: Format, use: ExpertsUse, facts: MoeMlpFp8Facts) -> None:
        self._form, self._use, self._facts = form, use, facts
        self._experts = slice(use.experts.start, use.experts.stop)

    def __call__(self) -> dict[str, torch.Tensor]:
        hidden, everything = slice(self._use.hidden.start, self._use.hidden.stop), slice(None)
        wide = [part for part in ("gate", "up") if part in self._use.tensors]
        loaded = {}
        for name, parts, index in (("up", wide, (hidden, everything)), ("down", ["down"], (everything, hidden))):
            loaded[name] = torch.cat([self._use.tensors[part]["weight"].read((self._experts, *index)) for part in parts], 1)
            loaded[f"{name}_scale"] = torch.cat([self._scales(part, index) for part in parts], 1)
            if self._use.facts.bias:
                loaded[f"{name}_bias"] = torch.cat([self._bias(part, index[0]) for part in parts], 1)
        return loaded

    def _scales(self, part: str, index: tuple[slice, slice]) -> torch.Tensor:
        tensors, block = self._use.tensors[part], self._facts.block
        _, scale = scale_of(tensors)
        if not block:
            return rows_of(scale, tensors["weight"].shape, (self._experts, index[0]))
        cut = (
            slice(None if one.start is None else one.start // block, None if one.stop is None else -(-one.stop // block)) for one in index
        )
        return scale.read((self._experts, *cut)).float()

    def _bias(self, part: str, rows: slice) -> torch.Tensor:
        return self._form.plain(self._use.tensors[part]["bias"], self._facts.dtype, (self._experts, rows))
