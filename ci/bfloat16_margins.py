"""What transformers itself is off by in bfloat16, beside recorded float32 answers: `python ci/bfloat16_margins.py DIR…`.

Writes bfloat16.json into each folder: the largest error of its logits, hidden states or scores, in standard deviations of the reference;
the median of the medians of answers' rows, which rows with other experts hardly move; the largest lead of a greedy token that it
gives up; and of texts alone the error of every row. `pagoda parity --dtype bfloat16` allows twice that, no more rows far off than
here, and half of the rows not much more than their own errors here.
The largest of anything is one draw of a chaotic quantity where weights are random: which rows are far off, and how far, hangs on how single
numbers happen to be rounded. So `error` and `lead` of texts are the largest of several runs, in all but one of which matrix products are
rounded stochastically (Parker, Monte Carlo arithmetic, 1997); each row's error is kept of all runs. What is typical is of the run as it is.
With `--float32` it is float32.json: what the record is off by from float64, for models whose layers run so often that rounding grows.
Each greedy row is computed from the recorded tokens before it, so one early
difference does not spoil the rest.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = dict[str, torch.Tensor]
GROWING = ("token_type_ids", "position_mask")
"""Ends of the names of inputs with a column per token of the text, beside `attention_mask`."""
DRAWS = 4
"""Runs with products rounded stochastically, beside the one that rounds to nearest."""
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)


class Stochastic(TorchDispatchMode):
    """Matrix products of bfloat16 are summed in float32 and rounded up as often as they lie near the upper of both neighbours."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        wide = func(*(one.float() if isinstance(one, torch.Tensor) else one for one in args), **(kwargs or {}))
        return stochastic(wide, self._draw)


def stochastic(wide: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """bfloat16 of float32 of the same shape: what the last 16 bits say is the probability of the number further from zero."""
    below = torch.randint(1 << 16, wide.shape, generator=draw, dtype=torch.int32)
    return ((wide.contiguous().view(torch.int32) + below) & -(1 << 16)).view(torch.float32).bfloat16()


def margins(path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Of one folder, whatever its model answers with."""
    reference = load_file(path / "reference.safetensors")
    model = _opened(path, dtype)
    fixed = {name.removeprefix("inputs."): _narrow(value, dtype) for name, value in reference.items() if name.startswith("inputs.")}
    names = sorted(name.removesuffix(".prompt") for name in reference if name.endswith(".prompt"))
    answers = [{part.removeprefix(f"{name}."): value for part, value in reference.items() if part.startswith(f"{name}.")} for name in names]
    compared, lead = _run(model, path, fixed, answers)
    typical = float(torch.stack([rows.median() for rows in compared]).median())
    error, told = _largest(compared), dict[str, Any]()
    if not fixed and not model.config.is_encoder_decoder and dtype == torch.bfloat16 and "tokens" in answers[-1]:
        told = {"rows": _listed(compared), "draws": []}
        for seed in range(DRAWS):
            with Stochastic(seed):
                drawn, gave = _run(model, path, fixed, answers)
            error, lead = max(error, _largest(drawn)), max(lead, gave)
            told["draws"].append(_listed(drawn))
    return {"error": error, "typical": typical, "lead": lead, **told}


def _run(model: Any, path: Path, fixed: Tensors, answers: list[Tensors]) -> tuple[list[torch.Tensor], float]:
    """Errors of rows, comparison by comparison, and the largest lead that is given up."""
    compared, lead = list[torch.Tensor](), 0.0
    for given in answers:
        if "tokens" in given:
            rows, gave = _generated(model, fixed, given)
            compared, lead = [*compared, *rows], max(lead, gave)
        else:
            compared += _pooled(model, path, given)
    return compared, lead


def _listed(compared: list[torch.Tensor]) -> list[float]:
    return [round(row, 4) for rows in compared for row in rows.tolist()]


def _largest(compared: list[torch.Tensor]) -> float:
    return max(float(rows.max()) for rows in compared)


def _opened(path: Path, dtype: torch.dtype) -> Any:
    """The class that recorded the answers, with eager attention where it has a choice."""
    kind = getattr(transformers, json.loads((path / "reference.json").read_text(encoding="utf-8"))["class"])
    try:
        return kind.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    except ValueError:
        return kind.from_pretrained(path, dtype=dtype).eval()


def _narrow(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _generated(model: Any, fixed: Tensors, given: Tensors) -> tuple[list[torch.Tensor], float]:
    """Errors of a greedy answer, and of a whole prompt where that was recorded; the largest lead that is given up."""
    prompt, tokens, want = given["prompt"], given["tokens"], given["logits"]
    got = _logits(model, fixed, torch.cat([prompt, tokens]))
    rows = got[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
    gave = want.gather(1, tokens[:, None]) - want.gather(1, rows.argmax(-1, keepdim=True))
    whole = [_off(got[: len(prompt)], given["full_logits"])] if "full_logits" in given else []
    return [_off(rows, want), *whole], float(gave.max()) / float(want.std())


@torch.no_grad()
def _logits(model: Any, fixed: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Of every position; what has a column per token grows as the oracle lets it grow."""
    crossed = model.config.is_encoder_decoder
    inputs = {**fixed, ("decoder_input_ids" if crossed else "input_ids"): ids[None]}
    for name in (name for name in fixed if (name == "attention_mask" or name.endswith(GROWING)) and not crossed):
        lacking = len(ids) - fixed[name].shape[-1]
        fill = name == "attention_mask" or model.config.model_type == "paligemma"
        inputs[name] = torch.nn.functional.pad(fixed[name], (0, lacking), value=int(fill))
    with_cache = {} if model.config.model_type == "rwkv" else {"use_cache": False}
    return model(**inputs, **with_cache).logits[0].float()


@torch.no_grad()
def _pooled(model: Any, path: Path, given: Tensors) -> Iterator[torch.Tensor]:
    output = model(input_ids=given["prompt"][None])
    if "scores" in given:
        yield _off(output.logits[0], given["scores"])
        return
    hidden = output.last_hidden_state[0]
    if "linear.weight" in (extra := load_file(path / "model.safetensors")):  # of a ColBERT, which the class of its encoder lacks
        hidden = hidden @ extra["linear.weight"].to(hidden.dtype).t()
    mean = hidden.float().mean(0)
    yield _off(hidden, given["hidden"])
    yield _off(mean, given["mean"])
    yield _off(torch.nn.functional.normalize(mean, dim=-1), given["mean.normalized"])


def _off(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The largest of each row, in standard deviations of what was recorded, as `pagoda parity` counts."""
    return (got.float() - want).abs().reshape(len(want), -1).amax(1) / max(float(want.std(unbiased=False)), 1e-9)


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    single = "--float32" in arguments
    for folder in (Path(name) for name in arguments if name != "--float32"):
        try:
            found = margins(folder, torch.float64 if single else torch.bfloat16)
        except Exception as trouble:
            print(f"{folder.name}: {type(trouble).__name__}: {str(trouble)[:150]}", flush=True)
            continue
        (folder / ("float32.json" if single else "bfloat16.json")).write_text(json.dumps(found) + "\n")
        print(f"{folder.name}: {found['error']:.3f}, half the rows {found['typical']:.3f}, leads up to {found['lead']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
