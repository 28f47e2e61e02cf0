"""Other decoders of the GPT line: GPT-Neo, CodeGen, Persimmon, BioGPT, Japanese GPT-NeoX."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Drop, Rename, Reorder, Rule, Split
from pagoda.models.config import Config
from pagoda.models.families import gptj
from pagoda.models.families.common import activation, attention_of, interleaved_qkv, max_positions, rope
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Learned, Mlp, Norm, QkNorm, Window

CODEGEN_PARTS = 4
"""CodeGen stores q, v and k in as many groups of heads as the machine that trained it had parts."""


def gpt_neo(config: Config) -> DecoderSpec:
    config.ignore("attention_types", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type")
    config.ignore("summary_use_proj", "embed_dropout")
    width, heads, positions = config.integer("hidden_size"), config.integer("num_heads"), config.integer("max_position_embeddings")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True)
    window = Window("sliding", config.integer("window_size", default=256))
    hidden = config.integer("intermediate_size", default=4 * width)
    ff = Mlp(hidden, activation(config, "activation_function"), gated=False, up_bias=True, down_bias=True)
    kinds = config.list("attention_layers", kind=str)

    def layer(kind: str) -> Layer:
        attention = Attention(heads, heads, width // heads, 1.0, window=window if kind == "local" else None, out_bias=True)
        return Layer(attention, ff, norm, ff_in=norm)

    config.ignore("num_layers")
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=tuple(layer(kind) for kind in kinds),
        norm=norm,
        embed=Embed(positions=Learned(positions)),
        head=Head(tied=config.flag("tie_word_embeddings", default=True)),
        max_positions=positions,
    )


def codegen(config: Config) -> DecoderSpec:
    config.ignore("n_ctx")
    return gptj.spec(config)


def persimmon(config: Config) -> DecoderSpec:
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)
    return _rotated(config, norm, config.integer("intermediate_size"), QkNorm(norm) if config.flag("qk_layernorm", default=True) else None)


def japanese(config: Config) -> DecoderSpec:
    """Only the last layer's attention has a bias."""
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)
    hidden = int(config.integer("hidden_size") * config.number("intermediate_multiple_size", default=4))
    plain = _rotated(config, norm, hidden, None, bias=False)
    *rest, last = plain.layers
    return replace(plain, layers=(*rest, replace(last, mixer=replace(attention_of(plain), out_bias=True))))


def biogpt(config: Config) -> DecoderSpec:
    config.ignore("layerdrop", "activation_dropout")
    width, heads, positions = (
        config.integer("hidden_size"),
        config.integer("num_attention_heads"),
        config.integer("max_position_embeddings"),
    )
    norm, dim = Norm("layer", 1e-5, bias=True), width // heads
    config.ignore("layer_norm_eps")  # the norms keep the default of their library
    attention = Attention(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True)
    ff = Mlp(config.integer("intermediate_size"), activation(config, "hidden_act"), gated=False, up_bias=True, down_bias=True)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(Layer(attention, ff, norm, ff_in=norm),) * config.integer("num_hidden_layers"),
        norm=norm,
        embed=Embed(scale=width**0.5 if config.flag("scale_embedding", default=True) else 1.0, positions=Learned(positions + 2, 2)),
        head=Head(tied=config.flag("tie_word_embeddings", default=True)),
        max_positions=positions,
    )


def _rotated(config: Config, norm: Norm, hidden: int, qk_norm: QkNorm | None, bias: bool = True) -> DecoderSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    dim = width // heads
    position = rope(config, dim)
    attention = Attention(heads, heads, dim, dim**-0.5, position, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    ff = Mlp(hidden, activation(config, "hidden_act"), gated=False, up_bias=bias, down_bias=bias)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(Layer(attention, ff, norm, ff_in=norm),) * config.integer("num_hidden_layers"),
        norm=norm,
        embed=Embed(),
        head=Head(tied=config.flag("tie_word_embeddings", default=not bias)),
        max_positions=max_positions(config, position.scaling),
    )


