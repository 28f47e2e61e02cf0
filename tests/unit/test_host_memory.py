"""HostMemory: counting, exhaustion, plans, sleep and wake."""

from __future__ import annotations

import threading

import pytest
import torch
from pagoda.backends.torch_host.memory import HostMemory
from pagoda.hal.errors import CapacityError
from pagoda.hal.memory import MemoryKind, MemoryRequest

MIB = 1 << 20


def memory(total: int = 100 * MIB, available: int = 100 * MIB) -> HostMemory:
    return HostMemory(total, lambda: available, torch.device("cpu"))


def test_counts_by_kind_until_the_last_view_is_gone() -> None:
    mem = memory()
    weights = mem.alloc(MemoryKind.WEIGHTS, (MIB,), torch.float32)
    kv = mem.alloc(MemoryKind.KV, (3, MIB), torch.uint8)
    assert mem.stats().used == {"weights": 4 * MIB, "kv": 3 * MIB, "work": 0}
    assert mem.stats().free == 93 * MIB
    view = kv[1:]
    del kv
    assert mem.stats().used["kv"] == 3 * MIB
    del view, weights
    assert mem.stats().used == {"weights": 0, "kv": 0, "work": 0}
    assert mem.stats().peak == {"weights": 4 * MIB, "kv": 3 * MIB, "work": 0}


def test_exhaustion_has_the_numbers_and_harms_nothing() -> None:
    mem = memory()
    kept = mem.alloc(MemoryKind.WORK, (60 * MIB,), torch.uint8)
    with pytest.raises(CapacityError, match=r"41,943,041 bytes of kv .* 41,943,040 of 104,857,600 are free") as caught:
        mem.alloc(MemoryKind.KV, (40 * MIB + 1,), torch.uint8)
    assert (caught.value.asked, caught.value.available) == (40 * MIB + 1, 40 * MIB)
    assert mem.alloc(MemoryKind.KV, (40 * MIB,), torch.uint8).nbytes == 40 * MIB
    assert kept.nbytes == 60 * MIB


def test_what_the_system_lacks_cannot_be_allocated() -> None:
    mem = memory(available=10 * MIB)
    with pytest.raises(CapacityError):
        mem.alloc(MemoryKind.KV, (11 * MIB,), torch.uint8)


def test_plan_adds_up_and_equals_what_is_used() -> None:
    mem = memory()
    plan = mem.plan(MemoryRequest(weights=20 * MIB, work=5 * MIB, page_bytes=7 * MIB, utilization=0.5))
    assert (plan.total, plan.reserved, plan.num_pages, plan.kv) == (100 * MIB, 50 * MIB, 3, 21 * MIB)
    assert plan.free == 4 * MIB
    held = [mem.alloc(MemoryKind(kind), (getattr(plan, kind),), torch.uint8) for kind in ("weights", "work", "kv")]
    assert mem.stats().used == {"weights": plan.weights, "kv": plan.kv, "work": plan.work}
    assert mem.plan(MemoryRequest(20 * MIB, 5 * MIB, 7 * MIB, 0.5)).num_pages == 3, held


def test_plan_takes_a_fixed_pool_and_no_cache() -> None:
    assert memory().plan(MemoryRequest(0, 0, MIB, kv_bytes=5 * MIB + 3)).num_pages == 5
    assert memory().plan(MemoryRequest(MIB, MIB, 0)).kv == 0


@pytest.mark.parametrize("wanted", [MemoryRequest(91 * MIB, 0, MIB), MemoryRequest(1 * MIB, 0, MIB, kv_bytes=90 * MIB)])
def test_a_plan_that_cannot_fit_is_refused_before_anything_loads(wanted: MemoryRequest) -> None:
    with pytest.raises(CapacityError, match="do not fit") as caught:
        memory().plan(wanted)
    assert caught.value.asked is not None and caught.value.asked > 90 * MIB
    assert caught.value.available == 90 * MIB


def test_sleep_gives_bytes_back_and_wake_revives_every_view() -> None:
    mem = memory()
    kv, work = mem.alloc(MemoryKind.KV, (4, MIB), torch.uint8), mem.alloc(MemoryKind.WORK, (8,), torch.float32)
    view = kv[2:].view(torch.float32)
    work.fill_(7)
    mem.release(MemoryKind.KV)
    mem.release(MemoryKind.KV)
    assert mem.stats().used == {"weights": 0, "kv": 0, "work": 32}
    assert kv.shape == (4, MIB) and kv.untyped_storage().nbytes() == 0
    assert mem.restore(MemoryKind.KV) is False
    assert mem.restore(MemoryKind.KV) is True, "nothing slept, so nothing moved"
    view.fill_(2.5)
    assert torch.equal(kv[2:].view(torch.float32), view) and (work == 7).all()
    assert mem.stats().used["kv"] == 4 * MIB


def test_garbage_that_slept_is_not_counted_twice() -> None:
    mem = memory()
    kv = mem.alloc(MemoryKind.KV, (MIB,), torch.uint8)
    mem.release(MemoryKind.KV)
    del kv
    assert mem.stats().used["kv"] == 0
    assert mem.restore(MemoryKind.KV) is True


def test_wake_into_too_little_memory_is_refused() -> None:
    mem = memory()
    kv = mem.alloc(MemoryKind.KV, (60 * MIB,), torch.uint8)
    mem.release(MemoryKind.KV)
    other = mem.alloc(MemoryKind.WEIGHTS, (60 * MIB,), torch.uint8)
    with pytest.raises(CapacityError):
        mem.restore(MemoryKind.KV)
    del other
    mem.restore(MemoryKind.KV)
    assert kv.fill_(1).sum() == 60 * MIB


def test_threads_count_together() -> None:
    mem = memory()

    def churn() -> None:
        for _ in range(300):
            mem.alloc(MemoryKind.WORK, (1000,), torch.uint8)

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mem.stats().used["work"] == 0
