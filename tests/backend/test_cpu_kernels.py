"""Every CPU kernel, on every instruction set that this processor has, against the float64 oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch  # before the library: they share one OpenMP runtime
from pagoda.backends.cpu.backend import CpuBackend
from pagoda.backends.cpu.kernels import cpu_kernels
from pagoda.backends.cpu.kernels_more import PackedBlocks
from pagoda.hal.kernel import Kernel, Needs
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.cases.attention import attention_case, facts_of
from pagoda.ops.cases.linear_gguf import draw_blocks, true_numbers
from pagoda.ops.check import check_kernel
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_gguf import GemmGgufFacts
from pagoda.ops.native.library import ISAS, QUANT_KINDS, SUPER_KINDS, available, here, load
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS

INFO = CpuBackend().describe()
KERNELS = {f"{kernel.op}={kernel.name}": kernel for kernel in cpu_kernels()}
USES = [(name, dtype) for name, kernel in sorted(KERNELS.items()) for dtype in sorted(kernel.needs.dtypes)]
OURS = [(name, dtype) for name, dtype in USES if KERNELS[name].implementation.startswith("pagoda.backends")]
ANYWHERE = [(name, dtype) for name, dtype in OURS if not KERNELS[name].needs.archs]


class ForIsa(Kernel):
    """A native kernel bound to one instruction set instead of the best."""

    def load(self, facts: Any) -> Any:
        module, _, attribute = self.implementation.partition(":")
        return getattr(import_module(module), attribute)(facts, load(self.name))


def test_the_library_is_built() -> None:
    assert torch.get_num_threads() >= 1
    assert available() is None, "run python -m pagoda.ops.native.build"
    assert here()[-1] == "baseline"


@pytest.mark.parametrize(("name", "dtype"), USES)
def test_kernel_matches_oracle(name: str, dtype: str) -> None:
    kernel = KERNELS[name]
    report = check_kernel(kernel, ALL_OPS[kernel.op], dtype=dtype, info=INFO)
    if kernel.needs.archs and INFO.arch not in kernel.needs.archs:
        assert report.ran == 0 and len(report.refused) == 1
        return
    assert report.ran > 5, report.refused
    assert not report.failures, str(report)


@pytest.mark.heavy
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in here()])
@pytest.mark.parametrize("kernel", ["paged_attention=native", "paged_attention=native_prompt"])
@pytest.mark.parametrize("place", [3, 300, 599])
def test_a_decode_shows_a_key_that_is_no_number(place: int, kernel: str, isa: str) -> None:
    """Where rows are few: in floats, packed or where the keys lie."""
    facts = facts_of("float32", (6, 2), 64)
    loaded = ForIsa(**{**vars(KERNELS[kernel]), "name": isa}).load(facts)
    case = attention_case(torch.Generator().manual_seed(8), facts, "poison", [(1, 600)], layout="pool")
    _, k, _, batch, *_ = case.args
    plain = loaded.run(*case.args)
    k[batch.block_table[0, place // k.shape[1]], place % k.shape[1], 1, 7] = float("nan")
    out = loaded.run(*case.args)
    assert out[:, 3:].isnan().all()
    assert torch.equal(out[:, :3], plain[:, :3])


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in here()])
@pytest.mark.parametrize(("name", "dtype"), ANYWHERE)
def test_every_instruction_set_matches_oracle(name: str, isa: str, dtype: str) -> None:
    kernel = KERNELS[name]
    bound = ForIsa(**{**vars(kernel), "name": isa})
    report = check_kernel(bound, ALL_OPS[kernel.op], dtype=dtype, seed=1)
    assert report.ran > 5, report.refused
    assert not report.failures, str(report)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in here()])
@pytest.mark.parametrize("name", ["gemm=native", "gemm=native_prompt"])
def test_products_match_oracle_on_every_instruction_set(name: str, isa: str) -> None:
    kernel = KERNELS[name]
    bound = ForIsa(**{**vars(kernel), "name": isa, "needs": Needs(dtypes=kernel.needs.dtypes)})
    for dtype in sorted(kernel.needs.dtypes):
        report = check_kernel(bound, ALL_OPS["gemm"], dtype=dtype, seed=2)
        assert report.ran > 15, report.refused
        assert not report.failures, str(report)


@pytest.mark.parametrize("isa", [isa for isa in here() if isa in ("avx512bf16", "avx512vnni")])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
def test_prompts_attend_in_integers_as_the_oracle_does(kv_dtype: str, isa: str) -> None:
    """Several blocks of keys and tiles of rows, heads of odd widths, windows, sinks, slopes and caps; few rows beside many."""
    kernel = KERNELS["paged_attention=native_prompt"]
    for facts, case, expected in prompts_and_answers(kv_dtype):
        out = ForIsa(**{**vars(kernel), "name": isa}).load(facts).run(*case.args).double()
        error = (out - expected).abs()
        assert error.max() < 2**-8 and error.norm() < 2**-11 * expected.norm(), facts
        assert isa != "avx512vnni" or error.max() > 2**-13, "not in integers"


@lru_cache(1)  # the instruction sets of a dtype come one after the other
def prompts_and_answers(kv_dtype: str) -> list[tuple[AttentionFacts, Case, torch.Tensor]]:
    """With what the oracle says, which takes most of the time."""
    gen, made = torch.Generator().manual_seed(5), []
    for extra in ({}, {"window": 100}, {"sinks": True, "softcap": 5.0}, {"alibi": True}):
        for heads, dim in (((6, 2), 64), ((7, 1), 24), ((8, 2), 66), ((2, 2), 128)):
            facts = facts_of("float32", heads, dim, kv_dtype=kv_dtype, **extra)
            case = attention_case(gen, facts, "prompts", [(300, 700), (1, 30), (20, 40), (97, 97)], layout="pool")
            made.append((facts, case, ALL_OPS["paged_attention"].oracle(case)))
    return made


def test_attention_in_integers_keeps_what_is_not_finite_apart() -> None:
    """A query that is no number makes its own result none, and neither it nor such a key disturbs those that do not see it."""
    facts = facts_of("float32", (6, 2), 64)
    kernel = KERNELS["paged_attention=native_prompt"].load(facts)
    case = attention_case(torch.Generator().manual_seed(6), facts, "poison", [(90, 90), (80, 80)], layout="pool")
    q, k, _, batch, *_ = case.args
    plain = kernel.run(*case.args)
    q[40, 3, 7] = float("nan")
    bad = ~kernel.run(*case.args).isfinite().all(-1)
    assert bad.nonzero().tolist() == [[40, 3]]
    q[40, 3, 7] = 0.0
    k[batch.block_table[0, 60 // k.shape[1]], 60 % k.shape[1], 1, 7] = float("nan")
    out = kernel.run(*case.args)
    assert torch.equal(out[:40], plain[:40]) and torch.equal(out[41:60], plain[41:60]) and torch.equal(out[90:], plain[90:])


@pytest.mark.parametrize("isa", [isa for isa in here() if isa in ("avx512bf16", "avx512vnni")])
@pytest.mark.parametrize("place", [3, 300, 599])
def test_attention_in_integers_takes_a_key_that_is_no_number_to_all_who_see_it(place: int, isa: str) -> None:
    """In the first, a middle and the last block of keys, whose results are merged: no finite number may come of it."""
    facts = facts_of("float32", (6, 2), 64)
    kernel = ForIsa(**{**vars(KERNELS["paged_attention=native_prompt"]), "name": isa}).load(facts)
    case = attention_case(torch.Generator().manual_seed(7), facts, "poison", [(60, 600)], layout="pool")
    _, k, _, batch, *_ = case.args
    plain = kernel.run(*case.args)
    k[batch.block_table[0, place // k.shape[1]], place % k.shape[1], 1, 7] = float("nan")
    out, first = kernel.run(*case.args), max(0, place - 540)
    assert out[first:, 3:].isnan().all()
    assert torch.equal(out[:, :3], plain[:, :3]) and torch.equal(out[:first], plain[:first])


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in here()])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_super_blocks_match_oracle_on_every_instruction_set(isa: str, dtype: str) -> None:
    kernel = KERNELS["gemm_gguf=native_super"]
    bound = ForIsa(**{**vars(kernel), "name": isa, "needs": Needs(dtypes=kernel.needs.dtypes, facts=kernel.needs.facts)})
    report = check_kernel(bound, ALL_OPS["gemm_gguf"], dtype=dtype, seed=3, info=INFO)
    assert report.ran >= 4 * len(SUPER_KINDS), report.refused
    assert not report.failures, str(report)


@pytest.mark.parametrize(
    ("kind", "isa"),
    [(kind, isa) for kind in QUANT_KINDS for isa in here() if isa in ("avx512bf16", "avx512vnni")]  # blocks of 32 need its dot product
    + [(kind, isa) for kind in ("Q2_K", "Q6_K", "IQ4_XS", "IQ3_S") for isa in here()],
)
def test_prompts_in_blocks_match_oracle_at_ragged_shapes(kind: str, isa: str) -> None:
    """Panels that end within a span, several panels, several blocks of rows, columns that fill no group, strided rows, a bias."""
    large = kind in SUPER_KINDS
    kernel = KERNELS["gemm_gguf=native_super_prompt" if large else "gemm_gguf=native_prompt"]
    gen = torch.Generator().manual_seed(4)
    shapes = ((64, 256, 1), (71, 1280, 40), (130, 512, 65)) if large else ((64, 32, 1), (71, 608, 40), (397, 1568, 65))
    for dtype, (rows, inner, outer) in itertools.product((torch.bfloat16, torch.float32), shapes):
        facts = GemmGgufFacts(str(dtype).removeprefix("torch."), kind, inner, outer, bias=True)
        blocks, bias = draw_blocks(gen, kind, outer, inner), torch.randn(outer, generator=gen).to(dtype)
        wide = torch.randn(rows, inner + 8, generator=gen).to(dtype)
        run = ForIsa(**{**vars(kernel), "name": isa}).load(facts)
        out = run.run(run.pack({"weight": blocks, "bias": bias}), wide[:, :inner])
        weight = torch.from_numpy(true_numbers(blocks, kind))
        expected = wide[:, :inner].double() @ weight.T + bias.double()
        size = (wide[:, :inner].double().square() @ weight.square().T).sqrt()  # what a sum of independent terms is like
        rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
        assert ((out.double() - expected).abs() <= rounding + 2**-9 * size + 2**-12).all(), (dtype, rows, inner, outer)


@pytest.mark.parametrize("kind", sorted(SUPER_KINDS))
def test_super_blocks_take_the_bytes_that_they_say(kind: str) -> None:
    facts = GemmGgufFacts("bfloat16", kind, 512, 70, bias=True)
    kernel = KERNELS["gemm_gguf=native_super"]
    packed = PackedBlocks(facts, load())
    assert kernel.packed_bytes is not None
    assert sum(t.numel() * t.itemsize for t in packed.tensors[:2] if t is not None) == kernel.packed_bytes(facts)
    assert kernel.packed_bytes(facts) < 1.04 * 96 * facts.row_bytes + 96 * 4


def test_integer_products_keep_what_is_not_finite_and_what_is_tiny() -> None:
    """A prompt's rows with infinities, NaN or nothing above a denormal do not disturb their neighbours."""
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(96, 160, generator=gen).bfloat16(), torch.randn(40, 160, generator=gen).bfloat16()
    x[3, 7], x[9, 40], x[11], x[12] = float("inf"), float("nan"), 0.0, 1e-39
    run = KERNELS["gemm=native_prompt"].load(GemmFacts("bfloat16", 160, 40))
    out = run.run(run.pack({"weight": weight}), x)
    plain = [row for row in range(96) if row not in (3, 9)]
    expected = x[plain].double() @ weight.double().T
    assert not out[[3, 9]].isfinite().any()
    assert torch.allclose(out[plain].double(), expected, rtol=2**-7, atol=0.2)
    assert not out[11].any() and out[12].abs().max() < 1e-36


