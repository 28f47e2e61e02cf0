"""Encoders with rotary positions: ModernBERT, Nomic-BERT, GTE (`NewModel`), Jina, EuroBERT."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Also, Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.bert import architectures, embedding_names, head_rules, layer_rules
from pagoda.models.families.common import Heads, activation, bidirectional, llama_rules, max_positions, plain_mlp, renamed, rope, split
from pagoda.models.families.llama import spec as llama
from pagoda.models.families.pooled import NO_HEAD, architecture, encoder, encoder_pooler, post_norm_layers, self_attention
from pagoda.models.family import Family, LeftToTransformers
from pagoda.models.pooling import Dense, PoolNorm
from pagoda.models.rope import DynamicScaling, Rope
from pagoda.models.spec import Bidirectional, DecoderSpec, Embed, Layer, Mlp, Norm, Window


def modernbert(config: Config) -> DecoderSpec:
    width, heads, count = config.integer("hidden_size"), config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    dim, bias, ff_bias = width // heads, config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    config.ignore("tie_word_embeddings", "decoder_bias", "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile")
    config.ignore(
        "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad", "position_embedding_type", "global_attn_every_n_layers"
    )
    config.ignore("layer_norm_eps")
    eps, norm_bias = config.number("norm_eps", default=1e-5), config.flag("norm_bias", default=False)
    norm = Norm("layer", eps, bias=norm_bias)
    ff = Mlp(config.integer("intermediate_size"), activation(config, "hidden_activation"), up_bias=ff_bias, down_bias=ff_bias)
    window = Window("sliding", config.integer("local_attention") // 2)

    def layer(index: int, local: bool) -> Layer:
        position = _modern_rope(config, dim, local)
        attention = Heads.each(heads, width).attention(position, bias, window=window if local else None)
        return Layer(Bidirectional(attention), ff, norm if index else None, ff_in=norm)

    head_bias = config.flag("classifier_bias", default=False)
    head = (Dense(width, activation(config, "classifier_activation", default="gelu"), head_bias), PoolNorm(eps, norm_bias))
    pooling = config.text("classifier_pooling", default="cls")
    pooler = encoder_pooler(config, head, "mean" if pooling == "mean" else "cls", token_head=True)
    layers = (layer(index, local) for index, local in enumerate(_local(config, count)))
    return encoder(config, width, layers, norm, Embed(norm=norm), config.integer("max_position_embeddings"), pooler)


def _local(config: Config, count: int) -> tuple[bool, ...]:
    every = config.integer("global_attn_every_n_layers", default=3)
    types = config.list("layer_types", kind=str, default=None)
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    return tuple(index % every != 0 for index in range(count))


def _modern_rope(config: Config, dim: int, local: bool) -> Rope:
    """In either spelling: `rope_parameters` by layer type, or a theta for each."""
    old = config.number("local_rope_theta" if local else "global_rope_theta", default=10000.0 if local else 160000.0)
    config.ignore("local_rope_theta", "global_rope_theta")
    return rope(config, dim, part="sliding_attention" if local else "full_attention", theta=old if old is not None else 10000.0)


def modernbert_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"attn_norm": "mixer_in", "attn.Wo": "mixer.o", "mlp_norm": "ff_in", "mlp.Wo": "ff.down"}
    scores = spec.pooler is not None and spec.pooler.task == "classify"
    head = (Rename("head.dense.{t}", "pooler.0.{t}"), Rename("head.norm.{t}", "pooler.1.{t}"), Rename("classifier.{t}", "pooler.2.{t}"))
    return (
        *(Also(f"{part}.{{x*}}", f"model.{part}.{{x*}}") for part in ("embeddings", "layers", "final_norm")),
        *(head if scores else (Drop("head.{x*}"), Drop("decoder.{x*}"))),
        Rename("model.embeddings.tok_embeddings.{t}", "embed.{t}"),
        Rename("model.embeddings.norm.{t}", "embed.norm.{t}"),
        Rename("model.final_norm.{t}", "norm.{t}"),
        Rename("model.layers.{x*}", "layers.{x*}"),
        *renamed(names),
        split("layers.{i}.attn.Wqkv", "layers.{i}.mixer", "qkv"),
        split("layers.{i}.mlp.Wi", "layers.{i}.ff", ("gate", "up")),
    )


def nomic(config: Config) -> DecoderSpec:
    """As transformers has it; the hub's own code calls the same numbers by GPT-2's names."""
    width, heads = config.integer("hidden_size", "n_embd"), config.integer("num_attention_heads", "n_head")
    own, longest = config.has("n_embd"), config.integer("max_position_embeddings", "n_positions")
    if own:
        _check_nomic(config)
    dim = config.integer("head_dim", default=width // heads)
    act = "silu" if own else activation(config, "hidden_act")
    position = Rope(config.number("rotary_emb_base"), dim) if own else rope(config, dim, theta=1000.0)
    norm = Norm("layer", config.number("layer_norm_eps", "layer_norm_epsilon", default=1e-12), bias=True)
    ff = Mlp(config.integer("intermediate_size", "n_inner"), act)
    layers = post_norm_layers(config.integer("num_hidden_layers", "n_layer"), self_attention(heads, dim, position, False), ff, norm)
    embed = Embed(types=config.integer("type_vocab_size", default=2))
    return encoder(config, width, layers, norm, embed, longest, (Dense(width, "tanh"),))


def _check_nomic(config: Config) -> None:
    for name, value in (("activation_function", "swiglu"), ("rotary_emb_fraction", 1.0), ("qkv_proj_bias", False), ("prenorm", False)):
        config.require(name, value)
    for name in ("mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "parallel_block", "causal"):
        config.require(name, False, None)
    config.require("rotary_emb_interleaved", False, None)
    config.require("rotary_emb_scale_base", None)
    config.ignore(
        "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
        "use_xentropy", "reorder_and_upcast_attn", "rotary_scaling_factor", "dense_seq_output", "last_layer_subset",
        "max_trained_positions", "shared_type_embeddings", "hidden_act", "expand_vocab",
    )  # fmt: skip


def nomic_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    count = len(spec.layers)
    names = {**{f"self_attn.{part}_proj": f"mixer.{part}" for part in "qkvo"}, "post_attention_layernorm": "ff_in"}
    names |= {f"mlp.{part}_proj": f"ff.{part}" for part in ("gate", "up", "down")}
    hub = {"attn.out_proj": "mixer.o", "norm1": "ff_in", "mlp.fc11": "ff.up", "mlp.fc12": "ff.gate", "mlp.fc2": "ff.down"}
    return (
        *(Also(f"{part}.{{x*}}", f"nomic_bert.{part}.{{x*}}") for part in ("embeddings", "emb_ln", "layers", "encoder", "pooler")),
        Drop("cls.{x*}"),
        *head_rules("nomic_bert", spec.pooler),
        *embedding_names("nomic_bert", norms=("emb_ln", "embeddings.LayerNorm")),
        *layer_rules("nomic_bert.layers", count, names, "post_mlp_layernorm"),
        split("nomic_bert.encoder.layers.{i}.attn.Wqkv", "layers.{i}.mixer", "qkv"),
        *layer_rules("nomic_bert.encoder.layers", count, hub, "norm2"),
    )


def gte(config: Config) -> DecoderSpec:
    """Alibaba's GTE from 1.5 on, and Snowflake's models of that line."""
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.require("position_embedding_type", "rope", default="rope")
    config.require("pack_qkv", True, default=True)
    config.require("logn_attention_scale", False, None)
    config.require("layer_norm_type", "layer_norm", default="layer_norm")
    config.ignore("unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1", "tie_word_embeddings")
    position = rope(config, width // heads)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-12), bias=True)
    ff = Mlp(config.integer("intermediate_size"), activation(config, "hidden_act"), down_bias=True)
    stated, dynamic = config.integer("max_position_embeddings"), isinstance(position.scaling, DynamicScaling)
    layers = post_norm_layers(config.integer("num_hidden_layers"), self_attention(heads, width // heads, position), ff, norm)
    longest = stated if dynamic else max_positions(config, position.scaling)
    embed = Embed(types=config.integer("type_vocab_size", default=0))
    return encoder(config, width, layers, norm, embed, longest, (Dense(width, "tanh"),))


def gte_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"attention.o_proj": "mixer.o", "attn_ln": "ff_in", "mlp.down_proj": "ff.down"}
    at = "new.encoder.layer"
    return (
        *(Also(f"{part}.{{x*}}", f"new.{part}.{{x*}}") for part in ("embeddings", "encoder", "pooler")),
        Also("gte.{x*}", "new.{x*}"),
        Drop("lm_head.{x*}"),
        *head_rules("new", spec.pooler),
        *embedding_names("new"),
        split(f"{at}.{{i}}.attention.qkv_proj", "layers.{i}.mixer", "qkv"),
        split(f"{at}.{{i}}.mlp.up_gate_proj", "layers.{i}.ff", ("up", "gate")),
        *layer_rules(at, len(spec.layers), names, "mlp_ln"),
    )


def jina(config: Config) -> DecoderSpec:
    """Jina's vectors of the third version, adapters merged: XLM-RoBERTa with a rotation."""
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.ignore("tie_word_embeddings")
    position = rope(config, width // heads, theta=20000.0)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)
    ff = plain_mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))
    layers = post_norm_layers(config.integer("num_hidden_layers"), self_attention(heads, width // heads, position), ff, norm)
    embed = Embed(types=config.integer("type_vocab_size", default=1))
    return encoder(config, width, layers, norm, embed, max_positions(config, position.scaling), (Dense(width, "tanh"),))


def jina_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"mixer.out_proj": "mixer.o", "norm1": "ff_in", "mlp.fc1": "ff.up", "mlp.fc2": "ff.down"}
    at = "roberta.encoder.layers"
    return (
        *(Also(f"{part}.{{x*}}", f"roberta.{part}.{{x*}}") for part in ("embeddings", "emb_ln", "encoder", "pooler")),
        Drop("lm_head.{x*}"),
        *head_rules("roberta", spec.pooler),
        *embedding_names("roberta", norms=("emb_ln",)),
        split(f"{at}.{{i}}.mixer.Wqkv", "layers.{i}.mixer", "qkv"),
        *layer_rules(at, len(spec.layers), names, "norm2"),
    )


def eurobert(config: Config) -> DecoderSpec:
    """Llama in both directions."""
    width = config.integer("hidden_size")
    pooling = config.text("classifier_pooling", default="late")
    if "ForSequence" in architecture(config) and pooling == "late":
        raise LeftToTransformers(f"{config.where}: classifier_pooling='late' is not implemented; bos and mean are")
    config.ignore("clf_pooling")
    pooler = encoder_pooler(config, (Dense(width, "gelu"),), "mean" if pooling == "mean" else "cls")
    return replace(bidirectional(llama(config)), head=NO_HEAD, pooler=pooler)


def eurobert_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    each = spec.pooler is not None and spec.pooler.kind == "all"
    return (
        *(Also(f"{part}.{{x*}}", f"model.{part}.{{x*}}") for part in ("embed_tokens", "layers", "norm")),
        Rename("dense.{t}", "pooler.0.{t}"),
        Rename("classifier.{t}", f"pooler.{0 if each else 1}.{{t}}"),
        *llama_rules(tied=True),
    )


ROPE_ENCODERS = (
    Family("jina", architectures("JinaEmbeddingsV3"), ("jina_embeddings_v3",), jina, jina_rules, pools=True),
    Family("eurobert", architectures("EuroBert"), ("eurobert",), eurobert, eurobert_rules, pools=True),
    Family("modernbert", architectures("ModernBert"), ("modernbert",), modernbert, modernbert_rules, pools=True),
    Family("nomic_bert", architectures("NomicBert"), ("nomic_bert",), nomic, nomic_rules, pools=True),
    Family("gte", architectures("New", "GteNew", "Gte"), ("new", "gte"), gte, gte_rules, pools=True),
)
