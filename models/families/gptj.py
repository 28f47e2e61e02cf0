"""GPT-J: both sublayers read one norm, the first dimensions of each head turn in pairs."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import activation
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Mlp, Norm, Residual


def spec(config: Config) -> DecoderSpec:
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), width // heads
    config.ignore("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "rotary")
    config.ignore("scale_attn_weights")
    attention = Attention(heads, heads, dim, dim**-0.5, Rope(10000.0, config.integer("rotary_dim", default=dim), "interleaved"))
    hidden = config.integer("n_inner", default=4 * width)
    ff = Mlp(hidden, activation(config, "activation_function"), gated=False, up_bias=True, down_bias=True)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(Layer(attention, ff, norm, residual=Residual.PARALLEL),) * config.integer("n_layer"),
        norm=norm,
        embed=Embed(),
        head=Head(tied=config.flag("tie_word_embeddings", default=False), bias=True),
        max_positions=positions,
    )


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"ln_1": "mixer_in", "mlp.fc_in": "ff.up", "mlp.fc_out": "ff.down"}
    return (
        *(Drop(f"transformer.h.{{i}}.attn.{name}") for name in ("bias", "masked_bias", "embed_positions")),
        Rename("lm_head.{t}", "head.{t}"),
        Rename("transformer.wte.{t}", "embed.{t}"),
        Rename("transformer.ln_f.{t}", "norm.{t}"),
        Rename("transformer.h.{x*}", "layers.{x*}"),
        *(Rename(f"layers.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
        Rename("layers.{i}.attn.{p}_proj.{t}", "layers.{i}.mixer.{p}.{t}"),
        Rename("layers.{i}.mixer.out.{t}", "layers.{i}.mixer.o.{t}"),
    )


GPTJ = Family("gptj", ("GPTJForCausalLM",), ("gptj",), spec, rules)
