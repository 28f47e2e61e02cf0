"""The SDK over the toy engine: blocking and asyncio, order, errors, interrupts, closing."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading

import pytest
from pagoda.hal.errors import ConfigError, PagodaError, RequestError
from pagoda.serving import sdk
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.frontend.processor import Processor
from pagoda.serving.frontend.session import Session
from pagoda.serving.local import config_of
from pagoda.serving.loop_thread import LoopThread, Progress
from pagoda.serving.sdk import LLM, AsyncLLM, SamplingParams, devices
from patience import eventually, until
from toy_engine import ToyEngine, toy_text


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    engine = ToyEngine()

    async def open_toy(config: EngineConfig) -> Session:
        return Session(engine, Processor(toy_text(), engine.facts, {"temperature": 0.0}))

    monkeypatch.setattr(sdk, "open_local", open_toy)
    return engine


FIVE = SamplingParams(max_tokens=5)


def test_prompts_of_every_kind_come_back_in_order(toy: ToyEngine) -> None:
    with LLM() as llm:
        outputs = llm.generate(["hello", [104, 105], {"prompt_token_ids": [106]}], FIVE)
        assert [output.outputs[0].text for output in outputs] == ["hell", "hi", "j"]  # the toy repeats its prompt, BOS first
        assert [output.prompt for output in outputs] == ["hello", None, None]
        assert all(output.finished for output in outputs)
        assert llm.generate("hello", FIVE)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert llm.generate([104, 105], FIVE)[0].outputs[0].finish_reason == "stop"
        assert llm.generate([], FIVE) == []


def test_settings_for_all_for_each_and_by_default(toy: ToyEngine) -> None:
    with LLM() as llm:
        outputs = llm.generate(["hello", "hello"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=2)])
        assert [len(output.outputs) for output in outputs] == [1, 2]
        llm.generate("x")
        assert (toy.requests[-1].params.temperature, toy.requests[-1].params.max_tokens) == (0.0, 4094)
        assert llm.default_params(top_k=3).top_k == 3
        with pytest.raises(RequestError, match="1 settings for 2 prompts"):
            llm.generate(["a", "b"], [FIVE])


async def test_an_answer_made_at_the_end_equals_the_one_that_grew(toy: ToyEngine) -> None:
    toy.burst = 3
    session = await sdk.open_local(EngineConfig())
    params = SamplingParams(n=2, max_tokens=11, logprobs=1, prompt_logprobs=1, include_stop_str_in_output=True, skip_special_tokens=False)
    for prompt in ("grüße 日本", "x" * 40, "y"):
        request, text = session.of_prompt(prompt, params)
        grown = [output async for output in session.run(request, text)][-1]
        made = await session.complete(request, text)
        assert made.outputs == grown.outputs and made.prompt_logprobs == grown.prompt_logprobs
        assert (made.finished, made.num_cached_tokens) == (grown.finished, grown.num_cached_tokens) == (True, 3)
        assert made.metrics.time_to_first_token is not None and made.metrics.latency is not None


def test_tokens_alone_have_no_text(toy: ToyEngine) -> None:
    with LLM() as llm:
        answer = llm.generate("hello", SamplingParams(max_tokens=3, detokenize=False))[0].outputs[0]
        assert (answer.text, answer.token_ids) == ("", [257, 104, 101])


def test_chats_one_and_many(toy: ToyEngine) -> None:
    hello = [{"role": "user", "content": "hello"}]
    with LLM() as llm:
        one = llm.chat(hello, SamplingParams(max_tokens=4))
        many = llm.chat([hello, hello], SamplingParams(max_tokens=4))
        assert [output.outputs[0].text for output in [*one, *many]] == ["user"] * 3
        assert one[0].prompt == "user:hello\nassistant:"


def test_beam_search_asks_the_engine_for_beams(toy: ToyEngine) -> None:
    with LLM() as llm:
        output = llm.beam_search("hello", beam_width=3, max_tokens=2, length_penalty=0.5)[0]
        assert len(output.outputs) == 3
        request = toy.requests[-1]
        assert (request.beam_width, request.length_penalty, request.params.n, request.params.temperature) == (3, 0.5, 3, 0)


def test_control_calls_reach_the_engine(toy: ToyEngine) -> None:
    with LLM() as llm:
        assert llm.reset_prefix_cache() is True
        with pytest.raises(RequestError, match="the toy engine has no sleep"):
            llm.sleep()
        with pytest.raises(RequestError, match="the toy engine has no wake"):
            llm.wake_up()


def test_nothing_is_sent_when_one_prompt_is_wrong(toy: ToyEngine) -> None:
    with LLM() as llm:
        with pytest.raises(RequestError, match="5001 tokens"):
            llm.generate(["fine", "x" * 5000], FIVE)
        assert toy.requests == []


async def test_blocking_calls_work_inside_a_running_loop(toy: ToyEngine) -> None:
    with LLM() as llm:
        assert llm.generate("hello", FIVE)[0].outputs[0].text == "hell"


def test_one_failure_ends_the_others(toy: ToyEngine) -> None:
    toy.held = 5

    def die() -> None:
        until(lambda: toy.generated == 15)
        toy.dead = "the rank ended"

    with LLM() as llm:
        threading.Thread(target=die, daemon=True).start()
        with pytest.raises(PagodaError, match="the rank ended"):
            llm.generate(["hello" * 200] * 3, SamplingParams(max_tokens=1000))
    assert toy.live == {}


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pagoda-sdk"}


def test_closing_is_idempotent_and_leaves_no_thread(toy: ToyEngine) -> None:
    before = own_threads()
    llm = LLM()
    assert len(own_threads() - before) == 1
    llm.close()
    llm.close()
    assert own_threads() <= before
    with pytest.raises(ConfigError, match="was closed"):
        llm.generate("x", FIVE)


def test_a_failed_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(config: EngineConfig) -> Session:
        raise ConfigError("no such model")

    monkeypatch.setattr(sdk, "open_local", fail)
    before = own_threads()
    with pytest.raises(ConfigError, match="no such model"):
        LLM("absent")
    assert own_threads() <= before


async def test_async_streams_grow_and_leaving_aborts(toy: ToyEngine) -> None:
    async with AsyncLLM() as llm:
        texts = [output.outputs[0].text async for output in llm.generate("hello", FIVE)]
        assert texts == ["", "h", "he", "hel", "hell"]
        async for _ in llm.chat([{"role": "user", "content": "hello"}]):
            break
    await eventually(lambda: toy.live == {})
    assert len(toy.aborted) == 1


async def test_async_abort_ends_the_stream(toy: ToyEngine) -> None:
    toy.held = 2
    async with AsyncLLM() as llm:
        reasons = []
        async for output in llm.generate("hello" * 100, SamplingParams(max_tokens=400), request_id="mine"):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 2:
                await llm.abort("mine")
    assert reasons == [None, None, "abort"]


async def test_async_needs_a_start(toy: ToyEngine) -> None:
    llm = AsyncLLM()
    with pytest.raises(ConfigError, match="not running"):
        llm.default_params()
    await llm.start()
    await llm.close()
    await llm.close()


def test_settings_are_checked_and_other_names_work() -> None:
    assert config_of("m", {"gpu_memory_utilization": 0.5, "max_num_seqs": 3}) == EngineConfig(
        model="m", device_memory_utilization=0.5, max_num_seqs=3
    )
    with pytest.raises(ConfigError, match=r"unknown engine setting max_num_seq; did you mean max_num_seqs\?"):
        config_of(None, {"max_num_seq": 3})
    with pytest.raises(ConfigError, match="unknown engine setting zzz; there are model, device"):
        config_of(None, {"zzz": 3})


def test_an_interrupt_cancels_the_work() -> None:
    thread, ended = LoopThread(), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    class Interrupting:
        def result(self) -> None:
            raise KeyboardInterrupt

    real = asyncio.run_coroutine_threadsafe

    def interrupted(coroutine, loop):  # type: ignore[no-untyped-def]
        future = real(coroutine, loop)
        if coroutine.__name__ == "work":
            asyncio.run_coroutine_threadsafe = real
            future.result = Interrupting().result
        return future

    asyncio.run_coroutine_threadsafe = interrupted
    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    assert ended == [True]
    thread.stop()
    thread.stop()


def test_progress_counts_tokens() -> None:
    out = io.StringIO()
    progress = Progress(2, True, out)
    progress.advance(10, 5)
    progress.advance(10, 5)
    progress.end()
    assert "1/2 prompts" in out.getvalue() and "2/2 prompts" in out.getvalue() and out.getvalue().endswith("\n")
    assert Progress(5, None, io.StringIO())._shown is False


def test_devices_are_typed() -> None:
    found = {device.name: device for device in devices()}
    assert found["cpu"].available and found["cpu"].devices[0].memory_bytes > 0


def test_no_server_package_is_needed() -> None:
    lacking = ("starlette", "uvicorn", "msgspec", "zmq", "rich", "typer", "prometheus_client", "httpx")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking}));"
        "import pagoda; print(pagoda.LLM.__name__, pagoda.AsyncLLM.__name__, pagoda.devices.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["LLM", "AsyncLLM", "devices"]
