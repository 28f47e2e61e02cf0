"""Operators with a lowering of their own give what torch gives on the host, bit for bit where they are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pagoda.hal.discovery import find

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(scope="module")
def tpu() -> torch.device:
    return find("tpu").open().torch_device


def same(tpu: torch.device, work: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    found, wanted = work(*(tensor.to(tpu) for tensor in given)).cpu(), work(*given)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_right_shifts(tpu: torch.device, dtype: torch.dtype) -> None:
    bounds = torch.iinfo(dtype)
    numbers = torch.tensor([bounds.min, bounds.min + 1, 0, 1, 5, bounds.max], dtype=dtype)
    places = torch.arange(bounds.bits, dtype=dtype)
    same(tpu, lambda x, n: x[:, None] >> n, numbers, places)
    for number in numbers:
        same(tpu, lambda x, n: x >> n, number.view(1, 1, 1), places)
    for place in (0, 1, bounds.bits - 1):
        same(tpu, lambda x, place=place: x >> place, numbers)


def test_a_shifted_number_has_the_dtype_of_its_places(tpu: torch.device) -> None:
    same(tpu, lambda n: 0x00200000 << n, torch.tensor([0, 1, 2], dtype=torch.int32))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8(tpu: torch.device, kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(kind).float().isfinite()]
    same(tpu, lambda x: x.view(kind), codes)
    same(tpu, lambda x: x.view(kind).float(), codes)
    same(tpu, lambda x: x.view(kind).view(torch.uint8), codes)
    numbers = torch.cat([torch.linspace(-448, 448, 4001), torch.randn(1000, generator=torch.Generator().manual_seed(0)) / 64])
    found, wanted = numbers.to(tpu).to(kind).cpu().float(), numbers.to(kind).float()
    # PJRT's CPU client rounds by way of a wider small type: next to the middle of two codes it may take the other one, never a worse.
    assert bool(((found - numbers).abs() <= 1.02 * (wanted - numbers).abs()).all())
    assert int((found != wanted).sum()) <= len(numbers) // 100


def test_bytes_as_wider_and_narrower_numbers(tpu: torch.device) -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16)
    for dtype in (torch.int8, torch.int16, torch.float16, torch.float32, torch.int64):
        same(tpu, lambda x, dtype=dtype: x.view(dtype), codes)
        same(tpu, lambda x: x.view(torch.uint8), codes.view(dtype))


def test_look_ups_of_no_rows(tpu: torch.device) -> None:
    none = torch.zeros(0, 7, dtype=torch.int64)
    same(tpu, lambda x, index: x.gather(-1, index), torch.zeros(0, 33), none)
    same(tpu, lambda x, index: F.embedding(index, x), torch.ones(10, 4), none[:, 0])


def test_gelu_vanishes_far_below_zero(tpu: torch.device) -> None:
    numbers = torch.cat([torch.linspace(-200, 5, 2001), torch.tensor([-1e20, -3e38, 3e38, float("inf")])])
    for kind in ("none", "tanh"):
        found = F.gelu(numbers.to(tpu), approximate=kind).cpu().double()
        wanted = F.gelu(numbers.double(), approximate=kind)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-7)


def test_strides_with_gaps(tpu: torch.device) -> None:
    def written(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.as_strided((3, 4), (10, 2), 5).copy_(part)
        return x

    numbers = torch.arange(60.0)
    same(tpu, lambda x: x.as_strided((3, 4), (10, 2), 5), numbers)
    same(tpu, written, numbers, -torch.ones(3, 4))


def test_searchsorted(tpu: torch.device) -> None:
    row = torch.tensor([2, 2, 5, 9], dtype=torch.int32)
    for right in (False, True):
        same(tpu, lambda x, v, right=right: torch.searchsorted(x, v, right=right), row, torch.arange(12, dtype=torch.int32))
