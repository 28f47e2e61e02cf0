"""`--device metal`: Apple's GPUs through torch.mps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagoda.backends.metal.kernels import metal_kernels
from pagoda.backends.torch_accelerator.backend import VendorBackend
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.kernel import Kernel

METAL = Vendor(
    name="metal",
    title="Apple GPU",
    kind="mps",
    files="/System/Library/Extensions/AGX*.kext",
    driver="it needs a Mac with Apple silicon and macOS",
    package="torch",
    module="torch",
    library="libtorch_cpu.dylib",
    get="pip install torch on macOS for arm64",
    folder=Path(__file__).parent,
    default_model="m4-max",
    companions=(),
    collectives=None,
    triton="",
    score=80,
)


class MetalBackend(VendorBackend):
    """Every Apple GPU that torch shows."""

    name = "metal"
    vendor = METAL

    def kernels(self) -> Iterable[Kernel]:
        return metal_kernels()
