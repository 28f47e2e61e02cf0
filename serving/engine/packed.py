"""The arrays of a packed step, as views of its buffer on the host and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.serving.engine.layout import DTYPES, Layout


def host_views(buffer: NDArray[np.uint8], layout: Layout) -> dict[str, NDArray[Any]]:
    """The arrays of a packed buffer on the host, by section name."""
    return {
        name: buffer[section.offset : section.offset + section.nbytes].view(DTYPES[section.dtype]).reshape(section.shape)
        for name, section in layout.sections.items()
    }


def device_views(buffer: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The arrays of a packed buffer on the device, by section name: slices, no copies."""
    return {
        name: buffer[section.offset : section.offset + section.nbytes].view(getattr(torch, section.dtype)).view(section.shape)
        for name, section in layout.sections.items()
    }


def put(out: NDArray[Any], values: NDArray[Any], pad: int = 0) -> None:
    """Write along the last axis, or along the first of a matrix of rows; what is left over is padding."""
    if out.shape == values.shape:
        out[...] = values
    elif out.ndim == 1:
        out[: len(values)] = values
        out[len(values) :] = pad
    elif out.shape[0] == values.shape[0]:
        out[:, : values.shape[1]] = values
        out[:, values.shape[1] :] = pad
    else:
        out[: values.shape[0]] = values
        out[values.shape[0] :] = pad
