"""Bytes that loaded weights take, counted from the tensors themselves: what a plan is held against."""

from __future__ import annotations

from typing import Any

import torch


class Loaded:
    """Counts each memory once, however many packed forms share it."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def add(self, packed: Any) -> None:
        """A tensor, or what a kernel's `pack` gave: containers of tensors, or objects that keep theirs in `tensors`."""
        if isinstance(packed, torch.Tensor):
            storage = packed.untyped_storage()
            self._sizes[storage._cdata] = storage.nbytes()  # unlike the address, distinct without memory too
        elif isinstance(packed, dict):
            self.add(list(packed.values()))
        elif isinstance(packed, list | tuple):
            for part in packed:
                self.add(part)
        elif packed is not None:
            self.add(tuple(getattr(packed, "tensors", ())))
