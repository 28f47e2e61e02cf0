"""`/v1/chat/completions` over the toy engine: the prompt is `user:TEXT\\nassistant:`, and so is the answer."""

from toy_server import toy_server


async def test_whole_answer():
    async with toy_server() as toy:
        reply = (await toy.chat("hé")).json()
    assert reply["object"] == "chat.completion"
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user:hé\nassistant:", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == reply["usage"]["prompt_tokens"] + 1


async def test_stream_equals_whole():
    async with toy_server() as toy:
        body = {"messages": [{"role": "user", "content": "日本"}], "n": 2, "logprobs": True, "top_logprobs": 1}
        whole = (await toy.http.post("/v1/chat/completions", json=body)).json()
        chunks = await toy.stream("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert sum(part["delta"].get("role") == "assistant" for part in parts) == 1


async def test_logprobs_have_bytes():
    async with toy_server() as toy:
        reply = (await toy.chat("é", logprobs=True, top_logprobs=2)).json()
    entry = reply["choices"][0]["logprobs"]["content"][5]
    assert (entry["token"], entry["bytes"], len(entry["top_logprobs"])) == ("\ufffd", [0xC3], 2)


async def test_limits_by_either_name():
    async with toy_server() as toy:
        for name in ("max_tokens", "max_completion_tokens"):
            choice = (await toy.chat("hello", **{name: 4})).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("user", "length")


async def test_continue_the_last_message():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "half an"}]
    async with toy_server() as toy:
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        reply = (await toy.http.post("/v1/chat/completions", json={**body, "echo": True, "max_tokens": 3})).json()
        assert bytes(toy.engine.requests[0].prompt).decode().endswith("assistant:half an")
        both = await toy.http.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert reply["choices"][0]["message"]["content"] == "half anuse"
    assert both.status_code == 400


async def test_template_of_a_request_needs_trust():
    async with toy_server() as toy:
        refused = await toy.chat("x", chat_template="T")
    async with toy_server(trust_request_chat_template=True) as toy:
        taken = (await toy.chat("x", chat_template="T")).json()
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    assert taken["choices"][0]["message"]["content"].startswith("Tuser:x")


async def test_token_ids_come_on_request():
    async with toy_server() as toy:
        whole = (await toy.chat("a", return_token_ids=True, return_prompt_text=True)).json()
        body = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True, "return_prompt_text": True}
        chunks = await toy.stream("/v1/chat/completions", **body)
    assert bytes(whole["prompt_token_ids"]).decode() == "user:a\nassistant:"
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert whole["prompt_text"] == chunks[0]["prompt_text"] == "user:a\nassistant:" and "prompt_text" not in chunks[1]
    assert [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids", ())] == whole["choices"][0]["token_ids"]


async def test_usage_can_be_forced():
    async with toy_server(enable_force_include_usage=True) as toy:
        chunks = await toy.stream("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert chunks[-1]["usage"]["total_tokens"] > 0
