"""What most families share: reading of ropes, windows and activations, and the tensor names of the Llama line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Drop, Rename, Reorder, Rule, Split, Stack, Transpose
from pagoda.models.config import Config
from pagoda.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeStyle,
    Scaling,
    YarnScaling,
    yarn_attention_factor,
)
from pagoda.models.spec import Alibi, Attention, Bidirectional, DecoderSpec, Embed, Head, Layer, Mlp, Moe, Norm, Router, Window

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu", "tanh": "tanh",
}  # fmt: skip


def activation(config: Config, *names: str, default: str | None = None) -> str:
    """The activation named in the configuration, in our own word."""
    found = config.text(*names) if default is None else config.text(*names, default=default)
    if found not in ACTIVATIONS:
        raise ModelError(f"{config.where}: {names[0]}={found!r} is not implemented; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]


@dataclass(frozen=True)
class Heads:
    """Head geometry as most configurations spell it."""

    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, config: Config, width: int) -> Heads:
        heads = config.integer("num_attention_heads")
        return cls(heads, config.integer("num_key_value_heads", default=heads), config.integer("head_dim", default=width // heads))

    @classmethod
    def each(cls, heads: int, width: int) -> Heads:
        """Keys of its own for every head."""
        return cls(heads, heads, width // heads)

    def attention(self, position: Rope | Alibi | None = None, bias: bool = False, **rest: Any) -> Attention:
        """Of these heads and the usual scale; `bias`: of all projections; `rest`: its other fields."""
        return Attention(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, position, qkv_bias=bias, out_bias=bias, **rest)


def rms(config: Config, default: float = 1e-6, offset: float = 0.0) -> Norm:
    return Norm("rms", config.number("rms_norm_eps", default=default), offset=offset)


def rope(config: Config, head_dim: int, style: RopeStyle = "neox", part: str | None = None, theta: float = 10000.0) -> Rope:
    """The rotary parameters in either spelling: `rope_parameters` (of layer type `part`), or `rope_theta` and `rope_scaling`."""
    values = config.child("rope_parameters")
    if values is not None and part is not None and values.has(part):
        values = values.child(part)
    if values is None:
        values = Config({}, config.where)
    scaling = values if values.has("rope_type") or values.has("type") else config.child("rope_scaling")
    config.ignore("rope_scaling")
    base = values.number("rope_theta", default=config.number("rope_theta", default=theta))
    fraction = values.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
    dims, sections = int(head_dim * fraction), values.list("mrope_section", kind=int, default=())
    values.ignore("mrope_interleaved")  # `woven` is the families' to say
    if sections and 2 * sum(sections) != dims:
        raise ModelError(f"{values.where}: mrope_section={list(sections)} does not add up to half of {dims} rotated numbers")
    return Rope(base, dims, style, _scaling(config, scaling), sections)


def woven(spec: DecoderSpec, default: tuple[int, ...]) -> DecoderSpec:
    """The spec with the sections of its ropes woven into one another; `default`: sections where the configuration names none."""

    def change(layer: Layer) -> Layer:
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or not isinstance(mixer.position, Rope):
            return layer
        position = replace(mixer.position, sections=mixer.position.sections or default, woven=True)
        return replace(layer, mixer=replace(mixer, position=position))

    return replace(spec, layers=tuple(map(change, spec.layers)))


def _scaling(config: Config, values: Config | None) -> Scaling | None:
    if values is None:
        return None
    values.ignore("rope_theta", "partial_rotary_factor", "type")
    kind = values.text("rope_type", "type", default="default")
    reader = _SCALINGS.get(kind)
    if reader is None:
        raise ModelError(f"{values.where}: rope_type={kind!r} is not implemented; known: {', '.join(_SCALINGS)}")
    return reader(config, values)


def _no_scaling(config: Config, values: Config) -> None:
    # A default rope may still carry the keys of a scaling that it does not use.
    values.ignore("factor", "original_max_position_embeddings", "attention_factor")


def _linear(config: Config, values: Config) -> LinearScaling:
    return LinearScaling(values.number("factor"))


def _dynamic(config: Config, values: Config) -> DynamicScaling:
    values.ignore("original_max_position_embeddings")
    return DynamicScaling(values.number("factor"), config.integer("max_position_embeddings"))


def _yarn(config: Config, values: Config) -> YarnScaling:
    longest = config.integer("max_position_embeddings")
    original = values.integer("original_max_position_embeddings", default=longest)
    factor = values.number("factor", default=longest / original)
    given = values.number("attention_factor", default=None)
    mscale, all_dim = values.number("mscale", default=None), values.number("mscale_all_dim", default=None)
    return YarnScaling(
        factor,
        original,
        given if given is not None else yarn_attention_factor(factor, mscale, all_dim),
        values.number("beta_fast", default=32.0),
        values.number("beta_slow", default=1.0),
        values.flag("truncate", default=True),
    )


def _llama3(config: Config, values: Config) -> Llama3Scaling:
    original = values.integer("original_max_position_embeddings", default=config.integer("max_position_embeddings"))
    return Llama3Scaling(values.number("factor"), values.number("low_freq_factor"), values.number("high_freq_factor"), original)


def _longrope(config: Config, values: Config) -> LongRopeScaling:
    longest = config.integer("max_position_embeddings")
    original = config.integer("original_max_position_embeddings", default=None)
    original = values.integer("original_max_position_embeddings", default=original or longest)
    factor = values.number("factor", default=longest / original)
    given = values.number("attention_factor", default=None)
    short, long = (values.list(f"{name}_factor", kind=(int, float)) for name in ("short", "long"))
    return LongRopeScaling(short, long, original, given if given is not None else LongRopeScaling.default_factor(factor, original))


_SCALINGS: Mapping[str, Any] = {
    "default": _no_scaling, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope,
    "su": _longrope,
}  # fmt: skip


def max_positions(config: Config, scaling: Scaling | None) -> int:
    """Longest sequence: configurations of stretched ropes give the length before stretching, or after."""
    longest = config.integer("max_position_embeddings")
    match scaling:
        case LinearScaling(factor) | DynamicScaling(factor=factor):
            return int(longest * factor)
        case YarnScaling(factor, original):
            return max(longest, int(original * factor))
        case _:
            return longest


def windows(config: Config, layers: int, sliding: int | None) -> tuple[Window | None, ...]:
    """A window per layer from `layer_types`; without them every layer slides when `sliding` is given."""
    window = Window("sliding", sliding) if sliding else None
    types = config.list("layer_types", kind=str, default=("sliding_attention",) * layers)
    if len(types) != layers:
        raise ModelError(f"{config.where}: layer_types has {len(types)} entries for {layers} layers")
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelError(
            f"{config.where}: layer_types holds {', '.join(unknown)}; this model type knows sliding_attention and full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def decoder(
    config: Config, width: int, layers: Iterable[Layer], norm: Norm | None, longest: int, *, tied: bool = False, embed: Embed | None = None
) -> DecoderSpec:
    """A decoder around its layers. `longest`: sequence that its positions allow; `tied`: its head is, where the configuration is silent."""
    head = Head(tied=config.flag("tie_word_embeddings", default=tied))
    return DecoderSpec(config.integer("vocab_size"), width, tuple(layers), norm, embed or Embed(), head, longest)


def plain_mlp(hidden: int, act: str, bias: bool = True) -> Mlp:
    """Two products with an activation between them, as GPT has it."""
    return Mlp(hidden, act, gated=False, up_bias=bias, down_bias=bias)


def head_names(tied: bool, name: str = "lm_head") -> tuple[Rule, ...]:
    return (Drop(f"{name}.weight") if tied else Rename(f"{name}.{{t}}", "head.{t}"),)


def body_names(
    spec: DecoderSpec, embed: str, norm: str, layers: str, names: Mapping[str, str], positions: str = "", head: str = "lm_head"
) -> tuple[Rule, ...]:
    """By their modules' names the table of tokens, the last norm, the layers with `names` of modules in each (theirs → ours), the table of
    `positions` where there is one, and the head."""
    return (
        *head_names(spec.head.tied, head),
        Rename(f"{embed}.{{t}}", "embed.{t}"),
        *((Rename(f"{positions}.weight", "embed.positions"),) if positions else ()),
        Rename(f"{norm}.{{t}}", "norm.{t}"),
        Rename(f"{layers}.{{x*}}", "layers.{x*}"),
        *renamed(names),
    )


def attention_names(theirs: str) -> dict[str, str]:
    """Projections of the attention that lies at `theirs` in a layer, where the last is called out."""
    return {f"{theirs}.{name}_proj": f"mixer.{name[0]}" for name in ("q", "k", "v", "out")}


BART_LAYER = {
    **attention_names("self_attn"), "self_attn_layer_norm": "mixer_in", "final_layer_norm": "ff_in", "fc1": "ff.up", "fc2": "ff.down",
}  # fmt: skip
"""Modules of a decoder's layer as BART and its time called them."""


