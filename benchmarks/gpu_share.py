"""Attention and experts of a GPU as shares of what the device can do: `python benchmarks/gpu_share.py [--only latent,experts]`.

A row is one use of one kernel: µs inside a CUDA graph (`gpu_kernels.timed`), the fewest bytes that it must move and the operations that
it must do, and the larger of both times over what it took. Inputs rotate past the cache. `--tiles` tries other ways to cut the kernels
that have a choice; `--only few-experts` those of experts of few tokens. The ceilings are those measured on an H200.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_kernels import CEILING, timed
from pagoda.hal.kernel import KernelRun
from pagoda.ops.attention import AttentionFacts, HostLengths, PagedBatch
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts
from pagoda.ops.triton.latent_attention import LatentAttention
from pagoda.ops.triton.moe import Cut, MoeMlp, MoeTile, moe_tile
from pagoda.ops.triton.moe_few import DOWN, UP, Few, choices_apart
from pagoda.ops.triton.moe_fp8 import Fp8Tile, MoeMlpFp8, fp8_tile
from pagoda.ops.triton.paged_attention import AttentionPlan, PagedAttention
from pagoda.ops.triton.tiles import Tile

FLOPS = {"bfloat16": 800e12, "float8_e4m3fn": 1530e12}
"""Operations a second of large products on an H200."""
CACHE = 3e8
"""Bytes that inputs rotate through: several times what the cache holds."""

LATENT_TILES = tuple(
    Tile(*sizes, False)
    for sizes in (
        (16, 32, 4, 5), (16, 32, 4, 9), (16, 32, 8, 7), (16, 64, 8, 5), (32, 32, 8, 5), (64, 32, 8, 3), (64, 32, 8, 7), (64, 64, 8, 2),
    )
)  # fmt: skip
FLOAT8_TILES = tuple(
    Tile(*sizes)
    for sizes in (
        (16, 64, 2, 7, True), (16, 64, 4, 4, True), (16, 64, 4, 7, True), (16, 64, 4, 5, False),
        (64, 64, 4, 5, True), (128, 64, 8, 3, True), (128, 64, 8, 5, True), (128, 64, 4, 5, True),
    )
)  # fmt: skip
EXPERT_TILES = tuple(
    Fp8Tile(rows, up, down)
    for rows, up, down in (
        (16, (64, 128, 4, 3), (64, 128, 4, 3)), (16, (64, 128, 4, 5), (64, 128, 4, 6)), (16, (128, 128, 4, 4), (128, 128, 4, 4)),
        (16, (64, 256, 4, 3), (64, 256, 4, 3)), (64, (64, 128, 4, 4), (64, 128, 4, 4)), (64, (128, 128, 8, 3), (128, 128, 8, 4)),
        (128, (64, 128, 4, 3), (128, 128, 4, 3)), (128, (128, 128, 8, 3), (128, 128, 4, 3)),
    )
)  # fmt: skip


PLAIN_CUTS = {
    32: (
        (64, 64, 4, 4, False), (64, 128, 4, 3, False), (32, 128, 4, 4, False), (32, 256, 4, 3, False), (128, 64, 4, 4, False),
        (64, 64, 4, 4, True), (64, 64, 4, 6, True), (64, 128, 4, 3, True), (128, 64, 4, 3, True), (128, 128, 4, 3, True),
        (32, 128, 4, 4, True),
    ),
    64: ((64, 64, 4, 4, False), (64, 64, 4, 4, True), (128, 64, 4, 3, True), (64, 128, 4, 3, True)),
    128: (
        (128, 64, 8, 3, False), (64, 64, 4, 3, True), (64, 64, 4, 4, True), (128, 64, 8, 3, True), (128, 64, 8, 4, True),
        (64, 64, 8, 4, True), (64, 128, 8, 3, True),
    ),
}  # fmt: skip
"""Rows of a block of choices → columns, inner numbers, warps, stages and descriptors that are tried for bfloat16 experts, up and down."""


class Work(NamedTuple):
    """Fewest bytes, and operations at the rate of `dtype`."""

    nbytes: float
    flops: float
    dtype: str = "bfloat16"

    @property
    def floor_us(self) -> float:
        return 1e6 * max(self.nbytes / CEILING, self.flops / FLOPS[self.dtype])


@dataclass(frozen=True)
class Shape:
    """`requests` of `queries` new tokens on `length` keys in all, the first `shared` of which are everybody's."""

    name: str
    facts: AttentionFacts
    requests: int
    queries: int
    length: int
    shared: int = 0
    read_once: bool = True

    @property
    def work(self) -> Work:
        facts, kv_size = self.facts, getattr(torch, self.facts.kv_dtype).itemsize
        visible = min(self.length, facts.window or self.length)
        own = visible if self.queries == 1 else min(self.length, visible + self.queries)
        keys = self.requests * (own - self.shared) + self.shared if self.queries == 1 else self.requests * own
        width = facts.head_dim + (0 if facts.latent else facts.v_dim)
        tokens = self.requests * self.queries
        nbytes = keys * facts.num_kv_heads * width * kv_size + 2 * tokens * facts.num_heads * (facts.head_dim + facts.v_dim)
        seen = visible if self.queries == 1 else visible - visible * (visible - 1) / 2 / self.queries
        return Work(nbytes, 2 * tokens * seen * facts.num_heads * (facts.head_dim + facts.v_dim))


