"""What transformers itself is off by in bfloat16, beside recorded float32 answers: `python ci/bfloat16_margins.py DIR…`.

Writes bfloat16.json into each folder: the largest error of its logits, hidden states or scores, in standard deviations of the reference;
the median of the medians of answers' rows, which rows with other experts hardly move; the largest lead of a greedy token that it
gives up; and of texts alone the error of every row. `pagoda parity --dtype bfloat16` allows twice that, and no more rows far off than here.
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

Tensors = dict[str, torch.Tensor]
GROWING = ("token_type_ids", "position_mask")
"""Ends of the names of inputs with a column per token of the text, beside `attention_mask`."""


def margins(path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Of one folder, whatever its model answers with."""
    reference = load_file(path / "reference.safetensors")
    model = _opened(path, dtype)
    fixed = {name.removeprefix("inputs."): _narrow(value, dtype) for name, value in reference.items() if name.startswith("inputs.")}
    compared: list[torch.Tensor] = []
    lead, texts = 0.0, not fixed and not model.config.is_encoder_decoder and dtype == torch.bfloat16
    for name in sorted(name.removesuffix(".prompt") for name in reference if name.endswith(".prompt")):
        given = {part.removeprefix(f"{name}."): value for part, value in reference.items() if part.startswith(f"{name}.")}
        if "tokens" in given:
            rows, gave = _generated(model, fixed, given)
            compared, lead = [*compared, *rows], max(lead, gave)
        else:
            compared += _pooled(model, path, given)
    typical = float(torch.stack([rows.median() for rows in compared]).median())
    told = {"rows": [round(row, 4) for rows in compared for row in rows.tolist()]} if texts and "tokens" in given else {}
    return {"error": max(float(rows.max()) for rows in compared), "typical": typical, "lead": lead, **told}


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
