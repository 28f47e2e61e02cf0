"""Other decoders of the GPT line: GPT-J, GPT-NeoX (Pythia), GPT-Neo, CodeGen, Persimmon, BioGPT, Japanese GPT-NeoX."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Also, Drop, Rename, Reorder, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import (
    BART_LAYER,
    Heads,
    activation,
    attention_names,
    attention_of,
    body_names,
    decoder,
    fused_layer,
    interleaved_qkv,
    max_positions,
    plain_mlp,
    rope,
    split,
)
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, DecoderSpec, Embed, Layer, Learned, Norm, QkNorm, Residual, Window

CODEGEN_PARTS = 4
"""CodeGen stores q, v and k in as many groups of heads as the machine that trained it had parts."""

_SUMMARY = ("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")


def gptj(config: Config) -> DecoderSpec:
    """Both sublayers read one norm; the first dimensions of each head turn in pairs."""
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    config.ignore(*_SUMMARY, "rotary", "scale_attn_weights")
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), width // heads
    attention = Heads.each(heads, width).attention(Rope(10000.0, config.integer("rotary_dim", default=dim), "interleaved"))
    ff = plain_mlp(config.integer("n_inner", default=4 * width), activation(config, "activation_function"))
    layers = (Layer(attention, ff, norm, residual=Residual.PARALLEL),) * config.integer("n_layer")
    plain = decoder(config, width, layers, norm, positions)
    return replace(plain, head=replace(plain.head, bias=True))


def codegen(config: Config) -> DecoderSpec:
    config.ignore("n_ctx")
    return gptj(config)


def gpt_neox(config: Config) -> DecoderSpec:
    """Sublayers side by side, each with a norm."""
    norm, bias = _norm(config), config.flag("attention_bias", default=True)
    residual = Residual.PARALLEL if config.flag("use_parallel_residual", default=True) else Residual.SEQUENTIAL
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    position = _neox_rope(config, width // heads)
    ff = plain_mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))
    layer = Layer(Heads.each(heads, width).attention(position, bias), ff, norm, None, norm, None, residual)
    return decoder(config, width, (layer,) * config.integer("num_hidden_layers"), norm, max_positions(config, position.scaling))


def _neox_rope(config: Config, dim: int) -> Rope:
    """The oldest spelling has names of its own."""
    found = rope(config, dim, theta=config.number("rotary_emb_base", default=10000.0))
    fraction = config.number("rotary_pct", default=None)
    return found if fraction is None else Rope(found.theta, int(dim * fraction), found.style, found.scaling)


def gpt_neo(config: Config) -> DecoderSpec:
    config.ignore(*_SUMMARY, "attention_types", "num_layers")
    width, heads, positions = config.integer("hidden_size"), config.integer("num_heads"), config.integer("max_position_embeddings")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True)
    window = Window("sliding", config.integer("window_size", default=256))
    ff = plain_mlp(config.integer("intermediate_size", default=4 * width), activation(config, "activation_function"))

    def layer(kind: str) -> Layer:
        attention = Attention(heads, heads, width // heads, 1.0, window=window if kind == "local" else None, out_bias=True)
        return Layer(attention, ff, norm, ff_in=norm)

    layers = (layer(kind) for kind in config.list("attention_layers", kind=str))
    return decoder(config, width, layers, norm, positions, tied=True, embed=Embed(positions=Learned(positions)))


def persimmon(config: Config) -> DecoderSpec:
    normed = QkNorm(_norm(config)) if config.flag("qk_layernorm", default=True) else None
    return _rotated(config, config.integer("intermediate_size"), normed)


def japanese(config: Config) -> DecoderSpec:
    """Only the last layer's attention has a bias."""
    hidden = int(config.integer("hidden_size") * config.number("intermediate_multiple_size", default=4))
    plain = _rotated(config, hidden, None, bias=False)
    *rest, last = plain.layers
    return replace(plain, layers=(*rest, replace(last, mixer=replace(attention_of(plain), out_bias=True))))


def biogpt(config: Config) -> DecoderSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    positions, norm = config.integer("max_position_embeddings"), Norm("layer", 1e-5, bias=True)
    config.ignore("layer_norm_eps")  # the norms keep the default of their library
    ff = plain_mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))
    layers = (Layer(Heads.each(heads, width).attention(bias=True), ff, norm, ff_in=norm),) * config.integer("num_hidden_layers")
    scale = width**0.5 if config.flag("scale_embedding", default=True) else 1.0
    return decoder(config, width, layers, norm, positions, tied=True, embed=Embed(scale, positions=Learned(positions + 2, 2)))


