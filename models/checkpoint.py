"""How a checkpoint's tensors become ours: ordered, invertible rules, as data.

A pattern is a tensor name in which `{x}` stands for one word between dots and `{x*}` for any rest; the same words appear in the rule's
other side. Each rule works on all tensors that the rules before it left, so a list reads from the file's names to ours. `inverse` turns a
list round: saving, adapter names and other namings fall out of it. For that, no rule may take up a name that an earlier one made final.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from pagoda.hal.errors import CheckpointError
from pagoda.models import views
from pagoda.models.builder import Parameter
from pagoda.models.views import Joined, Part, Renamed, Reordered, Shifted, Stacked, Unstacked, transposed
from pagoda.quant.format import Format, StoredTensor

Tensors = dict[str, StoredTensor]
_WORD = re.compile(r"\{(\w+)\*?\}")


@dataclass(frozen=True)
class Rename:
    """`old` → `new`."""

    old: str
    new: str


@dataclass(frozen=True)
class Also:
    """Another spelling that some checkpoints have, taken as `new`; turned round it does nothing."""

    old: str
    new: str


@dataclass(frozen=True)
class Split:
    """One tensor → several along `dim`, `sizes` numbers each (or in equal parts where empty)."""

    old: str
    new: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    dim: int = 0


@dataclass(frozen=True)
class Join:
    """Several tensors → one along `dim`; `sizes` as in `Split`, for the way back."""

    old: tuple[str, ...]
    new: str
    sizes: tuple[int, ...] = ()
    dim: int = 0


@dataclass(frozen=True)
class Stack:
    """Tensors whose names differ in the word `{axis}`, 0 to count − 1, → one with a new first dimension."""

    old: str
    new: str
    axis: str
    count: int


@dataclass(frozen=True)
class Unstack:
    """The inverse of `Stack`."""

    old: str
    new: str
    axis: str
    count: int


@dataclass(frozen=True)
class Transpose:
    """Exchange the last two dimensions, in place under the same name; with `until` only where they are not that, and not turned round."""

    name: str
    until: tuple[int, int] | None = None


@dataclass(frozen=True)
class Reorder:
    """Dimension `dim` seen as `view`, axes exchanged to `order`: undoes per-head interleaving and permuted rotary rows."""

    name: str
    view: tuple[int, ...]
    order: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Add:
    """A constant on every number (norm weights stored as w + 1)."""

    name: str
    value: float


@dataclass(frozen=True)
class Drop:
    """Tensors that are not needed (masks, rotary tables, a tied head stored twice); turned round it does nothing."""

    name: str


@dataclass(frozen=True)
class UnitRows:
    """Rows are divided by their length; turned round it does nothing, for such rows stay as they are."""

    name: str


@dataclass(frozen=True)
class Zeros:
    """A bias `new` of zeros beside each weight `like`, for layers that have one beside others; turned round it goes."""

    like: str
    new: str


Rule = Rename | Also | Split | Join | Stack | Unstack | Transpose | Reorder | Add | Drop | UnitRows | Zeros


def apply(rules: Sequence[Rule], tensors: Mapping[str, StoredTensor]) -> Tensors:
    """All tensors under the names that the rules lead to; those that no rule touches keep theirs."""
    current = dict(tensors)
    for rule in rules:
        current = _apply(rule, current)
    return current


def inverse(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules that lead back."""
    return tuple(_inverse(rule) for rule in reversed(rules))


NO_WEIGHTS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)) | {"bool", "complex64"}
"""Types that no plain weight is stored in."""


def check(stored: Mapping[str, StoredTensor], parameters: Mapping[str, Parameter], format: Format) -> None:
    """Raises `CheckpointError` naming every missing, unexpected and misshapen tensor at once."""
    wanted = {name: parameter for parameter in parameters.values() for name in _names(parameter, format)}
    welcome = {f"{stem}.{name}" for stem in map(_stem, parameters.values()) if stem for name in format.optional_names}
    missing = [f"{name} {list(wanted[name].shape)}" for name in wanted if name not in stored]
    unexpected = [
        f"{tensor.name}"
        for name, tensor in stored.items()
        if name not in wanted and name not in welcome and name.rpartition(".")[2] not in format.spare
    ]
    misshapen = [
        f"{name} {list(stored[name].shape)}, expected {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if name in stored and _is_whole(name, parameter, format) and tuple(stored[name].shape) != parameter.shape
    ]
    ill_typed = [
        f"{name} {stored[name].dtype}"
        for name, parameter in wanted.items()
        if name in stored and _is_whole(name, parameter, format) and stored[name].dtype in NO_WEIGHTS
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen), ("of no float type", ill_typed))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit its configuration. {'. '.join(problems)}. Fetch it again, or check the model type"
        )


def _names(parameter: Parameter, format: Format) -> tuple[str, ...]:
    stem = _stem(parameter)
    if stem is None:
        return (parameter.path,)
    return tuple(f"{stem}.{name}" for name in format.names_of(stem))


def _stem(parameter: Parameter) -> str | None:
    return parameter.path.removesuffix(".weight") if parameter.formatted else None


def _is_whole(name: str, parameter: Parameter, format: Format) -> bool:
    return not parameter.formatted or _names(parameter, format) == (name,)


