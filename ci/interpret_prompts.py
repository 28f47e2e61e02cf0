"""Which calls attention makes of FlashInfer and cuDNN, and that captured ones serve later steps: in Triton's interpreter, with doubles.

`python ci/interpret_prompts.py`; in a process of its own, since Triton decides when a kernel is declared whether it is interpreted.
Against the oracle, like all kernels, they are checked by `interpret_kernels.py --kernels flashinfer,flashinfer_pages,flashinfer_rows,cudnn,
cudnn_always`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import cudnn_double
import flashinfer_double as double
import numpy as np
import torch

double.install()
cudnn_double.install()

from pagoda.backends.cuda.context_rows import Metadata, contexts  # noqa: E402
from pagoda.backends.cuda.cudnn_attention import FEWEST, NARROW, CudnnAlways, CudnnAttention  # noqa: E402
from pagoda.backends.cuda.flashinfer_attention import FlashInferAttention, FlashInferPages, FlashInferRows  # noqa: E402
from pagoda.ops.cases.attention import PAGED_ATTENTION, attention_case, facts_of  # noqa: E402
from pagoda.ops.check import Report, compare, planned  # noqa: E402
from pagoda.ops.op import Case  # noqa: E402
from pagoda.ops.triton.context_rows import lay_out  # noqa: E402

FACTS = facts_of("float16", (8, 2), 128, 64)
PROMPTS = [(130, 130), (64, 200), (2, 129)]
DECODES = [(1, 1), (1, 70)]
TOKENS = 218
"""Of a captured step: there is room for 512 rows of contexts."""


def main() -> int:
    warnings.simplefilter("ignore")
    failed = [check.__doc__ for check in CHECKS if not _holds(check)]
    print("\n".join(["failed:", *map(str, failed)]) if failed else f"{len(CHECKS)} checks hold")
    return 1 if failed else 0


def _holds(check: Callable[[], None]) -> bool:
    double.CALLS.clear()
    cudnn_double.CALLS.clear()
    cudnn_double.GRAPHS.clear()
    double._Wrapper.replaying = False
    try:
        check()
    except AssertionError as error:
        print(f"{check.__name__}: {error}")
        return False
    return True


def _step(segments: list[tuple[int, int]], **more: Any) -> Case:
    return attention_case(torch.Generator().manual_seed(len(segments)), FACTS, "", segments, layout="heads", known=True, **more)


def _run(kernel: FlashInferAttention | CudnnAttention, case: Case, plan: Any) -> None:
    q, k, v, batch, *_ = case.args
    got = kernel.run(q, k, v, batch, plan)
    problem = compare(got, PAGED_ATTENTION.oracle(case), PAGED_ATTENTION.tolerance(case), Report("", "", ""))
    assert problem is None, problem


def one_call_for_all_prompts() -> None:
    """All prompts of a step go to one call, decodes to none."""
    for kernel, kind in ((FlashInferRows(FACTS), "rows"), (FlashInferPages(FACTS), "pages"), (FlashInferAttention(FACTS), "pages")):
        case = _step(PROMPTS + DECODES)
        _run(kernel, case, kernel.plan(case.args[3]))
        assert [double.Call(kind, tuple(PROMPTS))] == double.CALLS, double.CALLS
        double.CALLS.clear()


def decodes_alone_make_no_call() -> None:
    """A step of decodes, or one whose lengths the host does not know, makes no call."""
    for case in (_step(DECODES), _unknown(_step(PROMPTS))):
        kernel = FlashInferRows(FACTS)
        _run(kernel, case, kernel.plan(case.args[3]))
        assert not double.CALLS, double.CALLS


def _unknown(case: Case) -> Case:
    return replace(case, args=(*case.args[:3], replace(case.args[3], lengths=None), *case.args[4:]))


def rows_are_what_pages_hold() -> None:
    """Rows are bit by bit what pages hold, zeros behind each context, and nothing is written where nothing is planned."""
    case = _step(PROMPTS + DECODES)
    _, k_pages, v_pages, batch, *_ = case.args
    lengths, used = batch.seq_lens.numpy(), 256 + 256 + 256
    laid = contexts(lengths[:3], 64, batch.block_table.shape[1], room=20)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh tensors are NaN
    rows = lay_out(k_pages, v_pages, batch.block_table, torch.from_numpy(laid.parts), FACTS)
    torch.use_deterministic_algorithms(False)
    for have, pages in zip(rows, (k_pages, v_pages), strict=True):
        assert have.shape == (20 * 64, 2, 128) and have[used:].isnan().all()
        for row, length in enumerate(lengths[:3].tolist()):
            start, end = laid.bounds[2 * row], laid.bounds[2 * row + 2]
            want = pages[batch.block_table[row].long()].flatten(0, 1)[:length]
            assert end - start == 256 and laid.bounds[2 * row + 1] == start + length
            assert torch.equal(have[start : start + length].view(torch.int16), want.contiguous().view(torch.int16)), f"keys of {row}"
            assert not have[start + length : end].any(), f"behind {row}"


def pages_nobody_owns_are_zeros() -> None:
    """What fell out of a window lies in page 0, whatever is there: its rows are zeros."""
    case = _step([(70, 200)])
    _, k_pages, v_pages, batch, *_ = case.args
    batch.block_table[0, 0] = 0
    parts = torch.from_numpy(contexts(batch.seq_lens.numpy(), 64, batch.block_table.shape[1]).parts)
    for have in lay_out(k_pages, v_pages, batch.block_table, parts, FACTS):
        assert not have[:64].any() and have[64:200].isfinite().all()


def captured_calls_serve_later_steps() -> None:
    """What is captured of a step runs again for others: the way that pays has their prompts, the other nothing."""
    steps = [PROMPTS + DECODES, [(200, 200), (1, 9)], [(40, 900)], [(1, 5), (1, 6)], [(3, 3), (2, 64)], [(TOKENS, TOKENS)]]
    for kernel in (FlashInferRows(FACTS), FlashInferPages(FACTS)):
        stable, captured = [torch.zeros(size, dtype=torch.int32) for size in ((9,), (8,), (8, 16))], None
        for segments in steps:
            case = _in_place(_step(segments, padding=TOKENS - sum(n for n, _ in segments), rows=8 - len(segments)), *stable)
            captured = captured or kernel.plan(case.args[3])
            kernel.plan(case.args[3], captured)
            prompts = tuple(segment for segment in segments if segment[0] > 1)
            rows = isinstance(kernel, FlashInferRows) and sum(-(-keys // 128) * 128 for _, keys in prompts) <= 512
            want = {"pages": () if rows else prompts, "rows": prompts if rows else ()}
            _replay(kernel, case, captured)
            assert len(double.CALLS) == len(captured.prompts) == 1 + isinstance(kernel, FlashInferRows)
            assert all(want[kind] == asked for kind, asked in double.CALLS), (double.CALLS, want)
            # In pieces around attention, it is called again.
            double.CALLS.clear()
            _run(kernel, case, captured)
            assert [call for call in want.items() if call[1]] == double.CALLS, (double.CALLS, want)


def _replay(kernel: FlashInferAttention, case: Case, captured: Any) -> None:
    """Launches as they were captured, of all tokens in all ways; wrappers have the last plan."""
    before = [prompts.tokens for prompts in captured.prompts]
    double._Wrapper.replaying = True
    double.CALLS.clear()
    for prompts in captured.prompts:
        prompts.tokens = TOKENS
    _run(kernel, case, captured)
    for prompts, tokens in zip(captured.prompts, before, strict=True):
        prompts.tokens = tokens
    double._Wrapper.replaying = False


def _in_place(case: Case, query_start: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Case:
    """A replayed step, its arrays where captured steps have theirs."""
    batch = case.args[3]
    query_start.copy_(batch.query_start), seq_lens.copy_(batch.seq_lens), table.zero_()
    table[:, : batch.block_table.shape[1]] = batch.block_table
    batch = replace(batch, query_start=query_start, seq_lens=seq_lens, block_table=table, replayed=True, max_query=TOKENS)
    return replace(case, args=(*case.args[:3], batch, *case.args[4:]))


def a_replayed_plan_is_right_when_run_as_it_is() -> None:
    """The second plan of a replayed step is that step's own."""
    kernel = FlashInferRows(FACTS)
    case = _step(PROMPTS[:2] + DECODES, padding=17, rows=3)
    case = replace(case, args=(*case.args[:3], replace(case.args[3], replayed=True), *case.args[4:]))
    _run(kernel, case, planned(kernel, case.args[3]))
    assert [double.Call("rows", tuple(PROMPTS[:2]))] == double.CALLS, double.CALLS


