"""The native kernels' own threads: as many as torch's setting says, used by one caller at a time, there again after a fork."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import torch
from pagoda.backends.cpu.kernels_native import NativeGemm, PackedWeight
from pagoda.ops.linear import GemmFacts

INNER, OUTER = 256, 4096


def _product() -> tuple[NativeGemm, PackedWeight, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    kernel = NativeGemm(GemmFacts("float32", INNER, OUTER))
    return kernel, kernel.pack({"weight": torch.randn(OUTER, INNER, generator=gen)}), torch.randn(3, INNER, generator=gen)


def _in_process(body: str) -> str:
    head = "import os, torch\nfrom test_cpu_threads import _product\n"
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", head + body], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_are_made_once_and_no_more_than_were_asked_for() -> None:
    count = "len(os.listdir('/proc/self/task'))"
    out = _in_process(
        "run, packed, x = _product()\ntorch.set_num_threads(3)\ntorch.nn.functional.gelu(torch.ones(1 << 20))\n"
        f"before = {count}\nrun.run(packed, x)\nprint({count} - before)\n"
        f"for threads in (2, 3, 1): torch.set_num_threads(threads); run.run(packed, x)\nprint({count} - before)"
    )
    assert out.split() == ["2", "2"]


def test_one_openmp_runtime_is_loaded() -> None:
    maps = _in_process("from pagoda.ops.native.library import load\nload()\nprint(open('/proc/self/maps').read())")
    runtimes = {line.split()[-1] for line in maps.splitlines() if re.search(r"lib(gomp|omp|iomp5)[^/]*\.so", line)}
    assert len(runtimes) == 1, runtimes


def test_a_forked_process_has_threads_of_its_own() -> None:
    out = _in_process(
        "torch.set_num_threads(3)\nrun, packed, x = _product()\nwanted = run.run(packed, x)\nchild = os.fork()\n"
        "if child == 0: os._exit(0 if all(torch.equal(run.run(packed, x), wanted) for _ in range(100)) else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(run.run(packed, x), wanted))"
    )
    assert out.split() == ["0", "True"]


def test_callers_do_not_disturb_each_other() -> None:
    kernel, packed, x = _product()
    wanted = kernel.run(packed, x)
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(number for turn in range(300) if not torch.equal(kernel.run(packed, x), wanted))

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        callers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong


def test_parts_are_each_done_once_however_late_threads_come() -> None:
    """Waits between calls let threads spin, fall asleep, and be woken in the middle of a job."""
    kernel, packed, x = _product()
    wanted = kernel.run(packed, x)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        for turn in range(60):
            threading.Event().wait(0.0005 * (turn % 13))
            for rows in (1, 3):
                assert torch.equal(kernel.run(packed, x[:rows]), wanted[:rows])
    finally:
        torch.set_num_threads(before)
