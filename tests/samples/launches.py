"""What a step launches, seen on the CPU: primitives one by one, and the operators of torch around them; views launch nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagoda.hal.kernel import KernelRun
from pagoda.hal.table import Choice
from torch.utils._python_dispatch import TorchDispatchMode

NOTHING = frozenset({"empty", "empty_like", "empty_strided", "detach", "new_empty", "_unsafe_view", "lift_fresh"})
"""Operators that reserve memory, or name it otherwise, and are no views by their schema."""


class Launches(TorchDispatchMode):
    """Counts, while it is entered; `wrap` is for a `KernelTable`, whose primitives count as one each, whatever they do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._inside = 0
        self.entered = False

    def __enter__(self) -> Launches:
        self.entered = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.entered = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self._inside and not func.is_view and func.overloadpacket.__name__ not in NOTHING:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def wrap(self, choice: Choice, run: KernelRun) -> KernelRun:
        return _Counted(self, choice.op, run)

    @contextmanager
    def primitive(self, op: str) -> Iterator[None]:
        self.seen[f"primitive {op}"] += self.entered
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


class _Counted:
    def __init__(self, launches: Launches, op: str, run: KernelRun) -> None:
        self._launches, self._op, self._inner = launches, op, run
        self.pack, self.plan = run.pack, run.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self._launches.primitive(self._op):
            return self._inner.run(*args, **kwargs)
