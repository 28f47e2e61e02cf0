"""The scheduler's book of adapters: which are loaded, which have a device slot, and what the ranks must put where."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pagoda.hal.errors import ConfigError, NotFoundError
from pagoda.serving.engine.plan import Placement
from pagoda.serving.engine.slots import Slots

NO_ADAPTER = -1


class AdapterModule(NamedTuple):
    """An adapter as a user names it: requests ask for `name`; `path` is a PEFT folder; `parent`: the model it belongs to."""

    name: str
    path: str
    parent: str | None = None


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests may use. `number` tells it from others of the same name; `key` is part of the block hash."""

    module: AdapterModule
    number: int
    key: str
    rank: int


class AdapterBook:
    """Args:
    slots: the running sequences, whose `adapter` says which device slots are in use.
    device_slots: how many there are; 0 where adapters were not enabled.
    loaded: adapters that the ranks have read.
    """

    def __init__(self, slots: Slots, device_slots: int, loaded: Iterable[LoadedAdapter] = ()) -> None:
        self.loaded = {adapter.module.name: adapter for adapter in loaded}
        self._slots = slots
        self._held = [NO_ADAPTER] * device_slots
        self._used_at = [0] * device_slots
        self._turn = 0
        self._pending: list[Placement] = []

    @property
    def enabled(self) -> bool:
        return bool(self._held)

    def find(self, name: str) -> LoadedAdapter:
        """Raises `NotFoundError` for a name that is not loaded."""
        if name not in self.loaded:
            there = f"there is: {', '.join(sorted(self.loaded))}" if self.loaded else "none is loaded"
            raise NotFoundError(f"adapter {name!r} is not loaded here; {there}", param="model", code="model_not_found")
        return self.loaded[name]

    def place(self, adapter: LoadedAdapter) -> int | None:
        """The device slot that holds the adapter from the next step on; None while running sequences use all of them."""
        self._turn += 1
        if adapter.number in self._held:
            slot = self._held.index(adapter.number)
        else:
            used = set(np.unique(self._slots.adapter).tolist())
            free = [slot for slot in range(len(self._held)) if slot not in used]
            if not free:
                return None
            slot = min(free, key=lambda one: (self._held[one] != NO_ADAPTER, self._used_at[one]))
            self._held[slot] = adapter.number
            self._pending.append(Placement(slot, adapter.number))
        self._used_at[slot] = self._turn
        return slot

    def take_placements(self) -> tuple[Placement, ...]:
        """What the ranks must put into their slots before the step that is planned now."""
        if not self._pending:
            return ()
        pending, self._pending = self._pending, []
        return tuple(pending)

    def evict(self, number: int) -> None:
        """The ranks are about to drop the adapter, which no live request uses."""
        self._held = [NO_ADAPTER if held == number else held for held in self._held]
        self._pending = [placement for placement in self._pending if placement.adapter != number]

    def forget(self) -> None:
        """The ranks' slots are empty (their weights were loaded again)."""
        self._held = [NO_ADAPTER] * len(self._held)
        self._pending = []


def modules_of(texts: Iterable[str]) -> tuple[AdapterModule, ...]:
    """`name=path`, or JSON with `name`, `path` and perhaps `base_model_name`. Raises `ConfigError`; names must differ."""
    modules = tuple(_module(text) for text in texts)
    names = [module.name for module in modules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"lora_modules names {', '.join(twice)} twice; adapters need names of their own")
    return modules


def _module(text: str) -> AdapterModule:
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"lora_modules {text!r} must be name=path, or JSON with name and path")
        return AdapterModule(name, path)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"lora_modules {text!r} is not valid JSON: {error}") from None
    if not all(isinstance(values.get(key), str) and values[key] for key in ("name", "path")):
        raise ConfigError(f"lora_modules {text!r} must have texts for name and path")
    return AdapterModule(values["name"], values["path"], values.get("base_model_name"))
