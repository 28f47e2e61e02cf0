"""ColBERT: a vector for each token, compared by late interaction (arXiv:2004.12832)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.bert import bert, bert_rules
from pagoda.models.family import Family
from pagoda.models.pooling import Dense, Pooler
from pagoda.models.spec import DecoderSpec


def colbert(config: Config) -> DecoderSpec:
    """BERT whose states are projected to short vectors of length 1."""
    config.ignore("similarity_metric", "mask_punctuation", "attend_to_mask_tokens")
    outputs = config.integer("colbert_dim", "dim", "projection_dim", default=128)
    pooler = Pooler("embed", "all", (Dense(outputs, bias=False),), normalize=True)
    return replace(bert(config), pooler=pooler)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*bert_rules("bert", spec), Rename("linear.weight", "pooler.0.weight"))


COLBERT = (Family("colbert", ("HF_ColBERT", "ColBERTModel"), (), colbert, rules, pools=True),)
