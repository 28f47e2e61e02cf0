"""`/v1/completions` over the toy engine, whose answers repeat the prompt byte by byte."""

import asyncio

from patience import eventually
from toy_engine import EOS, ToyEngine
from toy_server import events, toy_server


async def test_whole_text():
    async with toy_server() as toy:
        reply = (await toy.complete("hi", max_tokens=10, add_special_tokens=False)).json()
    assert reply["object"] == "text_completion"
    assert reply["model"] == "toy"
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("hi", "stop", None)
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_default_limit_is_sixteen_tokens():
    async with toy_server() as toy:
        choice = (await toy.complete("x" * 40)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 15, "length")  # the first of the sixteen is the begin token


async def test_stream_equals_whole():
    body = {"prompt": "übergrößenträger", "max_tokens": 30, "logprobs": 2, "n": 2, "echo": True}
    async with toy_server() as toy:
        whole = (await toy.http.post("/v1/completions", json=body)).json()
        chunks = await toy.stream(**body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        choice = whole["choices"][index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [entry for part in parts for entry in part["logprobs"][name]] == choice["logprobs"][name], name


async def test_usage_in_every_chunk():
    async with toy_server() as toy:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await toy.stream(prompt="abc", add_special_tokens=False, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


async def test_every_kind_of_prompt():
    async with toy_server() as toy:
        for prompt, texts in (
            ("ab", ["ab"]),
            (["ab", "c"], ["ab", "c"]),
            ([97, 98], ["ab"]),
            ([[97], [98, 99]], ["a", "bc"]),
            (["a", [98]], ["a", "b"]),
        ):
            reply = (await toy.complete(prompt, add_special_tokens=False)).json()
            assert [choice["text"] for choice in reply["choices"]] == texts
            assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))


async def test_many_prompts_stream_with_their_indices():
    async with toy_server() as toy:
        chunks = await toy.stream(prompt=["ab", "cd", "ef"], n=2, add_special_tokens=False)
    texts = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "ab", 1: "ba", 2: "cd", 3: "dc", 4: "ef", 5: "fe"}


async def test_stop_string_ends_the_text_and_the_engine_request():
    async with toy_server(ToyEngine()) as toy:
        body = {"max_tokens": 200, "ignore_eos": True, "add_special_tokens": False, "stop": ["lo w", "zzz"]}
        choice = (await toy.complete("hello world", **body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hel", "stop", "lo w")
        kept = (await toy.complete("hello world", **body, include_stop_str_in_output=True)).json()["choices"][0]
        assert kept["text"] == "hello w"
        assert len(toy.engine.aborted) == 2
        assert not toy.engine.live


async def test_no_part_of_a_stop_string_is_streamed():
    async with toy_server() as toy:
        chunks = await toy.stream(prompt="one STOP two", stop="STOP", max_tokens=50, add_special_tokens=False)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "one "
    assert chunks[-1]["choices"][0]["stop_reason"] == "STOP"


async def test_min_tokens_hold_back_stop_strings():
    async with toy_server() as toy:
        body = {"stop": "a", "min_tokens": 4, "ignore_eos": True, "max_tokens": 20, "add_special_tokens": False}
        choice = (await toy.complete("abc", **body)).json()["choices"][0]
    assert choice["text"] == "abcabc"


async def test_stop_token_is_left_out_of_the_text_unless_asked_for():
    async with toy_server() as toy:
        body = {"stop_token_ids": [ord("c")], "add_special_tokens": False, "return_token_ids": True}
        choice = (await toy.complete("abcd", **body)).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("ab", ord("c"), [97, 98, 99])
        assert choice["prompt_token_ids"] == [97, 98, 99, 100]
        kept = (await toy.complete("abcd", **body, include_stop_str_in_output=True)).json()["choices"][0]
        assert kept["text"] == "abc"


async def test_special_tokens_shown_on_request():
    async with toy_server() as toy:
        body = {"skip_special_tokens": False, "include_stop_str_in_output": True, "add_special_tokens": False}
        assert (await toy.complete("ab", **body)).json()["choices"][0]["text"] == "ab<eos>"


async def test_logprobs():
    async with toy_server() as toy:
        reply = (await toy.complete("ab", logprobs=2, add_special_tokens=False)).json()
        named = (await toy.complete("ab", logprobs=0, add_special_tokens=False, return_tokens_as_token_ids=True)).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "<eos>"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"][0] == -0.597
    assert logprobs["top_logprobs"][0] == {"a": -0.597, "b": -1.597}
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:98", f"token_id:{EOS}"]
    assert list(named["choices"][0]["logprobs"]["top_logprobs"][0]) == ["token_id:97"]


async def test_echo_scores_the_prompt_without_answering():
    async with toy_server() as toy:
        reply = (await toy.complete("abc", echo=True, max_tokens=0, logprobs=1, add_special_tokens=False)).json()
    choice = reply["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert reply["usage"]["completion_tokens"] == 0


async def test_scoring_costs_no_completion_tokens_in_a_stream_either():
    async with toy_server() as toy:
        reply = await toy.complete("abc", echo=True, max_tokens=0, logprobs=1, stream=True, stream_options={"include_usage": True})
    assert events(reply.text)[-1]["usage"]["completion_tokens"] == 0


async def test_a_seed_is_the_same_number_in_the_engine():
    async with toy_server() as toy:
        assert (await toy.complete("hi", seed=-7)).status_code == 200
        assert toy.engine.requests[0].params.seed == -7


async def test_prompt_logprobs():
    async with toy_server() as toy:
        choice = (await toy.complete("ab", prompt_logprobs=1, add_special_tokens=False)).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.598, "rank": 1, "decoded_token": "b"}}]


