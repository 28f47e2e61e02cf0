"""Runs a function in one fresh process a rank, and brings back what each found."""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.device import Device
from pagoda.hal.discovery import find
from pagoda.hal.info import Feature
from pagoda.serving.conformance.check import FailedError, Target, UnclaimedError

RankWork = Callable[[Device, Communicator], str]
"""`(device, group) → a sentence`; raises where something is wrong. A module-level function."""


def run_ranks(target: Target, world: int, work: RankWork, timeout_s: float = 180) -> list[str]:
    """One answer a rank. Raises `FailedError` with the first trouble, `UnclaimedError` where there are too few devices."""
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
        return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout_s)
    finally:
        for process in processes:
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


def _collect(receivers: list[Connection], deadline: float) -> list[str]:
    answers, troubles = [], []
    for rank, receiver in enumerate(receivers):
        try:
            fine, answer = receiver.recv() if receiver.poll(max(0, deadline - time.monotonic())) else (False, "no answer in time")
        except EOFError:
            fine, answer = False, "the process died"
        answers.append(answer)
        troubles += [] if fine else [f"rank {rank}: {answer}"]
    if troubles:
        raise FailedError("\n".join(troubles))
    return answers


def _rank(name: str, index: int, topology: Topology, work: RankWork, answers: Connection) -> None:
    try:
        device = find(name).open(index)
        group = device.communicator(topology)
        answer = (True, work(device, group))
        group.close()
    except Exception:
        answer = (False, traceback.format_exc(limit=-4))
    answers.send(answer)
