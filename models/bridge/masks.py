"""What a mask function of transformers lets a query see, found by asking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.models.bridge.spec import Visible
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

FAR = 1 << 24
"""A query further than any window."""

Sees = Callable[[int, int], bool]


def visible_of(mask_function: Callable[..., torch.Tensor], where: str) -> Visible:
    """Raises `ModelError` for a mask that is neither causal, sliding nor chunked."""

    def sees(query: int, key: int) -> bool:
        with _Zeros():
            return bool(mask_function(*(torch.tensor(number) for number in (0, 0, query, key))))

    try:
        found = _found(sees)
        queries = _queries(found)
        agrees = all(sees(q, k) == _expected(found, q, k) for q in queries for k in _keys(q, queries))
    except (IndexError, RuntimeError, TypeError) as error:
        raise ModelError(f"{where} is masked by a rule that needs more than positions ({error})") from error
    if not agrees:
        raise ModelError(f"{where} is masked by a rule that is neither causal, sliding nor chunked")
    return found


class _Zeros(TorchDispatchMode):
    """Tensors without numbers are zeros: how much padding stands before a text, of which there is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs or {}))


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _found(sees: Sees) -> Visible:
    first = _first(sees, FAR)
    if first == 0:
        return Visible()
    if _first(sees, FAR + 1) != first and _first(sees, FAR + 2) != _first(sees, FAR + 1):
        return Visible(window=FAR - first + 1)
    return Visible(chunk=first - _first(sees, first - 1))


def _first(sees: Sees, query: int) -> int:
    """The first key that a query sees, if what it sees is one stretch that ends with itself."""
    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sees(query, middle) else (middle + 1, high)
    return low


def _queries(found: Visible) -> list[int]:
    edge = found.window or found.chunk or 8
    return sorted({q for base in (0, edge, 2 * edge, 5 * edge) for q in (base - 1, base, base + 1, base + 2) if q >= 0})


def _keys(query: int, queries: list[int]) -> list[int]:
    return sorted({*queries, query, query + 1, max(query - 1, 0)})


def _expected(found: Visible, query: int, key: int) -> bool:
    if key > query:
        return False
    if found.window is not None:
        return query - key < found.window
    return found.chunk is None or query // found.chunk == key // found.chunk