def fused_layer(attention: str) -> dict[str, str]:
    """Modules of a layer whose `attention` holds q, k and v in one, as GPT-NeoX and its time called them."""
    norms = {"input_layernorm": "mixer_in", "post_attention_layernorm": "ff_in"}
    return {**norms, f"{attention}.dense": "mixer.o", "mlp.dense_h_to_4h": "ff.up", "mlp.dense_4h_to_h": "ff.down"}


def renamed(names: Mapping[str, str], at: str = "layers.{i}", to: str = "layers.{i}") -> tuple[Rule, ...]:
    """Modules below `at` that lie below `to` here: theirs → ours; {i} stands for the layer."""
    return tuple(Rename(f"{at}.{theirs}.{{t}}", f"{to}.{ours}.{{t}}") for theirs, ours in names.items())


def split(old: str, to: str, parts: Iterable[str], sizes: tuple[int, ...] = (), leaf: str = ".{t}", dim: int = 0) -> Split:
    """What is stored in one tensor `old` → its parts below `to`."""
    return Split(f"{old}{leaf}", tuple(f"{to}.{part}{leaf}" for part in parts), sizes, dim)


def llama_rules(tied: bool, norms: Mapping[str, str] | None = None) -> tuple[Rule, ...]:
    """Names of the Llama line. `norms`: checkpoint's word → our slot, where they differ from pre-norms."""
    slots = norms or {"input_layernorm": "mixer_in", "post_attention_layernorm": "ff_in"}
    return (
        Drop("{x*}.rotary_emb.inv_freq"),
        *head_names(tied),
        Rename("model.embed_tokens.{t}", "embed.{t}"),
        Rename("model.norm.{t}", "norm.{t}"),
        Rename("model.layers.{x*}", "layers.{x*}"),
        Rename("layers.{i}.self_attn.{p}_proj.{t}", "layers.{i}.mixer.{p}.{t}"),
        Rename("layers.{i}.self_attn.{n}_norm.{t}", "layers.{i}.mixer.{n}_norm.{t}"),
        Rename("layers.{i}.mlp.{p}_proj.{t}", "layers.{i}.ff.{p}.{t}"),
        *renamed(slots),
    )


