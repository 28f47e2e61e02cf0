"""An engine plan for people (bars and tables) and for programs (a plain record)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from pagoda.hal.kv import CacheGroup
from pagoda.hal.table import Choice
from pagoda.models.fusion import Fused
from pagoda.serving.engine.engine_plan import EnginePlan
from rich.console import Console
from rich.table import Table
from rich.text import Text

PARTS = {"weights": "cyan", "work": "magenta", "kv": "green", "reserved": "bright_black", "free": "white"}
"""Parts of a device's memory and their colours."""

NAMES = {"kv": "KV cache", "reserved": "reserved for others"}


class Use(NamedTuple):
    """Uses of one primitive that got the same kernel for the same reasons."""

    op: str
    kernel: str
    dtypes: tuple[str, ...]
    times: int
    passed_over: tuple[tuple[str, str], ...]


def record(plan: EnginePlan) -> dict[str, Any]:
    """Everything in the plan as JSON values."""
    plain = {f.name: _plain(getattr(plan, f.name)) for f in fields(plan) if f.name not in {"kernels", "fusions"}}
    plain["memory"]["free"] = plan.memory.free
    return plain | {"kernels": [_choice(choice) for choice in plan.kernels], "fusions": [_fusion(fused) for fused in plan.fusions]}


def show(plan: EnginePlan, console: Console) -> None:
    """The plan on a terminal, as wide as it is."""
    for part in (_head(plan), _memory(plan, console.width), _fits(plan), _kernels(plan.kernels), _fusions(plan.fusions)):
        for line in part:
            console.print(line)
        console.print()


def grouped(choices: Sequence[Choice]) -> list[Use]:
    """The choices, one entry for each primitive, kernel and set of reasons."""
    uses: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]] = {}
    for choice in choices:
        reasons = tuple((kernel.name, reason) for kernel, reason in choice.passed_over)
        uses.setdefault((choice.op, choice.chosen.name, reasons), []).append(choice.facts.dtype)
    return [Use(op, kernel, tuple(dict.fromkeys(dtypes)), len(dtypes), reasons) for (op, kernel, reasons), dtypes in sorted(uses.items())]


def size(nbytes: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _head(plan: EnginePlan) -> Iterator[Text]:
    yield Text.assemble((plan.model, "bold"), f"  {plan.architecture}, {_count(plan.parameters)} parameters")
    weights = f"{plan.format.removesuffix('Format').lower() or 'plain'} weights, computes in {plan.dtype}, KV in {plan.kv_dtype}"
    ranks = f", split over {plan.world} ranks" if plan.world > 1 else ""
    yield Text(f"{weights}{ranks}", "dim")
    yield Text.assemble((plan.device.model, "bold"), f"  {plan.device.vendor} {plan.device.arch}, {size(plan.memory.total)}")
    if not plan.why.startswith(plan.device.model):  # else it would say the same again
        yield Text(plan.why, "dim")


def _memory(plan: EnginePlan, width: int) -> Iterator[Text | Table]:
    amounts = {name: int(getattr(plan.memory, name)) for name in PARTS}
    yield Text("Memory" + (" of each rank" if plan.world > 1 else ""), "bold")
    yield bar(amounts, plan.memory.total, min(width, 100))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for column in ("left", "right", "right", "left"):
        table.add_column(justify=column)  # type: ignore[arg-type]
    details = {"weights": plan.weights, "work": plan.work}
    for name, amount in amounts.items():
        parts = ", ".join(f"{part} {size(n)}" for part, n in sorted(details.get(name, {}).items(), key=lambda item: -item[1]))
        label = Text.assemble(("■ ", PARTS[name]), NAMES.get(name, name))
        table.add_row(label, size(amount), f"{100 * amount / plan.memory.total:.1f} %", Text(parts, "dim"))
    yield table


def bar(amounts: Mapping[str, int], total: int, width: int) -> Text:
    """Segments as long as their shares; what is there at all has at least one cell."""
    cells = {name: max(1, round(width * amount / total)) for name, amount in amounts.items() if amount > 0}
    while sum(cells.values()) != width and cells:
        longest = max(cells, key=lambda name: cells[name])
        cells[longest] += 1 if sum(cells.values()) < width else -1
    return Text.assemble(*(("█" * count, PARTS[name]) for name, count in cells.items()))


def _fits(plan: EnginePlan) -> Iterator[Text | Table]:
    yield Text("Fits", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("tokens in the cache", f"{plan.tokens:,}")
    table.add_row("longest sequence", _longest(plan))
    together = ", ".join(f"{count} of {length:,}" for length, count in plan.requests)
    table.add_row("at the same time", f"{together} tokens")
    for group in plan.groups:
        table.add_row("pages", _pages(plan, group))
    yield table


def _longest(plan: EnginePlan) -> str:
    limit = f"the model's limit is {plan.max_positions:,}, the cache holds {plan.longest:,}"
    return f"{plan.max_model_len:,} tokens ({limit})"


def _pages(plan: EnginePlan, group: CacheGroup) -> str:
    window = f", window {group.window:,}" if group.window else ""
    layers = f"{len(group.layers)} layer{'s' * (len(group.layers) != 1)} of kind {group.kind.value}{window}"
    padding = f", {100 * plan.padding:.1f} % padding" if plan.padding else ", no padding"
    return f"{plan.num_pages:,} × {group.tokens_per_page} tokens, {size(group.page_bytes)} each{padding}: {layers}"


def _kernels(choices: Sequence[Choice]) -> Iterator[Text | Table]:
    yield Text("Kernels", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("primitive", "uses", "kernel", "passed over"):
        table.add_column(name, overflow="fold")
    for use in grouped(choices):
        style = "yellow" if use.kernel == "reference" else "green"
        table.add_row(use.op, str(use.times), Text(use.kernel, style), Text("; ".join(_reasons(use)), "dim"))
    yield table


def _fusions(fusions: Sequence[Fused]) -> Iterator[Text | Table]:
    yield Text("Fused", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("primitive", "uses", "in place of", "not elsewhere"):
        table.add_column(name, overflow="fold")
    for fused in fusions:
        sequences = " or ".join(", ".join(sequence) for sequence in fused.replaces)
        apart = "; ".join(f"{times}: {reason}" for reason, times in fused.apart)
        table.add_row(fused.op, Text(str(fused.times), "green" if fused.times else "yellow"), sequences, Text(apart, "dim"))
    yield table


def _reasons(use: Use) -> Iterator[str]:
    for kernel, reason in use.passed_over:
        yield f"{kernel}: {reason}"


def _count(number: int) -> str:
    for scale, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= scale:
            return f"{number / scale:.1f} {name}"
    return f"{number:,}"


def _choice(choice: Choice) -> dict[str, Any]:
    passed = [{"kernel": kernel.name, "reason": reason} for kernel, reason in choice.passed_over]
    return {"op": choice.op, "facts": _plain(choice.facts), "kernel": choice.chosen.name, "passed_over": passed}


def _fusion(fused: Fused) -> dict[str, Any]:
    apart = [{"reason": reason, "times": times} for reason, times in fused.apart]
    return {"op": fused.op, "replaces": _plain(fused.replaces), "times": fused.times, "apart": apart}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in asdict(value).items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
