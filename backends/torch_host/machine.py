"""Facts of this machine from the operating system: processor, instruction set, cores and memory that this process may use. No torch."""

from __future__ import annotations

import os
import platform
import re
from functools import reduce
from pathlib import Path

_X86_ARCHS = (
    ("x86-64-amx", {"amx_bf16", "amx_tile", "avx512_bf16", "avx512_vnni", "avx512f"}),
    ("x86-64-avx512bf16", {"avx512_bf16", "avx512_vnni", "avx512f", "avx512bw", "avx512vl"}),
    ("x86-64-avx512vnni", {"avx512_vnni", "avx512f", "avx512bw", "avx512vl"}),
    ("x86-64-avx512", {"avx512f", "avx512bw", "avx512vl"}),
    ("x86-64-avx2", {"avx2", "fma", "f16c"}),
)  # best first
_ARM_ARCHS = (
    ("aarch64-sve-bf16", {"sve", "bf16", "i8mm"}),
    ("aarch64-bf16", {"bf16", "i8mm", "asimddp"}),
    ("aarch64-dotprod", {"asimddp"}),
)
INT8_ARCHS = frozenset({"x86-64-amx", "x86-64-avx512bf16", "x86-64-avx512vnni", "aarch64-sve-bf16", "aarch64-bf16", "aarch64-dotprod"})
"""Architectures with an 8-bit integer dot product."""


def processor(root: Path = Path("/")) -> tuple[str, str]:
    """(vendor, model name) of the processor."""
    text = _read(root / "proc/cpuinfo")
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(_field(text, "vendor_id"), "")
    model = _field(text, "model name") or _field(text, "Model") or platform.processor() or platform.machine()
    return vendor or _vendor_of(platform.machine()), model


def architecture(root: Path = Path("/"), machine: str | None = None) -> str:
    """The instruction set as one word: the machine, then the best extension set that a kernel may be built for."""
    machine = (machine or platform.machine()).lower()
    text = _read(root / "proc/cpuinfo")
    flags = set((_field(text, "flags") or _field(text, "Features")).split())
    if machine in ("x86_64", "amd64"):
        return next((name for name, needed in _X86_ARCHS if needed <= flags), "x86-64")
    if machine in ("aarch64", "arm64"):
        return next((name for name, needed in _ARM_ARCHS if needed <= flags), "aarch64")
    return machine


def cores(root: Path = Path("/")) -> int:
    """Processors that this process may use: its affinity, and the quota of its control groups."""
    allowed = len(_affinity())
    quotas = [quota for folder in _cgroups(root, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([allowed, *quotas]))


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use: that of the nodes its processors and its memory policy allow, cut by its control groups."""
    total = _node_bytes(root) or _meminfo(_read(root / "proc/meminfo"), "MemTotal") or _sysconf_bytes()
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that could be taken now without swapping; never more than `memory_bytes`."""
    available = _meminfo(_read(root / "proc/meminfo"), "MemAvailable") or memory_bytes(root)
    return max(0, min([available, memory_bytes(root), *(limit - used for limit, used in _memory_limits(root))]))


def settle(rank: int, ranks: int, root: Path = Path("/")) -> set[int]:
    """Bind this process to its share of the processors, so that what it touches first lies in its own memory node; which they are.

    Ranks are dealt whole nodes, or equal parts of one where there are more ranks than nodes. Nothing is bound on a machine of one node,
    whose scheduler places threads better than a fixed choice does, or where there are fewer processors than ranks.
    """
    allowed = _affinity()
    nodes = [near for folder in _nodes(root) if (near := sorted(_ranges(_read(folder / "cpulist")) & allowed))]
    if len(nodes) < 2 or len(allowed) < ranks or not hasattr(os, "sched_setaffinity"):
        return allowed
    mine = _dealt(nodes, rank, ranks)
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), mine)
    return mine


def _dealt(nodes: list[list[int]], rank: int, ranks: int) -> set[int]:
    if ranks <= len(nodes):
        return {cpu for near in nodes[rank * len(nodes) // ranks : (rank + 1) * len(nodes) // ranks] for cpu in near}
    home = rank * len(nodes) // ranks
    together = [other for other in range(ranks) if other * len(nodes) // ranks == home]
    return set(nodes[home][together.index(rank) :: len(together)]) or set(nodes[home])


def _nodes(root: Path) -> list[Path]:
    return sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _node_bytes(root: Path) -> int:
    """Bytes of the memory nodes near this process's processors; 0 where that is all of them (hot-plugged memory may be missing there)."""
    allowed = _ranges(_field(_read(root / "proc/self/status"), "Mems_allowed_list"))
    folders = _nodes(root)
    near = [
        folder
        for folder in folders
        if _ranges(_read(folder / "cpulist")) & _affinity() and (not allowed or int(folder.name[4:]) in allowed)
    ]
    if len(near) == len(folders):
        return 0
    return sum(_meminfo(_read(folder / "meminfo"), "MemTotal") for folder in near)


def _cgroups(root: Path, controller: str) -> list[Path]:
    """This process's control group for `controller` and all its parents, version 2 and 1."""
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        parts = [part for part in path.split("/") if part]
        folders += [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each control group that has a limit."""
    limits = []
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max").strip() or _read(folder / "memory.limit_in_bytes").strip()
        if not limit.isdigit() or int(limit) >= 1 << 60:
            continue
        used = int(_read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip() or 0)
        statistics = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        cache = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
        limits.append((int(limit), max(0, used - cache)))
    return limits


def _quota(folder: Path) -> int | None:
    text = _read(folder / "cpu.max").split() or [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    if len(text) < 2 or not text[0].isdigit() or not text[1].isdigit():
        return None
    return max(1, -(-int(text[0]) // int(text[1])))


def _vendor_of(machine: str) -> str:
    return {"aarch64": "arm", "arm64": "arm", "ppc64le": "ibm", "s390x": "ibm"}.get(machine.lower(), machine.lower() or "unknown")


def _sysconf_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(text: str, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}\s*:[ \t]*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _ranges(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    spans = [part.split("-") for part in text.strip().split(",") if part.strip()]
    return reduce(set.union, (set(range(int(span[0]), int(span[-1]) + 1)) for span in spans), set())


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
