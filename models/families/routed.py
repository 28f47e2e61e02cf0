"""Experts scored by sigmoids or chosen with a correction (GLM 4.5, dots, ERNIE 4.5 MoE, MiniMax M2, MiMo V2); Hunyuan MoE, DeepSeek 1."""

from __future__ import annotations

from dataclasses import replace

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Drop, Rename, Rule, Unstack
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import (
    MIXTRAL_NAMES,
    change_layers,
    correction,
    experts_of,
    mlp_of,
    moe_names,
    plain_names,
    rms,
    rope,
    sparse,
    with_attention,
)
from pagoda.models.families.llama_kin import HUNYUAN, ernie, hunyuan
from pagoda.models.families.qwen import qwen_windows
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Moe, QkNorm, Router


def glm4_moe(config: Config) -> DecoderSpec:
    normed = QkNorm(rms(config)) if config.flag("use_qk_norm", default=False) else None
    plain = with_attention(llama.spec(config), qk_norm=normed, out_bias=False)
    return sparse(plain, grouped(config, plain), range(config.integer("first_k_dense_replace", default=0)))


def dots1(config: Config) -> DecoderSpec:
    config.ignore("use_sliding_window", "scoring_func", "topk_method", "moe_layer_freq", "ep_size")
    plain, windows = with_attention(llama.spec(config), qk_norm=QkNorm(rms(config))), qwen_windows(config)
    plain = change_layers(plain, lambda i, layer, attention: replace(layer, mixer=replace(attention, window=windows[i])))
    return sparse(plain, grouped(config, plain), range(config.integer("first_k_dense_replace", default=0)))


def solar_open(config: Config) -> DecoderSpec:
    config.ignore("use_qk_norm")
    plain = with_attention(llama.spec(config, hidden=config.integer("intermediate_size", "moe_intermediate_size")), out_bias=False)
    config.ignore("first_k_dense_replace")
    return sparse(plain, grouped(config, plain))


def exaone_moe(config: Config) -> DecoderSpec:
    config.ignore("sliding_window_pattern", "first_k_dense_replace", "is_moe_layer")
    hybrid, plain = config.has("sliding_window"), with_attention(llama.spec(config), qk_norm=QkNorm(rms(config)))

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        return replace(layer, mixer=replace(attention, position=attention.position if attention.window or not hybrid else None))

    return sparse(change_layers(plain, change), grouped(config, plain), dense_layers(config, len(plain.layers)))


def ernie_moe(config: Config) -> DecoderSpec:
    plain = ernie(config)
    first, last = config.integer("moe_layer_start_index"), config.integer("moe_layer_end_index", default=-1)
    last, every = last if last >= 0 else len(plain.layers) - 1, config.integer("moe_layer_interval", default=1)
    config.ignore("moe_norm_min", "moe_capacity", "moe_use_aux_free", "moe_gate")
    hidden, shared = config.integer("moe_intermediate_size"), config.integer("moe_num_shared_experts", default=0)
    router, act = Router("softmax", renormalize=True, correction=True), mlp_of(plain).activation
    beside = Mlp(hidden * shared, act) if shared else None
    moe = experts_of(config, plain, router, hidden, beside)
    dense = [i for i in range(len(plain.layers)) if (i + 1) % every or not first <= i <= last]
    return sparse(plain, moe, dense)


def hunyuan_moe(config: Config) -> DecoderSpec:
    plain = hunyuan(config)
    return sparse(plain, experts_of(config, plain, Router("softmax", renormalize=True), shared=mlp_of(plain)))


def deepseek(config: Config, groups: int = 1, top_groups: int = 1) -> DecoderSpec:
    """The first one: plain attention, a softmax over all experts, or those of some groups."""
    config.require("moe_layer_freq", 1, default=1)
    config.require("scoring_func", "softmax", default="softmax")
    config.ignore("ep_size")
    plain = llama.spec(config)
    scale = config.number("routed_scaling_factor", default=1.0)
    router = Router("softmax", config.flag("norm_topk_prob", default=False), groups, top_groups, scale=scale)
    moe = _with_shared(config, plain, router)
    return sparse(plain, moe, range(config.integer("first_k_dense_replace", default=0)))


def deepseek_ocr2(config: Config) -> DecoderSpec:
    """The first one in a newer spelling."""
    config.require("topk_method", "greedy", default="greedy")
    config.ignore("n_group", "topk_group")
    kinds = config.list("mlp_layer_types", kind=str)
    return deepseek(config.having({"first_k_dense_replace": kinds.index("sparse") if "sparse" in kinds else len(kinds)}))


def minimax_m2(config: Config) -> DecoderSpec:
    for name, value in {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}.items():
        config.require(name, value, default=value)
    config.require("shared_intermediate_size", 0, None)
    config.ignore(
        "attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "max_model_len", "rotary_dim", "attn_window_size"
    )
    plain, turned = with_attention(llama.spec(config), qk_norm=QkNorm(rms(config), "full")), config.integer("rotary_dim", default=None)
    if turned is not None:
        plain = change_layers(plain, lambda _, layer, a: replace(layer, mixer=replace(a, position=_first(a, turned))))
    return sparse(plain, experts_of(config, plain, Router("sigmoid", renormalize=True, correction=True)))