def test_attention_is_the_same_however_it_is_cut() -> None:
    """Chunks of a prompt, one token at a time, and any number of threads give the same bits, split decoding included."""
    gen = torch.Generator().manual_seed(0)
    for extra in ({}, {"window": 100}, {"sinks": True, "softcap": 5.0}, {"alibi": True}):
        facts = facts_of("bfloat16", (6, 2), **extra)
        whole = attention_case(gen, facts, "whole", [(700, 700)], layout="pool")
        kernel = KERNELS["paged_attention=native"].load(facts)
        with _threads(1):
            expected = kernel.run(*whole.args)
        for threads, cuts in ((3, (1, 2, 300, 301, 650, 699)), (2, tuple(range(660, 700)))):
            with _threads(threads):
                _assert_chunks_equal(kernel, whole, expected, [0, *cuts, 700])


def _assert_chunks_equal(kernel: Any, whole: Case, expected: torch.Tensor, edges: list[int]) -> None:
    q, k, v, batch, _, sinks, slopes = whole.args
    for start, end in itertools.pairwise(edges):
        # Later keys are there already, and must not be seen.
        chunk = PagedBatch(
            torch.tensor([0, end - start]).int(), torch.tensor([end]).int(), batch.block_table, batch.slots[start:end], end - start, end
        )
        assert torch.equal(kernel.run(q[start:end], k, v, chunk, None, sinks, slopes), expected[start:end]), (start, end)


