"""The newer path to TPUs, torch-tpu, by documentation only: a device of torch's own, so the base of torch-style accelerators opens it.

Nothing of it was run: without a TPU its wheel registers no device. Steps are padded, as each shape is a compilation, and run as they are.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.backends.torch_accelerator.packages import installed
from pagoda.backends.torch_accelerator.vendor import Vendor


def newer(vendor: Vendor) -> Vendor | None:
    """`vendor` through torch-tpu, where it is installed and torch-xla is not."""
    if installed(vendor.package).version or not installed("torch-tpu").version:
        return None
    get = "pip install torch-tpu libtpu with torch 2.11 or later"
    return replace(vendor, kind="tpu", package="torch-tpu", module="torch_tpu", get=get, collectives="tpu_dist")
