"""Models with an encoder, through the engine: whatever stands beside a request, or was before it, it answers as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagoda import LLM, SamplingParams
from pagoda.hal.errors import ConfigError, PagodaError, RequestError
from pagoda.models.checkpoint import apply, inverse
from pagoda.models.load import describe, open_checkpoint, support_of
from safetensors.torch import load_file
from tiny_checkpoints import make

COUNT = 10
SIDES = {
    f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
WHISPER = {**SIDES, "d_model": 32, "num_mel_bins": 10, "max_source_positions": 24, "max_target_positions": 64, "decoder_start_token_id": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", {**SIDES, "d_model": 32, "scale_embedding": True, "decoder_start_token_id": 2}),
    "mbart": ("MBartForConditionalGeneration", {**SIDES, "d_model": 32, "decoder_start_token_id": 2}),
    "m2m_100": ("M2M100ForConditionalGeneration", {**SIDES, "d_model": 32, "decoder_start_token_id": 2, "activation_function": "relu"}),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
}
BRIDGED: dict[str, tuple[str, dict[str, Any]]] = {
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1},
    ),
    "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", {**SIDES, "d_model": 32, "decoder_start_token_id": 2}),
}
"""Those that no family knows: transformers' module runs, what its encoder gave lies on pages."""
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 48, "block_size": 16}
POOL = {"kv_cache_memory_bytes": 4 << 20}


def ids(start: int, count: int) -> list[int]:
    return [(37 * (start + i) + 11) % 120 + 5 for i in range(count)]


def inputs(case: str) -> list[Any]:
    """Of several lengths; the third is the first again."""
    if case != "whisper":
        return [ids(0, 20), ids(3, 5), ids(0, 20), ids(7, 33), ids(1, 1)]
    generator = np.random.default_rng(0)
    sounds = [generator.standard_normal((10, 48), np.float32) for _ in range(3)]
    return [sounds[0], sounds[1], sounds[0], sounds[2], sounds[1]]


def prompts(case: str) -> list[dict[str, Any]]:
    """Each input below a long and a short beginning of the answer."""
    texts = [ids(9, 25), ids(9, 25), ids(9, 3), ids(4, 1), ids(9, 25)]
    return [pair(case, given, text) for given, text in zip(inputs(case), texts, strict=True)]


