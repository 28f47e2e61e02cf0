"""MiniMax Text 01 and M1: lightning attention, a layer of softmax attention after some, experts, a residual of normed streams."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rename, Reorder, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import MIXTRAL_NAMES, Heads, activation, decoder, max_positions, moe_names, plain_names, rms, rope, split
from pagoda.models.families.qwen_next import FULL, LINEAR
from pagoda.models.families.recurrent_common import first_of, layer_kinds
from pagoda.models.family import Family
from pagoda.models.recurrent import GatedNorm, Lightning
from pagoda.models.spec import DecoderSpec, Layer, Moe, Norm, Normed, Router


def minimax(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config, 1e-5)
    heads = Heads.read(config, width)
    position = rope(config, heads.head_dim)
    attention = heads.attention(position)
    config.require("hidden_act", "silu")
    config.ignore("block_size", "sliding_window")
    hidden, top_k = config.integer("intermediate_size"), config.integer("num_experts_per_tok")
    moe = Moe(config.integer("num_local_experts"), top_k, hidden, Router("softmax", renormalize=True), activation(config, "hidden_act"))
    default = [FULL if (i + 1) % 2 else LINEAR for i in range(count)]
    kinds = layer_kinds(config, count, (LINEAR, FULL), default=default)
    factors = {kind: (_factors(config, name), _factors(config, "mlp")) for kind, name in ((LINEAR, "linear_attn"), (FULL, "full_attn"))}
    layers = (
        Layer(attention if kind == FULL else _lightning(heads, i, count), moe, mixer_in=norm, ff_in=norm, residual=Normed(*factors[kind]))
        for i, kind in enumerate(kinds)
    )
    return decoder(config, width, layers, norm, max_positions(config, position.scaling))


def _factors(config: Config, name: str) -> tuple[float, float]:
    return config.number(f"{name}_alpha_factor", default=1.0), config.number(f"{name}_beta_factor", default=1.0)


def _lightning(heads: Heads, layer: int, count: int) -> Lightning:
    """Rates fall from head to head and from layer to layer."""
    falls = 1 - layer / (count - 1 + 1e-5) + 1e-5
    rates = tuple(2.0 ** (-8 * (head + 1) / heads.heads) * falls for head in range(heads.heads))
    return Lightning(rates, heads.head_dim, GatedNorm(Norm("rms", 1e-6), 1, "sigmoid"))


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    mixer, at, to = first_of(spec, Lightning), "layers.{i}.self_attn", "layers.{i}.mixer"
    return (
        *(Drop(f"model.layers.{{i}}.self_attn.{name}") for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
        *plain_names(spec),
        *moe_names(spec, "block_sparse_moe", names=MIXTRAL_NAMES),
        Reorder(f"{to}.qkv.{{t}}", (len(mixer.rates), 3, mixer.head_dim), (1, 0, 2)),
        split(f"{to}.qkv", to, ("query", "key", "value")),
        Rename(f"{at}.output_gate.{{t}}", f"{to}.gate.{{t}}"),
        Rename(f"{at}.norm.{{t}}", f"{to}.norm.{{t}}"),
    )


MINIMAX = Family("minimax", ("MiniMaxForCausalLM",), ("minimax",), minimax, rules)
