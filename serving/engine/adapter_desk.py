"""Loads and unloads adapters on all ranks between steps, and sees to it that those asked for are in the ranks' host memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from pagoda.hal.errors import PagodaError, RequestError
from pagoda.serving.engine.adapters import AdapterModule, LoadedAdapter
from pagoda.serving.engine.executor import Executor
from pagoda.serving.engine.scheduler import Scheduler


class AdapterDesk:
    """Args:
    limit: most adapters in host memory (those of live requests stay in any case); None is no limit.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, limit: int | None = None) -> None:
        self._scheduler, self._executor, self._limit = scheduler, executor, limit
        self._resident: OrderedDict[int, None] = OrderedDict((one.number, None) for one in scheduler.adapters.loaded.values())
        self._next = len(self._resident)
        self._trim()

    def load(self, name: str, path: str, parent: str | None = None, in_place: bool = False) -> dict[str, Any]:
        """Let requests use the adapter in folder `path` as `name`; `in_place` may replace one, for requests from now on.

        Raises `RequestError` for a name that is taken and for an adapter that does not fit the model.
        """
        book = self._scheduler.adapters
        if not book.enabled:
            raise RequestError("this engine has no room for adapters; start it with --enable-lora", param="lora_name")
        if name in book.loaded and not in_place:
            raise RequestError(f"adapter {name!r} is loaded already; unload it first, or load in place", param="lora_name")
        number, self._next = self._next, self._next + 1
        digest, rank = self._read(number, path)
        old = book.loaded.get(name)
        book.loaded[name] = LoadedAdapter(AdapterModule(name, path, parent), number, digest, rank)
        if old is not None:
            self._drop_unused(old)
        self._trim()
        return {"name": name, "path": path, "rank": rank}

    def unload(self, name: str) -> None:
        """Refuse new requests for the adapter; those that run go on with it. Raises `NotFoundError`."""
        adapter = self._scheduler.adapters.find(name)
        del self._scheduler.adapters.loaded[name]
        self._drop_unused(adapter)

    def ensure(self, name: str) -> None:
        """Have the adapter in host memory, before its request is submitted. Raises `NotFoundError`, `RequestError`."""
        adapter = self._scheduler.adapters.find(name)
        if adapter.number not in self._resident:
            digest, _ = self._read(adapter.number, adapter.module.path)
            if digest != adapter.key:
                self._drop(adapter.number)
                raise RequestError(f"adapter {name!r} has changed on disk since it was loaded; load it again", param="model")
            self._trim(but=adapter.number)
        self._resident.move_to_end(adapter.number)

    def _read(self, number: int, path: str) -> tuple[str, int]:
        answers = self._executor.collective("load_adapter", number=number, path=path)
        self._resident[number] = None
        failed = next((answer for answer in answers if isinstance(answer, PagodaError)), None)
        if failed is not None:
            self._drop(number)
            raise RequestError(str(failed), param="lora_path")
        digest, rank = answers[0]
        return digest, rank

    def _trim(self, but: int | None = None) -> None:
        """Forget what nobody can ask for, and the least recently used beyond the limit."""
        known = {adapter.number for adapter in self._scheduler.adapters.loaded.values()}
        for number in list(self._resident):
            full = self._limit is not None and len(self._resident) > self._limit
            if number != but and (number not in known or full) and not self._scheduler.uses_adapter(number):
                self._drop(number)

    def _drop_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.number in self._resident and not self._scheduler.uses_adapter(adapter.number):
            self._drop(adapter.number)

    def _drop(self, number: int) -> None:
        self._scheduler.adapters.evict(number)
        self._resident.pop(number, None)
        self._executor.collective("drop_adapter", number=number)
