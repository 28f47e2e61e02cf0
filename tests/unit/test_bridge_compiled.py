"""Layers of transformers' modules compiled: the same numbers, one compilation for all layers that are alike, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagoda import LLM, SamplingParams
from pagoda.hal.errors import ConfigError
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.info import Feature
from pagoda.models.bridge.model import BridgeModel
from pagoda.models.direct import DirectRun
from pagoda.models.load import Description, describe, load_model, open_checkpoint
from pagoda.serving.engine.compiled import compiled, to_compile
from pagoda.serving.engine.config import EngineConfig
from spec_samples import opened
from tiny_checkpoints import make

DEVICE, TABLE = opened()
IDS = [(37 * i + 11) % 131 for i in range(40)]


def described(folder: Path, model_impl: str = "transformers") -> Description:
    return describe(open_checkpoint(folder), dtype="float32", table=TABLE, model_impl=model_impl)  # type: ignore[arg-type]


def hidden(model: BridgeModel) -> torch.Tensor:
    """Of steps with prompts of several lengths, of decodes beside them and alone."""
    run = DirectRun(model, DEVICE, 2, 64)
    steps = [[(0, IDS[:9]), (1, IDS[5:12])], [(0, IDS[9:10]), (1, IDS[12:30])], [(0, IDS[10:14])], [(0, IDS[14:15])]]
    return torch.cat([run.step(step).hidden.clone() for step in steps])


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in what it imports
@torch.inference_mode()
def test_compiled_layers_give_the_same_numbers(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    make(tmp_path, "Llama", num_hidden_layers=9)
    model = load_model(described(tmp_path), DEVICE, TABLE)
    assert isinstance(model, BridgeModel)
    want = hidden(model)
    counters.clear()
    assert model.compile() == 9
    torch.testing.assert_close(hidden(model), want, rtol=1e-4, atol=1e-4)
    # Of nine layers twice two parts, before attention and behind it: of one token, and of more. Not two for each layer.
    assert 2 <= counters["stats"]["unique_graphs"] <= 9, counters["stats"]


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.inference_mode()
def test_another_model_beside_leaves_compiled_layers_alone(tmp_path: Path) -> None:
    """Entries of transformers' attention interface are the process's: a model that is loaded later must not change what compiled layers end
    in front of. A model that is read again is compiled again."""
    from torch._dynamo.utils import counters

    make(tmp_path, "Llama")
    load = partial(load_model, described(tmp_path), DEVICE, TABLE)
    model = compiled(load)
    assert isinstance(model, BridgeModel)
    want = hidden(model)
    other = load()
    counters.clear()
    assert torch.equal(hidden(model), want) and not counters["stats"]
    assert isinstance(other, BridgeModel)
    torch.testing.assert_close(hidden(other), want, rtol=1e-4, atol=1e-4)
    assert not counters["stats"], "what is not compiled was compiled"
    torch.testing.assert_close(hidden(compiled(load)), want, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_what_has_nothing_to_compile_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "Llama")
    config = EngineConfig(model=str(tmp_path), torch_compile=True)
    with pytest.raises(ConfigError, match="fused already: leave --torch-compile out, or add --model-impl transformers"):
        to_compile(config, described(tmp_path, "auto"), 1, DEVICE)
    with pytest.raises(ConfigError, match="for one rank, and 2 are asked for"):
        to_compile(config, described(tmp_path), 2, DEVICE)
    traces: Any = SimpleNamespace(info=DEVICE.info, graphs=SimpleNamespace(policy=GraphPolicy("traced")))
    with pytest.raises(ConfigError, match="compiles whole steps as it is: leave --torch-compile out"):
        to_compile(config, described(tmp_path), 1, traces)
    gpu: Any = SimpleNamespace(info=replace(DEVICE.info, features=frozenset({Feature.TRITON})), graphs=DEVICE.graphs)
    assert to_compile(config, described(tmp_path), 1, gpu) == config
    assert to_compile(config, described(tmp_path), 1, DEVICE).graphs == "none"  # what runs past torch is not replayed on a host


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_answers_alike(tmp_path: Path) -> None:
    make(tmp_path, "Llama")
    answers = []
    for compiles in (False, True):
        settings = {"model_impl": "transformers", "dtype": "float32", "device": "cpu", "max_model_len": 64}
        sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
        with LLM(model=str(tmp_path), skip_tokenizer_init=True, torch_compile=compiles, **settings) as llm:
            found = llm.generate([{"prompt_token_ids": IDS[:4]}, {"prompt_token_ids": IDS[7:16]}], sampling)
            answers.append([list(answer.outputs[0].token_ids) for answer in found])
    assert answers[0] == answers[1] and [len(one) for one in answers[0]] == [12, 12]
