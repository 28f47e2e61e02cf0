"""Runs a module without numbers for a few tokens and writes down each attention call: can the bridge carry the model, and if not, why?"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.models.bridge.encoder import media_facts
from pagoda.models.bridge.interface import ASK, ATTRIBUTE, RUN, register
from pagoda.models.bridge.kinds import bridged_class
from pagoda.models.bridge.masks import visible_of
from pagoda.models.bridge.module import Given, Module, attend_by, body_paths, hollow_module, replaced
from pagoda.models.bridge.spec import AttentionCall, BridgeSpec, Visible
from pagoda.models.bridge.split import split_module
from pagoda.models.parallel.shard import Shard

TOKENS = 300
"""Of the text that is run without numbers: long enough for layers that sum up many tokens in one key."""


EXPERTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What transformers' experts take; many look at the numbers of their choice, which are not there."""


@dataclass
class Recorder:
    """Of one forward: the calls that modules made, while it listens."""

    calls: list[AttentionCall] = field(default_factory=list)
    listens: bool = True

    def bound(self, path: str, module: Any) -> Any:
        """What stands in the module at `path` for its attention."""

        def ask(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
        ) -> torch.Tensor:
            if self.listens:
                self.calls.append(_call(path, module, (query, key, value), mask, options))
            return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

        return ask


def probe(config: Mapping[str, Any], dtype: str, shard: Shard | None = None) -> tuple[BridgeSpec, Module]:
    """What the bridge needs to know of a rank, and the hollow module. Raises `ModelError` naming why a model cannot be carried."""
    register()
    _check_config(config)
    module = hollow_module(bridged_class(config), config, dtype, ASK)
    if shard is not None and shard.world > 1:
        split_module(module, shard)
    recorder = Recorder()
    for path, part in module.named_modules():
        setattr(part, ATTRIBUTE, recorder.bound(path, part))
        if tuple(inspect.signature(part.forward).parameters)[:3] == EXPERTS:
            part.forward = _routed
    settings = module.config.get_text_config(decoder=True)
    tokens = min(TOKENS, longest_of(settings) or TOKENS)
    body, top, hidden = _body(module, recorder, tokens)
    calls = tuple(recorder.calls)
    _check_calls(calls, _layers(settings), type(module).__name__)
    recorder.listens = False
    _check_unmasked(module, body, tokens)
    logits = head(module, top, hidden)
    first = first_position_of(module)
    longest, width = _max_positions(settings) - first, hidden.shape[-1]
    media = media_facts(module, body, width)
    return BridgeSpec(config, body, calls, logits.shape[-1], width, widest_of(module), longest, first, top, media), module


def _routed(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states)


def head(module: Module, top: str, hidden: torch.Tensor) -> torch.Tensor:
    """Logits `[1, S, vocab]` of hidden states `[1, S, width]`, by everything that the model does after `top` gave them."""
    given = Given()
    given.hidden = hidden
    with replaced(module, top, given):
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        # Some want an image where there is none to see, or what was made of one.
        seen = {"image_embeds": hidden} if "image_embeds_position_mask" in inspect.signature(module.forward).parameters else {}
        logits: torch.Tensor = module(input_ids=ids, use_cache=False, **seen).logits
    return logits


def _body(module: Module, recorder: Recorder, tokens: int) -> tuple[str, str, torch.Tensor]:
    """The first submodule that makes all attention calls and leaves none to the rest, and what hands its states to the head."""
    reasons = []
    for path, top in body_paths(module):
        recorder.calls.clear()
        try:
            hidden = _run_either(module.get_submodule(path), tokens, recorder)
            made = list(recorder.calls)
            logits = head(module, top, hidden)
        except ModelError:
            raise
        except Exception as error:  # whatever a model's code raises
            reasons.append(f"{path}: {type(error).__name__}: {error}")
            continue
        if len(recorder.calls) == len(made) and logits.shape[:2] == hidden.shape[:2]:
            return path, top, hidden
        reasons.append(f"{path}: its hidden states are not all that the logits are made of")
    raise ModelError(f"transformers' {type(module).__name__} cannot be run from outside: {'; '.join(reasons) or 'it has no body'}")


