"""GPT-NeoX (Pythia, …): parallel sublayers with a norm each, q, k, v interleaved per head in the checkpoint."""

from __future__ import annotations

from pagoda.models.checkpoint import Also, Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import activation, interleaved_qkv, max_positions, rope
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Mlp, Norm, Residual


def spec(config: Config) -> DecoderSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    norm, dim = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True), width // heads
    position, bias = _rope(config, dim), config.flag("attention_bias", default=True)
    residual = Residual.PARALLEL if config.flag("use_parallel_residual", default=True) else Residual.SEQUENTIAL
    attention = Attention(heads, heads, dim, dim**-0.5, position, qkv_bias=bias, out_bias=bias)
    ff = Mlp(config.integer("intermediate_size"), activation(config, "hidden_act"), gated=False, up_bias=True, down_bias=True)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(Layer(attention, ff, norm, None, norm, None, residual),) * config.integer("num_hidden_layers"),
        norm=norm,
        embed=Embed(),
        head=Head(tied=config.flag("tie_word_embeddings", default=False)),
        max_positions=max_positions(config, position.scaling),
    )


def _rope(config: Config, dim: int) -> Rope:
    """The oldest spelling has names of its own."""
    found = rope(config, dim, theta=config.number("rotary_emb_base", default=10000.0))
    fraction = config.number("rotary_pct", default=None)
    return found if fraction is None else Rope(found.theta, int(dim * fraction), found.style, found.scaling)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "input_layernorm": "mixer_in", "post_attention_layernorm": "ff_in", "attention.dense": "mixer.o",
        "mlp.dense_h_to_4h": "ff.up", "mlp.dense_4h_to_h": "ff.down",
    }  # fmt: skip
    return (
        *(Also(f"{part}.{{x*}}", f"gpt_neox.{part}.{{x*}}") for part in ("embed_in", "final_layer_norm", "layers")),
        *(Drop(f"gpt_neox.layers.{{i}}.attention.{name}") for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        Rename("gpt_neox.embed_in.{t}", "embed.{t}"),
        Rename("gpt_neox.final_layer_norm.{t}", "norm.{t}"),
        *((Drop("embed_out.weight"),) if spec.head.tied else (Rename("embed_out.{t}", "head.{t}"),)),
        Rename("gpt_neox.layers.{x*}", "layers.{x*}"),
        *(Rename(f"layers.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
        *interleaved_qkv(spec, "layers.{i}.attention.query_key_value"),
    )


GPT_NEOX = Family("gpt_neox", ("GPTNeoXForCausalLM",), ("gpt_neox",), spec, rules)
