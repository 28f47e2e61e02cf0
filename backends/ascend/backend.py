"""`--device ascend`: Huawei Ascend NPUs through torch-npu."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagoda.backends.ascend.kernels import ascend_kernels
from pagoda.backends.torch_accelerator.backend import VendorBackend
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.kernel import Kernel

ASCEND = Vendor(
    name="ascend",
    title="Ascend NPU",
    kind="npu",
    files="/dev/davinci[0-9]*",
    driver="install the Ascend driver and firmware, or give the container /dev/davinci0 and /dev/davinci_manager",
    package="torch-npu",
    module="torch_npu",
    library="",
    get="install CANN, source its set_env.sh, then pip install torch-npu of torch's own version",
    folder=Path(__file__).parent,
    default_model="ascend910b",
    companions=(),
    collectives="hccl",
    triton="ascend",
    score=90,
)


class AscendBackend(VendorBackend):
    """Every Ascend NPU that torch shows."""

    name = "ascend"
    vendor = ASCEND

    def kernels(self) -> Iterable[Kernel]:
        return ascend_kernels()
