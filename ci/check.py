"""Every check that needs no test run, the same for people and CI; prints what each took and exits non-zero if one failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

STRICT = ("pagoda.hal", "pagoda.ops", "pagoda.serving.engine")

CHECKS: tuple[tuple[str, list[str]], ...] = (
    ("ruff check", [str(BIN / "ruff"), "check", "."]),
    ("ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("import contract", [str(BIN / "lint-imports")]),
    ("types", [str(BIN / "mypy"), *(part for room in STRICT for part in ("-p", room))]),
    ("budgets", [sys.executable, "ci/budgets.py"]),
    ("vendor words", [sys.executable, "ci/vendor_words.py"]),
    ("kernel matrix", [sys.executable, "ci/kernel_matrix.py", "--check"]),
    ("model matrix", [sys.executable, "ci/model_matrix.py", "--check"]),
    ("block table", [sys.executable, "ci/block_table.py", "--check"]),
    ("gRPC stubs", [sys.executable, "ci/grpc_stubs.py", "--check"]),
    ("dashboard", [sys.executable, "ci/grafana_dashboard.py", "--check"]),
    ("migration page", [sys.executable, "ci/migrate_table.py", "--check"]),
    ("conformance workflow", [sys.executable, "ci/matrix.py", "--check"]),
    ("peer table", [sys.executable, "ci/peer_table.py", "--check"]),
)


def main() -> int:
    site = ROOT / ".site"
    subprocess.run([sys.executable, str(ROOT / "ci/link.py"), str(site)], check=True)
    environment = {**os.environ, "MYPYPATH": str(site), "PYTHONPATH": str(site)}
    failed = [name for name, command in CHECKS if not _run(name, command, environment)]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def _run(name: str, command: list[str], environment: dict[str, str]) -> bool:
    start = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"── {name}: {'ok' if code == 0 else 'FAILED'} in {time.perf_counter() - start:.1f} s", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