def attention_shapes(only: str) -> Iterator[Shape]:
    plain = AttentionFacts("bfloat16", "bfloat16", 32, 8, 128, 128, 64, 128**-0.5)
    latent = AttentionFacts("bfloat16", "bfloat16", 16, 1, 576, 512, 64, 192**-0.5, latent=True)
    kinds = {
        "latent": {"latents, 16 heads": latent, "latents, 128 heads": replace(latent, num_heads=128)},
        "latent8": {"latents, 16 heads, float8": replace(latent, kv_dtype="float8_e4m3fn")},
        "sinks": {"sinks, 64/8 heads of 64": replace(plain, num_heads=64, head_dim=64, v_dim=64, scale=0.125, sinks=True)},
        "window": {"window of 1,024": replace(plain, window=1024)},
        "float8": {"float8 pages": replace(plain, kv_dtype="float8_e4m3fn"), "plain": plain},
    }
    if only == "shared":
        for read_once in (True, False):
            for heads in (16, 32):
                facts = replace(plain, num_heads=heads)
                yield Shape(f"beginning read {'once' if read_once else 'by each'}, {heads}/8", facts, 64, 1, 4224, 4096, read_once)
    for name, facts in kinds.get(only, {}).items():
        for requests in (1, 8, 64):
            yield Shape(f"{name}, decode {requests} x 4096", facts, requests, 1, 4096)
        yield Shape(f"{name}, prompt 1 x 4096", facts, 1, 4096, 4096)