def _renames(prefix: str, names: dict[str, str], tied: bool) -> tuple[Rule, ...]:
    return (
        *((Drop("lm_head.weight"),) if tied else (Rename("lm_head.{t}", "head.{t}"),)),
        Rename(f"{prefix}.{{x*}}", "layers.{x*}"),
        *(Rename(f"layers.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
    )


def _neo_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"ln_1": "mixer_in", "ln_2": "ff_in", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down"}
    return (
        *(Drop(f"transformer.h.{{i}}.attn.attention.{name}") for name in ("bias", "masked_bias")),
        Rename("transformer.wte.{t}", "embed.{t}"),
        Rename("transformer.wpe.weight", "embed.positions"),
        Rename("transformer.ln_f.{t}", "norm.{t}"),
        *_renames("transformer.h", names, spec.head.tied),
        Rename("layers.{i}.attn.attention.{p}_proj.{t}", "layers.{i}.mixer.{p}.{t}"),
        Rename("layers.{i}.mixer.out.{t}", "layers.{i}.mixer.o.{t}"),
    )


def _codegen_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    view = (CODEGEN_PARTS, 3, attention.heads * attention.head_dim // CODEGEN_PARTS)
    fused = "layers.{i}.attn.qkv_proj.weight"
    names = {"ln_1": "mixer_in", "mlp.fc_in": "ff.up", "mlp.fc_out": "ff.down", "attn.out_proj": "mixer.o"}
    return (
        *(Drop(f"transformer.h.{{i}}.attn.{name}") for name in ("causal_mask", "bias", "masked_bias")),
        Rename("transformer.wte.{t}", "embed.{t}"),
        Rename("transformer.ln_f.{t}", "norm.{t}"),
        *_renames("transformer.h", names, spec.head.tied),
        Reorder(fused, view, (1, 0, 2)),
        Split(fused, tuple(f"layers.{{i}}.mixer.{part}.weight" for part in "qvk")),
    )


def _persimmon_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "input_layernorm": "mixer_in", "post_attention_layernorm": "ff_in", "self_attn.dense": "mixer.o",
        "self_attn.q_layernorm": "mixer.q_norm", "self_attn.k_layernorm": "mixer.k_norm",
        "mlp.dense_h_to_4h": "ff.up", "mlp.dense_4h_to_h": "ff.down",
    }  # fmt: skip
    return (
        Drop("{x*}.rotary_emb.inv_freq"),
        Rename("model.embed_tokens.{t}", "embed.{t}"),
        Rename("model.final_layernorm.{t}", "norm.{t}"),
        *_renames("model.layers", names, spec.head.tied),
        *interleaved_qkv(spec, "layers.{i}.self_attn.query_key_value"),
    )


def _japanese_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "input_layernorm": "mixer_in", "post_attention_layernorm": "ff_in", "attention.dense": "mixer.o",
        "mlp.dense_h_to_4h": "ff.up", "mlp.dense_4h_to_h": "ff.down",
    }  # fmt: skip
    old = "gpt_neox_japanese"
    return (
        Drop("{x*}.rotary_emb.inv_freq"),
        *((Drop("embed_out.weight"),) if spec.head.tied else (Rename("embed_out.{t}", "lm_head.{t}"),)),
        Rename(f"{old}.embed_in.{{t}}", "embed.{t}"),
        Rename(f"{old}.final_layer_norm.{{t}}", "norm.{t}"),
        Rename(f"{old}.layers.{{i}}.attention.dense_bias", f"{old}.layers.{{i}}.attention.dense.bias"),
        *_renames(f"{old}.layers", names, spec.head.tied),
        *interleaved_qkv(spec, "layers.{i}.attention.query_key_value"),
    )


def _biogpt_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "self_attn_layer_norm": "mixer_in", "final_layer_norm": "ff_in", "fc1": "ff.up", "fc2": "ff.down"
    }  # fmt: skip
    return (
        *((Drop("output_projection.weight"),) if spec.head.tied else (Rename("output_projection.{t}", "lm_head.{t}"),)),
        Rename("biogpt.embed_tokens.{t}", "embed.{t}"),
        Rename("biogpt.embed_positions.weight", "embed.positions"),
        Rename("biogpt.layer_norm.{t}", "norm.{t}"),
        *_renames("biogpt.layers", names, spec.head.tied),
        Rename("layers.{i}.self_attn.{p}_proj.{t}", "layers.{i}.mixer.{p}.{t}"),
        Rename("layers.{i}.mixer.out.{t}", "layers.{i}.mixer.o.{t}"),
    )


GPT_KIN = (
    Family("gpt_neo", ("GPTNeoForCausalLM",), ("gpt_neo",), gpt_neo, _neo_names),
    Family("codegen", ("CodeGenForCausalLM",), ("codegen",), codegen, _codegen_names),
    Family("persimmon", ("PersimmonForCausalLM",), ("persimmon",), persimmon, _persimmon_names),
    Family("gpt_neox_japanese", ("GPTNeoXJapaneseForCausalLM",), ("gpt_neox_japanese",), japanese, _japanese_names),
    Family("biogpt", ("BioGptForCausalLM",), ("biogpt",), biogpt, _biogpt_names),
)
