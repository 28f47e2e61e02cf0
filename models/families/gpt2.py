"""GPT-2: layer norms, learned positions, plain feed-forward; its linear weights are stored transposed."""

from __future__ import annotations

from pagoda.models.checkpoint import Also, Drop, Rename, Rule, Split, Transpose
from pagoda.models.config import Config
from pagoda.models.families.common import activation
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Learned, Mlp, Norm

HARMLESS = (
    "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj",
)  # fmt: skip


def spec(config: Config) -> DecoderSpec:
    config.ignore(*HARMLESS)
    width, heads = config.integer("n_embd"), config.integer("n_head")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True)
    scaled, by_depth = config.flag("scale_attn_weights", default=True), config.flag("scale_attn_by_inverse_layer_idx", default=False)
    ff = Mlp(
        config.integer("n_inner", default=4 * width), activation(config, "activation_function"), gated=False, up_bias=True, down_bias=True
    )

    def layer(index: int) -> Layer:
        scale = ((width // heads) ** -0.5 if scaled else 1.0) / (index + 1 if by_depth else 1)
        attention = Attention(heads, heads, width // heads, scale, qkv_bias=True, out_bias=True)
        return Layer(attention, ff, mixer_in=norm, ff_in=norm)

    positions = config.integer("n_positions")
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=tuple(layer(i) for i in range(config.integer("n_layer"))),
        norm=norm,
        embed=Embed(positions=Learned(positions)),
        head=Head(tied=config.flag("tie_word_embeddings", default=True)),
        max_positions=positions,
    )


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    linears = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = {"ln_1": "mixer_in", "ln_2": "ff_in", "attn.c_proj": "mixer.o", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down"}
    return (
        *(Also(f"{name}.{{x*}}", f"transformer.{name}.{{x*}}") for name in ("wte", "wpe", "ln_f", "h")),
        Drop("transformer.h.{i}.attn.bias"),
        Drop("transformer.h.{i}.attn.masked_bias"),
        *((Drop("lm_head.weight"),) if spec.head.tied else (Rename("lm_head.{t}", "head.{t}"),)),
        Rename("transformer.wte.{t}", "embed.{t}"),
        Rename("transformer.wpe.weight", "embed.positions"),
        Rename("transformer.ln_f.{t}", "norm.{t}"),
        Rename("transformer.h.{x*}", "h.{x*}"),
        *(Transpose(f"h.{{i}}.{name}.weight") for name in linears),
        Split("h.{i}.attn.c_attn.{t}", tuple(f"layers.{{i}}.mixer.{part}.{{t}}" for part in "qkv")),
        *(Rename(f"h.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
    )


GPT2 = Family(name="gpt2", architectures=("GPT2LMHeadModel",), model_types=("gpt2",), spec=spec, rules=rules)
