"""The first GPT, whose norms come after the sums."""

from __future__ import annotations

from pagoda.models.checkpoint import Also, Drop, Rename, Rule, Split, Transpose
from pagoda.models.config import Config
from pagoda.models.families.common import activation
from pagoda.models.families.pooled import POST_NORMS
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Learned, Mlp, Norm


def first_gpt(config: Config) -> DecoderSpec:
    config.ignore("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_ctx")
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), width // heads
    act = activation(config, "afn", default="gelu")
    # What this model type calls gelu is its approximation by a tanh.
    ff = Mlp(4 * width, "gelu_tanh" if act == "gelu" else act, gated=False, up_bias=True, down_bias=True)
    attention, count = Attention(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True), config.integer("n_layer")
    first = Layer(attention, ff, None, ff_in=norm, residual=POST_NORMS)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(first, *(Layer(attention, ff, norm, ff_in=norm, residual=POST_NORMS),) * (count - 1)),
        norm=norm,
        embed=Embed(positions=Learned(positions)),
        head=Head(tied=config.flag("tie_word_embeddings", default=True)),
        max_positions=positions,
    )


def first_gpt_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """The norm after a layer's last sum is the one before the next layer."""
    count = len(spec.layers)
    after = ["norm" if i == count - 1 else f"layers.{i + 1}.mixer_in" for i in range(count)]
    linears = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = {"ln_1": "ff_in", "attn.c_proj": "mixer.o", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down"}
    return (
        *(Also(f"{name}.{{x*}}", f"transformer.{name}.{{x*}}") for name in ("tokens_embed", "positions_embed", "h")),
        Drop("transformer.h.{i}.attn.bias"),
        *((Drop("lm_head.weight"),) if spec.head.tied else (Rename("lm_head.{t}", "head.{t}"),)),
        Rename("transformer.tokens_embed.{t}", "embed.{t}"),
        Rename("transformer.positions_embed.weight", "embed.positions"),
        Rename("transformer.h.{x*}", "h.{x*}"),
        *(Rename(f"h.{i}.ln_2.{{t}}", f"{ours}.{{t}}") for i, ours in enumerate(after)),
        *(Transpose(f"h.{{i}}.{name}.weight") for name in linears),
        Split("h.{i}.attn.c_attn.{t}", tuple(f"layers.{{i}}.mixer.{part}.{{t}}" for part in "qkv")),
        *(Rename(f"h.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
    )


GPT_FIRST = Family("openai-gpt", ("OpenAIGPTLMHeadModel",), ("openai-gpt",), first_gpt, first_gpt_rules)
