"""Level 4, models: a tiny one for each kind of block, against the reference device and against transformers; pages that move."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.discovery import find
from pagoda.models.decoder import Decoder
from pagoda.models.direct import DirectRun
from pagoda.models.load import COMPUTE, Checkpoint, describe, load_model, open_checkpoint
from pagoda.ops.table import kernel_table
from pagoda.serving.conformance.check import Check, Target, UnclaimedError, apart, expect
from pagoda.serving.conformance.comparison import Finding, Tolerance, compare_greedy, compare_values
from pagoda.serving.conformance.tiny_models import TINY

Generated = list[tuple[list[int], torch.Tensor]]
"""Of each prompt: greedy tokens, and the logits that each came from."""

EXACT = Tolerance(1e-3, 0.02)
"""For float32, in standard deviations of the logits."""

PROMPTS = tuple(tuple((7 * length + 31 * i * i) % 190 + 64 for i in range(length)) for length in (1, 7, 33))
NEW = 8


def checks(target: Target) -> Iterator[Check]:
    """All of level 4."""
    for kind, config in TINY.items():
        for dtype in (name for name in ("float32", "bfloat16", "float16") if name in COMPUTE):
            yield apart(4, f"{kind}: as on the reference device [{dtype}]", _bind(_against_reference, config, dtype))
        yield apart(4, f"{kind}: in chunks as at once", _bind(_in_chunks, config))
        yield apart(4, f"{kind}: pages written here continue elsewhere", _bind(_pages_elsewhere, config))
        yield apart(4, f"{kind}: as in transformers", _bind(_against_transformers, config))


def reference_target() -> Target:
    """The reference device of this machine."""
    backend = find("reference")
    return Target(backend, backend.open())


def load(target: Target, checkpoint: Checkpoint | Mapping[str, Any], dtype: str) -> Decoder:
    """The model on a device; without weights in the checkpoint the same random ones everywhere."""
    table = kernel_table(target.backend, target.device.info)
    return load_model(describe(checkpoint, dtype=dtype, table=table), target.device, table)


def _bind(check: Callable[..., str | None], *arguments: Any) -> Callable[[Target], str | None]:
    return lambda target: check(target, *arguments)


def _against_reference(target: Target, config: Mapping[str, Any], dtype: str) -> str:
    if dtype not in target.device.info.dtypes:
        raise UnclaimedError(f"the device does not compute in {dtype}")
    oracle = reference_target()
    config = config if dtype == "float32" else _without_choices(config)
    wanted = _generate(oracle, load(oracle, config, "float64"))
    tolerance = EXACT if dtype == "float32" else _narrow(_generate(oracle, load(oracle, config, dtype)), wanted)
    return judge(_compare(_generate(target, load(target, config, dtype)), wanted, tolerance))


def _without_choices(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every expert for every token: in a narrow dtype a near tie between two experts would decide about everything after it."""
    total = config.get("num_local_experts", config.get("num_experts"))
    return config if total is None else {**config, "num_experts_per_tok": total}


def _narrow(portable: Generated, wanted: Generated) -> Tolerance:
    """What a narrow dtype may lose: twice what the portable kernels lose in it, against float64."""
    anything = Tolerance(math.inf, math.inf)
    worst = max(finding.error for finding in _compare(portable, wanted, anything))
    return Tolerance(max(0.01, 2 * worst), max(0.02, 4 * worst))


def _generate(target: Target, model: Decoder) -> Generated:
    return DirectRun(model, target.device, len(PROMPTS), max(map(len, PROMPTS)) + NEW).generate(PROMPTS, NEW)


def _compare(found: Generated, wanted: Generated, tolerance: Tolerance) -> list[Finding]:
    findings: list[Finding] = []
    for number, ((tokens, logits), (want_tokens, want_logits)) in enumerate(zip(found, wanted, strict=True)):
        findings += compare_greedy(f"prompt {number}", tokens, logits, want_tokens, want_logits, tolerance)
    return findings


