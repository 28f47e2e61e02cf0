"""From prompts and settings to engine requests, and from deltas to the SDK's outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontend_samples import byte_level
from pagoda.hal.errors import CheckpointError, ConfigError, PagodaError, RequestError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.messages import EngineFacts, FinishReason, RequestDelta, SequenceDelta, TokenLogprobs
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.chat_template import ChatTemplate
from pagoda.serving.frontend.generation_config import sampling_defaults
from pagoda.serving.frontend.load import load_text, text_of, tokenizer_path
from pagoda.serving.frontend.outputs import OutputBuilder
from pagoda.serving.frontend.processor import Processor
from pagoda.serving.frontend.text import TextFrontend
from pagoda.serving.frontend.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"}, (1,))
TEMPLATE = ChatTemplate({"default": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"})
FACTS = EngineFacts(max_model_len=64, num_pages=9, tokens_per_page=16, vocab_size=TOKENIZER.vocab_size, device="here")
PROCESSOR = Processor(TextFrontend(TOKENIZER, TEMPLATE), FACTS, {"temperature": 0.6, "top_k": 20})


def test_prompts_of_every_kind() -> None:
    ids = TOKENIZER.encode("The fox")
    assert PROCESSOR.encode("The fox")[:2] == (ids, "The fox")
    assert PROCESSOR.encode({"prompt": "The fox"})[:2] == (ids, "The fox")
    assert PROCESSOR.encode(ids) == PROCESSOR.encode({"prompt_token_ids": tuple(ids)}) and PROCESSOR.encode(ids)[:2] == (ids, None)
    chat = PROCESSOR.encode_chat([{"role": "user", "content": "hi"}])
    assert chat.text == "<|im_start|>hi<|im_end|>" and chat.ids[0] == 3 and chat.ids[-1] == 4
    for bad in ({"text": "x"}, ["x"], [1, "x"]):
        with pytest.raises(RequestError, match="prompt"):
            PROCESSOR.encode(bad)  # type: ignore[arg-type]


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        Processor(TextFrontend(TOKENIZER), FACTS).encode_chat([{"role": "user", "content": "hi"}])


def test_settings_of_the_checkpoint_yield_to_the_callers() -> None:
    params = PROCESSOR.default_params(temperature=0)
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 20, None)


def test_a_length_of_the_checkpoint_gives_way_to_the_prompt() -> None:
    model = Processor(TextFrontend(TOKENIZER), FACTS, {"max_tokens": 32})
    assert [model.params_for(prompt, {}).max_tokens for prompt in (10, 60)] == [32, 4]
    assert model.request([5] * 60, model.params_for(60, {})).params.max_tokens == 4
    with pytest.raises(RequestError, match="ask for at most 4"):
        model.request([5] * 60, model.params_for(60, {"max_tokens": 32}))
    with pytest.raises(RequestError, match="64 tokens, but prompt and answer"):
        model.request([5] * 64, model.params_for(64, {}))


def test_the_answer_fills_what_the_prompt_leaves() -> None:
    request = PROCESSOR.request([5] * 60, SamplingParams(max_tokens=None))
    assert (request.params.max_tokens, request.eos_ids, len(request.prompt)) == (4, (1,), 60)
    assert request.request_id != PROCESSOR.request([5], SamplingParams()).request_id


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([5] * 64, {}, "64 tokens, but prompt and answer together may have 64"),
        ([5] * 50, {"max_tokens": 15}, "50 tokens and max_tokens=15, but together they may have 64; ask for at most 14"),
        ([5, 9999], {}, "token id 9999; the model's ids go from 0 to"),
        ([5], {"stop_token_ids": [-1]}, "stop_token_ids holds the token id -1"),
        ([5], {"logit_bias": {70000: 1.0}}, "logit_bias holds the token id 70000"),
        ([5], {"allowed_token_ids": [70000]}, "allowed_token_ids holds the token id 70000"),
    ],
)
def test_what_cannot_run_is_refused_with_numbers(prompt: list[int], params: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PROCESSOR.request(prompt, SamplingParams(**params))  # type: ignore[arg-type]


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop=("x",), detokenize=False)


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    request = PROCESSOR.request([5], SamplingParams(bad_words=("fox",)))
    assert {TOKENIZER.decode(ids) for ids in request.params.bad_words_token_ids} == {"fox", " fox"}


def test_outputs_grow_and_end_with_their_metrics() -> None:
    request = PROCESSOR.request(TOKENIZER.encode("The"), SamplingParams(n=2, logprobs=1, max_tokens=9, stop=("lazy",)))
    builder = OutputBuilder(request, "The", TOKENIZER)
    fox, dog = TOKENIZER.encode(" fox"), TOKENIZER.encode(" lazy dog")
    entry = TokenLogprobs(fox[0], -0.5, 2, (7,), (-0.1,))
    builder.push(RequestDelta(request.request_id, (SequenceDelta(1, tuple(fox), tuple([entry] * len(fox))),), cached_tokens=2))
    assert builder.output.metrics.time_to_first_token is not None and not builder.output.finished
    last = [SequenceDelta(0, (1,), finish_reason=FinishReason.STOP), SequenceDelta(1, tuple(dog))]
    builder.push(RequestDelta(request.request_id, tuple(last)))
    output = builder.output
    assert [(answer.text, answer.finish_reason, answer.stop_reason) for answer in output.outputs] == [
        ("", "stop", None),
        (" fox ", "stop", "lazy"),
    ]
    assert output.outputs[0].token_ids == [1] and output.outputs[1].token_ids[: len(fox)] == fox
    assert output.outputs[1].cumulative_logprob == pytest.approx(-0.5 * len(fox))
    assert [(c.rank, c.logprob) for c in output.outputs[1].logprobs[0].values()] == [(2, -0.5), (1, -0.1)]  # type: ignore[index]
    assert (output.finished, output.num_cached_tokens, output.prompt) == (True, 2, "The")


def test_prompt_logprobs_begin_with_none() -> None:
    request = PROCESSOR.request([5, 6], SamplingParams(prompt_logprobs=0))
    builder = OutputBuilder(request, None, TOKENIZER)
    builder.push(RequestDelta(request.request_id, (), prompt_logprobs=(TokenLogprobs(6, -1.0, 1, (), ()),)))
    assert builder.output.prompt_logprobs == [None, {6: (-1.0, 1, TOKENIZER.decode([6]))}]


def test_a_failed_request_raises_its_reason() -> None:
    builder = OutputBuilder(PROCESSOR.request([5], SamplingParams()), None, TOKENIZER)
    delta = RequestDelta("r1", (SequenceDelta(0, (), finish_reason=FinishReason.ERROR),), True, error="logits held NaN")
    with pytest.raises(PagodaError, match="r1 failed: logits held NaN"):
        builder.push(delta)


def test_sampling_defaults_of_a_folder(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.7, "top_p": null, "max_new_tokens": 5, "do_sample": true}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.7, "max_tokens": 5}
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        sampling_defaults(tmp_path)


def test_the_tokenizer_is_the_models_or_another_ones(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_path(EngineConfig(tokenizer=str(tmp_path))) == tmp_path
    assert tokenizer_path(EngineConfig()).suffix == ".gguf"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="holds neither"):
        tokenizer_path(EngineConfig(tokenizer=str(tmp_path)))


def test_without_a_tokenizer_there_are_only_ids() -> None:
    text = text_of(EngineConfig(model="./nowhere", skip_tokenizer_init=True))
    processor = Processor(text, FACTS)
    with pytest.raises(RequestError, match="send token ids"):
        processor.encode("hello")
    with pytest.raises(RequestError, match="no chat template"):
        processor.encode_chat([{"role": "user", "content": "hi"}])
    builder = OutputBuilder(processor.request(processor.encode([5, 6]).ids, SamplingParams(logprobs=0)), None, text.tokenizer)
    last = SequenceDelta(0, (7, 8), (TokenLogprobs(7, -1.0, 1, (), ()),) * 2, FinishReason.LENGTH)
    builder.push(RequestDelta("r", (last,), finished=True))
    answer = builder.output.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [7, 8], "length")


def test_a_template_from_a_file_or_in_full(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_text(tmp_path).template is None
    (tmp_path / "mine.jinja").write_text("{{ messages|length }}")
    for given in (str(tmp_path / "mine.jinja"), "{{ messages|length }}"):
        template = load_text(tmp_path, chat_template=given).template
        assert template is not None and template.render([{"role": "user", "content": "x"}]) == "1"
    with pytest.raises(ConfigError, match="--chat-template absent: No such file"):
        load_text(tmp_path, chat_template="absent")
    with pytest.raises(ConfigError, match=r"--chat-template cannot be compiled: chat template, line 2"):
        load_text(tmp_path, chat_template="a\n{% for")


def test_how_answers_are_read_is_chosen_with_the_template(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    source = "{{ tools }}<tool_call><think>"
    found = load_text(tmp_path, chat_template=source).answers
    assert found.tools and found.tools.names[0] == "hermes"
    assert found.reasoning and found.reasoning.names[0] == "deepseek_r1"
    told = load_text(tmp_path, chat_template=source, tool_call_parser="mistral", reasoning_parser="none").answers
    assert told.tools and told.tools.names == ("mistral",) and told.reasoning is None
    with pytest.raises(ConfigError, match="--reasoning-parser 'qwen9' is not here"):
        load_text(tmp_path, chat_template=source, reasoning_parser="qwen9")
