"""Adapters, attention of whole segments, choice of keys and attention over them, each in a CUDA graph beside what it must at least take:
`python benchmarks/gpu_spans.py [--only adapters,segments,choices]`; `--smoke` runs small ones once on the CPU in Triton's interpreter.

The floor is the larger of bytes (what is touched, once) over `CEILING` and of operations over `RATE`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_kernels import CEILING, timed
from pagoda.ops.attention import PagedBatch
from pagoda.ops.lora import LoraDeltaReference, LoraFacts
from pagoda.ops.segment_attention import SegmentAttentionFacts, SegmentAttentionReference, SegmentAttentionTorch, Segments
from pagoda.ops.sparse_attention import ChooseFacts, ChooseKeysReference, SparseAttentionFacts, SparseAttentionReference
from pagoda.ops.triton.choose_keys import ChooseKeys
from pagoda.ops.triton.lora import LoraDelta
from pagoda.ops.triton.segment_attention import SegmentAttention
from pagoda.ops.triton.sparse_attention import SparseAttention

RATE = 8e14
"""Operations a second of bfloat16 products that a cool H200 reaches."""


class Sizes(NamedTuple):
    """What is measured, or tried."""

    device: str
    dtype: str
    layers: tuple[tuple[int, tuple[int, ...]], ...]
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    segments: tuple[tuple[str, SegmentAttentionFacts, tuple[int, ...]], ...]
    heads: tuple[int, ...]
    latent: tuple[int, int]
    index: tuple[int, int, int]
    contexts: tuple[tuple[int, int], ...]


def segment_facts(dtype: str, heads: int, kv_heads: int, dim: int, **more: Any) -> SegmentAttentionFacts:
    return SegmentAttentionFacts(dtype, heads, kv_heads, dim, dim**-0.5, **more)


def full() -> Sizes:
    of = partial(segment_facts, "bfloat16")
    segments = (
        ("Whisper, 1", of(20, 20, 64), (1500,)), ("Whisper, 8", of(20, 20, 64), (1500,) * 8), ("texts", of(12, 12, 64), (128,) * 64),
        ("ModernBERT", of(12, 12, 64, window=64), (1024,) * 8), ("T5", of(32, 32, 64, bias=True), (512,) * 8),
        ("heads of 72", of(16, 16, 72), (4096,)), ("heads of 80", of(16, 16, 80), (4096,)), ("heads of 128", of(16, 16, 128), (4096,)),
    )  # fmt: skip
    layers = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,)))
    contexts = ((1, 65536), (16, 16384), (64, 16384))
    return Sizes("cuda", "bfloat16", layers, (16, 64), (1, 16, 64, 256, 2048), segments, (16, 128), (576, 512), (64, 128, 2048), contexts)


def small() -> Sizes:
    of = partial(segment_facts, "float16")
    segments = (("two", of(2, 1, 24), (40, 7)), ("window", of(2, 2, 16, window=3), (20,)), ("bias", of(2, 2, 16, bias=True), (20, 9)))
    return Sizes("cpu", "float16", ((96, (32, 16)),), (8,), (3, 70), segments, (4,), (48, 32), (4, 16, 12), ((2, 40),))


class Found(NamedTuple):
    """One use: our call, others to compare with, bytes and operations that it takes at least, and results ours and true."""

    label: str
    ours: list[Callable[[], Any]]
    others: dict[str, Callable[[], Any]]
    nbytes: float
    operations: float
    check: Callable[[], float]


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    return float(((have.double() - want.double()).norm() / want.double().norm()).cpu())


def adapters(sizes: Sizes) -> Iterator[Found]:
    """Every row with an adapter, eight of them there and as many used as rows allow."""
    dtype, slots = getattr(torch, sizes.dtype), 8
    for (inner, parts), rank, rows in ((layer, r, t) for layer in sizes.layers for r in sizes.ranks for t in sizes.rows):
        facts = LoraFacts(sizes.dtype, inner, parts, slots, rank)
        nbytes = 2 * (int(np.prod(facts.down_shape)) + int(np.prod(facts.up_shape)))
        copies = 1 if sizes.device == "cpu" else min(24, max(2, 3 * 10**8 // nbytes))
        down = [torch.randn(facts.down_shape, device=sizes.device, dtype=dtype) * inner**-0.5 for _ in range(copies)]
        up = [torch.randn(facts.up_shape, device=sizes.device, dtype=dtype) * rank**-0.5 for _ in range(copies)]
        x = torch.randn(rows, inner, device=sizes.device, dtype=dtype)
        out = torch.zeros(rows, facts.out_features, device=sizes.device, dtype=dtype)
        chosen = (torch.arange(rows, device=sizes.device) % slots).int()
        kernel, reference = LoraDelta(facts), LoraDeltaReference(facts)
        touched = nbytes * min(rows, slots) / slots + 2 * rows * (inner + 2 * facts.out_features)
        yield Found(
            f"adapters {inner}→{'+'.join(map(str, parts))}, rank {rank}, {rows} rows",
            [partial(kernel.run, out, x, d, u, chosen) for d, u in zip(down, up, strict=True)],
            {"reference": partial(reference.run, out, x, down[0], up[0], chosen)},
            touched, 2 * rows * rank * (len(parts) * inner + facts.out_features),
            partial(_added, kernel, reference, out, x, down[0], up[0], chosen),
        )  # fmt: skip


def _added(ours: LoraDelta, reference: LoraDeltaReference, out: torch.Tensor, *args: torch.Tensor) -> float:
    have, want = torch.zeros_like(out), torch.zeros(out.shape, device=out.device)
    ours.run(have, *args)
    reference.run(want, *(t.float() for t in args[:3]), args[3])
    return distance(have, want)


def segments(sizes: Sizes) -> Iterator[Found]:
    dtype = getattr(torch, sizes.dtype)
    for label, facts, lengths in sizes.segments:
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ends, tokens = Segments(torch.from_numpy(bounds.copy()).to(sizes.device), bounds), int(bounds[-1])
        heads = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
        q, k, v = (torch.randn(tokens, count, facts.head_dim, device=sizes.device, dtype=dtype) for count in heads)
        bias = torch.randn(facts.num_heads, 2 * max(lengths) - 1, device=sizes.device) if facts.bias else None
        args = (q, k, v, ends, bias)
        reach = facts.window if facts.window is not None else max(lengths)
        seen = sum(n * min(n, 2 * reach + 1) for n in lengths)
        nbytes = q.element_size() * tokens * facts.head_dim * 2 * (facts.num_heads + facts.num_kv_heads)
        yield Found(
            f"segments {label}", [partial(SegmentAttention(facts).run, *args)], {"torch": partial(SegmentAttentionTorch(facts).run, *args)},
            nbytes, 4 * seen * facts.num_heads * facts.head_dim,
            partial(_differ, SegmentAttention(facts), SegmentAttentionReference(facts), args),
        )  # fmt: skip


def _differ(ours: Any, reference: Any, args: tuple[Any, ...]) -> float:
    return distance(ours.run(*args), reference.run(*args))


def choices(sizes: Sizes) -> Iterator[Found]:
    """Of decodes: the choice by small heads, and attention over what was chosen."""
    dtype, (heads, dim, top_k), page = getattr(torch, sizes.dtype), sizes.index, 64
    for rows, context in sizes.contexts:
        there, most = sizes.device, -(-context // page)
        table = torch.randperm(rows * most, device=there).view(rows, most).int() + 1
        starts, lengths = torch.arange(rows + 1, device=there).int(), torch.full((rows,), context, device=there, dtype=torch.int32)
        batch = PagedBatch(starts, lengths, table, torch.zeros(rows, device=there, dtype=torch.int64), 1, context)
        keys = torch.randn(rows * most + 1, page, 1, dim, device=there, dtype=dtype)
        small = torch.randn(rows, heads, dim, device=there, dtype=dtype)
        args: tuple[Any, ...] = (small, torch.randn(rows, heads, device=there, dtype=dtype), keys, batch)
        facts = ChooseFacts(sizes.dtype, sizes.dtype, heads, dim, page, top_k)
        choose, reference = ChooseKeys(facts), ChooseKeysReference(facts)
        yield Found(
            f"choice, {rows} × {context}", [partial(choose.run, *args)], {"reference": partial(reference.run, *args)},
            2 * rows * context * dim, 2 * rows * context * heads * dim, partial(_differ, choose, reference, args),
        )  # fmt: skip
        chosen = choose.run(*args)
        for many in sizes.heads:
            width, values = sizes.latent
            latents = torch.randn(rows * most + 1, page, 1, width, device=there, dtype=dtype)
            attention = SparseAttentionFacts(sizes.dtype, sizes.dtype, many, width, values, page, width**-0.5, top_k)
            args = (torch.randn(rows, many, width, device=there, dtype=dtype), latents, chosen, batch)
            ours, theirs = SparseAttention(attention), SparseAttentionReference(attention)
            yield Found(
                f"chosen keys, {rows} × {min(top_k, context)}, {many} heads", [partial(ours.run, *args)],
                {"reference": partial(theirs.run, *args)}, 2 * rows * min(top_k, context) * width,
                2 * rows * min(top_k, context) * many * (width + values), partial(_differ, ours, theirs, args),
            )  # fmt: skip


PARTS = {"adapters": adapters, "segments": segments, "choices": choices}


def measured(found: Found) -> dict[str, float]:
    """µs of ours and of others, the floor, and how far the results differ from the reference's."""
    floor = 1e6 * max(found.nbytes / CEILING, found.operations / RATE)
    repeats = max(1, 48 // len(found.ours))
    line = {"floor": floor, "ours": timed(found.ours * repeats), "error": found.check()}
    for name, call in found.others.items():
        try:
            line[name] = timed([call] * 3, 3)
        except RuntimeError as error:  # what waits for the device cannot be captured
            print(f"  {found.label}: {name} is not captured: {str(error)[:80]}", flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-spans.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    deadline, result = time.perf_counter() + options.seconds, dict[str, Any]()
    for found in (found for name in options.only.split(",") for found in PARTS[name](small() if options.smoke else full())):
        if time.perf_counter() > deadline:
            print("out of time", flush=True)
            return
        if options.smoke:
            error = found.check()
            assert error < 1e-2, f"{found.label} differs by {error}"
            print(f"{found.label}: differs by {error:.1e}", flush=True)
            continue
        result[found.label] = line = measured(found)
        others = ", ".join(f"{name} {line[name]:.1f}" for name in found.others if name in line)
        print(f"{found.label}: {line['ours']:.1f} µs, floor {line['floor']:.1f}, {others}, differs by {line['error']:.1e}", flush=True)
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **result}, indent=1))


if __name__ == "__main__":
    main()
