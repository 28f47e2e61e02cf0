"""What became of a check, or of a part of one that ran elsewhere."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pagoda.hal.errors import PagodaError
from pagoda.serving.conformance.check import Check, FailedError, SkippedError, Target, UnclaimedError
from pagoda.serving.conformance.report import Outcome, Result


class Answer(NamedTuple):
    """`found`: what it gave, where it passed; `detail` says why it did not. `seconds`: it took."""

    found: Any
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


def answer_of(work: Callable[[], Any]) -> Answer:
    """Never raises for what the device does wrong."""
    began = time.perf_counter()
    found, outcome, detail = _answer(work)
    return Answer(found, outcome, detail, time.perf_counter() - began)


def run_check(check: Check, target: Target) -> Result:
    """One check, whole."""
    answer = answer_of(lambda: check.run(target))
    return Result(check.level, check.name, answer.outcome, answer.detail or answer.found or "", answer.seconds)


def joined(check: Check, answers: Sequence[Answer]) -> Result:
    """The check whose parts gave these answers, in order; its seconds are those of all of them."""
    assert check.split is not None
    join, seconds = check.split.join, sum(answer.seconds for answer in answers)
    for outcome in (Outcome.FAILED, Outcome.SKIPPED, Outcome.UNCLAIMED):
        details = list(dict.fromkeys(answer.detail for answer in answers if answer.outcome is outcome))
        if details:
            return Result(check.level, check.name, outcome, "\n".join(details), seconds)
    answer = answer_of(lambda: join([answer.found for answer in answers]))
    return Result(check.level, check.name, answer.outcome, answer.detail or answer.found or "", seconds + answer.seconds)


def _answer(work: Callable[[], Any]) -> tuple[Any, Outcome, str]:
    try:
        return work(), Outcome.PASSED, ""
    except UnclaimedError as reason:
        return None, Outcome.UNCLAIMED, str(reason)
    except SkippedError as reason:
        return None, Outcome.SKIPPED, str(reason)
    except (FailedError, PagodaError) as error:
        return None, Outcome.FAILED, str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"
    except Exception:
        return None, Outcome.FAILED, traceback.format_exc(limit=-4)
