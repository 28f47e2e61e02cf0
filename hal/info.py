"""What a device is, as data: features, limits and the answer of a probe."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

CONTRACT_VERSION = 1
"""Version of the contract in this folder; a backend written for another major version is refused at start."""


class Feature(Enum):
    """What a device can do, asked instead of who made it.

    `IN_CALLS`: work has been done when the call that submits it returns, as on the host's own processors; elsewhere it goes on beside
    the host.
    """

    GRAPHS = "graphs"
    TRACED = "traced"
    STATIC_SHAPES = "static_shapes"
    FP8 = "fp8"
    FP4 = "fp4"
    INT8 = "int8"
    P2P = "p2p"
    PINNED_HOST = "pinned_host"
    UNIFIED_MEMORY = "unified_memory"
    TRITON = "triton"
    FLOAT64 = "float64"
    VIRTUAL_MEMORY = "virtual_memory"
    IN_CALLS = "in_calls"


@dataclass(frozen=True)
class Limits:
    """Numbers a kernel or a plan must respect.

    Attributes:
        shared_memory_bytes: fast memory of one block of threads; 0 where the notion does not exist.
        max_threads: threads of one block, or cores of a CPU.
        alignment: byte alignment of allocations.
        page_sizes: tokens per KV page that the device's layout supports, preferred first.
    """

    shared_memory_bytes: int = 0
    max_threads: int = 1
    alignment: int = 64
    page_sizes: tuple[int, ...] = (16, 32, 64)


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one device. `dtypes` are names such as "bfloat16"; `memory_bytes` is what may be used (cgroup-aware); `driver` is a
    version for reports, empty where there is none.
    """

    vendor: str
    model: str
    arch: str
    index: int
    memory_bytes: int
    dtypes: frozenset[str]
    features: frozenset[Feature] = frozenset()
    limits: Limits = field(default_factory=Limits)
    default_dtype: str = "bfloat16"
    driver: str = ""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can be used here, and the sentence that helps if not.

    Attributes:
        available: the backend has at least one device here.
        message: what was found, or what is missing and how to get it.
        score: preference for `--device auto`; the highest available wins.
    """

    available: bool
    message: str
    score: int = 0
