"""`speculative_config`: what is taken, what is refused and by which name; the counters under vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.api.metrics import Metrics
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.messages import EngineStats
from pagoda.serving.engine.spec.config import Ngram
from pagoda.serving.engine.spec.drafter import PromptLookup
from pagoda.serving.engine.spec.make import make_drafter
from pagoda.serving.local import config_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_speculative_tokens": 4}, Ngram(4, 5, 5)),
        ({"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}, Ngram(4, 4, 1)),
        ({"num_speculative_tokens": 4, "prompt_lookup_max": 3}, Ngram(4, 3, 3)),
        ({"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": None}, Ngram(4, 2, 2)),
    ],
)
def test_ngram(given: dict[str, Any], expected: Ngram) -> None:
    config = config_of(None, {"speculative_config": {"method": "ngram", **given}})
    assert config.speculation == expected
    assert isinstance(make_drafter(config.speculation), PromptLookup)


def test_nothing_asked_drafts_nothing() -> None:
    assert EngineConfig().speculation is None and make_drafter(None) is None


def test_the_flag_as_in_vllm() -> None:
    parser = Parser("serve", "")
    parser.add_config(EngineConfig)
    for flag in ("--speculative-config", "--speculative_config", "-sc"):
        values = parser.values([flag, '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":1}'])
        assert build(EngineConfig, values).speculation == Ngram(4, 4, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "medusa", "num_speculative_tokens": 3}, "method 'medusa' is not one of ngram"),
        ({"num_speculative_tokens": 3}, "method None is not one of ngram"),
        ({"method": "ngram"}, "needs 'num_speculative_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be from 1 to 63"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5 must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min=3 must be"),
        ({"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}, "no key 'draft_tensor_parallel_size'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=given)


def test_metrics_have_vllms_names() -> None:
    shown = Metrics("m").render(EngineStats(drafts=3, draft_tokens=9, accepted_tokens=4, accepted_at=(3, 1))).decode()
    labels = 'engine="0",model_name="m"'
    for line in (
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 3.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 9.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 4.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 1.0',
    ):
        assert line in shown
