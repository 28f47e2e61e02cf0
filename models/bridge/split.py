"""A rank's part of a transformers module, by the module's own plan: columns of some linear layers, rows of those that follow them.

What the plan splits in other ways (experts, joined projections) every rank keeps whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.errors import ConfigError
from pagoda.models.bridge.module import Module, body_paths
from pagoda.models.parallel.shard import Shard

USUAL = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip
"""The plan of most models, tried where a module has none: a model that it does not suit is found out by the check at load."""


def split_module(module: Module, shard: Shard, communicator: Communicator | None = None) -> None:
    """Keep this rank's part, in place. Without a communicator only shapes are right. Raises `ConfigError` where it cannot be split."""
    settings = module.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(settings, name, None)
        if isinstance(heads, int):
            shard.split(heads, name)
    found = list(_planned(module, getattr(settings, "base_model_tp_plan", None) or USUAL))
    if not found:
        raise ConfigError(f"transformers has no plan that splits {type(module).__name__}; use tensor_parallel_size=1")
    for linear, style in found:
        _split(linear, 0 if style == "colwise" else 1, shard)
        if style == "rowwise" and communicator is not None:
            _summed(linear, communicator)


def _planned(module: Module, plan: dict[str, str]) -> Iterator[tuple[torch.nn.Linear, str]]:
    bodies = "|".join(re.escape(body) for body, _ in body_paths(module))
    rules = [(re.compile(f"({bodies})\\.{re.escape(path).replace(re.escape('*'), '[0-9]+')}"), style) for path, style in plan.items()]
    for name, part in module.named_modules():
        style = next((style for pattern, style in rules if pattern.fullmatch(name)), None)
        if style in ("colwise", "rowwise") and isinstance(part, torch.nn.Linear):
            yield part, style


def _split(linear: torch.nn.Linear, dim: int, shard: Shard) -> None:
    span = shard.split(linear.weight.shape[dim], "features of a linear layer")
    linear.weight.data = linear.weight.data.narrow(dim, span.part.start, len(span)).clone()
    linear.out_features, linear.in_features = linear.weight.shape
    if linear.bias is not None and dim == 0:
        linear.bias.data = linear.bias.data[span.index].clone()
    elif linear.bias is not None and shard.rank > 0:
        linear.bias.data = torch.zeros_like(linear.bias.data)


def _summed(linear: torch.nn.Linear, communicator: Communicator) -> None:
    def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return communicator.all_reduce(output.contiguous())

    linear.register_forward_hook(hook)
