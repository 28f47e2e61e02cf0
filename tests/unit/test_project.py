"""The project's own promises: a light import, exported names, no torch before a model is touched."""

from __future__ import annotations

import subprocess
import sys

import pagoda


def test_exports_resolve() -> None:
    for name in pagoda.__all__:
        assert getattr(pagoda, name) is not None


def test_import_is_light() -> None:
    code = "import sys, pagoda; heavy = {'torch', 'numpy', 'starlette', 'transformers', 'rich'} & set(sys.modules); print(sorted(heavy))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
