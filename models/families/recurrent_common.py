"""What families with recurrent layers share: the names and sizes of a Mamba mixer's tensors, patterns of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import llama_rules, split
from pagoda.models.recurrent import Recurrent, Selective, Ssd
from pagoda.models.spec import Both, DecoderSpec, Shared

ENDLESS = 131072
"""Longest sequence of models without positions, whose configurations name none; their state is as large for any length."""

T = TypeVar("T", bound=Recurrent)


def first_of(spec: DecoderSpec, kind: type[T]) -> T:
    """The first recurrent mixer of this kind; a family's layers agree in geometry. Raises `ModelError` where there is none."""
    mixers = (layer.mixer.recurrent if isinstance(layer.mixer, Both | Shared) else layer.mixer for layer in spec.layers)
    found = [mixer for mixer in mixers if isinstance(mixer, kind)]
    if not found:
        raise ModelError("config.json names no recurrent layer, of which this family's models have some; correct its kinds of layers")
    return found[0]


def layer_kinds(
    config: Config, count: int | None, names: Sequence[str], *keys: str,
    default: Sequence[str] | None = None, named: Mapping[str, str] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """The kind of each layer, as a list under one of `keys` says, each one of `names`; `named`: other words for them. `count` None: any."""
    listed = config.list(*(keys or ("layer_types",)), kind=str, default=tuple(default) if default else ())
    kinds = tuple((named or {}).get(kind, kind) for kind in listed)
    count = len(kinds) if count is None else count
    unknown = sorted(set(kinds) - set(names))
    if len(kinds) != count or unknown:
        raise ModelError(
            f"{config.where}: {(keys or ('layer_types',))[0]} has {len(kinds)} entries for {count} layers, of kinds"
            f" {', '.join(sorted(set(kinds)))}; this model type knows {', '.join(names)}"
        )
    return kinds


def hybrid_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Llama's names but for the last norm and the feed-forward's, as Jamba and those after it have them."""
    return (
        Rename("model.final_layernorm.{t}", "model.norm.{t}"),
        *llama_rules(spec.head.tied, {"input_layernorm": "mixer_in", "pre_ff_layernorm": "ff_in"}),
        Rename("layers.{i}.feed_forward.{p}_proj.{t}", "layers.{i}.ff.{p}.{t}"),
    )


def ssd_rules(mixer: Ssd, at: str, to: str = "layers.{i}.mixer") -> tuple[Rule, ...]:
    """Mamba 2's tensors under `at`."""
    inner, shared = mixer.heads * mixer.head_dim, mixer.groups * mixer.state
    return (
        split(f"{at}.in_proj", to, ("z", "x", "b", "c", "step"), (inner, inner, shared, shared, mixer.heads)),
        split(f"{at}.conv1d", f"{to}.conv", "xbc", (inner, shared, shared)),
        *_scan_rules(at, to),
        *((Rename(f"{at}.norm.{{t}}", f"{to}.norm.{{t}}"),) if at != to else ()),
    )


def selective_rules(mixer: Selective, at: str, to: str = "layers.{i}.mixer") -> tuple[Rule, ...]:
    """Mamba's tensors under `at`, and Jamba's norms."""
    norms = (("dt", "step"), ("b", "b"), ("c", "c")) if mixer.inner_norm is not None and mixer.inner_norm.weight else ()
    return (
        split(f"{at}.in_proj", to, "xz"),
        Rename(f"{at}.conv1d.{{t}}", f"{to}.conv.x.{{t}}"),
        Rename(f"{at}.x_proj.{{t}}", f"{to}.latents.{{t}}"),
        Rename(f"{at}.dt_proj.{{t}}", f"{to}.step.{{t}}"),
        *(Rename(f"{at}.{theirs}_layernorm.{{t}}", f"{to}.{ours}_norm.{{t}}") for theirs, ours in norms),
        *_scan_rules(at, to),
    )


def _scan_rules(at: str, to: str) -> tuple[Rule, ...]:
    return (*rate_names(at, to), Rename(f"{at}.D", f"{to}.d"), Rename(f"{at}.out_proj.{{t}}", f"{to}.out.{{t}}"))


def rate_names(at: str, to: str) -> tuple[Rule, ...]:
    """How fast a state decays: a rate and what is added to the steps."""
    return (Rename(f"{at}.A_log", f"{to}.a_log"), Rename(f"{at}.dt_bias", f"{to}.step_bias"))
