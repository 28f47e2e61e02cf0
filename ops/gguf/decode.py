"""Numbers out of ggml blocks: `decode` for any format that a GGUF file can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pagoda.ops.gguf import i_blocks, k_blocks, plain_blocks
from pagoda.ops.gguf.types import GgmlType

PLAIN_DTYPES = {
    GgmlType.F32: torch.float32,
    GgmlType.F16: torch.float16,
    GgmlType.BF16: torch.bfloat16,
    GgmlType.F64: torch.float64,
    GgmlType.I8: torch.int8,
    GgmlType.I16: torch.int16,
    GgmlType.I32: torch.int32,
    GgmlType.I64: torch.int64,
}
"""Formats that are a torch dtype."""

DECODERS: dict[GgmlType, Callable[[torch.Tensor], torch.Tensor]] = {
    GgmlType.Q1_0: plain_blocks.q1_0,
    GgmlType.Q4_0: plain_blocks.q4_0,
    GgmlType.Q4_1: plain_blocks.q4_1,
    GgmlType.Q5_0: plain_blocks.q5_0,
    GgmlType.Q5_1: plain_blocks.q5_1,
    GgmlType.Q8_0: plain_blocks.q8_0,
    GgmlType.IQ4_NL: plain_blocks.iq4_nl,
    GgmlType.MXFP4: plain_blocks.mxfp4,
    GgmlType.NVFP4: plain_blocks.nvfp4,
    GgmlType.Q2_K: k_blocks.q2_k,
    GgmlType.Q3_K: k_blocks.q3_k,
    GgmlType.Q4_K: k_blocks.q4_k,
    GgmlType.Q5_K: k_blocks.q5_k,
    GgmlType.Q6_K: k_blocks.q6_k,
    GgmlType.Q8_K: k_blocks.q8_k,
    GgmlType.TQ1_0: k_blocks.tq1_0,
    GgmlType.TQ2_0: k_blocks.tq2_0,
    GgmlType.IQ1_S: i_blocks.iq1_s,
    GgmlType.IQ1_M: i_blocks.iq1_m,
    GgmlType.IQ2_XXS: i_blocks.iq2_xxs,
    GgmlType.IQ2_XS: i_blocks.iq2_xs,
    GgmlType.IQ2_S: i_blocks.iq2_s,
    GgmlType.IQ3_XXS: i_blocks.iq3_xxs,
    GgmlType.IQ3_S: i_blocks.iq3_s,
    GgmlType.IQ4_XS: i_blocks.iq4_xs,
}
"""Block formats. Q8_1 is absent: ggml makes it of activations and writes no file with it."""


def decode(data: torch.Tensor, kind: GgmlType) -> torch.Tensor:
    """Bytes of whole rows → numbers.

    Args:
        data: uint8 `[…, row_bytes]`, contiguous, on any device.
        kind: the format of its blocks.

    Returns:
        `[…, elements]`: float32 for block formats, the format's own dtype for plain ones (a view of `data`). Static shapes,
        no synchronisation.
    """
    if kind.plain:
        return data.view(PLAIN_DTYPES[kind])
    blocks = data.reshape(-1, kind.bytes)
    elements = data.shape[-1] // kind.bytes * kind.block
    return DECODERS[kind](blocks).view(*data.shape[:-1], elements)


CACHED, LAUNCHED = 1 << 17, 1 << 24
"""Numbers decoded at once: on a processor what its cache holds, elsewhere enough to make launches cheap."""


def decode_into(out: torch.Tensor, data: torch.Tensor, kind: GgmlType, elements_at_once: int | None = None) -> torch.Tensor:
    """`decode` rows `[R, row_bytes]` into `out [R, elements]` of any float dtype, a few rows at a time.

    The working memory is bounded by `elements_at_once`, whatever the tensor is.
    """
    if out.is_meta:
        return out
    step = max(1, (elements_at_once or (CACHED if data.is_cpu else LAUNCHED)) // max(1, out.shape[-1]))
    for start in range(0, out.shape[0], step):
        out[start : start + step].copy_(decode(data[start : start + step], kind))
    return out