def _norm(config: Config) -> Norm:
    return Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)


def _rotated(config: Config, hidden: int, qk_norm: QkNorm | None, bias: bool = True) -> DecoderSpec:
    width, heads, norm = config.integer("hidden_size"), config.integer("num_attention_heads"), _norm(config)
    position = rope(config, width // heads)
    attention = Heads.each(heads, width).attention(position, bias, qk_norm=qk_norm)
    layer = Layer(attention, plain_mlp(hidden, activation(config, "hidden_act"), bias), norm, ff_in=norm)
    longest = max_positions(config, position.scaling)
    return decoder(config, width, (layer,) * config.integer("num_hidden_layers"), norm, longest, tied=not bias)


_GPTJ = {"ln_1": "mixer_in", "mlp.fc_in": "ff.up", "mlp.fc_out": "ff.down"}


def _gptj_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *(Drop(f"transformer.h.{{i}}.attn.{name}") for name in ("bias", "masked_bias", "embed_positions")),
        *body_names(spec, "transformer.wte", "transformer.ln_f", "transformer.h", _GPTJ | attention_names("attn")),
    )


def _neox_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *(Also(f"{part}.{{x*}}", f"gpt_neox.{part}.{{x*}}") for part in ("embed_in", "final_layer_norm", "layers")),
        *(Drop(f"gpt_neox.layers.{{i}}.attention.{name}") for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        *body_names(spec, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "gpt_neox.layers", fused_layer("attention"), head="embed_out"),
        *interleaved_qkv(spec, "layers.{i}.attention.query_key_value"),
    )


def _neo_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"ln_1": "mixer_in", "ln_2": "ff_in", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down", **attention_names("attn.attention")}
    return (
        *(Drop(f"transformer.h.{{i}}.attn.attention.{name}") for name in ("bias", "masked_bias")),
        *body_names(spec, "transformer.wte", "transformer.ln_f", "transformer.h", names, "transformer.wpe"),
    )


def _codegen_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    view = (CODEGEN_PARTS, 3, attention.heads * attention.head_dim // CODEGEN_PARTS)
    fused = "layers.{i}.attn.qkv_proj"
    return (
        *(Drop(f"transformer.h.{{i}}.attn.{name}") for name in ("causal_mask", "bias", "masked_bias")),
        *body_names(spec, "transformer.wte", "transformer.ln_f", "transformer.h", _GPTJ | {"attn.out_proj": "mixer.o"}),
        Reorder(f"{fused}.weight", view, (1, 0, 2)),
        split(fused, "layers.{i}.mixer", "qvk"),
    )


def _persimmon_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    norms = {f"self_attn.{part}_layernorm": f"mixer.{part}_norm" for part in "qk"}
    return (
        Drop("{x*}.rotary_emb.inv_freq"),
        *body_names(spec, "model.embed_tokens", "model.final_layernorm", "model.layers", fused_layer("self_attn") | norms),
        *interleaved_qkv(spec, "layers.{i}.self_attn.query_key_value"),
    )


def _japanese_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    old = "gpt_neox_japanese"
    return (
        Drop("{x*}.rotary_emb.inv_freq"),
        Rename(f"{old}.layers.{{i}}.attention.dense_bias", f"{old}.layers.{{i}}.attention.dense.bias"),
        *body_names(spec, f"{old}.embed_in", f"{old}.final_layer_norm", f"{old}.layers", fused_layer("attention"), head="embed_out"),
        *interleaved_qkv(spec, "layers.{i}.attention.query_key_value"),
    )


def _biogpt_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    at = "biogpt"
    return body_names(
        spec, f"{at}.embed_tokens", f"{at}.layer_norm", f"{at}.layers", BART_LAYER, f"{at}.embed_positions", "output_projection"
    )


GPT_KIN = (
    Family("gptj", ("GPTJForCausalLM",), ("gptj",), gptj, _gptj_names),
    Family("gpt_neox", ("GPTNeoXForCausalLM",), ("gpt_neox",), gpt_neox, _neox_names),
    Family("gpt_neo", ("GPTNeoForCausalLM",), ("gpt_neo",), gpt_neo, _neo_names),
    Family("codegen", ("CodeGenForCausalLM",), ("codegen",), codegen, _codegen_names),
    Family("persimmon", ("PersimmonForCausalLM",), ("persimmon",), persimmon, _persimmon_names),
    Family("gpt_neox_japanese", ("GPTNeoXJapaneseForCausalLM",), ("gpt_neox_japanese",), japanese, _japanese_names),
    Family("biogpt", ("BioGptForCausalLM",), ("biogpt",), biogpt, _biogpt_names),
)
