"""The committed matrix of primitives and backends is the one that the records give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_matrix_is_fresh() -> None:
    result = subprocess.run([sys.executable, str(ROOT / "ci/kernel_matrix.py"), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_stale_matrix_is_noticed(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import kernel_matrix as k; from pathlib import Path; k.TARGET = Path(sys.argv[2])"
    script = f"{code}; k.TARGET.write_text('old'); a = k.main(['--check']); k.main([]); sys.exit(10 * a + k.main(['--check']))"
    result = subprocess.run([sys.executable, "-c", script, str(ROOT / "ci"), str(tmp_path / "kernels.md")], check=False)
    assert result.returncode == 10
