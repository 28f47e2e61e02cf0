"""Our two entries in transformers' attention interface: one that runs on pages, and one that writes down what it is asked.

A module that calls the interface passes itself; what runs for it is its attribute `pagoda_attention`. So that no step, model or request is
known globally.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

RUN, ASK, APART = "pagoda", "pagoda_ask", "pagoda_apart"
"""Names in the interface. For `RUN`, which has no mask function, transformers makes no mask; for `ASK` it makes what `MaskMaker` gives.
`APART` is `RUN` for compiled layers, which end in front of it (`compiled.py`)."""

ATTRIBUTE = "pagoda_attention"


class AttentionFunction(Protocol):
    """q `[1, H, T, D]`, k `[1, Hk, T, D]`, v `[1, Hk, T, Dv]` → `[1, T, H, Dv]`."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor: ...


MaskMaker = Callable[..., Any]


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls."""
    function: AttentionFunction = getattr(module, ATTRIBUTE)
    return function(query, key, value, attention_mask, options), None


def register() -> None:
    """Make both entries known to transformers. Idempotent."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(RUN, attend)
    ALL_ATTENTION_FUNCTIONS.register(ASK, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ASK, _ask_mask)


def _ask_mask(*, mask_function: Any, config: Any, **sizes: Any) -> torch.Tensor:
    mask = torch.empty((1, 1, sizes["q_length"], sizes["kv_length"]), dtype=torch.bool, device="meta")
    mask.pagoda_rule = mask_function  # type: ignore[attr-defined]
    return mask