def long_prompts_pay() -> None:
    """A large step of long prompts has rows by itself."""
    kernel = FlashInferAttention(replace(FACTS, num_heads=32, num_kv_heads=8))
    assert kernel.as_rows(Metadata(np.array([0, 4096, 8192], np.int32), np.array([4096, 4096], np.int32)))


def cudnn_has_all_prompts_in_one_call() -> None:
    """All prompts of a step go to one call of cuDNN, decodes to none; too few tokens for it, or unknown lengths, make none."""
    always, usual = CudnnAlways(FACTS), CudnnAttention(FACTS)
    for kernel, case, want in (
        (always, _step(PROMPTS + DECODES), [cudnn_double.Call(4, tuple(PROMPTS))]),
        (always, _step(DECODES), []),
        (always, _unknown(_step(PROMPTS)), []),
        (usual, _step(PROMPTS + DECODES), []),
        (usual, _step([(NARROW - 1, 99)] * 17), []),  # of 1,071 tokens, but each request of few
        (usual, _step([(FEWEST, FEWEST + 9), *DECODES]), [cudnn_double.Call(4, ((FEWEST, FEWEST + 9),))]),
    ):
        _run(kernel, case, kernel.plan(case.args[3]))
        assert want == cudnn_double.CALLS, cudnn_double.CALLS
        cudnn_double.CALLS.clear()


