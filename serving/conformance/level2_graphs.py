"""Level 2, executable steps: a replay equals an eager run on changed inputs, for every bucket, also after sleep and wake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import Pieces, Replay
from pagoda.hal.info import Feature
from pagoda.hal.kernel import Kernel
from pagoda.hal.memory import MemoryKind
from pagoda.ops.check_replay import check_replay
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.table import candidates
from pagoda.serving.conformance.check import Check, SkippedError, Target, UnclaimedError, apart, expect

EAGER_SIZES = (1, 2, 7, 16, 64)
"""Sizes that are tried where the policy has no buckets."""

VOCAB, WIDTH, SLOTS = 97, 32, 1024


def checks(target: Target) -> Iterator[Check]:
    """All of level 2."""
    policy = target.device.graphs.policy
    yield Check(2, "the policy agrees with the features", _policy)
    yield Check(2, "steps are captured or traced", _captured)
    for size in sorted({*policy.token_buckets, *policy.row_buckets}) or EAGER_SIZES:
        yield Check(2, f"replay equals eager on changed inputs [{size}]", partial(_replays, size=size))
    yield Check(2, "replays of two sizes do not disturb each other", _interleaved)
    yield Check(2, "sleep and wake", _sleep)
    for kernel in sorted(candidates(target.backend), key=lambda kernel: (kernel.op, kernel.name)):
        if "capturable" in kernel.claims and kernel.op in ALL_OPS:
            yield apart(2, f"captured {kernel.op}={kernel.name}", partial(_captured_kernel, kernel=kernel))
    yield Check(2, "a step in pieces equals eager on changed inputs", _pieces)
    yield Check(2, "a step that raises is an error and leaves the device usable", _raises)


@dataclass(frozen=True)
class _Step:
    """A small step with what real ones have: a look-up, a product, a write into pages, a read back, a reduction."""

    table: torch.Tensor
    weight: torch.Tensor
    pages: torch.Tensor

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.table[ids] @ self.weight) * scale[:, None]
        self.pages[slots] = hidden
        logits = self.pages[slots.flip(0)] @ self.table.T
        return {"logits": logits, "tokens": logits.argmax(-1)}


@dataclass(frozen=True)
class _PiecedStep(_Step):
    """The same with a part between its pieces that looks at a value, which no capture can."""

    graphs: Pieces

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.table[ids] @ self.weight) * scale[:, None]

        def apart() -> torch.Tensor:
            rows = int(slots.amax()) + 1
            self.pages[:rows].index_copy_(0, slots, hidden)
            return self.pages[slots.flip(0)]

        logits = self.graphs.cut(apart) @ self.table.T
        return {"logits": logits, "tokens": logits.argmax(-1)}


class _Bucket:
    """A step with inputs of one size on the device under test."""

    def __init__(self, target: Target, size: int, step: _Step | None = None) -> None:
        memory = target.device.memory
        self.size, self.target = size, target
        self.step = step or make_step(target)
        self.ids = memory.alloc(MemoryKind.WORK, (size,), torch.int64).zero_()
        self.slots = memory.alloc(MemoryKind.WORK, (size,), torch.int64).zero_()
        self.scale = memory.alloc(MemoryKind.WORK, (size,), torch.float32).zero_()

    def capture(self) -> Replay:
        return self.target.device.graphs.capture(("conformance", self.size), self.step, (self.ids, self.slots, self.scale))

    def change(self, turn: int) -> None:
        """New inputs in place, different each turn."""
        generator = torch.Generator().manual_seed(1000 * self.size + turn)
        self.ids.copy_(torch.randint(0, VOCAB, (self.size,), generator=generator))
        self.slots.copy_(torch.randperm(SLOTS, generator=generator)[torch.arange(self.size) % SLOTS])
        self.scale.copy_(torch.rand(self.size, generator=generator) + 0.5)

    def compare(self, replay: Replay, turn: int) -> None:
        """Run the replay and the step itself on the same inputs; pages and outputs must agree."""
        self.change(turn)
        outputs = replay()
        self.target.device.synchronize()
        replayed, pages = {name: tensor.cpu() for name, tensor in outputs.items()}, self.step.pages.cpu().clone()
        self.step.pages.zero_()
        expected = self.step(self.ids, self.slots, self.scale)
        self.target.device.synchronize()
        error = float((replayed["logits"] - expected["logits"].cpu()).abs().max())
        allowed = 1e-4 * max(1.0, float(expected["logits"].abs().max()))
        expect(error <= allowed, f"size {self.size}, turn {turn}: replay and eager differ by {error:.3g}")
        expect(float((pages - self.step.pages.cpu())[self.slots.cpu()].abs().max()) <= 1e-4, "replay and eager wrote different pages")
        own = replayed["logits"].gather(1, replayed["tokens"][:, None]).squeeze(1)
        expect(bool((own >= replayed["logits"].amax(1) - 1e-6).all()), "a replay's outputs disagree with each other")


def make_step(target: Target) -> _Step:
    """Weights and pages on the device."""
    memory, generator = target.device.memory, torch.Generator().manual_seed(7)
    table = memory.alloc(MemoryKind.WEIGHTS, (VOCAB, WIDTH), torch.float32)
    weight = memory.alloc(MemoryKind.WEIGHTS, (WIDTH, WIDTH), torch.float32)
    fill(table, generator)
    fill(weight, generator)
    return _Step(table, weight, memory.alloc(MemoryKind.KV, (SLOTS, WIDTH), torch.float32).zero_())


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)


def _policy(target: Target) -> str:
    policy, features = target.device.graphs.policy, target.device.info.features
    for sizes in (policy.token_buckets, policy.row_buckets):
        expect(list(sizes) == sorted(set(sizes)) and all(size > 0 for size in sizes), f"buckets are not ascending: {sizes}")
    wanted = {"captured": Feature.GRAPHS, "traced": Feature.TRACED}.get(policy.mode)
    expect(wanted is None or wanted in features, f"mode {policy.mode} without feature {wanted}")
    expect(wanted is not None or not features & {Feature.GRAPHS, Feature.TRACED}, f"mode {policy.mode} with graphs among the features")
    expect(policy.static_shapes == (Feature.STATIC_SHAPES in features), "static_shapes of policy and features differ")
    expect(not policy.static_shapes or bool(policy.token_buckets), "static shapes without token buckets")
    return f"{policy.mode}, token buckets {policy.token_buckets or 'none'}, row buckets {policy.row_buckets or 'none'}"


def _captured(target: Target) -> str:
    if target.device.graphs.policy.mode == "eager":
        raise UnclaimedError("steps run eagerly here; replays are checked all the same")
    bucket = _Bucket(target, target.device.graphs.policy.token_bucket(1))
    replay = bucket.capture()
    expect(replay.nbytes >= 0, f"a replay of {replay.nbytes} bytes")
    return f"{replay.nbytes:,} bytes for the smallest bucket"


def _replays(target: Target, size: int) -> None:
    bucket = _Bucket(target, size)
    replay = bucket.capture()
    for turn in range(3):
        bucket.compare(replay, turn)
    first, second = replay(), replay()
    expect(first["logits"].data_ptr() == second["logits"].data_ptr(), "a replay must hand out the same output tensors each time")


def _interleaved(target: Target) -> None:
    step = make_step(target)
    sizes = (target.device.graphs.policy.token_buckets or EAGER_SIZES)[:4]
    buckets = [_Bucket(target, size, step) for size in sizes]
    replays = [bucket.capture() for bucket in buckets]
    for turn in range(3):
        for bucket, replay in zip(buckets, replays, strict=True):
            bucket.compare(replay, turn)
    kept = [dict(replay()) for replay in replays]
    target.device.synchronize()
    before = kept[0]["logits"].cpu().clone()
    for replay in replays[1:]:
        replay()
    target.device.synchronize()
    expect(torch.equal(kept[0]["logits"].cpu(), before), "replaying one size changed another size's outputs")


def _sleep(target: Target) -> str:
    bucket = _Bucket(target, target.device.graphs.policy.token_bucket(4))
    memory, replay = target.device.memory, bucket.capture()
    bucket.compare(replay, 0)
    kept = True
    for kind in (MemoryKind.WEIGHTS, MemoryKind.KV):
        memory.release(kind)
        kept &= memory.restore(kind)
    generator = torch.Generator().manual_seed(8)
    fill(bucket.step.table, generator)
    fill(bucket.step.weight, generator)
    bucket.step.pages.zero_()
    if not kept:
        replay = bucket.capture()
    bucket.compare(replay, 1)
    return "replays outlive sleep" if kept else "replays are made again after sleep"


def _pieces(target: Target) -> str:
    graphs = target.device.graphs
    if graphs.policy.mode == "eager" or not isinstance(graphs, Pieces):
        raise UnclaimedError(f"steps are {graphs.policy.mode}, whole: nothing can be cut out of them")
    plain, sizes = make_step(target), graphs.policy.token_buckets[:3]
    for size in sizes:
        bucket = _Bucket(target, size, _PiecedStep(plain.table, plain.weight, plain.pages, graphs))
        replay = bucket.capture()
        for turn in range(3):
            bucket.compare(replay, turn)
    return f"{len(sizes)} sizes"


def _captured_kernel(target: Target, kernel: Kernel) -> str:
    device, op = target.device, ALL_OPS[kernel.op]
    reason = kernel.needs.refuse_device(device.info)
    if reason is not None:
        raise UnclaimedError(reason)
    wanted = [dtype for dtype in op.dtypes if dtype in device.info.dtypes and (not kernel.needs.dtypes or dtype in kernel.needs.dtypes)]
    reports = [
        check_replay(kernel, op, device.graphs.capture, dtype=dtype, device=device.torch_device, info=device.info) for dtype in wanted
    ]
    expect(not any(report.failures for report in reports), "\n".join(str(report) for report in reports if report.failures))
    if not any(report.ran for report in reports):
        raise SkippedError("no generated case reaches this kernel, so nothing shows that it can be captured")
    return "; ".join(f"{report.dtype} {report.ran} cases" for report in reports if report.ran)


def _raises(target: Target) -> None:
    def broken(ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a step that cannot run")

    bucket = _Bucket(target, target.device.graphs.policy.token_bucket(2))
    try:
        target.device.graphs.capture("broken", broken, (bucket.ids,))
    except DeviceError as error:
        expect("broken" in str(error) or "cannot run" in str(error), f"the error does not say what failed: {error}")
    else:
        expect(False, "a step that raises was captured")
    bucket.compare(bucket.capture(), 0)
