"""Level 0, the device: probe under fork, open, facts, streams and events, copies."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator
from functools import partial

import torch
from pagoda.hal.device import Backend, Device
from pagoda.hal.discovery import find
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, Feature
from pagoda.hal.memory import MemoryKind
from pagoda.serving.conformance.check import Check, Target, expect
from pagoda.serving.conformance.level0_memory import checks as memory_checks

PATIENCE_S = 600
"""For a process that tries a vendor's package, imports it and opens the device; 42 s on a busy machine of two cores."""


def checks(target: Target) -> Iterator[Check]:
    """All of level 0."""
    yield Check(0, "backend and device implement the contract", _contract)
    yield Check(0, "probe twice, fork, then open in the child", _probe_under_fork)
    yield Check(0, "facts agree and are complete", _facts)
    yield Check(0, "what is not here is refused", _refusals)
    yield Check(0, "events and order within a stream", _events)
    yield Check(0, "one stream waits for another", _streams)
    for dtype in sorted(target.device.info.dtypes):
        yield Check(0, f"copy to the device and back [{dtype}]", partial(_copies, name=dtype))
    yield from memory_checks(target)


def _contract(target: Target) -> str:
    expect(isinstance(target.backend, Backend), "the backend lacks members of hal.device.Backend")
    expect(isinstance(target.device, Device), "the device lacks members of hal.device.Device")
    expect(target.backend.contract == CONTRACT_VERSION, f"contract {target.backend.contract}, expected {CONTRACT_VERSION}")
    probe = target.backend.probe()
    expect(probe.available and bool(probe.message), f"the probe of an opened device says {probe}")
    expect(target.device.extension(_NobodysProtocol) is None, "an unknown extension must be None")
    return probe.message


class _NobodysProtocol:
    pass


def _probe_under_fork(target: Target) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_probe_then_fork, args=(target.backend.name, target.device.info.index, sender))
    process.start()
    sender.close()
    try:
        trouble = receiver.recv() if receiver.poll(PATIENCE_S) else f"no answer within {PATIENCE_S} s"
    except EOFError:
        trouble = "the child process died"
    process.join(10)
    expect(trouble == "", trouble)


def _probe_then_fork(name: str, index: int, answers: multiprocessing.connection.Connection) -> None:
    backend = find(name)
    backend.probe()
    backend.probe()
    child = os.fork()
    if child == 0:
        answers.send(_open_and_use(backend, index))
        os._exit(0)
    os.waitpid(child, 0)


def _open_and_use(backend: Backend, index: int) -> str:
    try:
        device = backend.open(index)
        tensor = device.memory.alloc(MemoryKind.WORK, (1000,), torch.float32)
        tensor.fill_(3)
        device.synchronize()
        return "" if float(tensor.cpu().sum()) == 3000 else "a tensor made after the fork has wrong content"
    except Exception:
        return f"after probe and fork the device does not open: {traceback.format_exc(limit=-3)}"


def _facts(target: Target) -> str:
    info, devices = target.device.info, target.backend.devices()
    expect(info.index < len(devices) and devices[info.index].model == info.model, f"devices() does not list {info.model} at {info.index}")
    expect(info.memory_bytes > 0 and bool(info.dtypes) and bool(info.arch), f"facts are incomplete: {info}")
    expect(all(hasattr(torch, dtype) for dtype in info.dtypes), f"unknown dtypes among {sorted(info.dtypes)}")
    expect(bool(info.limits.page_sizes) and info.limits.alignment > 0, f"limits are incomplete: {info.limits}")
    expect(target.backend.describe().memory_bytes > 0, "describe() has no memory")
    return f"{info.vendor} {info.model} ({info.arch})"


def _refusals(target: Target) -> None:
    for name, call in (("open(1000000)", lambda: target.backend.open(1_000_000)), ("describe", lambda: target.backend.describe("abacus"))):
        try:
            call()
        except DeviceError as error:
            expect(bool(str(error)), f"{name} raised without a message")
        else:
            expect(False, f"{name} of what is not here must raise DeviceError")


def _events(target: Target) -> None:
    device = target.device
    work = device.memory.alloc(MemoryKind.WORK, (1 << 20,), torch.float32)
    stream = device.stream()
    with stream:
        before = stream.record()
        for _ in range(10):
            work.fill_(1).add_(1)
        after = stream.record()
        at_once = after.done()
    after.wait()
    expect(at_once or Feature.IN_CALLS not in device.info.features, "in_calls is claimed and work goes on after its call")
    expect(before.done() and after.done(), "an event is not done after the host waited for a later one")
    elapsed = before.elapsed_ms(after)
    expect(elapsed >= 0, f"time from an event to a later one is {elapsed} ms")
    device.synchronize()
    expect(float(work.cpu().min()) == 2, "work of the stream was lost")


def _streams(target: Target) -> None:
    device = target.device
    first, second = device.stream(), device.stream()
    work = device.memory.alloc(MemoryKind.WORK, (1 << 22,), torch.float32)
    copy = torch.empty_like(work)
    device.synchronize()
    for turn in range(5):
        with first:
            for _ in range(5):
                work.fill_(-1)
            work.fill_(turn)
            event = first.record()
        second.wait(event)
        with second:
            copy.copy_(work)
            done = second.record()
        first.wait(done)
        done.wait()
        expect(bool((copy.cpu() == turn).all()), f"turn {turn}: the second stream did not wait for the first")


def _copies(target: Target, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    device = target.device
    generator = torch.Generator().manual_seed(0)
    staging = device.memory.host((64, 33), dtype)
    raw = torch.randint(0, 255, (64, 33 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    staging.copy_(raw.view(dtype))
    there = device.memory.alloc(MemoryKind.WORK, (64, 33), dtype)
    there.copy_(staging, non_blocking=True)
    device.synchronize()
    expect(_same_bits(there.cpu(), staging), "a copy to the device and back changed bits")
    strided = there[:, ::3]
    expect(_same_bits(strided.cpu().contiguous(), staging[:, ::3].contiguous()), "a strided copy back changed bits")
    back = device.memory.host((64, 33), dtype)
    back.copy_(there, non_blocking=True)
    device.synchronize()
    expect(_same_bits(back, staging), "a copy into host staging changed bits")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