def _in_chunks(target: Target, config: Mapping[str, Any]) -> str:
    model, prompt = load(target, config, _widest(target)), PROMPTS[-1]
    whole = DirectRun(model, target.device, 1, 64)
    wanted = whole.logits(whole.step([(0, prompt)]).hidden)
    run = DirectRun(model, target.device, 2, 64)
    parts = [run.step([(0, prompt[:5])]).hidden, run.step([(0, prompt[5:17]), (1, PROMPTS[1])]).hidden[:12]]
    parts += [run.step([(1, (99,)), (0, (token,))]).hidden[1:] for token in prompt[17:20]]
    parts.append(run.step([(0, prompt[20:])]).hidden)
    return judge([compare_values("logits of every position", run.logits(torch.cat(parts)), wanted, EXACT)])


def _pages_elsewhere(target: Target, config: Mapping[str, Any]) -> str:
    here, elsewhere, prompt = load(target, config, _widest(target)), load(reference_target(), config, "float32"), PROMPTS[-1]
    if _widest(target) != "float32":
        raise UnclaimedError("the device does not compute in float32, and the reference device in nothing narrower")
    there = reference_target().device
    size = here.page_sizes()[0]
    writer, reader = DirectRun(here, target.device, 2, 64, size), DirectRun(elsewhere, there, 3, 64, size)
    writer.step([(1, prompt)])
    pages, places = torch.tensor(writer.page_ids(1)), torch.tensor(reader.page_ids(2))
    for (layout, pool), (other, sheets) in zip(writer.pools, reader.pools, strict=True):
        form = layout.export(pool, pages.to(target.device.torch_device))
        other.load(sheets, places, form)
        again = other.export(sheets, places)
        same = again.form == form.form and _same_bits(again.k, form.k) and _same_bits(again.v, form.v)
        expect(same, "pages exported here and loaded elsewhere differ")
    reader.lengths[2] = len(prompt)
    found, wanted = reader.logits(reader.step([(2, (77,))]).hidden), writer.logits(writer.step([(1, (77,))]).hidden)
    return judge([compare_values("the next token's logits", found, wanted, EXACT)])


def _against_transformers(target: Target, config: Mapping[str, Any]) -> str:
    if find_spec("transformers") is None:
        raise UnclaimedError("transformers is not installed here; the reference device is the oracle")
    with tempfile.TemporaryDirectory() as folder:
        wanted = _transformers_logits(config, Path(folder))
        model = load(target, open_checkpoint(folder), _widest(target))
        run = DirectRun(model, target.device, len(PROMPTS), 64)
        hidden = run.step(list(enumerate(PROMPTS))).hidden
        return judge([compare_values("logits of every position", run.logits(hidden), wanted, EXACT)])


def _transformers_logits(config: Mapping[str, Any], folder: Path) -> torch.Tensor:
    """Logits of every prompt position in transformers, and the checkpoint that they came from, in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM  # optional: an independent oracle where it is installed

    own = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), torch.inference_mode():
        warnings.simplefilter("ignore")
        settings = AutoConfig.for_model(config["model_type"], **own)
        build: Any = AutoModelForCausalLM.from_config
        model = build(settings, attn_implementation="eager", dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(11)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else parameter + 0.1 * noise)
        model.save_pretrained(folder)
        return torch.cat([model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS])


def _widest(target: Target) -> str:
    return next(name for name in ("float32", "bfloat16", "float16") if name in target.device.info.dtypes)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # parts never written may hold NaN


def judge(findings: list[Finding]) -> str:
    """The worst error, or a failure naming each finding that did not pass."""
    wrong = [f"{one.name}: {one.note or f'off by {one.error:.2g} standard deviations'}" for one in findings if not one.passed]
    expect(not wrong, "; ".join(wrong))
    ties = sum("tie" in finding.note for finding in findings)
    return f"off by {max(finding.error for finding in findings):.1e} standard deviations at most" + (f", {ties} ties" if ties else "")
