"""Every family with recurrent layers, for the registry."""

from __future__ import annotations

from pagoda.models.families.delta_kin import DELTA_KIN
from pagoda.models.families.hybrid_mamba import HYBRID_MAMBA
from pagoda.models.families.jamba import JAMBA
from pagoda.models.families.lfm import LFM2, LFM2_MOE
from pagoda.models.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from pagoda.models.families.minimax import MINIMAX
from pagoda.models.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from pagoda.models.families.rwkv import RWKV

RECURRENT_KIN = (
    MAMBA, FALCON_MAMBA, MAMBA2, JAMBA, LFM2, LFM2_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, *HYBRID_MAMBA, *DELTA_KIN, MINIMAX, RWKV,
)  # fmt: skip
