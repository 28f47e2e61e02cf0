"""RWKV 4: averages over time and a feed-forward with a memory of one token, each behind a norm; no attention."""

from __future__ import annotations

from pagoda.models.checkpoint import Also, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import decoder
from pagoda.models.families.recurrent_common import ENDLESS
from pagoda.models.family import Family
from pagoda.models.recurrent import ChannelMix, TimeMix
from pagoda.models.spec import DecoderSpec, Embed, Layer, Norm


def rwkv(config: Config) -> DecoderSpec:
    width = config.integer("hidden_size")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True)
    inner = config.integer("attention_hidden_size", default=width)
    hidden = config.integer("intermediate_size", default=4 * width)
    # Halving the stream every so many layers keeps half precision from overflowing; norms undo it. Nothing depends on the context's length.
    config.ignore("rescale_every", "context_length")
    pair = (Layer(TimeMix(inner), None, mixer_in=norm), Layer(ChannelMix(hidden), None, mixer_in=norm))
    return decoder(config, width, pair * config.integer("num_hidden_layers"), norm, ENDLESS, embed=Embed(norm=norm))


def rwkv_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """A layer of theirs is two of ours."""
    names: list[Rule] = [
        *(Also(f"{part}.{{x*}}", f"rwkv.{part}.{{x*}}") for part in ("embeddings", "blocks", "ln_out")),
        Rename("rwkv.embeddings.{t}", "embed.{t}"),
        Rename("rwkv.blocks.0.pre_ln.{t}", "embed.norm.{t}"),
        Rename("rwkv.ln_out.{t}", "norm.{t}"),
    ]
    for block in range(len(spec.layers) // 2):
        at, time, channel = f"rwkv.blocks.{block}", f"layers.{2 * block}", f"layers.{2 * block + 1}"
        names += [
            Rename(f"{at}.ln1.{{t}}", f"{time}.mixer_in.{{t}}"),
            Rename(f"{at}.ln2.{{t}}", f"{channel}.mixer_in.{{t}}"),
            *(Rename(f"{at}.attention.{theirs}", f"{time}.mixer.{ours}") for theirs, ours in _TIME.items()),
            *(Rename(f"{at}.feed_forward.{theirs}", f"{channel}.mixer.{ours}") for theirs, ours in _CHANNEL.items()),
        ]
    return tuple(names)


_TIME = {
    "time_decay": "decay", "time_first": "first", "time_mix_key": "blend_key", "time_mix_value": "blend_value",
    "time_mix_receptance": "blend_gate", "key.{t}": "key.{t}", "value.{t}": "value.{t}", "receptance.{t}": "gate.{t}",
    "output.{t}": "out.{t}",
}  # fmt: skip
_CHANNEL = {
    "time_mix_key": "blend_up", "time_mix_receptance": "blend_gate", "key.{t}": "up.{t}", "receptance.{t}": "gate.{t}",
    "value.{t}": "down.{t}",
}  # fmt: skip

RWKV = Family("rwkv", ("RwkvForCausalLM",), ("rwkv",), rwkv, rwkv_rules)
