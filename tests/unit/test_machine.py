"""Facts of the machine, read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pagoda.backends.torch_host import machine

GIB = 1 << 30


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal:       {64 * GIB // 1024} kB\nMemAvailable:   {48 * GIB // 1024} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod/app\n")
    return tmp_path


def test_without_limits_all_memory_is_ours(root: Path) -> None:
    assert machine.memory_bytes(root) == 64 * GIB
    assert machine.available_bytes(root) == 48 * GIB


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    write(root, "sys/fs/cgroup/pod/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{5 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/app/memory.max", "max\n")
    assert machine.memory_bytes(root) == 8 * GIB
    assert machine.available_bytes(root) == 5 * GIB, "page cache can be dropped"


def test_version_one_groups(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{1 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "50000\n")
    write(root, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert machine.memory_bytes(root) == 4 * GIB
    assert machine.available_bytes(root) == 3 * GIB
    assert machine.cores(root) == 1


def test_a_quota_limits_the_cores(root: Path) -> None:
    assert machine.cores(root) == len(os.sched_getaffinity(0))
    write(root, "sys/fs/cgroup/pod/cpu.max", "100000 100000\n")
    write(root, "sys/fs/cgroup/pod/app/cpu.max", "max 100000\n")
    assert machine.cores(root) == 1


def test_memory_of_distant_nodes_is_left_out(root: Path) -> None:
    near = ",".join(str(cpu) for cpu in os.sched_getaffinity(0))
    write(root, "proc/self/status", "Mems_allowed_list:\t0-1\n")
    write(root, "sys/devices/system/node/node0/cpulist", near)
    write(root, "sys/devices/system/node/node0/meminfo", f"Node 0 MemTotal:       {16 * GIB // 1024} kB\n")
    assert machine.memory_bytes(root) == 64 * GIB, "one node is the whole machine"
    write(root, "sys/devices/system/node/node1/cpulist", "4000-4063")
    write(root, "sys/devices/system/node/node1/meminfo", f"Node 1 MemTotal:       {48 * GIB // 1024} kB\n")
    assert machine.memory_bytes(root) == 16 * GIB


def test_ranks_are_dealt_whole_memory_nodes() -> None:
    nodes = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5], [6, 7]]
    assert [machine._dealt(nodes, rank, 2) for rank in range(2)] == [{0, 1, 8, 9, 2, 3, 10, 11}, {4, 5, 6, 7}]
    assert [machine._dealt(nodes, rank, 4) for rank in range(4)] == [set(node) for node in nodes]
    assert machine._dealt(nodes, 0, 1) == {*range(12)}


def test_ranks_of_one_node_divide_its_processors() -> None:
    dealt = [machine._dealt([[0, 1, 2, 3], [4, 5, 6, 7]], rank, 4) for rank in range(4)]
    assert dealt == [{0, 2}, {1, 3}, {4, 6}, {5, 7}]
    assert machine._dealt([[0], [1]], 1, 4) == {0}, "more ranks than processors of a node share them"


def test_a_rank_is_bound_where_there_are_two_nodes(root: Path) -> None:
    before = os.sched_getaffinity(0)
    write(root, "sys/devices/system/node/node0/cpulist", ",".join(map(str, before)))
    assert machine.settle(0, 2, root) == before == os.sched_getaffinity(0), "one node: nothing is bound"
    first, *rest = sorted(before)
    if not rest:
        return
    write(root, "sys/devices/system/node/node0/cpulist", str(first))
    write(root, "sys/devices/system/node/node1/cpulist", ",".join(map(str, rest)))
    try:
        assert machine.settle(1, 2, root) == set(rest) == os.sched_getaffinity(0)
    finally:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), before)


@pytest.mark.parametrize(
    ("kind", "line", "arch"),
    [
        ("x86_64", "flags : fpu avx2 fma f16c", "x86-64-avx2"),
        ("x86_64", "flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16", "x86-64-avx512bf16"),
        ("x86_64", "flags : avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16", "x86-64-amx"),
        ("x86_64", "flags : fpu", "x86-64"),
        ("aarch64", "Features : fp asimd asimddp i8mm bf16", "aarch64-bf16"),
        ("aarch64", "Features : fp asimd", "aarch64"),
        ("ppc64le", "", "ppc64le"),
    ],
)
def test_the_instruction_set_is_one_word(root: Path, kind: str, line: str, arch: str) -> None:
    write(root, "proc/cpuinfo", f"processor : 0\n{line}\n")
    assert machine.architecture(root, kind) == arch


def test_this_machine_answers() -> None:
    vendor, model = machine.processor()
    assert vendor and model
    assert 0 < machine.available_bytes() <= machine.memory_bytes()