def few_graphs_serve_many_steps() -> None:
    """Steps that differ in requests, lengths and pages share a graph of cuDNN."""
    kernel, layers = CudnnAlways(FACTS), [_step(segments, slack=2) for segments in ([(130, 130)], PROMPTS, [(9, 700), (70, 71)])]
    pool = max(len(case.args[1]) for case in layers)
    for case in layers:
        q, k, v, *rest = case.args
        more = [torch.cat([x.transpose(1, 2), x.new_full((pool - len(x), 2, 64, 128), float("nan"))]).transpose(1, 2) for x in (k, v)]
        case = replace(case, args=(q, *more, *rest))
        _run(kernel, case, kernel.plan(case.args[3]))
    assert len(cudnn_double.CALLS) == 3 and cudnn_double.GRAPHS == [4], cudnn_double.GRAPHS


def nothing_is_cleared_but_what_nobody_has() -> None:
    """For cuDNN values behind prompts and page 0 become zeros; keys, and what decodes have, stay."""
    case = _step([(70, 70), (1, 70)])
    _, k_pages, v_pages, batch, *_ = case.args
    before, table = (k_pages.clone(), v_pages.clone()), batch.block_table.long()
    kernel = CudnnAlways(FACTS)
    _run(kernel, case, kernel.plan(batch))
    assert torch.equal(before[0].view(torch.int16), k_pages.view(torch.int16)), "keys changed"
    before[1][0], before[1][table[0, 1], 6:] = 0, 0
    assert torch.equal(before[1].view(torch.int16), v_pages.view(torch.int16)), "other values changed, or not all of these"


def captured_cudnn_serves_later_steps() -> None:
    """What is captured of cuDNN runs again for other steps, from lengths that are written anew."""
    steps = [PROMPTS + DECODES, [(200, 200), (1, 9)], [(40, 900)], [(1, 5), (1, 6)], [(3, 3), (2, 64)], [(TOKENS, TOKENS)]]
    stable, captured = [torch.zeros(size, dtype=torch.int32) for size in ((9,), (8,), (8, 16))], None
    kernel = CudnnAlways(FACTS)
    for segments in steps:
        case = _in_place(_step(segments, padding=TOKENS - sum(n for n, _ in segments), rows=8 - len(segments)), *stable)
        captured = captured or kernel.plan(case.args[3])
        kernel.plan(case.args[3], captured)
        cudnn_double.CALLS.clear()
        prompts = tuple(segment for segment in segments if segment[0] > 1)
        # A replay runs whatever the step has.
        captured.prompts.tokens = TOKENS
        _run(kernel, case, captured)
        assert [cudnn_double.Call(8, prompts)] == cudnn_double.CALLS, (cudnn_double.CALLS, prompts)
    few = _step(PROMPTS, rows=2)
    few = replace(few, args=(*few.args[:3], replace(few.args[3], replayed=True), *few.args[4:]))
    usual = CudnnAttention(FACTS)
    _run(usual, few, planned(usual, few.args[3]))
    assert len(cudnn_double.CALLS) == 1, "a small step is captured without cuDNN"


CHECKS = (
    cudnn_has_all_prompts_in_one_call, few_graphs_serve_many_steps, nothing_is_cleared_but_what_nobody_has,
    captured_cudnn_serves_later_steps,
    one_call_for_all_prompts, decodes_alone_make_no_call, rows_are_what_pages_hold, pages_nobody_owns_are_zeros,
    captured_calls_serve_later_steps, a_replayed_plan_is_right_when_run_as_it_is, long_prompts_pay,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
