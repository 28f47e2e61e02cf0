"""Every family with recurrent layers, for the registry."""

from __future__ import annotations

from pagoda.models.families.jamba import JAMBA
from pagoda.models.families.lfm import LFM2
from pagoda.models.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from pagoda.models.families.qwen_next import QWEN3_NEXT

RECURRENT_KIN = (MAMBA, FALCON_MAMBA, MAMBA2, JAMBA, LFM2, QWEN3_NEXT)