def _apply(rule: Rule, tensors: Tensors) -> Tensors:
    match rule:
        case Rename(old, new) | Also(old, new):
            return _each(tensors, old, lambda words, tensor: {_fill(new, words): Renamed(tensor.name, tensor)})
        case Split():
            return _each(tensors, rule.old, lambda words, tensor: _split(rule, words, tensor))
        case Join():
            return _gather(tensors, lambda name: _join_place(rule, name), len(rule.old), rule.dim)
        case Stack():
            return _gather(tensors, lambda name: _stack_place(rule, name), rule.count, None)
        case Unstack():
            return _each(tensors, rule.old, lambda words, tensor: _unstack(rule, words, tensor))
        case Transpose(name, until):
            done = lambda tensor: tuple(tensor.shape[-2:]) == until  # noqa: E731
            return _each(tensors, name, lambda words, tensor: {_fill(name, words): tensor if done(tensor) else transposed(tensor)})
        case Reorder(name, view, order, dim):
            return _each(tensors, name, lambda words, tensor: {_fill(name, words): Reordered(tensor.name, tensor, view, order, dim)})
        case Add(name, value):
            return _each(tensors, name, lambda words, tensor: {_fill(name, words): Shifted(tensor.name, tensor, value)})
        case UnitRows(name):
            return _each(tensors, name, lambda words, tensor: {_fill(name, words): views.UnitRows(tensor.name, tensor)})
        case Zeros(like, new):
            made = _each(tensors, like, lambda words, tensor: {_fill(new, words): views.Zeros(tensor.name, tensor)})
            return {**made, **tensors}
        case Drop(name):
            return _each(tensors, name, lambda words, tensor: {})


def _inverse(rule: Rule) -> Rule:
    match rule:
        case Rename(old, new):
            return Rename(new, old)
        case Split(old, new, sizes, dim):
            return Join(new, old, sizes, dim)
        case Join(old, new, sizes, dim):
            return Split(new, old, sizes, dim)
        case Stack(old, new, axis, count):
            return Unstack(new, old, axis, count)
        case Unstack(old, new, axis, count):
            return Stack(new, old, axis, count)
        case Reorder(view=view, order=order):
            back = tuple(order.index(i) for i in range(len(order)))
            return replace(rule, view=tuple(view[i] for i in order), order=back)
        case Add(name, value):
            return Add(name, -value)
        case Transpose(until=until):
            return rule if until is None else Drop("")
        case Zeros(new=new):
            return Drop(new)
        case Drop() | Also() | UnitRows():
            return Drop("")


def _each(tensors: Tensors, pattern: str, turn: Callable[[Mapping[str, str], StoredTensor], Tensors]) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        words = _match(pattern, name)
        for new, made in ({name: tensor} if words is None else turn(words, tensor)).items():
            if new in out:
                raise CheckpointError(f"two tensors of the checkpoint lead to {new}: {out[new].name} and {tensor.name}")
            out[new] = made
    return out


def _gather(tensors: Tensors, place: Callable[[str], tuple[str, int] | None], count: int, dim: int | None) -> Tensors:
    found: dict[str, dict[int, str]] = {}
    for name in tensors:
        placed = place(name)
        if placed is not None:
            found.setdefault(placed[0], {})[placed[1]] = name
    whole = {target: names for target, names in found.items() if len(names) == count}
    used = {name for names in whole.values() for name in names.values()}
    out = {name: tensor for name, tensor in tensors.items() if name not in used}
    for target, names in whole.items():
        bases = tuple(tensors[names[i]] for i in range(count))
        out[target] = Stacked(target, bases) if dim is None else Joined(target, bases, dim)
    return out


def _join_place(rule: Join, name: str) -> tuple[str, int] | None:
    for i, old in enumerate(rule.old):
        words = _match(old, name)
        if words is not None:
            return _fill(rule.new, words), i
    return None


def _stack_place(rule: Stack, name: str) -> tuple[str, int] | None:
    words = _match(rule.old, name)
    if words is None or not words[rule.axis].isdigit():
        return None
    return _fill(rule.new, words), int(words[rule.axis])


def _split(rule: Split, words: Mapping[str, str], tensor: StoredTensor) -> Tensors:
    names = [_fill(new, words) for new in rule.new]
    if tensor.shape in ((), (1,)):
        # A scale of the whole is one of every part.
        return {name: Renamed(tensor.name, tensor) for name in names}
    total = tensor.shape[rule.dim]
    sizes = rule.sizes or (total // len(rule.new),) * len(rule.new)
    unit = sum(sizes) // total if total else 1
    if unit > 1 and not any(size % unit for size in sizes):
        # One number for so many rows.
        sizes = tuple(size // unit for size in sizes)
    if sum(sizes) != total:
        raise CheckpointError(f"{tensor.name} has {total} rows, the configuration expects {sum(sizes)} = {' + '.join(map(str, sizes))}")
    bounds = pairwise(accumulate(sizes, initial=0))
    return {name: Part(tensor.name, tensor, rule.dim, *bound) for name, bound in zip(names, bounds, strict=True)}


def _unstack(rule: Unstack, words: Mapping[str, str], tensor: StoredTensor) -> Tensors:
    if tensor.shape[0] != rule.count:
        raise CheckpointError(f"{tensor.name} holds {tensor.shape[0]} experts, the configuration expects {rule.count}")
    return {_fill(rule.new, {**words, rule.axis: str(i)}): Unstacked(tensor.name, tensor, i) for i in range(rule.count)}


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\*?\})", pattern)
    return re.compile("".join(_group(part) if part.startswith("{") else re.escape(part) for part in parts))


def _group(part: str) -> str:
    name = part.strip("{}*")
    return f"(?P<{name}>.+)" if part.endswith("*}") else f"(?P<{name}>[^.]+)"


def _match(pattern: str, name: str) -> dict[str, str] | None:
    found = _compiled(pattern).fullmatch(name)
    return found.groupdict() if found else None


def _fill(pattern: str, words: Mapping[str, str]) -> str:
    return _WORD.sub(lambda match: words[match.group(1)], pattern)
