"""Level 0, memory and pages: counting, plans, exhaustion, sleep and wake, KV layouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from pagoda.hal.errors import CapacityError
from pagoda.hal.kv import CacheGroup, CacheKind, KVLayout, LayerCache
from pagoda.hal.memory import MemoryKind, MemoryRequest
from pagoda.serving.conformance.check import Check, Target, expect

MIB = 1 << 20


def checks(target: Target) -> Iterator[Check]:
    """Memory and page checks."""
    yield Check(0, "allocations are aligned, counted, and forgotten", _counting)
    yield Check(0, "a plan equals what is then used", _plan)
    yield Check(0, "a plan that cannot fit is refused with the numbers", _impossible_plan)
    yield Check(0, "over-allocate, then continue", _exhaustion)
    yield Check(0, "sleep and wake keep tensors valid", _sleep)
    for dtype in sorted(target.device.info.dtypes & {"float32", "float16", "bfloat16"}):
        for tokens in target.device.info.limits.page_sizes:
            yield Check(0, f"pages of {tokens} tokens [{dtype}]", partial(_pages, dtype=dtype, tokens=tokens))


def _counting(target: Target) -> None:
    memory, limits = target.device.memory, target.device.info.limits
    before = memory.stats()
    for kind in MemoryKind:
        tensor = memory.alloc(kind, (3, MIB), torch.uint8)
        expect(tensor.data_ptr() % limits.alignment == 0, f"an allocation is not aligned to {limits.alignment} bytes")
        expect(tensor.device.type == target.device.torch_device.type, f"an allocation lies on {tensor.device}")
        expect(
            memory.stats().used[kind.value] - before.used[kind.value] == 3 * MIB, f"3 MiB of {kind.value} are counted as {memory.stats()}"
        )
        view = tensor[1:]
        del tensor
        expect(memory.stats().used[kind.value] - before.used[kind.value] == 3 * MIB, "a live view's memory is no longer counted")
        del view
        expect(memory.stats().used == before.used, f"garbage is still counted: {memory.stats().used}")
        expect(memory.stats().peak[kind.value] >= 3 * MIB, "the peak was forgotten")
    expect(memory.alloc(MemoryKind.WORK, (0, 5), torch.float32).numel() == 0, "an empty allocation is not empty")


def _plan(target: Target) -> str:
    memory = target.device.memory
    request = MemoryRequest(weights=8 * MIB, work=4 * MIB, page_bytes=MIB // 4, kv_bytes=16 * MIB + 5)
    plan = memory.plan(request)
    expect(plan.num_pages == 64 and plan.kv == 16 * MIB, f"a pool of 16 MiB of 256 KiB pages was planned as {plan}")
    before = memory.stats().used
    sizes = {MemoryKind.WEIGHTS: plan.weights, MemoryKind.WORK: plan.work, MemoryKind.KV: plan.kv}
    held = [memory.alloc(kind, (size,), torch.uint8) for kind, size in sizes.items()]
    used = {kind: memory.stats().used[kind.value] - before[kind.value] for kind in sizes}
    expect(used == sizes, f"planned {sizes}, used {used}")
    del held
    whole = memory.plan(MemoryRequest(weights=8 * MIB, work=4 * MIB, page_bytes=MIB))
    total = whole.reserved + whole.weights + whole.work + whole.kv + whole.free
    expect(total == whole.total == target.device.info.memory_bytes, f"the parts of {whole} do not add up to the device's memory")
    expect(0 <= whole.free < MIB and whole.num_pages > 0, f"a plan left a page's room unused: {whole}")
    return f"{whole.num_pages} pages of 1 MiB beside 12 MiB"


def _impossible_plan(target: Target) -> None:
    total = target.device.info.memory_bytes
    for request in (MemoryRequest(2 * total, 0, MIB), MemoryRequest(0, 0, MIB, kv_bytes=2 * total)):
        try:
            target.device.memory.plan(request)
        except CapacityError as error:
            expect((error.asked or 0) >= 2 * total and error.available is not None, f"the numbers are missing: {error!r}")
        else:
            expect(False, f"a plan for {request} was accepted on {total} bytes")


def _exhaustion(target: Target) -> str:
    memory = target.device.memory
    before = memory.stats()
    for size in (2 * before.total, 1 << 50):
        _refused(target, size)
    held: list[torch.Tensor] = []
    while memory.stats().free > 64 * MIB and len(held) < 100:
        held.append(memory.alloc(MemoryKind.KV, (max(32 * MIB, memory.stats().free // 2),), torch.uint8))
    _refused(target, memory.stats().free + 64 * MIB)
    alive = memory.alloc(MemoryKind.WORK, (1000,), torch.float32)
    expect(float(alive.fill_(2).cpu().sum()) == 2000, "the device computes wrongly when it is nearly full")
    held.clear()
    memory.trim()
    expect(memory.stats().used["kv"] == before.used["kv"], "freed memory is still counted")
    again = memory.alloc(MemoryKind.KV, (before.free // 4,), torch.uint8)
    return f"{again.nbytes:,} bytes could be allocated again after exhaustion"


def _refused(target: Target, size: int) -> None:
    try:
        target.device.memory.alloc(MemoryKind.KV, (size,), torch.uint8)
    except CapacityError as error:
        expect(error.asked == size and error.available is not None, f"the numbers are missing: {error!r}")
    else:
        expect(False, f"{size:,} bytes were handed out; there are {target.device.info.memory_bytes:,}")


def _sleep(target: Target) -> str:
    memory = target.device.memory
    kept = memory.alloc(MemoryKind.WEIGHTS, (MIB,), torch.float32).fill_(5)
    pool = memory.alloc(MemoryKind.KV, (8, MIB), torch.uint8).fill_(1)
    view = pool[4:].view(torch.float32)
    before = memory.stats().used["kv"]
    target.device.synchronize()
    memory.release(MemoryKind.KV)
    expect(memory.stats().used["kv"] <= before - 8 * MIB, "released memory is still counted")
    expect(float(kept.cpu().min()) == 5, "releasing one kind harmed another")
    same = memory.restore(MemoryKind.KV)
    expect(memory.stats().used["kv"] == before, "restored memory is not counted")
    pool.zero_()
    view.fill_(2.5)
    expect(bool((pool[4:].cpu().view(torch.float32) == 2.5).all()) and int(pool[:4].cpu().max()) == 0, "a woken tensor and its view parted")
    return "addresses are kept" if same else "addresses change; replays are made again"


def _pages(target: Target, dtype: str, tokens: int) -> str:
    layout = page_layout(target, dtype, tokens)
    expect(layout.page_bytes % target.device.info.limits.alignment == 0, f"pages of {layout.page_bytes} bytes are not aligned")
    expect(layout.page_bytes >= layout.group.used_bytes, f"pages of {layout.page_bytes} bytes cannot hold {layout.group.used_bytes}")
    pool, views = layout.allocate(9)
    expect(tuple(pool.shape) == (9, layout.page_bytes) and int(pool[0].cpu().max()) == 0, "page 0 is not zero, or the pool misshapen")
    for number, view in enumerate(views):
        expect(tuple(view.k.shape) == (9, tokens, 2, 16) and tuple(view.v.shape) == (9, tokens, 2, 8), f"views have shape {view.k.shape}")
        view.k[1:].fill_(number + 1)
        view.v[1:].fill_(-number - 1)
    for number, view in enumerate(views):
        whole = bool((view.k[1:].cpu() == number + 1).all() and (view.v[1:].cpu() == -number - 1).all())
        expect(whole, f"layer {number} shares bytes with another")
    expect(int(pool[0].cpu().max()) == 0, "writing other pages changed page 0")
    _moves(target, layout, pool)
    return f"{layout.page_bytes} bytes, K stored as {layout.page_shape}"


def page_layout(target: Target, dtype: str, tokens: int) -> KVLayout:
    """Pages of three layers with two heads, K wider than V."""
    cache = LayerCache(CacheKind.FULL, 2, 16, 8, dtype)
    return target.device.kv_layout(CacheGroup(CacheKind.FULL, (0, 1, 2), (cache,) * 3, tokens, 0))


def _moves(target: Target, layout: KVLayout, pool: torch.Tensor) -> None:
    where = target.device.torch_device
    _, views = layout.allocate(9, pool)
    for view in views:
        view.k[1:].copy_(torch.randn(view.k[1:].shape, generator=torch.Generator().manual_seed(1)))
    ids = torch.tensor([1, 2], device=where)
    others = torch.tensor([5, 6], device=where)
    layout.copy(pool, ids, others)
    first, copied = layout.export(pool, ids), layout.export(pool, others)
    expect(torch.equal(first.k, copied.k) and torch.equal(first.v, copied.v), "a copied page differs from its source")
    expect(first.k.device.type == "cpu" and first.k.is_contiguous(), "the neutral form must be contiguous and on the host")
    layout.load(pool, torch.tensor([7, 8], device=where), first)
    again = layout.export(pool, torch.tensor([7, 8], device=where))
    expect(torch.equal(first.k, again.k) and torch.equal(first.v, again.v), "pages that were exported and loaded differ")
