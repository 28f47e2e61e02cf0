"""`pagoda bench serve` over the real HTTP stack, and its arithmetic against numpy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import mean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.serving.cli.bench.load import LoadOptions, arrivals, asks, ramp
from pagoda.serving.cli.bench.report import percentile, table
from pagoda.serving.cli.bench.serve import Sample, ServeOptions, measure
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.main import main
from pagoda.serving.cli.remote import connect
from patience import eventually
from toy_engine import ToyEngine
from toy_server import toy_server


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_equal_numpy(values: list[float], percent: int) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_arrivals_keep_the_rate_and_the_burstiness() -> None:
    poisson, smooth = (np.diff(arrivals(20_001, 50.0, burstiness, 0)) for burstiness in (1.0, 100.0))
    assert mean(poisson) == pytest.approx(0.02, rel=0.05) and pstdev(poisson) == pytest.approx(0.02, rel=0.1)
    assert mean(smooth) == pytest.approx(0.02, rel=0.05) and pstdev(smooth) == pytest.approx(0.002, rel=0.1)
    assert arrivals(3, float("inf"), 1.0, 0) == [0, 0, 0]


def test_a_ramp_ends_at_its_last_rate() -> None:
    options = ServeOptions(ramp_up_strategy="linear", ramp_up_start_rps=10, ramp_up_end_rps=1000, burstiness=1000.0)
    gaps = np.diff(options.times(2001, 0))
    assert gaps[:20].mean() == pytest.approx(1 / 15, rel=0.1) and gaps[-100:].mean() == pytest.approx(1 / 975, rel=0.05)
    assert ramp(3, 1, 100, True) == pytest.approx([1, 10, 100])


def test_lengths_in_the_manner_of_sharegpt() -> None:
    drawn = asks(LoadOptions(dataset="sharegpt", num_prompts=4000))
    prompts, answers = [len(ask.prompt) for ask in drawn], [ask.output_len for ask in drawn]
    # the mean of a log-normal, less what the longest length cuts off
    assert mean(prompts) == pytest.approx(157, rel=0.08) and mean(answers) == pytest.approx(310, rel=0.08)
    assert min(prompts) >= 4 and max(prompts) <= 1024 and np.median(prompts) < 0.75 * mean(prompts)
    assert {ask.output_len for ask in asks(LoadOptions(dataset="sharegpt", num_prompts=9, sharegpt_output_len=7))} == {7}


def test_the_peers_own_command_lines_are_understood() -> None:
    parser = Parser("bench serve", "")
    for config in (ServeOptions, LoadOptions):
        parser.add_config(config)
    line = (
        "--base-url http://h --model m --endpoint /v1/chat/completions --dataset-name sharegpt --dataset-path f --sharegpt-output-len 9"
        " --num-prompts 5 --request-rate inf --burstiness 0.5 --max-concurrency 3 --num-warmups 0 --temperature 0.5 --ignore-eos --seed 2"
        " --goodput ttft:200 tpot:20 --metric-percentiles 50,99.9 --result-filename out.json"
    )
    values = parser.values(line.split())
    options, load = build(ServeOptions, values), build(LoadOptions, values)
    assert (options.is_chat, options.limits, options.percentiles, options.json) == (True, {"ttft": 200, "tpot": 20}, (50, 99.9), "out.json")
    assert (load.dataset_path, load.drawn, load.sharegpt_output_len, load.num_prompts) == ("f", False, 9, 5)


def test_random_prompts_have_the_asked_lengths_and_prefix() -> None:
    options = LoadOptions(num_prompts=50, input_len=20, output_len=10, range_ratio=0.5, prefix_len=4, vocab=200)
    drawn = asks(options)
    assert drawn == asks(options) and drawn != asks(LoadOptions(num_prompts=50, input_len=20, seed=1))
    assert len({tuple(ask.prompt[:4]) for ask in drawn}) == 1
    assert all(14 <= len(ask.prompt) <= 34 and 5 <= ask.output_len <= 15 for ask in drawn)
    assert all(100 <= i < 200 for ask in drawn for i in ask.prompt)  # type: ignore[operator]
    assert len(str(asks(options, as_text=True)[0].prompt).split()) == len(drawn[0].prompt)


def test_files_of_conversations_and_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(json.dumps([{"conversations": [{"value": "hi"}, {"value": "x" * 40}]}, {"conversations": []}]))
    assert asks(LoadOptions(dataset=str(path), num_prompts=2)) == [("hi", 10), ("hi", 10)]
    path.write_text('{"prompt": [5, 6]}\n{"prompt": "b", "output_len": 3}\n')
    assert sorted(asks(LoadOptions(dataset=str(path), num_prompts=2, output_len=7)), key=str) == [("b", 3), ([5, 6], 7)]
    for text, message in (("{", "neither JSON nor"), ("[]", "holds no prompts")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            asks(LoadOptions(dataset=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        asks(LoadOptions(dataset=str(tmp_path / "absent")))


LOAD = LoadOptions(num_prompts=6, input_len=8, output_len=5, vocab=200)


async def run_against(engine: ToyEngine, load: LoadOptions = LOAD, **options: object) -> dict:  # type: ignore[type-arg]
    async with toy_server(engine) as toy:
        return await measure(ServeOptions(url=str(toy.http.base_url), **options), load)  # type: ignore[arg-type]


async def test_a_run_counts_tokens_and_times() -> None:
    result = await run_against(ToyEngine(delay=0.01), goodput=("ttft=1000000", "tpot:0.000001"))
    assert (result["completed"], result["failed"], result["output_tokens"], result["input_tokens"]) == (6, 0, 30, 48)
    tpot, ttft, whole = (result[name]["mean"] for name in ("tpot_ms", "ttft_ms", "e2el_ms"))
    assert ttft >= 10 and whole >= 50 and tpot == pytest.approx((whole - ttft) / 4)
    assert result["goodput_per_s"] == 0 and result["model"] == "toy"
    assert json.loads(json.dumps(result, allow_nan=False)) == result


async def test_chat_with_a_limit_of_concurrency() -> None:
    engine = ToyEngine(held=2)
    running = asyncio.ensure_future(run_against(engine, endpoint="chat", max_concurrency=2, num_warmups=0))
    await eventually(lambda: engine.generated == 4)
    engine.held = None
    result = await running
    assert (result["completed"], engine.most_live) == (6, 2)
    assert result["output_tokens"] == 30


async def test_failures_are_counted_and_told() -> None:
    long = LoadOptions(num_prompts=2, input_len=5000, output_len=5, vocab=200)
    result = await run_against(ToyEngine(), long, num_warmups=0)
    assert (result["completed"], result["failed"]) == (0, 2)
    assert "refused with 400" in result["errors"][0] and "5000 tokens" in result["errors"][0]
    with pytest.raises(PagodaError, match="refused with 400"):
        await run_against(ToyEngine(), long)


async def test_separators_in_a_text_do_not_cut_an_event() -> None:
    prompt = list("a\u2028b\x85c\x1cd\u2029e".encode())  # the toy answers with the prompt, byte by byte
    async with toy_server(ToyEngine()) as toy, connect(str(toy.http.base_url)) as remote:
        events = [e async for e in remote.stream("/v1/completions", {"model": "toy", "prompt": prompt, "max_tokens": len(prompt)})]
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == bytes(prompt).decode()


def test_goodput_asks_for_every_limit() -> None:
    sample = Sample(output_tokens=11, first=0.1, total=1.1)
    assert sample.per_token == pytest.approx(0.1)
    assert sample.keeps({"ttft": 100, "tpot": 101}) and not sample.keeps({"tpot": 99}) and not sample.keeps({"e2el": 1000})
    assert not Sample(error="x").keeps({})


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["bench", "nonsense"], 2, "no benchmark 'nonsense'"),
        (["bench", "serve", "--goodput", "ttft=x"], 2, "one of ttft, tpot, e2el with milliseconds"),
        (["bench", "serve", "--goodput", "ttft:5", "itl:5"], 2, "one of ttft, tpot, e2el with milliseconds"),
        (["bench", "serve", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"], 2, "a ramp needs"),
        (["bench", "serve", "--metric-percentiles", "50,101"], 2, "from 0 to 100"),
        (["bench", "serve", "--request-rate", "0"], 2, "must be above 0"),
        (["bench", "serve", "--num-prompts", "0"], 2, "must be at least 1"),
        (["bench", "serve", "--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1 does not answer"),
    ],
)
def test_errors_of_the_command(capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str) -> None:
    assert main(words) == code
    assert message in capsys.readouterr().err


def test_the_table_has_a_row_for_what_was_measured() -> None:
    text = table("t", {"a": "b"}, {"first": {"mean": 1.0, "p50": 2.0}, "nothing": {}})
    assert text.splitlines()[-1].split() == ["first", "1.00", "2.00"]
