"""Vendors whose hardware is not here: described, planned for, probed without an import, and a package that does not load is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pagoda.backends.torch_accelerator.packages import loads
from pagoda.backends.torch_accelerator.vendor import described
from pagoda.backends.tpu.torch_tpu import newer
from pagoda.hal.discovery import find, find_all
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import Feature
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.engine_plan import plan_engine

VENDORS = ("rocm", "xpu", "ascend", "gaudi", "metal", "tpu")
BACKENDS = Path(__file__).resolve().parents[2] / "backends"


def test_all_eight_are_listed_with_a_reason() -> None:
    found = {one.name: one for one in find_all()}
    assert {"cpu", "cuda", *VENDORS} <= set(found)
    for name in VENDORS:
        probe = found[name].probe
        assert probe.available or ("is absent" in probe.message and len(probe.message) > 60), probe


def test_probes_import_neither_torch_nor_a_vendor() -> None:
    program = (
        "import sys\nfrom pagoda.hal.discovery import find_all\nfind_all()\nprint([m for m in ('torch', 'torch_npu') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", VENDORS)
def test_every_described_model_is_whole(name: str) -> None:
    backend = find(name)
    for model in described(BACKENDS / name):
        info = backend.describe(model)
        assert info.memory_bytes >= 8 << 30 and info.arch and "float32" in info.dtypes and info.limits.page_sizes
        assert ("float8_e4m3fn" in info.dtypes) == (Feature.FP8 in info.features)
    with pytest.raises(DeviceError, match="there are"):
        backend.describe("abacus")


@pytest.mark.parametrize(
    "device", ["rocm:mi355x", "rocm:mi300x", "xpu:max1550", "ascend:ascend910b", "gaudi:gaudi3", "metal:m4-max", "tpu:v6e"]
)
def test_a_plan_for_what_is_not_here(device: str) -> None:
    name, _, model = device.partition(":")
    plan = plan_engine(EngineConfig(device=device, max_model_len=4096))
    assert plan.device == find(name).describe(model) and "not here" in plan.why
    assert plan.memory.total == plan.device.memory_bytes and plan.num_pages > 0
    chosen = {choice.op: choice.chosen.name for choice in plan.kernels}
    assert chosen["rms_norm"] == {"rocm": "triton", "xpu": "triton", "metal": "metal", "ascend": "cann", "gaudi": "habana"}.get(
        name, "reference"
    )


def test_the_null_device_agrees_about_models_that_both_describe() -> None:
    for model, facts in json.loads((BACKENDS / "null/devices.json").read_text()).items():
        for name in VENDORS:
            own = described(BACKENDS / name).get(model)
            assert own is None or (own["arch"], own["memory_bytes"]) == (facts["arch"], facts["memory_bytes"])


def test_an_opened_device_is_known_by_its_name_or_trusted_with_little() -> None:
    rocm = find("rocm").vendor  # type: ignore[attr-defined]
    known = rocm.matching("AMD Instinct MI300X OAM", 3, 1 << 37, "torch")
    assert (known.arch, known.index, known.memory_bytes) == ("gfx942", 3, 1 << 37)
    stranger = rocm.matching("AMD Instinct MI999", 0, 1 << 37, "torch")
    assert stranger.arch == "unknown" and not stranger.features & {Feature.TRITON, Feature.P2P, Feature.INT8}


BROKEN = {
    "rocm": ("amd-aiter", "aiter", ""),
    "xpu": ("intel-extension-for-pytorch", "intel_extension_for_pytorch", ""),
    "ascend": ("torch-npu", "torch_npu", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"),
    "gaudi": ("habana-torch-plugin", "habana_frameworks", ""),
    "metal": ("torch-metal-extras", "torch_metal_extras", "[torch.backends]\nmetal_extras = torch_metal_extras:_autoload\n"),
    "tpu": ("torch-xla", "torch_xla", ""),
    "tpu/newer": ("torch-tpu", "torch_tpu", "[torch.backends]\ntorch_tpu = torch_tpu:_autoload\n"),
    "cuda": ("torch-cuda-extras", "torch_cuda_extras", "[torch.backends]\ncuda_extras = torch_cuda_extras:_autoload\n"),
    "cpu": ("torch-cpu-extras", "torch_cpu_extras", "[torch.backends]\ncpu_extras = torch_cpu_extras:_autoload\n"),
}
"""Vendor → a distribution, its module, its entry points; those of metal, cuda and cpu are strangers' that torch loads by itself."""
KERNEL_PACKAGES = {"triton": ("triton", "triton", "")}


def install_broken(name: str, site: Path) -> str:
    """Build and install a wheel whose library is missing; returns the distribution's name."""
    distribution, module, points = (BROKEN | KERNEL_PACKAGES)[name]
    install(distribution, module, "raise ImportError('libvendor.so.1: cannot open shared object file')\n", points, site)
    return distribution


def install(distribution: str, module: str, code: str, points: str, site: Path) -> None:
    """A wheel of one module, with pip."""
    stem = f"{distribution.replace('-', '_')}-9.9.1"
    wheel = site.parent / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}/__init__.py", code)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9.1\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/entry_points.txt", points)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_an_installed_package_that_does_not_load_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = install_broken(name, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]))
    loads.cache_clear()
    probe = find(name.partition("/")[0]).probe()
    loads.cache_clear()
    assert not probe.available
    for part in (f"{distribution} 9.9.1", "libvendor.so.1", f"pip uninstall {distribution}"):
        assert part in probe.message, probe.message
    if BROKEN[name][2]:
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in probe.message


def test_the_newer_path_to_tpus_is_taken_where_it_alone_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tpu = find("tpu").vendor  # type: ignore[attr-defined]
    assert newer(tpu) is None
    install("torch-tpu", "torch_tpu", "", "", tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = newer(tpu)
    assert found is not None and (found.kind, found.module, found.collectives) == ("tpu", "torch_tpu", "tpu_dist")
    assert found.folder == tpu.folder, "the same models of devices"
    install("torch-xla", "torch_xla", "", "", tmp_path / "site")
    assert newer(tpu) is None, "torch-xla, which was seen to run, comes first"


RESOLVE = """
from pagoda.hal.discovery import find
from pagoda.hal.errors import KernelError
from pagoda.hal.table import KernelPolicy
from pagoda.ops.norm import NormFacts
from pagoda.ops.table import kernel_table
backend = find("cuda")
table = kernel_table(backend, backend.describe("h200"), KernelPolicy())
try:
    table.resolve("rms_norm", NormFacts("bfloat16", 256, 1e-6))
except KernelError as error:
    print(error)
"""


def test_a_kernel_whose_package_does_not_load_is_named(tmp_path: Path) -> None:
    install_broken("triton", tmp_path / "site")
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    message = done.stdout.strip()
    assert "\n" not in message and "kernel 'triton' of rms_norm does not load, although triton is there: libvendor.so.1" in message, message
    assert "repair or uninstall it, or take another kernel with --kernel rms_norm=" in message
