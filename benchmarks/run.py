"""`make bench`: the benchmarks that fit a laptop, one after the other, each also a command of its own.

host_step.py        host work of one decode step on the null device
kv_waste.py         share of allocated KV slots that hold nothing, under a mixed load
sdk_overhead.py     host work of the SDK's side of a token
prefill.py          prompt tokens a second on the CPU, and where a prompt's time goes
static_batches.py   throughput against transformers with static, maximum-length batches, in the same run
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("host_step.py", "kv_waste.py", "prefill.py", "sdk_overhead.py", "static_batches.py")


def main() -> int:
    failed = [name for name in SCRIPTS if subprocess.run([sys.executable, str(HERE / name)], check=False).returncode]
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
