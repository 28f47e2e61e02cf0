"""A server with a tiny random checkpoint: tokens and logprobs are transformers' own, and the flags of `pagoda serve` do what they say."""

import httpx
import openai
import pytest
import torch
from frontend_samples import byte_level
from tiny_checkpoints import logits, make
from toy_process import SERVE, ServerProcess

TEMPLATE = (
    "{{ greeting }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_level()
    model = make(folder, "Llama", vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1, pad_token_id=2)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model


def serve(folder, *flags):
    command = [*SERVE, str(folder), "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    return ServerProcess([*command, "--kv-cache-memory-bytes", "8M", *flags], patience=180)


@pytest.fixture(scope="module")
def tiny(checkpoint):
    with serve(
        checkpoint[0], "--served-model-name", "tiny", "small", "--api-key", "sesame", "--seed", "3", "--reasoning-parser", "qwen3"
    ) as server:
        yield server


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.where}/v1", api_key="sesame", max_retries=0, timeout=60) as made:
        yield made


@torch.no_grad()
def greedy(model, ids, count):
    """transformers' greedy tokens, recomputed without a cache, and their logprobs."""
    out, logprobs = list(ids), []
    for _ in range(count):
        row = torch.log_softmax(logits(model, out)[-1], -1)
        out.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return out[len(ids) :], logprobs


@pytest.mark.parametrize("length", [1, 7, 40])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(client, checkpoint, length):
    prompt = [(11 * k + 17) % 500 + 5 for k in range(length)]
    tokens, logprobs = greedy(checkpoint[1], prompt, 12)
    extra = {"return_token_ids": True, "ignore_eos": True, "prompt_logprobs": 0}
    reply = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=12, logprobs=1, extra_body=extra)
    choice = reply.choices[0]
    assert choice.token_ids == tokens
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3)
    rows = torch.log_softmax(logits(checkpoint[1], prompt), -1)
    scored = [next(iter(position.values()))["logprob"] for position in choice.prompt_logprobs[1:]]
    assert scored == pytest.approx([float(rows[k, token]) for k, token in enumerate(prompt[1:])], abs=1e-3)


def test_every_choice_of_a_sampled_request_is_likely_under_the_model(client, checkpoint):
    prompt = [30, 40, 50]
    extra = {"return_token_ids": True, "ignore_eos": True, "top_k": 5}
    reply = client.completions.create(model="small", prompt=prompt, n=4, max_tokens=6, seed=1, extra_body=extra)
    for choice in reply.choices:
        rows = logits(checkpoint[1], prompt + choice.token_ids)
        for k, token in enumerate(choice.token_ids):
            assert token in rows[len(prompt) - 1 + k].topk(5).indices


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 1}, {"stop": ["\ufffc"]}])
def test_a_streams_tokens_come_as_many_at_a_time_as_asked_for(client, more):
    def stream(interval):
        extra = {"ignore_eos": True, "return_token_ids": True, "stream_interval": interval}
        asked = {"model": "tiny", "prompt": [30, 40, 50], "temperature": 0, "max_tokens": 18, "stream": True, **more}
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, extra_body=extra) if chunk.choices[0].index == 0]
        return [token for chunk in chunks for token in chunk.token_ids], [len(chunk.token_ids) for chunk in chunks if chunk.token_ids]

    every, _ = stream(1)
    tokens, sizes = stream(8)
    assert tokens == every and len(every) == 18
    assert len(sizes) <= 4 and all(size >= 8 for size in sizes[1:-1])


@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_end_after_their_budget(client, budget):
    extra = {"ignore_eos": True, "thinking_token_budget": budget, "return_token_ids": True}
    [choice] = client.completions.create(model="tiny", prompt="Hm<think>", max_tokens=24, seed=1, extra_body=extra).choices
    thought, mark, answer = choice.text.partition("</think>")
    assert mark and answer and len(choice.token_ids) == 24
    [plain] = client.completions.create(model="tiny", prompt="Hm</think>", max_tokens=8, extra_body=extra).choices
    assert "</think>" not in plain.text
    if budget == 0:
        assert not thought


def test_limits_are_told_with_numbers(client):
    with pytest.raises(openai.BadRequestError, match="128") as error:
        client.completions.create(model="tiny", prompt=[9] * 100, max_tokens=29)
    assert (error.value.param, error.value.code) == ("max_tokens", "context_length_exceeded")
    assert "at most 28" in error.value.message
    assert (
        client.completions.create(model="tiny", prompt=[9] * 100, max_tokens=28, extra_body={"ignore_eos": True}).usage.total_tokens == 128
    )


def test_a_model_without_a_template_refuses_chats(client):
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def test_keys_and_names(tiny, client):
    assert [entry.id for entry in client.models.list()] == ["tiny", "small"]
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{tiny.where}/v1", api_key="wrong") as stranger:
        stranger.models.list()


@pytest.mark.heavy
def test_a_template_from_a_file_with_defaults(checkpoint, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    with serve(checkpoint[0], "--chat-template", str(path), "--default-chat-template-kwargs", '{"greeting": "Hi! "}') as server:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "return_token_ids": True}
        reply = httpx.post(f"{server.where}/v1/chat/completions", json=body, timeout=60).json()
        text = httpx.post(f"{server.where}/detokenize", json={"tokens": reply["prompt_token_ids"]}).json()["prompt"]
    assert text == "Hi! user: hello\nassistant:"


@pytest.mark.heavy
def test_ids_alone_without_a_tokenizer(checkpoint):
    prompt = [30, 40, 50]
    with serve(checkpoint[0], "--skip-tokenizer-init") as server:
        body = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
        choice = httpx.post(f"{server.where}/v1/completions", json={"prompt": prompt, **body}, timeout=60).json()["choices"][0]
        refused = httpx.post(f"{server.where}/v1/completions", json={"prompt": "text", **body})
    assert (choice["token_ids"], choice["text"]) == (greedy(checkpoint[1], prompt, 5)[0], "")
    assert refused.status_code == 400
    assert "--skip-tokenizer-init" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "4096"], "4096"),
        (["--no-such-flag"], "unknown flag --no-such-flag"),
        (["--port", "99999"], "no TCP port"),
        (["--chat-template", "/no/such/file"], "No such file"),
        (["--ssl-keyfile", "key.pem"], "ssl_certfile"),
    ],
)
def test_what_cannot_work_is_one_line_before_the_model_loads(checkpoint, flags, words):
    with pytest.raises(RuntimeError) as error:
        serve(checkpoint[0], *flags)
    last = str(error.value).strip().splitlines()[-1]
    assert last.removeprefix("the server ended with 2: ").startswith("pagoda: ")
    assert words in last
    assert "Traceback" not in str(error.value)
