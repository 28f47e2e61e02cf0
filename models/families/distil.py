"""Encoders near BERT with names of their own: DistilBERT, and MPNet with biases by distance."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Also, Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.distance import Distances
from pagoda.models.families.bert import architectures, embedding_names, head_rules, layer_rules
from pagoda.models.families.common import activation, plain_mlp
from pagoda.models.families.pooled import encoder, post_norm_layers, self_attention
from pagoda.models.family import Family
from pagoda.models.pooling import Dense
from pagoda.models.spec import Bidirectional, DecoderSpec, Embed, Learned, Norm


def distilbert(config: Config) -> DecoderSpec:
    width, heads, rows = config.integer("dim"), config.integer("n_heads"), config.integer("max_position_embeddings")
    config.ignore("sinusoidal_pos_embds", "tie_weights_", "tie_word_embeddings", "qa_dropout", "seq_classif_dropout", "output_past")
    norm = Norm("layer", 1e-12, bias=True)
    ff = plain_mlp(config.integer("hidden_dim"), activation(config, "activation"))
    layers = post_norm_layers(config.integer("n_layers"), self_attention(heads, width // heads), ff, norm)
    return encoder(config, width, layers, norm, Embed(positions=Learned(rows)), rows, (Dense(width, "relu"),))


_DISTIL_LAYER = {
    "attention.q_lin": "mixer.q", "attention.k_lin": "mixer.k", "attention.v_lin": "mixer.v", "attention.out_lin": "mixer.o",
    "sa_layer_norm": "ff_in", "ffn.lin1": "ff.up", "ffn.lin2": "ff.down",
}  # fmt: skip


def distilbert_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    each = spec.pooler is not None and spec.pooler.kind == "all"
    return (
        *(Also(f"{part}.{{x*}}", f"distilbert.{part}.{{x*}}") for part in ("embeddings", "transformer")),
        *(Drop(f"vocab_{name}.{{x*}}") for name in ("transform", "layer_norm", "projector")),
        Rename("pre_classifier.{t}", "pooler.0.{t}"),
        Rename("classifier.{t}", f"pooler.{0 if each else 1}.{{t}}"),
        *embedding_names("distilbert"),
        *layer_rules("distilbert.transformer.layer", len(spec.layers), _DISTIL_LAYER, "output_layer_norm"),
    )


BUCKETS, FAR = 32, 128
"""MPNet's biases: how many, and the distance from which they no longer differ."""


def mpnet(config: Config) -> DecoderSpec:
    """Positions count from beyond the padding's id, which is 1 whatever the configuration says."""
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.ignore("tie_word_embeddings")
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-12), bias=True)
    rows = config.integer("max_position_embeddings")
    config.require("relative_attention_num_buckets", BUCKETS, default=BUCKETS)
    ff = plain_mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))
    mixer = Bidirectional(replace(self_attention(heads, width // heads).attention, position=Distances(BUCKETS, FAR)))
    layers = post_norm_layers(config.integer("num_hidden_layers"), mixer, ff, norm)
    return encoder(config, width, layers, norm, Embed(positions=Learned(rows, 2)), rows - 2, (Dense(width, "tanh"),))


_MPNET_LAYER = {
    "attention.attn.q": "mixer.q", "attention.attn.k": "mixer.k", "attention.attn.v": "mixer.v", "attention.attn.o": "mixer.o",
    "attention.LayerNorm": "ff_in", "intermediate.dense": "ff.up", "output.dense": "ff.down",
}  # fmt: skip


def mpnet_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *(Also(f"{part}.{{x*}}", f"mpnet.{part}.{{x*}}") for part in ("embeddings", "encoder", "pooler")),
        Drop("lm_head.{x*}"),
        *head_rules("mpnet", spec.pooler),
        *embedding_names("mpnet"),
        Rename("mpnet.encoder.relative_attention_bias.weight", "distances"),
        *layer_rules("mpnet.encoder.layer", len(spec.layers), _MPNET_LAYER),
    )


DISTIL = (
    Family("distilbert", architectures("DistilBert"), ("distilbert",), distilbert, distilbert_rules, pools=True),
    Family("mpnet", architectures("MPNet"), ("mpnet",), mpnet, mpnet_rules, pools=True),
)
