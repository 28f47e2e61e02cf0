"""Feed-forwards: dense (`MlpBlock`) and routed (`MoeBlock`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pagoda.models.adapters.slots import AdaptedLinear
from pagoda.models.blocks.linear import Linear
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.xielu import XieluBlock
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Shard, Span
from pagoda.models.spec import ClampedSwiglu, Mlp, Moe, Xielu
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.moe import MoeMlpFacts, RouteFacts


class MlpBlock:
    """`down(act(gate) · up)` or `down(act(up))` on one rank."""

    def __init__(self, build: Builder, path: str, spec: Mlp, width: int) -> None:
        hidden, whole = build.shard.split(spec.hidden, "hidden numbers of the feed-forward"), Span.whole(width)
        parts = {"gate": hidden, "up": hidden} if spec.gated else {"up": hidden}
        self.first = build.linear(path, parts, whole, "column", spec.up_bias)
        self._down = build.linear(path, {"down": whole}, hidden, "row", spec.down_bias)
        self._act: Any = self._activation(build, path, spec)
        self._activated_down = _joined_down(build, path, self._down)
        self._gate_scale, self._scale, self._hidden = spec.gate_scale, spec.scale, len(hidden)

    def _activation(self, build: Builder, path: str, spec: Mlp) -> Any:
        if isinstance(spec.activation, Xielu):
            return XieluBlock(build, f"{path}.act")
        op = "gated_activation" if spec.gated else "activation"
        kernel = build.kernel(op, ActivationFacts(build.numerics.dtype, spec.activation, spec.limit))
        return kernel.run if build.loading else None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of `[T, width]`, to be summed over ranks."""
        return self.rest(self.first(x, step.adapters), step)

    def rest(self, wide: torch.Tensor, step: Step, activated: bool = False) -> torch.Tensor:
        """The same from the first product on; `activated`: from the activation on."""
        if self._gate_scale != 1.0:
            wide = torch.cat([wide[:, : self._hidden] * self._gate_scale, wide[:, self._hidden :]], dim=-1)
        if self._activated_down is not None and not activated:
            out = self._activated_down(wide)
        else:
            out = self._down(wide if activated else self._act(wide), step.adapters)
        return out if self._scale == 1.0 else out * self._scale


def _joined_down(build: Builder, path: str, down: Linear | AdaptedLinear) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Activation and last product as one kernel, where fusion found them and the product's weights lie as they are."""
    site = build.fusion("act_gemm", path)
    if site is None or site.facts is None or not isinstance(down, Linear) or down.plain != site.facts.gemm:  # type: ignore[attr-defined]
        return None
    kernel = build.kernel("act_gemm", site.facts)
    return partial(kernel.run, kernel.pack(down.packed)) if build.loading else None


class MoeBlock:
    """Routed experts, with a shared one where the spec has it, on one rank."""

    def __init__(self, build: Builder, path: str, spec: Moe, width: int) -> None:
        dtype, router = build.numerics.dtype, spec.router
        self._router = build.linear(path, {"router": Span.whole(spec.experts)}, Span.whole(width), "replicated", router.bias)
        self._correction = (
            build.tensor(f"{path}.correction", (Span.whole(spec.experts),), "replicated", "float32") if router.correction else None
        )
        facts = RouteFacts(
            dtype, spec.experts, spec.top_k, router.score, router.renormalize, router.groups, router.top_groups,
            router.group_score, router.correction, router.scale, router.jitter,
        )  # fmt: skip
        route = build.kernel("route", facts)
        experts, hidden = _placement(build.shard, spec)
        clamp = spec.activation if isinstance(spec.activation, ClampedSwiglu) else None
        mlp = MoeMlpFacts(
            dtype,
            spec.experts,
            width,
            len(hidden),
            spec.top_k,
            spec.activation if isinstance(spec.activation, str) else "silu",
            bias=spec.bias,
            alpha=clamp.alpha if clamp else None,
            limit=clamp.limit if clamp else None,
            first=experts.part.start,
            local=len(experts),
            scale_input=spec.scale_input,
            gated=spec.gated,
        )
        run, self._packed = build.experts(f"{path}.experts", mlp, experts, hidden)
        self._shared = MlpBlock(build, f"{path}.shared", spec.shared, width) if spec.shared else None
        self._gate = build.linear(path, {"shared_gate": Span.whole(1)}, Span.whole(width), "replicated") if spec.shared_gate else None
        self._route: Any = route.run if build.loading else None
        self._run: Any = run.run if build.loading else None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of `[T, width]`, to be summed over ranks."""
        weights, ids = self._route(self._router(x, step.adapters), self._correction)
        if step.routed is not None:
            step.routed.append(ids)
        out = self._run(self._packed, x, weights, ids)
        return out if self._shared is None else out + self._gated(self._shared, x, step)

    def _gated(self, shared: MlpBlock, x: torch.Tensor, step: Step) -> torch.Tensor:
        out = shared(x, step)
        return out if self._gate is None else out * torch.sigmoid(self._gate(x, step.adapters))


def _placement(shard: Shard, spec: Moe) -> tuple[Span, Span]:
    # Experts with biases stay whole: their outputs are summed over ranks, a bias must be added once.
    if spec.hidden % shard.world == 0 and not spec.bias:
        return Span.whole(spec.experts), shard.split(spec.hidden, "hidden numbers of an expert")
    return shard.split(spec.experts, "experts"), Span.whole(spec.hidden)
