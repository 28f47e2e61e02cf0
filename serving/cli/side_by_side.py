"""Runs a model on two devices side by side, and finds the first layer and the first primitive where they part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pagoda.hal.device import Backend, Device
from pagoda.hal.errors import ConfigError
from pagoda.hal.table import KernelPolicy, KernelTable
from pagoda.models.decoder import Decoder, Stream
from pagoda.models.direct import DirectRun
from pagoda.models.load import Checkpoint, Description, describe, load_model
from pagoda.ops.call_check import CallJudge, Verdict
from pagoda.ops.op import DTYPE_EPS
from pagoda.ops.table import kernel_table

DRIFT = 32.0
"""Roundings' worth of difference, times the root of the number of layers before, that two right devices may show in the stream."""


class Stage(NamedTuple):
    """The stream after one part of the model in one step. `error`: largest difference, relative to the largest number; `row`: where."""

    step: int
    part: int
    error: float
    allowed: float
    row: int

    @property
    def parted(self) -> bool:
        return not self.error <= self.allowed


@dataclass(frozen=True)
class Culprit:
    """A call of a primitive whose result its oracle does not accept. `side`: 0 for the device in question, 1 for the other."""

    side: int
    step: int
    part: int
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        layers: of the model. stages: every part of every step, in order.
        parted: the first stage that differs by more than roundings explain. culprit: the first wrong primitive up to there.
        judged: calls that were held to their oracles.
    """

    layers: int
    stages: tuple[Stage, ...]
    parted: Stage | None
    culprit: Culprit | None
    judged: int

    def name(self, part: int) -> str:
        """What a part is called: the embedding is before layer 0, the head after the last."""
        return "the embedding" if part < 0 else "the last norm and the head" if part == self.layers else f"layer {part}"


@dataclass
class Side:
    """A model on one device, watched layer by layer."""

    device: Device
    model: Decoder
    table: KernelTable
    judge: CallJudge
    values: list[torch.Tensor] = field(default_factory=list)
    part: int = -1
    judged_parts: range = range(0)

    def begins(self, index: int, stream: Stream) -> None:
        if index == 0:
            self._after(stream.peek())

    def ends(self, index: int, stream: Stream) -> None:
        self._after(stream.peek())

    def start(self) -> None:
        self.values, self.part = [], -1
        self.judge.active = self.part in self.judged_parts

    def finish(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The values of a step, with what it ended in."""
        self.judge.active = False
        return [*self.values, x.to("cpu", copy=True)]

    def _after(self, x: torch.Tensor) -> None:
        # A copy also on the host: what comes later may add to the stream in place.
        self.values.append(x.to("cpu", copy=True))
        self.part += 1
        self.judge.active = self.part in self.judged_parts


def open_side(
    backend: Backend, index: int, policy: KernelPolicy, checkpoint: Checkpoint | Mapping[str, Any], dtype: str = "auto"
) -> tuple[Side, Description]:
    """Load the model onto a device, with every kernel ready to be judged. Raises `ConfigError` for models without layers of ours."""
    device, judge = backend.open(index), CallJudge(lambda verdict: None)
    table = kernel_table(backend, device.info, policy, judge.wrap)
    description = describe(checkpoint, dtype=dtype, dtypes=device.info.dtypes, default=device.info.default_dtype, table=table)
    model = load_model(description, device, table)
    if not isinstance(model, Decoder) or description.facts.encoder is not None:
        raise ConfigError(f"{description.facts.architecture} is not one stack of layers of Pagoda's own, which a comparison needs")
    side = Side(device, model, table, judge)
    model.watch(side)
    return side, description


def compare_sides(sides: tuple[Side, Side], prompts: Sequence[Sequence[int]], new: int) -> Comparison:
    """Run the prompts together and then `new` tokens one by one, the second side's greedy ones on both."""
    texts, stages = _forced(sides[1], prompts, new), list[Stage]()
    for step, values in enumerate(zip(*(run_texts(side, prompts, texts) for side in sides), strict=True)):
        stages += _stages(step, values, _spacing(sides))
    parted = next((stage for stage in stages if stage.parted), None)
    layers = len(sides[1].model.spec.layers)
    if parted is None:
        return Comparison(layers, tuple(stages), None, None, 0)
    seen = _Verdicts()
    # What parted first; where every primitive of that is right, all that came before it.
    culprit = seen.first(sides, prompts, texts, parted.step, range(parted.part, parted.part + 1))
    culprit = culprit or seen.first(sides, prompts, texts, parted.step, range(-1, parted.part))
    return Comparison(layers, tuple(stages), parted, culprit, seen.count)


def run_texts(side: Side, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """Run the `prompts` that `texts` begin with in one step, then a token of each a step.

    For each step, the stream after each part, and last the logits, or the hidden states of a model without.
    """
    run = DirectRun(side.model, side.device, len(texts), max(map(len, texts)))
    for _, pool in run.pools:
        pool.zero_()  # a tolerance may follow from the largest number in the pages, read or not
    values = [_step(side, run, [(number, list(prompt)) for number, prompt in enumerate(prompts)])]
    for turn in range(len(texts[0]) - len(prompts[0])):
        values.append(_step(side, run, [(number, [text[len(prompts[number]) + turn]]) for number, text in enumerate(texts)]))
    return values


@torch.inference_mode()
def _step(side: Side, run: DirectRun, feed: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    side.start()
    hidden = run.step(feed).hidden
    return side.finish(hidden if side.model.facts.pooler is not None else side.model.logits(hidden))


def _forced(side: Side, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    if side.model.facts.pooler is not None:
        return [list(prompt) for prompt in prompts]
    run = DirectRun(side.model, side.device, len(prompts), max(map(len, prompts)) + new)
    return [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, run.generate(prompts, max(new, 1)), strict=True)]


def _spacing(sides: tuple[Side, Side]) -> float:
    """Relative spacing of the coarsest numbers that a kernel of either side computes with."""
    eps = [max((choice.chosen.eps for choice in side.table.explain()), default=0.0) for side in sides]
    return max(DTYPE_EPS[sides[0].model.facts.dtype], *eps)


def _stages(step: int, values: tuple[Any, ...], eps: float) -> list[Stage]:
    stages = []
    for part, (have, want) in enumerate(zip(*values, strict=True), start=-1):
        off = (have.double() - want.double()).abs().nan_to_num(nan=math.inf)
        by_row = off.flatten(1).amax(1)
        largest = max(float(want.double().abs().max()), 1e-30)
        allowed = DRIFT * eps * math.sqrt(part + 2)
        stages.append(Stage(step, part, float(by_row.max()) / largest, allowed, int(by_row.argmax())))
    return stages


class _Verdicts:
    """Looks for the first call that is wrong, the device in question before the other."""

    def __init__(self) -> None:
        self.count = 0

    def first(
        self, sides: tuple[Side, Side], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], step: int, parts: range
    ) -> Culprit | None:
        """Run again up to `step`, judging every call in `parts`."""
        upto = [list(text[: len(prompt) + step]) for text, prompt in zip(texts, prompts, strict=True)]
        for number, side in enumerate(sides):
            found: list[Culprit] = []
            side.judge.tell = self._note(found, number, side, step)
            side.judged_parts = parts
            run_texts(side, prompts, upto)
            side.judged_parts = range(0)
            if found:
                return found[0]
        return None

    def _note(self, found: list[Culprit], number: int, side: Side, step: int) -> Callable[[Verdict], None]:
        def note(verdict: Verdict) -> None:
            self.count += 1
            if verdict.problem is not None:
                found.append(Culprit(number, step, side.part, verdict))

        return note
