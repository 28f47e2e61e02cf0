"""Random bodies: whatever a client sends, it is an answer or a 400 that names a reason, never a 500, and the next request works."""

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagoda.serving.api.anthropic.protocol import MessagesRequest
from pagoda.serving.api.openai.protocol import ChatRequest, CompletionRequest
from pagoda.serving.api.openai.responses_protocol import ResponseRequest
from pagoda.serving.frontend.chat_template import ChatTemplate
from pagoda.serving.frontend.text import TextFrontend
from toy_engine import ToyEngine, ToyTokenizer
from toy_server import toy_server

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
scalars = st.none() | st.booleans() | st.integers(-3, 40) | st.sampled_from([10**9, 2**63, 10**30, 1e308, 0.5]) | st.text(max_size=4)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=5
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=5) | values}), max_size=3
)


kinds = ["text", "tool_use", "tool_result", "thinking", "image", "input_text", "output_text", "message", "function_call", "reasoning", "x"]
names = ["id", "text", "content", "name", "input", "tool_use_id", "thinking", "role", "call_id", "arguments", "output", "summary"]
blocks = st.lists(
    st.tuples(st.sampled_from(kinds), st.dictionaries(st.sampled_from(names), st.sampled_from(["user", "{}"]) | values, max_size=4)).map(
        lambda parts: {"type": parts[0], **parts[1]}
    ),
    max_size=3,
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=5) | blocks}), max_size=3
)


def bodies(kind, required):
    fields = sorted(set(kind.__struct_fields__) - {"stream", "model"})
    return st.tuples(required, st.dictionaries(st.sampled_from(fields), values, max_size=4), st.booleans()).map(
        lambda parts: {"max_tokens": 4, **parts[0], **parts[1], "stream": parts[2]}
    )


completions = bodies(CompletionRequest, st.fixed_dictionaries({"prompt": st.text(max_size=5) | values}))
chats = bodies(ChatRequest, st.fixed_dictionaries({"messages": messages}))
anthropic = bodies(MessagesRequest, st.fixed_dictionaries({"model": st.just("toy"), "messages": turns}))
responses = bodies(ResponseRequest, st.fixed_dictionaries({"input": st.text(max_size=5) | blocks | turns}))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(completions, min_size=15, max_size=15), st.lists(chats, min_size=15, max_size=15))
def test_no_body_is_a_500(some_completions, some_chats):
    async def send():
        async with toy_server(ToyEngine(burst=64)) as toy:
            toy.service.text = TextFrontend(ToyTokenizer(), ChatTemplate({"default": TEMPLATE}, {}))
            cases = [("/v1/completions", body) for body in some_completions] + [("/v1/chat/completions", body) for body in some_chats]

            async def check(path, body):
                response = await toy.http.post(path, json=body)
                assert response.status_code in (200, 400), (path, body, response.text)
                if response.status_code == 400:
                    assert response.json()["error"]["message"], (path, body)
                else:
                    assert '"error"' not in response.text, (path, json.dumps(body), response.text)

            await asyncio.gather(*(check(*case) for case in cases))
            assert (await toy.complete("fine")).status_code == 200
            assert toy.service.load == 0

    asyncio.run(send())


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(anthropic, min_size=15, max_size=15), st.lists(responses, min_size=15, max_size=15))
def test_no_body_of_the_other_protocols_is_a_500(some_messages, some_responses):
    async def send():
        async with toy_server(ToyEngine(burst=64)) as toy:
            toy.service.text = TextFrontend(ToyTokenizer(), ChatTemplate({"default": TEMPLATE}, {}))
            cases = [("/v1/messages", body) for body in some_messages] + [("/v1/responses", body) for body in some_responses]

            async def check(path, body):
                response = await toy.http.post(path, json=body)
                unknown = "previous_response_id" in body
                assert response.status_code in ((200, 400, 404) if unknown else (200, 400)), (path, body, response.text)
                if response.status_code != 200:
                    assert response.json()["error"]["message"], (path, body)
                else:
                    assert '"error":{' not in response.text, (path, json.dumps(body), response.text)

            await asyncio.gather(*(check(*case) for case in cases))
            while toy.service.load:  # what runs in the background
                await asyncio.sleep(0.01)

    asyncio.run(send())
