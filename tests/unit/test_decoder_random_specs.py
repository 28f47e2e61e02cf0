"""Whatever the spec says, the built decoder computes: random legal specs against a small interpreter in plain torch."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pagoda.hal.comm import Topology
from pagoda.hal.table import KernelTable
from pagoda.models.direct import DirectRun
from pagoda.models.fusion import RULES
from pagoda.models.parallel.shard import Shard
from pagoda.models.rope import Rope
from pagoda.models.spec import MLA, Attention, DecoderSpec, Mlp, Moe
from pagoda.ops.references import reference_kernels
from spec_interpreter import interpret
from spec_samples import JOINED_KERNELS, VOCAB, build_model, draw_weights, opened, specs

DEVICE, TABLE = opened()
JOINED = KernelTable(DEVICE.info, (*reference_kernels(), *JOINED_KERNELS))
EFFORT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def by_length(spec: DecoderSpec) -> bool:
    return any(isinstance(layer.mixer.position, Rope) and layer.mixer.position.by_length for layer in spec.layers if layer.mixer)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return float((got.double() - want).abs().max()) <= 2e-4 * max(1.0, float(want.std()))


@EFFORT
@given(specs(), st.integers(0, 2**31), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=21))
def test_one_pass_equals_the_interpreter(spec: DecoderSpec, seed: int, ids: list[int]) -> None:
    weights = draw_weights(spec, seed)
    run = DirectRun(build_model(spec, weights, DEVICE, TABLE), DEVICE, 1, 32)
    got = run.logits(run.step([(0, ids)]).hidden)
    assert close(got, interpret(spec, weights, ids))


@EFFORT
@given(specs(), st.integers(0, 2**31), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=21))
def test_fusion_changes_nothing(spec: DecoderSpec, seed: int, ids: list[int]) -> None:
    weights = draw_weights(spec, seed)
    fused, apart = (build_model(spec, weights, DEVICE, JOINED, rules=rules) for rules in (RULES, ()))
    run, taps = DirectRun(fused, DEVICE, 2, 32), tuple(range(len(spec.layers)))
    output, tapped = run.step([(0, ids)]), run.step([(1, ids)], taps)
    assert close(run.logits(output.hidden), interpret(spec, weights, ids))
    wanted = DirectRun(apart, DEVICE, 1, 32).step([(0, ids)], taps)
    pairs = zip((output.hidden, tapped.hidden, *tapped.taps), (wanted.hidden, wanted.hidden, *wanted.taps), strict=True)
    assert all(close(got, want.double()) for got, want in pairs)


@EFFORT
@given(specs(), st.integers(0, 2**31), st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=21), st.data())
def test_any_cut_of_a_sequence_beside_another_gives_the_same(spec: DecoderSpec, seed: int, ids: list[int], data: st.DataObject) -> None:
    assume(not by_length(spec))  # those depend on how long the request was at each step
    weights = draw_weights(spec, seed)
    run = DirectRun(build_model(spec, weights, DEVICE, TABLE), DEVICE, 2, 64)
    cut = data.draw(st.integers(1, len(ids) - 1))
    other = [(token * 7 + 3) % VOCAB for token in ids]
    first = run.step([(1, other[:2]), (0, ids[:cut])]).hidden[2:]
    second = run.step([(0, ids[cut:]), (1, other[2:])]).hidden[: len(ids) - cut]
    got = run.logits(torch.cat([first, second]))
    assert close(got, interpret(spec, weights, ids))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def splits_over(spec: DecoderSpec, world: int) -> bool:
    def fits(part: Attention | MLA | Mlp | Moe | None) -> bool:
        match part:
            case Attention(heads=heads, kv_heads=kv, qk_norm=qk_norm):
                full = qk_norm is not None and qk_norm.extent == "full"
                return heads % world == 0 and (kv % world == 0 or (kv == 1 and not full))
            case MLA(heads=heads):
                return heads % world == 0
            case _:
                return True

    return all(fits(layer.mixer) for layer in spec.layers)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(specs(), st.integers(0, 2**31), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=21))
def test_two_ranks_equal_one(spec: DecoderSpec, seed: int, ids: list[int]) -> None:
    assume(splits_over(spec, 2))
    weights = draw_weights(spec, seed)
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool:
        communicators = list(pool.map(lambda rank: DEVICE.communicator(Topology(rank, 2, address)), range(2)))

        def logits(rank: int) -> torch.Tensor:
            run = DirectRun(build_model(spec, weights, DEVICE, TABLE, Shard(rank, 2), communicators[rank]), DEVICE, 1, 32)
            return run.logits(run.step([(0, ids)]).hidden)

        ranks = list(pool.map(logits, range(2)))
    for communicator in communicators:
        communicator.close()
    want = interpret(spec, weights, ids)
    assert all(close(got, want) for got in ranks)