def plain_names(spec: DecoderSpec, norms: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None) -> tuple[Rule, ...]:
    """The rules of a family whose names are Llama's, but for those of its `norms`, or of some modules of a layer (theirs → ours)."""
    return (*llama_rules(spec.head.tied, norms), *renamed(names or {}))


def change_layers(spec: DecoderSpec, change: Callable[[int, Layer, Attention], Layer]) -> DecoderSpec:
    """The spec with each layer changed: `change(index, layer, its attention)`."""
    return replace(spec, layers=tuple(change(i, layer, _attention_in(layer)) for i, layer in enumerate(spec.layers)))


def with_attention(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """The spec with fields of every layer's attention changed."""
    return change_layers(spec, lambda _, layer, attention: replace(layer, mixer=replace(attention, **changes)))


def mlp_of(spec: DecoderSpec) -> Mlp:
    """The first layer's dense feed-forward."""
    mlp = spec.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    return mlp


def experts_of(config: Config, plain: DecoderSpec, router: Router, hidden: int | None = None, shared: Mlp | None = None) -> Moe:
    """Experts like the feed-forward of `plain`, or `hidden` wide, counted in any of the usual words."""
    mlp, count = mlp_of(plain), config.integer("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = config.integer("num_experts_per_tok", "moe_topk", "moe_k")
    return Moe(count, chosen, hidden or mlp.hidden, router, mlp.activation, shared)


def sparse(spec: DecoderSpec, moe: Moe, dense: Container[int] = ()) -> DecoderSpec:
    """The spec with experts in all layers but those."""
    return change_layers(spec, lambda i, layer, _: layer if i in dense else replace(layer, feed_forward=moe))


def bidirectional(spec: DecoderSpec) -> DecoderSpec:
    """The spec with every layer seeing the whole prompt."""
    return change_layers(spec, lambda _, layer, attention: replace(layer, mixer=Bidirectional(attention)))


def attention_of(spec: DecoderSpec) -> Attention:
    """The first layer's attention, of families whose layers agree in geometry."""
    return _attention_in(spec.layers[0])


def _attention_in(layer: Layer) -> Attention:
    mixer = layer.mixer.attention if isinstance(layer.mixer, Bidirectional) else layer.mixer
    assert isinstance(mixer, Attention)
    return mixer


def listed_experts(spec: DecoderSpec, block: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Experts stored one by one as `layers.{i}.BLOCK.experts.{e}.NAME`, stacked. `names`: theirs → ours."""
    counts = [layer.feed_forward.experts for layer in spec.layers if isinstance(layer.feed_forward, Moe)][:1]
    at, to = f"layers.{{i}}.{block}.experts.{{e}}", "layers.{i}.ff.experts"
    return tuple(Stack(f"{at}.{theirs}.{{t}}", f"{to}.{ours}.{{t}}", "e", count) for theirs, ours in names.items() for count in counts)


PROJECTIONS = {f"{name}_proj": name for name in ("gate", "up", "down")}
MIXTRAL_NAMES = {"w1": "gate", "w3": "up", "w2": "down"}


def moe_names(
    spec: DecoderSpec, block: str = "mlp", router: str = "gate", shared: str = "shared_experts", names: Mapping[str, str] = PROJECTIONS
) -> tuple[Rule, ...]:
    """A router, experts one by one (`names`: theirs → ours) and shared ones, below `layers.{i}.BLOCK`; with a gate beside the last."""
    at, to = f"layers.{{i}}.{block}", "layers.{i}.ff"
    return (
        Rename(f"{at}.{router}.{{t}}", f"{to}.router.{{t}}"),
        Rename(f"{at}.{shared}_gate.{{t}}", f"{to}.shared_gate.{{t}}"),
        Rename(f"{at}.{shared}.{{p}}_proj.{{t}}", f"{to}.shared.{{p}}.{{t}}"),
        *_paired_experts(spec, f"{at}.experts"),
        *listed_experts(spec, block, names),
    )


def sparse_names(spec: DecoderSpec, shared: str = "shared_experts") -> tuple[Rule, ...]:
    """The rules of a family whose names are Llama's, and those of experts the usual ones."""
    return (*plain_names(spec), *moe_names(spec, shared=shared))


def _paired_experts(spec: DecoderSpec, at: str) -> tuple[Rule, ...]:
    """Experts of a layer in two tensors, in either direction, where they are not stored one by one (Qwen 3.5, Qwen3-VL)."""
    up, down, to = f"{at}.gate_up_proj", f"{at}.down_proj", "layers.{i}.ff.experts"
    hidden = [layer.feed_forward.hidden for layer in spec.layers if isinstance(layer.feed_forward, Moe) and layer.feed_forward.gated][:1]
    turned = [(Transpose(up, until=(2 * size, spec.width)), Transpose(down, until=(spec.width, size))) for size in hidden]
    parts = (Split(up, tuple(f"{to}.{part}.weight" for part in ("gate", "up")), dim=1), Rename(down, f"{to}.down.weight"))
    return (*turned[0], *parts) if turned else ()


def correction(theirs: str) -> Rename:
    """What is added to the scores of a layer's experts when they are chosen."""
    return Rename(f"layers.{{i}}.{theirs}", "layers.{i}.ff.correction")


def interleaved_qkv(spec: DecoderSpec, name: str) -> tuple[Rule, ...]:
    """q, k and v of each head side by side in `NAME.{t}` → three tensors."""
    attention = attention_of(spec)
    view = (attention.heads, 3, attention.head_dim)
    return (Reorder(f"{name}.{{t}}", view, (1, 0, 2)), split(name, "layers.{i}.mixer", "qkv"))
