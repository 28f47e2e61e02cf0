"""`pagoda diff`: one model on two devices side by side; names the first layer and the first primitive where they part."""

from __future__ import annotations

from typing import Annotated

import typer
from pagoda.hal.discovery import choose
from pagoda.hal.errors import ConfigError
from pagoda.hal.table import KernelPolicy
from pagoda.models.load import Checkpoint, Description, open_checkpoint
from pagoda.models.loading.reference import resolve
from pagoda.serving.cli.side_by_side import Comparison, Culprit, Side, compare_sides, open_side
from pagoda.serving.frontend.load import load_tokenizer

LENGTHS = (1, 7, 33)
"""Tokens of the prompts that are run when none is given: one, a few, and more than two pages' worth."""

HELP = """Run one model on two devices side by side and name the first layer and primitive where they part.

All prompts run in one step, then --tokens tokens one by one, the same on both devices (--against chooses them). After every layer the two
streams are compared. Where they differ by more than roundings explain, the step is run again, and each primitive's result is held to its
float64 oracle on the very inputs that it got, so a small error is found where it is made and not where it has grown. Either device may be
the wrong one.

What is shown of a wrong primitive: its kernel and where that comes from, the facts of its use, shapes and dtypes, its error and what the
primitive allows, where in the result it is largest, and the command that checks this kernel alone.

Two devices: `pagoda diff MODEL --device auto --against reference`. Two kernels on one device:
`pagoda diff MODEL --device cpu --against cpu --against-kernel gemm=reference`. Exit code 0: they agree; 1: they part."""


def diff(
    model: Annotated[str, typer.Argument(help="As for `pagoda serve`.", metavar="MODEL")],
    device: Annotated[str, typer.Option(help="The device in question, NAME or NAME:INDEX.")] = "auto",
    against: Annotated[str, typer.Option(help="The device to compare with; `reference` runs the portable references alone.")] = "reference",
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel to use on --device, OP=NAME; repeatable.", metavar="OP=NAME")] = None,
    against_kernel: Annotated[list[str] | None, typer.Option(help="The same on --against.", metavar="OP=NAME")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to run; repeatable. Three of 1, 7 and 33 tokens when not given.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to go on with, one a step.", min=0)] = 4,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations on both; `auto` is what --device would use.")] = "auto",
) -> None:
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    side, description = _open(device, kernel, checkpoint, dtype)
    other, _ = _open(against, against_kernel, checkpoint, description.numerics.dtype)
    texts = [load_tokenizer(path).encode(text) for text in prompt] if prompt else _prompts(description.facts.vocab_size)
    names = (_named(device, kernel), _named(against, against_kernel))
    found = compare_sides((side, other), texts, tokens)
    for line in told(found, names):
        typer.echo(line)
    raise typer.Exit(0 if found.parted is None else 1)


diff.__doc__ = HELP


def told(found: Comparison, names: tuple[str, str]) -> list[str]:
    """The finding in lines."""
    steps = 1 + max(stage.step for stage in found.stages)
    if found.parted is None:
        worst = max(found.stages, key=lambda stage: stage.error / stage.allowed)
        error = f"the largest difference is {worst.error:.2g} of the largest number, after {found.name(worst.part)} in {_step(worst.step)}"
        return [
            f"{names[0]} and {names[1]} agree in {steps} steps and {found.layers} layers: {error} ({worst.allowed:.2g} would be roundings)"
        ]
    parted = found.parted
    lines = [f"{names[0]} and {names[1]} part at {found.name(parted.part)} in {_step(parted.step)}, row {parted.row}:"]
    lines.append(f"  the streams differ by {parted.error:.3g} of the largest number; roundings explain {parted.allowed:.3g}")
    if found.culprit is None:
        clean = f"  all {found.judged} primitives up to there are within their tolerances on the inputs that they got:"
        return [*lines, clean, "  roundings have grown (a near tie between experts, say), or what lies between primitives differs"]
    return [*lines, *_culprit(found, found.culprit, names)]


def _culprit(found: Comparison, culprit: Culprit, names: tuple[str, str]) -> list[str]:
    verdict = culprit.verdict
    kernel = verdict.kernel
    rows = [
        ("wrong", f"{kernel.op}={kernel.name} on {names[culprit.side]}, in {found.name(culprit.part)}"),
        ("found", str(verdict.problem)),
        ("kernel", kernel.implementation),
        ("use", str(verdict.facts)),
        ("inputs", verdict.inputs),
        ("check it", f"pagoda conformance --device {names[culprit.side].split()[0]} --level 1 --check {kernel.op}={kernel.name}"),
    ]
    return [f"  {name:8} {text}" for name, text in rows]


def _step(number: int) -> str:
    return "the prompts' step" if number == 0 else f"decode step {number}"


def _open(name: str, kernels: list[str] | None, checkpoint: Checkpoint, dtype: str) -> tuple[Side, Description]:
    kind, _, index = name.partition(":")
    if index and not index.isdigit():
        raise ConfigError(f"--device {name} names a model of device; two devices that are here are needed, as NAME or NAME:INDEX")
    return open_side(choose(kind).backend, int(index or 0), _policy(kernels or []), checkpoint, dtype)


def _policy(kernels: list[str]) -> KernelPolicy:
    pairs = [word.partition("=") for word in kernels]
    wrong = [word for word, (op, _, name) in zip(kernels, pairs, strict=True) if not op or not name]
    if wrong:
        raise ConfigError(f"--kernel {wrong[0]} is not of the form OP=NAME, such as gemm=reference; `pagoda devices --kernels` lists them")
    return KernelPolicy({op: name for op, _, name in pairs})


def _named(device: str, kernels: list[str] | None) -> str:
    return " ".join([device, *([f"({', '.join(kernels)})"] if kernels else [])])


def _prompts(vocab: int) -> list[list[int]]:
    """Token ids all over the vocabulary, the same every time."""
    return [[(7919 * length + 104729 * i * i) % vocab for i in range(length)] for length in LENGTHS]
