"""What a conformance run found, and its three forms: JUnit for CI, JSON for tools, Markdown for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any
from xml.etree import ElementTree

LEVELS = ("device", "kernels", "graphs", "collectives", "models", "engine")
"""Names of the levels, 0 to 5."""


class Outcome(Enum):
    """Of one check. `SKIPPED` is claimed but not shown, which fails a level; `UNCLAIMED` was never promised."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNCLAIMED = "unclaimed"


@dataclass(frozen=True)
class Result:
    """One check: its level, name, outcome, and a sentence of detail."""

    level: int
    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """A run on one device. `facts`: device, versions; `kernels`: op → names offered."""

    device: str
    facts: dict[str, str]
    kernels: dict[str, list[str]]
    levels: tuple[int, ...]
    results: list[Result] = field(default_factory=list)

    def passed(self, level: int | None = None) -> bool:
        """Nothing failed and nothing claimed was skipped, in `level` or in all that ran; a level without results did not pass."""
        levels = self.levels if level is None else (level,)
        bad = {result.level for result in self.results if result.outcome in (Outcome.FAILED, Outcome.SKIPPED)}
        shown = {result.level for result in self.results if result.outcome is Outcome.PASSED}
        return all(one in shown and one not in bad for one in levels)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What `to_json` wrote."""
        record = json.loads(text)
        results = [Result(**{**result, "outcome": Outcome(result["outcome"])}) for result in record["results"]]
        return cls(record["device"], record["facts"], record["kernels"], tuple(map(LEVELS.index, record["levels"])), results)

    def joined(self, later: Report) -> Report:
        """Both as one: of what both ran, and of the facts, the later one counts."""
        found = {(result.level, result.name): result for result in (*self.results, *later.results)}
        results = sorted(found.values(), key=lambda result: result.level)
        levels = tuple(sorted({*self.levels, *later.levels}))
        return Report(self.device, {**self.facts, **later.facts}, {**self.kernels, **later.kernels}, levels, results)

    def of(self, level: int, outcome: Outcome) -> list[Result]:
        return [result for result in self.results if result.level == level and result.outcome is outcome]

    def to_json(self) -> str:
        results = [{**asdict(result), "outcome": result.outcome.value} for result in self.results]
        levels = {LEVELS[level]: self.passed(level) for level in self.levels}
        record: dict[str, Any] = {"device": self.device, "facts": self.facts, "kernels": self.kernels, "levels": levels, "results": results}
        return json.dumps(record, indent=2) + "\n"

    def to_junit(self) -> str:
        root = ElementTree.Element("testsuites", name=f"pagoda conformance {self.device}")
        for level in self.levels:
            mine = [result for result in self.results if result.level == level]
            suite = ElementTree.SubElement(root, "testsuite", name=f"level {level} {LEVELS[level]}", tests=str(len(mine)))
            suite.set("failures", str(len(self.of(level, Outcome.FAILED)) + len(self.of(level, Outcome.SKIPPED))))
            suite.set("skipped", str(len(self.of(level, Outcome.UNCLAIMED))))
            for result in mine:
                _junit_case(suite, self.device, result)
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

    def to_markdown(self) -> str:
        verdict = "passed" if self.passed() else "did not pass"
        lines = [f"# Conformance of `{self.device}`: {verdict}", ""]
        lines += [f"* {name}: {value}" for name, value in self.facts.items()]
        lines += ["", "| level | | passed | failed | claimed, not shown | not claimed |", "| --- | --- | --- | --- | --- | --- |"]
        for level in self.levels:
            counts = " | ".join(str(len(self.of(level, outcome))) for outcome in Outcome)
            lines.append(f"| {level} {LEVELS[level]} | {'ok' if self.passed(level) else '**no**'} | {counts} |")
        for outcome, title in ((Outcome.FAILED, "Failed"), (Outcome.SKIPPED, "Claimed, not shown"), (Outcome.UNCLAIMED, "Not claimed")):
            listed = [result for level in self.levels for result in self.of(level, outcome)]
            if listed:
                lines += ["", f"## {title}", "", *(f"* level {one.level}, {one.name}: {_one_line(one.detail)}" for one in listed)]
        lines += ["", "## Kernels", "", *(f"* `{op}`: {', '.join(names)}" for op, names in self.kernels.items())]
        return "\n".join(lines) + "\n"


def _junit_case(suite: ElementTree.Element, device: str, result: Result) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"{device}.{LEVELS[result.level]}", name=result.name)
    case.set("time", f"{result.seconds:.3f}")
    if result.outcome in (Outcome.FAILED, Outcome.SKIPPED):
        failure = ElementTree.SubElement(case, "failure", message=_one_line(result.detail)[:200], type=result.outcome.value)
        failure.text = result.detail
    elif result.outcome is Outcome.UNCLAIMED:
        ElementTree.SubElement(case, "skipped", message=f"not claimed: {_one_line(result.detail)}")
    elif result.detail:
        ElementTree.SubElement(case, "system-out").text = result.detail


def _one_line(text: str) -> str:
    return " ".join(text.split())
