"""The check itself: each kind of mistake that a kernel can make is found; and the call log says what ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pagoda.backends.reference.backend import ReferenceBackend
from pagoda.hal.errors import DeviceError
from pagoda.hal.kernel import Kernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.attention import PagedAttentionReference, WriteKvReference
from pagoda.ops.call_log import Level, wrapper
from pagoda.ops.check import check_kernel
from pagoda.ops.linear import GemmFacts, GemmReference
from pagoda.ops.norm import NormFacts, RmsNormReference
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.sampling import SampleReference
from pagoda.ops.scan import SsdScanReference
from pagoda.ops.table import kernel_table


class LeavesGaps(GemmReference):
    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], self.facts.out_features, dtype=x.dtype)
        out[:, 1:] = super().run(packed, x)[:, 1:]
        return out


class ChangesInput(RmsNormReference):
    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        result = super().run(packed, x)
        x.mul_(1.0 + 2.0**-5)
        return result


class ReadsBeyond(RmsNormReference):
    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.as_strided((*x.shape[:-1], x.shape[-1] + 1), x.stride())
        return super().run(packed, x) + 0 * wide[..., 1:]


class WritesBeyond(WriteKvReference):
    def run(self, k: Any, v: Any, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: Any) -> None:
        super().run(k, v, k_pages, v_pages, slots)
        k_pages.as_strided((1,), (1,), k_pages.storage_offset() - 1).fill_(0.0)


class DependsOnBatch(GemmReference):
    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return super().run(packed, x) + x.shape[0] * 1e-7


class SeesTheFuture(PagedAttentionReference):
    def _visible(self, distance: torch.Tensor, position: Any, key: Any) -> torch.Tensor:
        return torch.ones_like(distance, dtype=torch.bool)


class ReadsStalePages(PagedAttentionReference):
    def run(self, q: Any, k_pages: Any, v_pages: Any, batch: Any, *rest: Any, **named: Any) -> torch.Tensor:
        """Each query sees one key more than it may: the last one's was never written."""
        return super().run(q, k_pages, v_pages, replace(batch, seq_lens=batch.seq_lens + 1), *rest, **named)


class ClearsValues(PagedAttentionReference):
    """Zeros in the place of what nobody reads, as is allowed; `clear` says what more is written."""

    def clear(self, v_pages: torch.Tensor) -> None: ...

    def run(self, q: Any, k_pages: Any, v_pages: Any, *rest: Any, **named: Any) -> torch.Tensor:
        result = super().run(q, k_pages, v_pages, *rest, **named)
        v_pages.masked_fill_(v_pages.isnan(), 0)
        self.clear(v_pages)
        return result


class ClearsNumbers(ClearsValues):
    def clear(self, v_pages: torch.Tensor) -> None:
        v_pages[-1] = 0


class LeavesNumbers(ClearsValues):
    def clear(self, v_pages: torch.Tensor) -> None:
        v_pages[0] = 1


class ClearsBeyond(ClearsValues):
    def clear(self, v_pages: torch.Tensor) -> None:
        v_pages.as_strided((1,), (1,), v_pages.storage_offset() - 1).fill_(0.0)


class Transposed(GemmReference):
    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return super().run(packed, x).t()


