"""GPT-2 and the first GPT, whose norms come after the sums: learned positions, plain feed-forwards, linear weights stored transposed."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Also, Drop, Rename, Rule, Transpose
from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, decoder, head_names, plain_mlp, renamed, split
from pagoda.models.families.pooled import POST_NORMS
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, Embed, Layer, Learned, Norm


def gpt2(config: Config) -> DecoderSpec:
    config.ignore("n_ctx", "reorder_and_upcast_attn")
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True)
    scaled, by_depth = config.flag("scale_attn_weights", default=True), config.flag("scale_attn_by_inverse_layer_idx", default=False)
    ff = plain_mlp(config.integer("n_inner", default=4 * width), activation(config, "activation_function"))

    def layer(index: int) -> Layer:
        scale = ((width // heads) ** -0.5 if scaled else 1.0) / (index + 1 if by_depth else 1)
        return Layer(replace(Heads.each(heads, width).attention(bias=True), scale=scale), ff, norm, ff_in=norm)

    layers = (layer(i) for i in range(config.integer("n_layer")))
    return decoder(config, width, layers, norm, positions, tied=True, embed=Embed(positions=Learned(positions)))


def first_gpt(config: Config) -> DecoderSpec:
    config.ignore("n_ctx")
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    norm, act = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), activation(config, "afn", default="gelu")
    # What this model type calls gelu is its approximation by a tanh.
    ff = plain_mlp(4 * width, "gelu_tanh" if act == "gelu" else act)
    layer = Layer(Heads.each(heads, width).attention(bias=True), ff, norm, ff_in=norm, residual=POST_NORMS)
    layers = (replace(layer, mixer_in=None), *(layer,) * (config.integer("n_layer") - 1))
    return decoder(config, width, layers, norm, positions, tied=True, embed=Embed(positions=Learned(positions)))


def gpt2_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return _rules(
        spec, {"wte.{t}": "embed.{t}", "wpe.weight": "embed.positions", "ln_f.{t}": "norm.{t}"}, {"ln_1": "mixer_in", "ln_2": "ff_in"}
    )


def first_gpt_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """The norm after a layer's last sum is the one before the next layer."""
    last = len(spec.layers) - 1
    after = ("norm" if i == last else f"layers.{i + 1}.mixer_in" for i in range(len(spec.layers)))
    ends = tuple(Rename(f"transformer.h.{i}.ln_2.{{t}}", f"{ours}.{{t}}") for i, ours in enumerate(after))
    return _rules(spec, {"tokens_embed.{t}": "embed.{t}", "positions_embed.weight": "embed.positions"}, {"ln_1": "ff_in"}, ends)


def _rules(spec: DecoderSpec, around: dict[str, str], norms: dict[str, str], more: tuple[Rule, ...] = ()) -> tuple[Rule, ...]:
    """`around`: tensors beside the layers."""
    at, names = "transformer.h.{i}", {**norms, "attn.c_proj": "mixer.o", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down"}
    return (
        *(Also(name, f"transformer.{name}") for name in (*around, "h.{x*}")),
        *(Drop(f"{at}.attn.{name}") for name in ("bias", "masked_bias")),
        *head_names(spec.head.tied),
        *(Rename(f"transformer.{theirs}", ours) for theirs, ours in around.items()),
        *more,
        *(Transpose(f"{at}.{name}.weight") for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        split(f"{at}.attn.c_attn", "layers.{i}.mixer", "qkv"),
        *renamed(names, at),
    )


GPT2 = (
    Family("gpt2", ("GPT2LMHeadModel",), ("gpt2",), gpt2, gpt2_rules),
    Family("openai-gpt", ("OpenAIGPTLMHeadModel",), ("openai-gpt",), first_gpt, first_gpt_rules),
)