def _run_either(body: Any, tokens: int, recorder: Recorder) -> torch.Tensor:
    """With a mask without numbers, or one with them where the model looks."""
    try:
        return _run(body, tokens)
    except Exception:  # whatever a model's code raises; the second attempt tells
        recorder.calls.clear()
        return _run(body, tokens, masks="cpu")


def _run(body: Any, tokens: int, positions: bool = False, masks: str = "meta") -> torch.Tensor:
    taken = inspect.signature(body.forward).parameters
    if "position_ids" not in taken:
        raise ModelError(f"transformers' {type(body).__name__} takes no position_ids: several requests cannot share its forward")
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    # A mask of rows keeps transformers from looking into positions for packed texts.
    options = {"attention_mask": torch.ones(1, tokens, dtype=torch.int64, device=masks)} if "attention_mask" in taken else {}
    if positions:
        options = {"position_ids": torch.zeros_like(ids)}
    hidden: torch.Tensor = body(input_ids=ids, use_cache=False, **options).last_hidden_state
    return hidden


def _check_unmasked(module: Module, body: str, tokens: int) -> None:
    """Steps on pages are run without a mask."""
    attend_by(module, body, RUN)
    try:
        _run(module.get_submodule(body), tokens, positions=True)
    except ModelError:
        raise
    except Exception as error:  # whatever a model's code raises
        raise ModelError(f"transformers' {type(module).__name__} cannot run on pages: {type(error).__name__}: {error}") from error
    finally:
        attend_by(module, body, ASK)


def _call(path: str, module: Any, qkv: tuple[torch.Tensor, ...], mask: torch.Tensor | None, options: dict[str, Any]) -> AttentionCall:
    query, key, value = qkv
    if options.get("position_bias") is not None:
        raise ModelError(f"{path} adds a bias of its own to the attention logits, which no paged kernel takes")
    if query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise ModelError(f"{path} attends from {query.shape[2]} tokens to {key.shape[2]}: it is no self-attention over a step's tokens")
    scaling = options.get("scaling")
    return AttentionCall(
        path=path,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        k_dim=key.shape[-1],
        v_dim=value.shape[-1],
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        visible=_visible(path, module, mask, options),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux") is not None,
    )


def _visible(path: str, module: Any, mask: torch.Tensor | None, options: dict[str, Any]) -> Visible:
    """From the mask, which is what transformers' own eager attention goes by; else from what the call says."""
    if mask is not None:
        rule = getattr(mask, "pagoda_rule", None)
        if rule is None:
            raise ModelError(f"{path} is masked by the model's own code, which a step of several requests cannot follow")
        return visible_of(rule, path)
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", False) if causal is None else causal):
        raise ModelError(f"{path} is not causal")
    return Visible(window=options.get("sliding_window"))


def _check_config(config: Mapping[str, Any]) -> None:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    if kind in ("dynamic", "longrope", "su"):
        raise ModelError(f"rope_type {kind!r} depends on each request's length, which transformers takes from the whole step")


def _check_calls(calls: tuple[AttentionCall, ...], layers: int, name: str) -> None:
    attending = len({call.path for call in calls})
    if attending < layers:
        raise ModelError(
            f"transformers' {name} has {layers} layers and {attending} of them call its attention interface:"
            " the others keep a state or an attention of their own, which cannot be paged"
        )


def _layers(settings: Any) -> int:
    return int(getattr(settings, "num_hidden_layers", 0))


def widest_of(module: Module) -> int:
    top = module.get_output_embeddings()
    return max((part.out_features for part in module.modules() if isinstance(part, torch.nn.Linear) and part is not top), default=0)


def first_position_of(module: Module) -> int:
    """Position tables of RoBERTa's kin begin behind the row of padding."""
    for part in module.modules():
        if hasattr(part, "create_position_ids_from_input_ids") and isinstance(getattr(part, "padding_idx", None), int):
            return int(part.padding_idx) + 1
    return 0


def _max_positions(settings: Any) -> int:
    found = longest_of(settings)
    if found is None:
        raise ModelError("the configuration names no longest sequence; give max_position_embeddings with --hf-overrides")
    return found


def longest_of(settings: Any) -> int | None:
    """Positions that a configuration allows; None where it says nothing of them."""
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_target_positions", "context_length")
    values = (getattr(settings, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