def test_decodes_are_the_same_in_any_company() -> None:
    """Many requests with a token each, of which a thread takes all heads together, against each of them alone."""
    gen = torch.Generator().manual_seed(0)
    lengths = [1, 300, 33, 256, 70, 16, 257, 500, 31]
    for kv_dtype in ("bfloat16", "float32"):
        facts = facts_of("bfloat16", (6, 2), kv_dtype=kv_dtype)
        case = attention_case(gen, facts, "decodes", [(1, length) for length in lengths], layout="pool")
        q, k, v, batch, *_ = case.args
        kernel = KERNELS["paged_attention=native"].load(facts)
        alone = []
        for row, length in enumerate(lengths):
            one = PagedBatch(
                torch.tensor([0, 1]).int(), torch.tensor([length]).int(), batch.block_table[row : row + 1], batch.slots[row:], 1, length
            )
            alone.append(kernel.run(q[row : row + 1], k, v, one))
        for threads in (1, 2, 5):
            with _threads(threads):
                assert torch.equal(kernel.run(q, k, v, batch), torch.cat(alone)), (kv_dtype, threads)


def test_products_are_the_same_for_any_rows_and_threads() -> None:
    gen = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        weight, x = torch.randn(200, 3000, generator=gen).to(dtype), torch.randn(300, 3000, generator=gen).to(dtype)
        kernel = KERNELS["gemm=native"].load(GemmFacts(str(dtype).removeprefix("torch."), 3000, 200))
        packed = kernel.pack({"weight": weight})
        with _threads(1):
            expected = kernel.run(packed, x)
        for threads in (2, 5, 16):
            with _threads(threads):
                for rows in (1, 2, 5, 7, 13, 100, 300):
                    assert torch.equal(kernel.run(packed, x[:rows]), expected[:rows]), (threads, rows)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ2_XS"])
def test_block_products_are_the_same_for_any_rows(kind: str) -> None:
    gen = torch.Generator().manual_seed(0)
    inner = 512 if kind in SUPER_KINDS else 3008  # 100 rows of which do not stay in a cache together
    facts = GemmGgufFacts("bfloat16", kind, inner, 72)
    kernel = KERNELS["gemm_gguf=native_super" if kind in SUPER_KINDS else "gemm_gguf=native"]
    if kernel.refuse(INFO, facts):
        assert INFO.arch not in kernel.needs.archs
        return
    run = kernel.load(facts)
    packed = run.pack({"weight": draw_blocks(gen, kind, 72, inner)})
    x = torch.randn(300, inner, generator=gen).bfloat16()
    expected = torch.cat([run.run(packed, x[row : row + 25]) for row in range(0, 300, 25)])
    for threads, rows in itertools.product((1, 3), (1, 2, 3, 4, 5, 6, 18, 19, 50, 99, 145, 289, 300)):
        with _threads(threads):
            assert torch.equal(run.run(packed, x[:rows]), expected[:rows]), (threads, rows)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