def _first(attention: Attention, dims: int) -> Rope:
    if not isinstance(attention.position, Rope):
        raise ModelError("rotary_dim was given for a layer that knows no positions; correct the configuration")
    return replace(attention.position, dims=dims)


def mimo(config: Config) -> DecoderSpec:
    """Sliding layers have sinks, twice the KV heads and a rotation of their own; values are narrower than keys. The configuration is as
    transformers 5 writes it."""
    config.ignore("sliding_window_size", "num_local_experts")
    plain, v_dim = llama.spec(config), config.integer("v_head_dim", default=None)
    plain = with_attention(plain, out_bias=False, v_dim=v_dim, v_scale=config.number("attention_value_scale", default=1.0))

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        slides = attention.window is not None
        position = rope(config, attention.head_dim, part="sliding_attention" if slides else "full_attention")
        kv_heads = attention.kv_heads * (2 if slides else 1)
        return replace(layer, mixer=replace(attention, kv_heads=kv_heads, position=position, sinks=slides))

    return sparse(change_layers(plain, change), grouped(config, plain), dense_layers(config, len(plain.layers), first=1))


def dense_layers(config: Config, count: int, first: int = 0) -> list[int]:
    """Layers without experts: those that `mlp_layer_types` calls dense, the `first` ones where it says nothing."""
    kinds = config.list("mlp_layer_types", kind=str, default=None)
    return list(range(min(first, count))) if kinds is None else [i for i, kind in enumerate(kinds) if kind == "dense"]


def grouped(config: Config, plain: DecoderSpec) -> Moe:
    """DeepSeek's routing: sigmoid scores, a correction for the choice, experts of the best groups, and shared ones."""
    return _with_shared(config, plain, grouped_router(config))


def _with_shared(config: Config, plain: DecoderSpec, router: Router) -> Moe:
    hidden, act = config.integer("moe_intermediate_size"), mlp_of(plain).activation
    shared = config.integer("n_shared_experts", "num_shared_experts", default=0)
    return experts_of(config, plain, router, hidden, Mlp(hidden * shared, act) if shared else None)


def grouped_router(config: Config) -> Router:
    return Router(
        "sigmoid",
        config.flag("norm_topk_prob", "moe_renormalize", default=True),
        config.integer("n_group", "num_expert_group", default=1),
        config.integer("topk_group", default=1),
        "top2",
        correction=True,
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def routed_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Layers beyond the last one predict several tokens at once; they are dropped."""
    return (
        Drop(f"model.layers.{len(spec.layers)}.{{x*}}"),
        *plain_names(spec),
        correction("mlp.gate.e_score_correction_bias"),
        *moe_names(spec),
    )


def _exaone_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    theirs, ours = "model.layers.{i}.mlp.e_score_correction_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"
    return (Rename(theirs, ours), *routed_rules(spec))


def _ernie_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    theirs, ours = "model.layers.{i}.mlp.moe_statics.e_score_correction_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"
    return (Unstack(theirs, f"{ours}.{{n}}", "n", 1), Rename(f"{ours}.0", ours), *routed_rules(spec))


def _hunyuan_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*plain_names(spec, names=HUNYUAN), *moe_names(spec, router="gate.wg", shared="shared_mlp"))


def _minimax_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    block = "block_sparse_moe"
    return (*plain_names(spec), correction(f"{block}.e_score_correction_bias"), *moe_names(spec, block, names=MIXTRAL_NAMES))


def _mimo_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*routed_rules(spec), Rename("layers.{i}.self_attn.attention_sink_bias", "layers.{i}.mixer.sinks"))


ROUTED = (
    Family("deepseek", ("DeepseekForCausalLM",), ("deepseek",), deepseek, routed_rules),
    Family("deepseek_ocr2", (), ("deepseek_ocr2_text",), deepseek_ocr2, routed_rules),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), ("glm4_moe", "glm4v_moe_text"), glm4_moe, routed_rules),
    Family("dots1", ("Dots1ForCausalLM",), ("dots1",), dots1, routed_rules),
    Family("solar_open", ("SolarOpenForCausalLM",), ("solar_open",), solar_open, routed_rules),
    Family("exaone_moe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), ("exaone_moe",), exaone_moe, _exaone_names),
    Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), ("ernie4_5_moe",), ernie_moe, _ernie_names),
    Family("hunyuan_v1_moe", ("HunYuanMoEV1ForCausalLM",), ("hunyuan_v1_moe",), hunyuan_moe, _hunyuan_names),
    Family("minimax_m2", ("MiniMaxM2ForCausalLM",), ("minimax_m2",), minimax_m2, _minimax_names),
    Family("mimo_v2_flash", ("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",), mimo, _mimo_names),
)
