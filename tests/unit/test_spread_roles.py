"""A device that parts whole tensors over its chips is told along which dimension: that of each tensor's role, and one rank does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.device import Spread, Spreads
from pagoda.hal.discovery import find
from pagoda.hal.table import KernelPolicy
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.ops.table import kernel_table
from pagoda.serving.engine.target import open_target, ranks
from tiny import tiny_config


class Chips:
    """The reference device, which notes what it is told to part."""

    def __init__(self) -> None:
        self._device: Any = find("reference").open()
        self.laid: dict[tuple[int, ...], set[int | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def extension(self, protocol: type) -> Any:
        return self if protocol is Spread else None

    def lay(self, tensor: torch.Tensor, dim: int | None) -> None:
        self.laid.setdefault(tuple(tensor.shape), set()).add(dim)


def test_each_weight_is_parted_as_its_role_says(tmp_path: Path) -> None:
    config, device = tiny_config(tmp_path), Chips()
    table = kernel_table(find("reference"), device.info, KernelPolicy())
    description = describe(open_checkpoint(config.model, "dummy"), dtype="float32", table=table)
    load_model(description, device, table)  # type: ignore[arg-type]
    qkv, out, gate_up, down, vocab = (128, 64), (64, 64), (192, 64), (64, 96), (211, 64)
    assert device.laid == {qkv: {0}, out: {1}, gate_up: {0}, down: {1}, vocab: {0}, (64,): {None}}


def test_one_process_stands_for_all_chips_of_such_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, device="reference", tensor_parallel_size=4)
    assert isinstance(find("tpu"), Spreads) and not isinstance(find("reference"), Spreads)
    assert ranks(config) == 4
    opened: list[tuple[int, int]] = []

    def open_spread(self: Any, index: int, chips: int) -> Any:
        opened.append((index, chips))
        return self.open(0)

    monkeypatch.setattr(type(find("reference")), "open_spread", open_spread, raising=False)
    target = open_target(config)
    assert (ranks(config), target.ranks, target.sharing, opened) == (1, 1, 1, [(0, 4)])