class IgnoresTopK(SampleReference):
    def run(self, logits: torch.Tensor, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(rows.temperature > 0, logits.argmin(-1), logits.argmax(-1)), logits.amax(-1).isnan()


class KeepsLess(SsdScanReference):
    """Its states have the digits of bfloat16."""

    def run(self, *args: Any) -> torch.Tensor:
        result = super().run(*args)
        args[7].copy_(args[7].bfloat16())
        return result


class AnswersInFloat32(SsdScanReference):
    def run(self, *args: Any) -> torch.Tensor:
        return super().run(*args).float()


def wrong_kernel(op: str, implementation: type) -> Kernel:
    class Wrong(Kernel):
        def load(self, facts: Any) -> Any:
            return implementation(facts)

    return Wrong(op, "wrong", "", claims=frozenset({"batch_invariant"}))


MISTAKES = (
    ("gemm", LeavesGaps, "not finite"),
    ("rms_norm", ChangesInput, "changed input 0"),
    ("rms_norm", ReadsBeyond, "not finite"),
    ("write_kv", WritesBeyond, "outside"),
    ("gemm", DependsOnBatch, "batch invariance"),
    ("paged_attention", SeesTheFuture, "error"),
    ("paged_attention", ReadsStalePages, "not finite"),
    ("paged_attention", ClearsNumbers, "changed input 2"),
    ("paged_attention", LeavesNumbers, "changed input 2"),
    ("paged_attention", ClearsBeyond, "changed input 2"),
    ("gemm", Transposed, "shape"),
    ("sample", IgnoresTopK, "integers are wrong"),
)


@pytest.mark.parametrize(("op", "implementation", "said"), MISTAKES, ids=[implementation.__name__ for _, implementation, _ in MISTAKES])
def test_a_mistake_is_found(op: str, implementation: type, said: str) -> None:
    report = check_kernel(wrong_kernel(op, implementation), ALL_OPS[op])
    assert any(said in failure.problem for failure in report.failures), str(report)


def test_zeros_may_stand_where_nothing_is() -> None:
    report = check_kernel(wrong_kernel("paged_attention", ClearsValues), ALL_OPS["paged_attention"])
    assert report.ran and not any("input" in failure.problem for failure in report.failures), str(report)


def test_an_error_of_the_kernel_is_a_failure_and_not_an_error_of_the_check() -> None:
    report = check_kernel(Kernel("gemm", "absent", "pagoda.ops.linear:Absent"), ALL_OPS["gemm"])
    assert len(report.failures) == report.ran > 0
    assert "AttributeError" in report.failures[0].problem


def test_an_oracle_that_writes_into_its_inputs_is_found() -> None:
    """A kernel's result is compared with what the oracle says of the same inputs, not of those it left behind."""
    lora = ALL_OPS["lora_delta"]

    def careless(case: Case) -> torch.Tensor:
        out: torch.Tensor = case.args[0]
        return out.copy_(lora.oracle(case))

    report = check_kernel(lora.reference_kernel(), replace(lora, oracle=careless))
    assert report.failures and all("changed its inputs [0]" in failure.problem for failure in report.failures)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_states_are_held_to_the_digits_that_they_are_kept_in(dtype: str) -> None:
    op = ALL_OPS["ssd_scan"]
    right = check_kernel(op.reference_kernel(), op, dtype=dtype)
    assert right.ran > 5 and not right.failures and right.worst < 1, str(right)
    wrong = check_kernel(wrong_kernel("ssd_scan", KeepsLess), op, dtype=dtype)
    assert wrong.failures and all("result 1: error" in failure.problem for failure in wrong.failures), str(wrong)


def test_results_in_float64_have_its_digits_though_states_do_not() -> None:
    report = check_kernel(wrong_kernel("ssd_scan", AnswersInFloat32), ALL_OPS["ssd_scan"], dtype="float64")
    assert report.failures and all("result 0: error" in failure.problem for failure in report.failures), str(report)


def test_a_run_is_settled_before_its_results_are_looked_at() -> None:
    pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorded(GemmReference):
        """Its results are there when it is settled, as on a device that records operators."""

        def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
            result = super().run(packed, x)
            pending.append((torch.full_like(result, float("nan")), result))
            return pending[-1][0]

    class Lazy(Kernel):
        def load(self, facts: Any) -> Any:
            return Recorded(facts)

    def settle() -> None:
        promised, result = pending.pop()
        promised.copy_(result)

    lazy = Lazy("gemm", "lazy", "")
    assert not check_kernel(lazy, ALL_OPS["gemm"], settle=settle).failures
    assert not pending
    assert check_kernel(lazy, ALL_OPS["gemm"]).failures


def _logged(level: Level) -> tuple[Any, list[str]]:
    said: list[str] = []
    backend = ReferenceBackend()
    return kernel_table(backend, backend.describe(), wrap=wrapper(level, said.append)), said


def test_the_log_names_kernel_shapes_and_dtypes() -> None:
    table, said = _logged("calls")
    run = table.resolve("gemm", GemmFacts("float32", 4, 3))
    assert run is table.resolve("gemm", GemmFacts("float32", 4, 3))
    run.run(run.pack({"weight": torch.ones(3, 4)}), torch.ones(2, 4))
    assert said == ["gemm=reference float32[3, 4] float32[2, 4] → float32[2, 3]"]


def test_the_log_tells_statistics() -> None:
    table, said = _logged("statistics")
    table.resolve("activation", ActivationFacts("float32", "relu")).run(torch.tensor([-1.0, 3.0]))
    assert said == ["activation=reference float32[2] → float32[2] (mean 1.5 deviation 1.5 min 0 max 3)"]


def test_the_log_stops_where_nan_is_made() -> None:
    table, _ = _logged("nan")
    run = table.resolve("rms_norm", NormFacts("float32", 2, 0.0, weight=False))
    assert run.run(None, torch.full((1, 2), float("nan"))).isnan().all()
    with pytest.raises(DeviceError, match="rms_norm=reference made NaN"):
        run.run(None, torch.zeros(1, 2))