def pair(case: str, given: Any, text: list[int]) -> dict[str, Any]:
    encoder = {"multi_modal_data": {"audio": given}} if case == "whisper" else {"prompt_token_ids": given}
    return {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": text}}


@torch.no_grad()
def wanted(model: torch.nn.Module, prompt: dict[str, Any]) -> list[int]:
    """Greedy, everything computed anew for each token."""
    encoder, text = prompt["encoder_prompt"], list(prompt["decoder_prompt"]["prompt_token_ids"])
    length = len(text)
    if "prompt_token_ids" in encoder:
        given = {"input_ids": torch.tensor([encoder["prompt_token_ids"]])}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    else:
        given = {"input_features": torch.from_numpy(encoder["multi_modal_data"]["audio"])[None]}
    for _ in range(COUNT):
        text.append(int(model(**given, decoder_input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[length:]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def stats(llm: LLM) -> Any:
    return llm._thread.run(llm._session.client.stats())


@pytest.mark.parametrize("case", [*CASES, *BRIDGED])
def test_requests_beside_each_other_in_chunks_answer_as_transformers_does(case: str, tmp_path: Path) -> None:
    name, values = {**CASES, **BRIDGED}[case]
    model = make(tmp_path, name, **values)
    assert support_of(open_checkpoint(tmp_path).config) == ("native" if case in CASES else "bridge")
    asked = prompts(case)
    want = [wanted(model, prompt) for prompt in asked]
    with LLM(str(tmp_path), **SETTINGS, **POOL, max_num_batched_tokens=8) as llm:
        assert tokens(llm.generate(asked, PARAMS, use_tqdm=False)) == want
        assert tokens([llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in asked]) == want
        assert stats(llm).pages_used == 0


@pytest.mark.parametrize("case", ["t5", "whisper", "switch"])
def test_preempted_requests_find_or_repeat_what_their_encoder_gave(case: str, tmp_path: Path) -> None:
    name, values = {**CASES, **BRIDGED}[case]
    model = make(tmp_path, name, **values)
    asked = prompts(case)
    want = [wanted(model, prompt) for prompt in asked]
    preemptions = 0
    for caching in (False, True):
        with LLM(str(tmp_path), **SETTINGS, num_gpu_blocks_override=9, enable_prefix_caching=caching) as llm:
            assert tokens(llm.generate(asked, PARAMS, use_tqdm=False)) == want
            assert stats(llm).pages_used == 0
            preemptions += stats(llm).preemptions
    assert preemptions > 0


@pytest.mark.parametrize("case", ["t5", "whisper"])
def test_beginnings_are_shared_only_below_the_same_input(case: str, tmp_path: Path) -> None:
    model = make(tmp_path, CASES[case][0], **CASES[case][1])
    one, other, text = inputs(case)[0], inputs(case)[3], ids(9, 25)
    asked = [pair(case, given, text) for given in (one, other, one, other)]
    want = [wanted(model, prompt) for prompt in asked]
    assert case == "whisper" or want[0] != want[1], "the inputs are to matter"
    with LLM(str(tmp_path), **SETTINGS, **POOL) as llm:
        outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in asked]
    assert tokens(outputs) == want
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 16, 16]


def test_samples_of_one_request_share_what_the_encoder_gave(tmp_path: Path) -> None:
    make(tmp_path, *CASES["bart"][:1], **CASES["bart"][1])
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=COUNT, ignore_eos=True)
    prompt = pair("bart", ids(0, 33), ids(9, 20))
    with LLM(str(tmp_path), **SETTINGS, num_gpu_blocks_override=11, enable_prefix_caching=False) as llm:
        together = llm.generate(prompt, params, use_tqdm=False)[0]
        assert stats(llm).preemptions == 0, "3 pages of the input, 2 pages each"
    with LLM(str(tmp_path), **SETTINGS, **POOL) as llm:
        again = llm.generate(prompt, params, use_tqdm=False)[0]
    answers = [answer.token_ids for answer in together.outputs]
    assert answers == [answer.token_ids for answer in again.outputs] and len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("case", CASES)
def test_turned_round_the_rules_give_the_names_and_numbers_on_disk(case: str, tmp_path: Path) -> None:
    make(tmp_path, CASES[case][0], **CASES[case][1])
    described = describe(open_checkpoint(tmp_path))
    disk = load_file(tmp_path / "model.safetensors")
    assert described.family is not None
    back = apply(inverse(described.family.rules(described.spec)), described.stored)
    assert set(disk) == set(back)
    assert all(torch.equal(tensor.read(), disk[name]) for name, tensor in back.items())


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "whisper", *CASES["whisper"][:1], **CASES["whisper"][1])
    make(tmp_path / "llama", "Llama")
    make(tmp_path / "t5", *CASES["t5"][:1], **CASES["t5"][1])
    with LLM(str(tmp_path / "whisper"), **SETTINGS, **POOL) as llm:
        for sound, words in ((np.zeros((10, 60), np.float32), "makes 30 tokens"), (np.zeros((7, 20), np.float32), r"shape \[7, 20\]")):
            with pytest.raises(PagodaError, match=words):
                llm.generate(pair("whisper", sound, [3]), PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match="given nothing"):
            llm.generate({"prompt_token_ids": [3]}, PARAMS, use_tqdm=False)
    image = {"prompt_token_ids": [3, 4], "multi_modal_data": {"image": np.zeros((3, 8, 8), np.float32)}}
    with LLM(str(tmp_path / "t5"), **SETTINGS, **POOL) as llm, pytest.raises(RequestError, match="leave out multi_modal_data"):
        llm.generate(image, PARAMS, use_tqdm=False)
    with LLM(str(tmp_path / "llama"), **SETTINGS, **POOL) as llm, pytest.raises(RequestError):
        llm.generate(pair("t5", ids(0, 4), [3]), PARAMS, use_tqdm=False)
    with pytest.raises(ConfigError, match="no room for adapters"):
        LLM(str(tmp_path / "whisper"), **SETTINGS, enable_lora=True)
