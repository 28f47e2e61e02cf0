"""Runs a function in fresh processes, one a rank or one alone, and brings back what each found."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.device import Device
from pagoda.hal.discovery import find
from pagoda.hal.info import Feature
from pagoda.serving.conformance.check import FailedError, Target, UnclaimedError, expect

RankWork = Callable[[Device, Communicator], str]
"""`(device, group) → a sentence`; raises where something is wrong. A module-level function."""


def run_ranks(target: Target, world: int, work: RankWork, timeout_s: float = 180, killed: frozenset[int] = frozenset()) -> list[str]:
    """One answer a rank. `killed`: ranks that end by themselves without one, which the others must survive.

    Raises `FailedError` with every rank's trouble, `UnclaimedError` where there are too few devices.
    """
    indices = device_indices(target, world)
    context = multiprocessing.get_context("spawn")
    address = f"127.0.0.1:{free_port()}"
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(
            target=_rank, args=(target.backend.name, indices[rank], Topology(rank, world, address, "conformance", 60), work, pipes[rank][1])
        )
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        answers = _collect([receiver for receiver, _ in pipes], processes, time.monotonic() + timeout_s, killed)
        if killed:
            _survived([process for rank, process in enumerate(processes) if rank not in killed])
        return answers
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def in_own_process(work: Callable[[], str], timeout_s: float = 1800) -> str:
    """The answer of `work`, a module-level function or a `partial` of one, in a process that has opened nothing. Raises `FailedError`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(work, sender))
    try:
        process.start()
        sender.close()
        fine, answer = _answer(receiver, process, time.monotonic() + timeout_s)
        expect(fine, answer)
        return answer
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def device_indices(target: Target, world: int) -> list[int]:
    """A device for each rank; ranks share one only where its memory is the host's. Raises `UnclaimedError` when there are too few."""
    count = len(target.backend.devices())
    if count >= world:
        return list(range(world))
    if Feature.UNIFIED_MEMORY in target.device.info.features:
        return [target.device.info.index] * world
    raise UnclaimedError(f"{world} ranks need {world} devices; {count} here")


def _collect(receivers: list[Connection], processes: list[Any], deadline: float, killed: frozenset[int]) -> list[str]:
    answers, troubles = [], []
    for rank, receiver in enumerate(receivers):
        fine, answer = _answer(receiver, processes[rank], deadline)
        if rank in killed:
            fine, answer = (False, f"was to end, and answered {answer}") if fine else (True, answer)
        answers.append(answer)
        troubles += [] if fine else [f"rank {rank}: {answer}"]
    if troubles:
        raise FailedError("\n".join(troubles))
    return answers


def _answer(receiver: Connection, process: Any, deadline: float) -> tuple[bool, str]:
    try:
        answer: tuple[bool, str] = receiver.recv() if receiver.poll(max(0, deadline - time.monotonic())) else (False, "no answer in time")
    except EOFError:
        process.join(5)
        answer = (False, f"the process ended without an answer: {ending(process.exitcode)}")
    return answer


def _survived(processes: list[Any]) -> None:
    """Those who answered that they saw the loss must then end as usual, and not be taken down by it a moment later."""
    for process in processes:
        process.join(30)
        expect(process.exitcode == 0, f"after a rank was lost another one answered, and then: {ending(process.exitcode)}")


def ending(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None:
        return "it never ended"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _rank(name: str, index: int, topology: Topology, work: RankWork, answers: Connection) -> None:
    try:
        device = find(name).open(index)
        group = device.communicator(topology)
        answer = (True, work(device, group))
        group.close()
    except Exception:
        answer = (False, traceback.format_exc(limit=-4))
    answers.send(answer)


def _alone(work: Callable[[], str], answers: Connection) -> None:
    try:
        answer = (True, work())
    except Exception:
        answer = (False, traceback.format_exc(limit=-4))
    answers.send(answer)