async def test_best_of_returns_the_likeliest():
    async with toy_server() as toy:
        reply = (await toy.complete("~a", best_of=2, max_tokens=1, add_special_tokens=False)).json()
    assert [choice["text"] for choice in reply["choices"]] == ["a"]
    assert reply["usage"]["completion_tokens"] == 2


async def test_settings_reach_the_engine():
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "allowed_token_ids": (1, 2),
        "stop_token_ids": (3,),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "prompt_logprobs": 1,
    }
    async with toy_server() as toy:
        more = {"logit_bias": {"5": -1.5}, "bad_words": ["no"], "priority": 4, "cache_salt": "s", "vllm_xargs": {"k": 1}}
        assert (await toy.complete("hi", **fields, **more)).status_code == 200
        (request,) = toy.engine.requests
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.params.logit_bias == {5: -1.5}
    assert request.params.bad_words_token_ids == ((110, 111), (32, 110, 111))
    assert request.params.extra == {"k": 1}
    assert (request.priority, request.cache_salt, request.eos_ids) == (4, "s", (EOS,))


async def test_beam_search_reaches_the_engine():
    async with toy_server() as toy:
        reply = await toy.complete("hi", use_beam_search=True, n=3, length_penalty=0.5)
        assert reply.status_code == 200
        (request,) = toy.engine.requests
    assert (request.beam_width, request.params.n, request.length_penalty) == (3, 3, 0.5)


async def test_truncation():
    async with toy_server() as toy:
        left = (await toy.complete("abcdef", truncate_prompt_tokens=2)).json()["choices"][0]["text"]
        right = (await toy.complete("abcdef", truncate_prompt_tokens=3, truncation_side="right")).json()["choices"][0]["text"]
        whole = (await toy.complete("a" * 5000, truncate_prompt_tokens=-1, max_tokens=96)).json()["usage"]["prompt_tokens"]
    assert (left, right, whole) == ("ef", "ab", 4000)


async def test_bursts_of_tokens_give_the_same_text():
    body = {"max_tokens": 60, "ignore_eos": True, "stop": "lo h", "add_special_tokens": False, "logprobs": 0}
    replies = []
    for burst in (1, 3, 64):
        async with toy_server(ToyEngine(burst=burst)) as toy:
            replies.append((await toy.complete("hello ", **body)).json())
    assert replies[0]["choices"] == replies[1]["choices"] == replies[2]["choices"]
    assert replies[0]["usage"] == replies[2]["usage"]


async def test_a_client_that_leaves_ends_its_request():
    async with toy_server(ToyEngine(held=9)) as toy:
        body = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True}
        async with toy.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        whole = asyncio.ensure_future(toy.http.post("/v1/completions", json=body))
        await eventually(lambda: len(toy.engine.requests) == 2)
        whole.cancel()
        await eventually(lambda: not toy.engine.live)
        assert len(toy.engine.aborted) == 2
        assert toy.service.load == 0
