"""Between `Numbers`, which cross processes, and torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from pagoda.models.media import Numbers


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """A tensor's numbers; those of 16 bits that numpy does not know become float32."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        host = host.float()
    array = host.numpy()
    return Numbers(str(array.dtype), tuple(array.shape), array.tobytes())


def array_of(numbers: Numbers) -> np.ndarray:
    """Read-only."""
    return np.frombuffer(numbers.data, np.dtype(numbers.dtype)).reshape(numbers.shape)


def tensor_of(numbers: Numbers) -> torch.Tensor:
    """A copy, on the host."""
    return torch.from_numpy(array_of(numbers).copy())
