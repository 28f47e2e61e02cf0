"""Command R (Cohere 1, 2, 2 with experts): both sublayers read one norm, angles in pairs, scaled logits; from 2 on only sliding layers know
positions."""

from __future__ import annotations

from dataclasses import replace

from pagoda.hal.errors import ModelError
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, experts_of, mlp_of, plain_names, rms, sparse_names, with_attention
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Moe, Norm, QkNorm, Residual, Router, Window


def cohere(config: Config) -> DecoderSpec:
    plain = _parallel(config, llama.spec(config, "interleaved"))
    if not config.flag("use_qk_norm", default=False):
        return plain
    return with_attention(plain, qk_norm=QkNorm(Norm("layer", config.number("layer_norm_eps", default=1e-5)), "each"))


def cohere2(config: Config) -> DecoderSpec:
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    config.require("use_qk_norm", False, None)
    config.ignore("order_of_interleaved_layers", "rotary_pct", "layer_switch", "position_embedding_type", "use_embedding_sharing")
    config.ignore("use_gated_activation", "use_parallel_block", "use_parallel_embedding")
    plain = _parallel(config, llama.spec(config, "interleaved"))

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        window: Window | None = attention.window
        if not config.has("layer_types") and (i + 1) % period == 0:
            window = None
        return replace(layer, mixer=replace(attention, window=window, position=attention.position if window else None))

    return change_layers(plain, change)


def cohere2_moe(config: Config) -> DecoderSpec:
    """Dense layers come first, if any; they know positions where their own pattern has no layer that sees all."""
    if not config.has("layer_types") or not config.has("mlp_layer_types"):
        raise ModelError(f"{config.where}: layer_types and mlp_layer_types are needed; save the configuration with transformers 5")
    kinds = config.list("mlp_layer_types", kind=str)
    config.ignore("sliding_window_pattern", "order_of_interleaved_layers", "first_k_dense_replace", "use_gated_activation")
    turned = config.integer("prefix_dense_sliding_window_pattern", default=1) == 1
    plain, hidden = _parallel(config, llama.spec(config, "interleaved")), config.integer("prefix_dense_intermediate_size", default=None)
    mlp = mlp_of(plain)
    norm = rms(config) if config.has("rms_norm_eps") else plain.norm
    sparse, dense = _experts(config, plain), replace(mlp, hidden=hidden or mlp.hidden)

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        is_dense = kinds[i] == "dense"
        position = attention.position if attention.window or (is_dense and turned) else None
        return replace(layer, mixer=replace(attention, position=position), feed_forward=dense if is_dense else sparse, mixer_in=norm)

    return replace(change_layers(plain, change), norm=norm)


def _experts(config: Config, plain: DecoderSpec) -> Moe:
    sigmoid = config.text("expert_selection_fn", default="softmax") == "sigmoid"
    normed, count = config.flag("norm_topk_prob", default=True), config.integer("num_shared_experts", default=0)
    config.require("shared_expert_combination_strategy", "average", "sum", default="average")
    halved = config.text("shared_expert_combination_strategy", default="average") == "average"
    scale = 0.5 if halved and count else 1.0
    router = Router("sigmoid", renormalize=normed, scale=scale) if sigmoid else Router("softmax_after", scale=scale)
    mlp = mlp_of(plain)
    shared = replace(mlp, hidden=mlp.hidden * count, scale=scale) if count else None
    return experts_of(config, plain, router, shared=shared)


def _parallel(config: Config, plain: DecoderSpec) -> DecoderSpec:
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5))
    head = replace(plain.head, tied=config.flag("tie_word_embeddings", default=True), scale=config.number("logit_scale", default=0.0625))
    parallel = change_layers(plain, lambda _, layer, a: Layer(a, layer.feed_forward, norm, residual=Residual.PARALLEL))
    return replace(parallel, norm=norm, head=head)


COHERE = Family("cohere", ("CohereForCausalLM",), ("cohere",), cohere, plain_names)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM",), ("cohere2",), cohere2, plain_names)
COHERE2_MOE = Family("cohere2_moe", ("Cohere2MoeForCausalLM",), ("cohere2_moe",), cohere2_moe, sparse_names)
