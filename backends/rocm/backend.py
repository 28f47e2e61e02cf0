"""`--device rocm`: AMD GPUs through torch built for ROCm, where they are torch.cuda."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagoda.backends.torch_accelerator.backend import VendorBackend
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.kernel import Kernel
from pagoda.ops.triton.kernels import triton_kernels

ROCM = Vendor(
    name="rocm",
    title="AMD GPU",
    kind="cuda",
    files="/sys/class/kfd/kfd/topology/nodes/[1-9]*/gpu_id",
    driver="install the amdgpu driver, or give the container /dev/kfd and /dev/dri",
    package="torch",
    module="torch",
    library="libtorch_hip*",
    get="install torch's ROCm build, from the index that PyTorch's install page names for it",
    folder=Path(__file__).parent,
    default_model="mi300x",
    companions=(("amd-aiter", "aiter"),),
    collectives="nccl",
    triton="amd",
    score=95,
)


class RocmBackend(VendorBackend):
    """Every AMD GPU that torch shows."""

    name = "rocm"
    vendor = ROCM

    def kernels(self) -> Iterable[Kernel]:
        return triton_kernels()
