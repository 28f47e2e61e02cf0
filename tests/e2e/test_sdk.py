"""The SDK on the default model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagoda import LLM, AsyncLLM, SamplingParams
from pagoda.hal.errors import RequestError

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=2**28) as made:
        yield made


def test_the_capital_of_france(llm: LLM) -> None:
    output = llm.chat(FRANCE, GREEDY)[0]
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"
    assert llm.generate("The capital of France is", GREEDY)[0].outputs[0].text.startswith(" Paris")


def test_prompts_together_equal_prompts_alone(llm: LLM) -> None:
    prompts = ["The capital of France is", "Two plus two is", "def fibonacci(n):", "日本の首都は"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert together == [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]


def test_several_answers_with_logprobs_and_a_stop_string(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12, logprobs=2)
    first, again = (llm.generate("Once upon a time", params)[0] for _ in range(2))
    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in again.outputs]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) == 3
    for answer in first.outputs:
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        assert all(token in entry for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
        chosen = sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
        assert answer.cumulative_logprob == pytest.approx(chosen)
    stopped = llm.chat(FRANCE, SamplingParams(temperature=0, max_tokens=16, stop=("France",)))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("The capital of ", "stop", "France")


def test_beams_are_ranked(llm: LLM) -> None:
    output = llm.beam_search("The sky is", beam_width=3, max_tokens=6)[0]
    scores = [beam.cumulative_logprob for beam in output.outputs]
    assert scores == sorted(scores, reverse=True) and len({beam.text for beam in output.outputs}) == 3


def test_a_shared_beginning_is_read_once(llm: LLM) -> None:
    prompt = "It was a dark and stormy night. " * 12
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens > 0


def test_sleep_gives_memory_back_and_wakes_the_same(llm: LLM) -> None:
    before = llm.generate("The capital of France is", GREEDY)[0].outputs[0].token_ids
    for level, tags in ((1, None), (2, None), (2, ["weights"]), (1, ["kv_cache"])):
        llm.sleep(level)
        if tags == ["weights"]:
            with pytest.raises(RequestError, match="the weights sleep too"):
                llm.wake_up(["kv_cache"])
        llm.wake_up(tags)
        if tags == ["weights"]:
            with pytest.raises(RequestError, match="the engine sleeps"):
                llm.generate("The capital of France is", GREEDY)
            llm.wake_up(["kv_cache"])
        output = llm.generate("The capital of France is", GREEDY)[0]
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (before, 0)


def test_too_long_is_refused_with_numbers(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"the prompt has \d+ tokens, but prompt and answer together may have 512"):
        llm.generate("word " * 600, GREEDY)


async def test_async_streams_side_by_side() -> None:
    async with AsyncLLM(max_model_len=256, max_num_seqs=8) as llm:

        async def whole() -> str:
            return [output async for output in llm.chat(FRANCE, GREEDY)][-1].outputs[0].text

        assert all("Paris" in text for text in await asyncio.gather(*(whole() for _ in range(3))))
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True)):
            if len(output.outputs[0].token_ids) > 3:
                break
        while (stats := await llm.session.client.stats()).running or stats.pages_used:
            await asyncio.sleep(0.05)


def test_ranks_are_processes_that_end_with_the_engine() -> None:
    others = set(_children())  # of tests before this one
    with LLM(tensor_parallel_size=3, max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=2**28) as llm:
        assert llm.generate("The capital of France is", GREEDY)[0].outputs[0].text.startswith(" Paris")
        ranks = [pid for pid in _children() if pid not in others]
        assert len(ranks) >= 3
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("ending", ["", "llm.close()", "raise SystemExit(0)"])
def test_a_script_ends_cleanly_however_it_ends(ending: str) -> None:
    work = "llm = LLM(max_model_len=128); print(llm.generate('Hi', SamplingParams(max_tokens=4))[0].finished)"
    code = f"from pagoda import LLM, SamplingParams; {work}; {ending}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n") and "Traceback" not in done.stderr


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
