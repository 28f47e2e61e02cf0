"""The fused operators of Intel's bridge without a Gaudi: calls as its users publish them, answered by the operators' formulas.

What they cannot show is what Gaudi's compiler makes of them, and arguments that its users do not use.
"""

from __future__ import annotations

import inspect
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

RECORDED = json.loads(Path(__file__).with_name("gaudi_operators.json").read_text())


def modules() -> dict[str, ModuleType]:
    """For `sys.modules`: the bridge's modules with these operators and nothing else."""
    made = {}
    for name in ("", ".torch", ".torch.hpex", ".torch.hpex.normalization", ".torch.hpex.kernels"):
        module = ModuleType(f"habana_frameworks{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        made[module.__name__] = module
    made["habana_frameworks.torch.hpex.normalization"].FusedRMSNorm = FusedRMSNorm  # type: ignore[attr-defined]
    made["habana_frameworks.torch.hpex.kernels"].FusedSDPA = FusedSDPA  # type: ignore[attr-defined]
    return made


def library() -> torch.library.Library:
    """`torch.ops.hpu.mixture_of_experts`, while it is kept."""
    made = torch.library.Library("hpu", "FRAGMENT")
    made.define(f"mixture_of_experts{RECORDED['mixture_of_experts']}")
    made.impl("mixture_of_experts", _experts, "CompositeExplicitAutograd")
    return made


def _given(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(f"def declared{RECORDED[name]}: ...", scope)
    return dict(inspect.signature(scope["declared"]).bind(*args).arguments)


class FusedRMSNorm:
    @staticmethod
    def apply(*args: Any) -> torch.Tensor:
        given = _given("FusedRMSNorm.apply", args)
        x, weight = given["x"], given["weight"]
        assert x.dim() == 3
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + given["eps"]).rsqrt()
        return (normed * weight.float()).to(x.dtype)


class FusedSDPA:
    @staticmethod
    def apply(*args: Any) -> torch.Tensor:
        """Batch, heads, sequence, numbers; the mask is added to the logits."""
        given = _given("FusedSDPA.apply", args)
        q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
        assert given["softmax_mode"] in ("fp32", "fast") and given["padding_side"] in ("left", "right") and not given["is_causal"]
        assert mask.shape == (q.shape[0], 1, q.shape[2], k.shape[2]) and mask.dtype == q.dtype and k.shape == v.shape
        group = q.shape[1] // k.shape[1]
        k, v = (one.float().repeat_interleave(group, 1) for one in (k, v))
        logits = q.float() @ k.transpose(2, 3) * given["scale"] + mask.float()
        return (logits.softmax(-1) @ v).to(q.dtype)


def _experts(
    hidden_states: torch.Tensor, expert_routing_table: torch.Tensor, router_weights: torch.Tensor, w12: list[torch.Tensor],
    w3: list[torch.Tensor], permuted_weights: bool, activation: str, experts_min: int, experts_max: int,
) -> torch.Tensor:  # fmt: skip
    assert permuted_weights and activation == "silu" and len(w12) == len(w3) == experts_max - experts_min + 1
    assert router_weights.dtype == hidden_states.dtype and expert_routing_table.dtype == torch.int64
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert, (both, down) in enumerate(zip(w12, w3, strict=True), experts_min):
        share = torch.where(expert_routing_table == expert, router_weights.float(), 0.0).sum(-1, keepdim=True)
        gate, up = (hidden_states.float() @ both.float().T).chunk(2, -1)
        total += share * ((torch.nn.functional.silu(gate) * up) @ down.float().T)
    return total.to(hidden_states.dtype)
