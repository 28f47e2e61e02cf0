"""Device slots for adapters: every linear layer keeps room for some, and a step says which token uses which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pagoda.models.blocks.linear import Linear
from pagoda.ops.lora import LoraFacts


@dataclass(frozen=True)
class LoraLimits:
    """How many adapters a device holds at a time, and their largest rank."""

    slots: int
    rank: int


@dataclass(frozen=True)
class Factors:
    """One adapter's change of one part of a linear layer, on one rank's host: `up @ down` is added to its weight.

    Attributes:
        down: `[r, in_features]`. up: `[r, out_features]`, times the adapter's scale.
    """

    down: torch.Tensor
    up: torch.Tensor


class AdaptedLinear:
    """A linear layer with room for adapters: its parts stay addressable by name although they are stacked."""

    __slots__ = ("_base", "_down", "_facts", "_places", "_run", "_up")

    def __init__(self, base: Linear, run: Any, facts: LoraFacts, names: tuple[str, ...], down: torch.Tensor, up: torch.Tensor) -> None:
        self._base, self._run, self._facts = base, run, facts
        self._places = {name: place for place, name in enumerate(names)}
        self._down, self._up = down.zero_(), up.zero_()

    def __call__(self, x: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """x `[T, in]` → `[T, out]`; `adapters` `[T]` int32, slot of each token or −1."""
        out = self._base(x)
        if adapters is not None:
            self._run(out, x, self._down, self._up, adapters)
        return out

    def place(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """What `slot` adds from now on, by part name; parts that are not named get nothing."""
        self._down[slot].zero_()
        self._up[slot].zero_()
        for name, pair in factors.items():
            place, rank = self._places[name], pair.down.shape[0]
            first, start = place * self._facts.rank, sum(self._facts.parts[:place])
            self._down[slot, first : first + rank].copy_(pair.down)
            self._up[slot, :rank, start : start + self._facts.parts[place]].copy_(pair.up)


class AdapterSlots:
    """All layers of a model that adapters may change. `layers`: by the path that their parts' paths begin with."""

    def __init__(self) -> None:
        self.layers: dict[str, AdaptedLinear] = {}
        self._of_part: dict[str, tuple[str, str]] = {}

    def add(self, path: str, parts: tuple[str, ...], layer: AdaptedLinear) -> None:
        """`path.part` for each of `parts` is a slice of `layer`."""
        key = f"{path}.{'_'.join(parts)}"
        self.layers[key] = layer
        self._of_part.update({f"{path}.{part}": (key, part) for part in parts})

    def place(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Put an adapter, by part path, into a slot of every layer; what was there goes."""
        by_layer: dict[str, dict[str, Factors]] = {key: {} for key in self.layers}
        for path, pair in factors.items():
            key, part = self._of_part[path]
            by_layer[key][part] = pair
        for key, layer in self.layers.items():
            layer.place(slot, by_layer[key])
