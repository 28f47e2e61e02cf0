"""`--device xpu`: Intel GPUs through torch.xpu."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagoda.backends.torch_accelerator.backend import VendorBackend
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.kernel import Kernel
from pagoda.ops.triton.kernels import triton_kernels

XPU = Vendor(
    name="xpu",
    title="Intel GPU",
    kind="xpu",
    files="/sys/class/drm/renderD*/device/tile*",
    driver="install the xe or i915 driver and the Level Zero runtime, or give the container /dev/dri",
    package="torch",
    module="torch",
    library="libtorch_xpu*",
    get="install torch's XPU build, from the index that PyTorch's install page names for it",
    folder=Path(__file__).parent,
    default_model="max1550",
    companions=(("intel-extension-for-pytorch", "intel_extension_for_pytorch"),),
    collectives="xccl",
    triton="intel",
    score=90,
)


class XpuBackend(VendorBackend):
    """Every Intel GPU that torch shows."""

    name = "xpu"
    vendor = XPU

    def kernels(self) -> Iterable[Kernel]:
        return triton_kernels()