class Attention:
    """Inputs of a shape: pages and tables for as many calls as keep the cache cold."""

    def __init__(self, shape: Shape) -> None:
        self.shape, facts = shape, shape.facts
        self.sets = int(min(40, max(2, CACHE // max(shape.work.nbytes, 1))))
        per = -(-shape.length // facts.page_size)
        width = facts.head_dim + (0 if facts.latent else facts.v_dim)
        total = shape.requests * per * self.sets + 1
        pool = torch.randn(total, facts.num_kv_heads, facts.page_size, width, device="cuda", dtype=torch.bfloat16)
        pool = pool.to(getattr(torch, facts.kv_dtype)).transpose(1, 2)
        self.k, self.v = pool[..., : facts.head_dim], pool[..., : facts.v_dim] if facts.latent else pool[..., facts.head_dim :]
        tables = torch.randperm(total - 1, device="cuda").to(torch.int32).view(self.sets, shape.requests, per) + 1
        if shape.shared:
            tables[:, :, : shape.shared // facts.page_size] = tables[:, :1, : shape.shared // facts.page_size].clone()
        self.batches = [self._batch(table) for table in tables]
        self.q = torch.randn(shape.requests * shape.queries, facts.num_heads, facts.head_dim, device="cuda", dtype=torch.bfloat16)
        self.sinks = torch.randn(facts.num_heads, device="cuda", dtype=torch.bfloat16) if facts.sinks else None

    def _batch(self, table: torch.Tensor) -> PagedBatch:
        shape = self.shape
        starts = np.arange(shape.requests + 1, dtype=np.int32) * shape.queries
        lengths = np.full(shape.requests, shape.length, np.int32)
        shared = None
        if shape.shared and shape.read_once:
            shared = torch.tensor([0, *[shape.shared] * shape.requests], dtype=torch.int32, device="cuda")
        slots = torch.zeros(shape.requests * shape.queries, dtype=torch.int64, device="cuda")
        return PagedBatch(
            torch.from_numpy(starts).cuda(), torch.from_numpy(lengths).cuda(), table, slots, shape.queries, shape.length,
            HostLengths(starts, lengths), shared=shared,
        )  # fmt: skip

    def timed(self, kernel: KernelRun, plan: Callable[[PagedBatch], Any]) -> float:
        calls = [partial(kernel.run, self.q, self.k, self.v, batch, plan(batch), self.sinks) for batch in self.batches]
        return timed(calls * max(1, 20 // len(calls)))


def attention(only: str, tiles: bool, note: Callable[..., None]) -> None:
    for shape in attention_shapes(only):
        inputs, facts = Attention(shape), shape.facts
        kernel: Any = LatentAttention(facts) if facts.latent else PagedAttention(facts)
        note(shape.name, inputs.timed(kernel, kernel.plan), shape.work)
        if tiles and (facts.latent or facts.kv_dtype != facts.dtype):
            for tile in LATENT_TILES if facts.latent else FLOAT8_TILES:
                if (tile.rows > 16) != (shape.queries > 1) and facts.num_heads < 64:
                    continue
                for splits in (1,) if shape.queries > 1 else (0, 2):
                    one = partial(_cut, kernel, tile, splits)
                    try:
                        note(f"{shape.name}: {list(tile[:4])}, splits × {max(splits, 1)}", inputs.timed(kernel, one), shape.work)
                    except Exception as error:
                        print(f"  {tile}: {str(error)[:150]}", flush=True)


def _cut(kernel: Any, tile: Tile, splits: int, batch: PagedBatch) -> AttentionPlan:
    """A plan of one launch with this tile and so many times the usual splits (0: as usual)."""
    part = kernel.part(batch, slice(0, batch.slots.shape[0]), tile)
    return AttentionPlan((part._replace(splits=min(part.splits * max(splits, 1), 64)),), True)


def experts(tiles: bool, float8: bool, note: Callable[..., None]) -> None:
    for plain in (MoeMlpFacts("bfloat16", 128, 2048, 768, 8), MoeMlpFacts("bfloat16", 32, 7168, 2048, 1)):
        weights = {block: _codes(MoeMlpFp8Facts(plain, block)) for block in (0, 128) if float8}
        bf16 = {
            "up": torch.randn(plain.experts, 2 * plain.hidden, plain.width, device="cuda", dtype=torch.bfloat16) / 60,
            "down": torch.randn(plain.experts, plain.width, plain.hidden, device="cuda", dtype=torch.bfloat16) / 40,
        }
        for tokens in (1, 8, 64, 256, 512, 4096, 8192):
            sets = [_routed(plain, tokens) for _ in range(8 if tokens < 512 else 2)]
            name = f"{plain.experts} experts of {plain.width} × {plain.hidden}, {plain.top_k} of them for {tokens} tokens"
            note(f"bf16, {name}", _of_experts(MoeMlp(plain).run, bf16, sets), _expert_work(plain, sets, 2, "bfloat16"))
            if tiles and tokens >= 256:
                plain_cuts(MoeMlp(plain), bf16, sets, partial(note, work=_expert_work(plain, sets, 2, "bfloat16")))
            for block, packed in weights.items():
                kernel, work = MoeMlpFp8(MoeMlpFp8Facts(plain, block)), _expert_work(plain, sets, 1, "float8_e4m3fn")
                note(f"float8, squares of {block}, {name}", _of_experts(kernel.run, packed, sets), work)
                usual = fp8_tile(tokens * plain.top_k / plain.experts, block)
                for tile in EXPERT_TILES if tiles else ():
                    if usual.rows // 2 <= tile.rows <= 2 * usual.rows and (not block or max(tile.up[1], tile.down[1]) <= block):
                        run = partial(_in_tile, kernel, tile)
                        note(f"float8, squares of {block}, {name}: {json.dumps(tile)}", _of_experts(run, packed, sets), work)


def plain_cuts(kernel: MoeMlp, packed: Any, sets: list[Any], note: Callable[..., None]) -> None:
    """bfloat16 experts in other tiles: up first, then down behind the best of it."""
    true, tokens = kernel.run(packed, *sets[0]).float(), len(sets[0][0])
    for rows, cuts in PLAIN_CUTS.items():
        if (rows <= 64) != (tokens <= 512):
            continue
        best = Cut(*cuts[0])
        for part in ("up", "down"):
            times = {}
            for cut in [Cut(*one) for one in cuts] + ([Cut(256, 64, 8, 3, True), Cut(128, 64, 4, 3, True)] if part == "down" else []):
                tile = MoeTile(rows, cut, Cut(*cuts[0])) if part == "up" else MoeTile(rows, best, cut)
                try:
                    error = float((kernel.in_tiles(packed, *sets[0], tile).float() - true).norm() / true.norm())
                    times[cut] = _of_experts(lambda *given, tile=tile: kernel.in_tiles(*given, tile), packed, sets)
                    note(f"bf16, {tokens} tokens, {rows} rows, {part} {list(cut)}{'' if error < 1e-2 else f' WRONG {error}'}", times[cut])
                except Exception as trouble:
                    print(f"  {part} {cut}: {str(trouble)[:150]}", flush=True)
            best = min(times, key=lambda cut: times[cut]) if part == "up" else best


FEW_CUTS = (Few(4, 1024), Few(8, 512), Few(2, 2048), Few(4, 512), Few(8, 1024, 8), Few(4, 2048, 8), Few(2, 1024))
SMALL_CUTS = (
    Cut(32, 128), Cut(32, 256, 4, 3), Cut(64, 128, 4, 3), Cut(64, 64, 4, 6), Cut(16, 256), Cut(32, 128, 4, 4, True),
    Cut(64, 128, 4, 3, True), Cut(128, 64, 4, 4, True),
)  # fmt: skip
"""How experts of few tokens are cut, each choice apart and in blocks of 16."""


def few_experts(note: Callable[..., None]) -> None:
    """bfloat16 experts of one, two and eight tokens: each choice apart, and sorted."""
    facts = MoeMlpFacts("bfloat16", 128, 2048, 768, 8)
    kernel, packed = MoeMlp(facts), {
        "up": torch.randn(facts.experts, 2 * facts.hidden, facts.width, device="cuda", dtype=torch.bfloat16) / 60,
        "down": torch.randn(facts.experts, facts.width, facts.hidden, device="cuda", dtype=torch.bfloat16) / 40,
    }  # fmt: skip
    for tokens in (1, 2, 8):
        sets = [_routed(facts, tokens) for _ in range(8)]
        work, usual = _expert_work(facts, sets, 2, "bfloat16"), moe_tile(tokens * facts.top_k / facts.experts)
        true = kernel.in_tiles(packed, *sets[0], usual).float()
        ways: dict[str, Callable[..., torch.Tensor]] = {"sorted": partial(_sorted, kernel, usual)}
        if tokens < 8:
            ways |= {f"apart, up {list(cut)}": partial(_apart, facts, cut, DOWN) for cut in FEW_CUTS}
            ways |= {f"apart, down {list(cut)}": partial(_apart, facts, UP, cut) for cut in FEW_CUTS[1:]}
        else:
            ways |= {f"sorted, up {list(cut)}": partial(_sorted, kernel, usual._replace(up=cut)) for cut in SMALL_CUTS}
            ways |= {f"sorted, down {list(cut)}": partial(_sorted, kernel, usual._replace(down=cut)) for cut in SMALL_CUTS[1:]}
        for name, way in ways.items():
            try:
                error = float((way(packed, *sets[0]).float() - true).norm() / true.norm())
                note(f"{tokens} tokens, {name}{'' if error < 1e-2 else f' WRONG {error}'}", _of_experts(way, packed, sets), work)
            except Exception as trouble:
                print(f"  {name}: {str(trouble)[:150]}", flush=True)


def _sorted(kernel: MoeMlp, tile: MoeTile, packed: Any, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return kernel.in_tiles(packed, x, shares, ids, tile)


def _apart(facts: MoeMlpFacts, up: Few, down: Few, packed: Any, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return choices_apart(facts, packed, x, shares, ids, up, down)


def _in_tile(kernel: MoeMlpFp8, tile: Fp8Tile, packed: Any, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return kernel.in_tiles(packed, x, shares, ids, tile)


def _codes(facts: MoeMlpFp8Facts) -> dict[str, torch.Tensor]:
    made = {}
    for name in ("up", "down"):
        made[name] = torch.randn(facts.shape(name), device="cuda", dtype=torch.bfloat16).mul_(60).to(torch.float8_e4m3fn)
        made[f"{name}_scale"] = torch.rand(facts.scale_shape(name), device="cuda") / 3000
    return made


def _routed(facts: MoeMlpFacts, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, facts.experts, device="cuda").topk(facts.top_k, -1).indices
    return torch.randn(tokens, facts.width, device="cuda", dtype=torch.bfloat16), torch.rand(tokens, facts.top_k, device="cuda"), ids


def _of_experts(run: Callable[..., torch.Tensor], packed: Any, sets: list[Any]) -> float:
    return timed([partial(run, packed, *one) for one in sets] * max(1, 16 // len(sets)))


def _expert_work(facts: MoeMlpFacts, sets: list[Any], size: int, dtype: str) -> Work:
    """Of one call: weights of the experts that were chosen, by the mean of the calls."""
    touched = sum(ids.unique().numel() for _, _, ids in sets) / len(sets)
    tokens = len(sets[0][0])
    matrix = 3 * facts.width * facts.hidden
    return Work(touched * matrix * size + 4 * tokens * facts.width, 2 * tokens * facts.top_k * matrix, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="latent,latent8,sinks,window,float8,shared,experts")
    parser.add_argument("--tiles", action="store_true", help="other ways to cut the kernels, too")
    parser.add_argument("--out", type=Path, default=Path("gpu-share.json"))
    options = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}

    def note(name: str, micros: float, work: Work) -> None:
        share = work.floor_us / micros
        result[name] = {"us": round(micros, 2), "bytes": work.nbytes, "flops": work.flops, "share": round(share, 3)}
        rates = f"{work.nbytes / micros / 1e6:6.2f} TB/s {work.flops / micros / 1e6:7.1f} TFLOP/s"
        print(f"{micros:9.1f} µs {rates} {100 * share:5.1f} %  {name}", flush=True)
        options.out.write_text(json.dumps(result, indent=1))

    for only in options.only.split(","):
        try:
            if only == "few-experts":
                few_experts(note)
            elif only in ("experts", "bf16-experts"):
                experts(options.tiles, only == "experts", note)
            else:
                attention(only, options.tiles, note)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
