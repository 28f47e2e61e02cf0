"""Float8 made of bytes, in Triton's interpreter, against torch's conversions: every byte, and roundings of all kinds, bit by bit.

`python ci/interpret_float8.py`; in a process of its own, since Triton decides when a kernel is declared whether it is interpreted.
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from pagoda.ops.triton.float8 import decoded, encoded

BLOCK = 1 << 16
FORMATS = {3: torch.float8_e4m3fn, 2: torch.float8_e5m2}


@triton.jit
def _decode(codes, out, FRACTION: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, decoded(tl.load(codes + i), FRACTION))


@triton.jit
def _encode(numbers, out, FRACTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, encoded(tl.load(numbers + i), FRACTION))


def main() -> int:
    warnings.simplefilter("ignore")  # numpy's, of infinities and NaN
    wrong = 0
    for fraction, dtype in FORMATS.items():
        codes = torch.arange(256, dtype=torch.uint8)
        means = codes.view(dtype).float()
        got = torch.empty(256, dtype=torch.float16)
        _decode[(1,)](codes, got, FRACTION=fraction)
        wrong += _differ(f"{dtype} read", got.float(), means)
        numbers = _numbers(means)
        stored = torch.empty(len(numbers), dtype=torch.uint8)
        _encode[(len(numbers) // BLOCK,)](numbers, stored, FRACTION=fraction, BLOCK=BLOCK)
        largest = torch.finfo(dtype).max
        want = numbers.clamp(-largest, largest).to(dtype)
        wrong += _differ(f"{dtype} written, {len(numbers):,} numbers", stored.view(dtype).float(), want.float())
        wrong += _differ(f"{dtype} written, signs", (stored & 0x80)[~numbers.isnan()], (want.view(torch.uint8) & 0x80)[~numbers.isnan()])
    print(f"{wrong} differ" if wrong else "every byte and every rounding is torch's")
    return 1 if wrong else 0


def _numbers(means: torch.Tensor) -> torch.Tensor:
    """Every float16, the codes, what lies half-way between them, those numbers' neighbours, and float32 of random bits."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    finite = means[means.isfinite()].sort().values
    ties = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, finite * 1.0625])
    near = [torch.nextafter(ties, torch.full_like(ties, side)) for side in (-torch.inf, torch.inf)]
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    found = torch.cat([halves, ties, *near, bits.view(torch.float32)])
    return torch.cat([found, found.new_zeros(-len(found) % BLOCK)])


def _differ(what: str, got: torch.Tensor, want: torch.Tensor) -> int:
    same = (got == want) | (got.isnan() & want.isnan())
    if not same.all():
        print(f"{what}: {got[~same][:5].tolist()}, not {want[~same][:5].tolist()}")
    return int((~same).sum())


if __name__ == "__main__":
    sys.exit(main())
