"""Prompts with images through the engine: transformers' answers, however steps cut them, and pages shared by equal images only."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.errors import PagodaError, RequestError
from pagoda.models.bridge.encoder import BridgedEncoder
from pagoda.models.media import EncoderInput
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.sdk import LLM, AsyncLLM
from tiny_vision import IMAGE, KINDS, add_processor, greedy, image_and_video, inputs, make_vision, picture, two_images

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True, **options}
    return LLM(str(folder), device="cpu", **settings)


def prompt(ids: list[int], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"processed": tensors}}


def answers(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("budget", [2048, 7])
@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_transformers_in_any_steps(name: str, budget: int, tmp_path: Path) -> None:
    model = make_vision(tmp_path, name)
    asked = [inputs(name, seed) for seed in (1, 2)]
    text: tuple[list[int], dict[str, torch.Tensor]] = ([50, 51, 52, 53, 54], {})
    want = [greedy(model, ids, tensors, 12) for ids, tensors in (*asked, text)]
    assert want[0] != want[1]
    if name == "Gemma3":
        budget = max(budget, 17)  # an image is computed as a whole
    with engine(tmp_path, max_num_batched_tokens=budget) as llm:
        given = [*(prompt(*one) for one in asked), {"prompt_token_ids": text[0]}]
        assert answers(llm, given) == want
        assert answers(llm, given[:1]) == want[:1]


@pytest.mark.parametrize("name", KINDS)
def test_images_of_a_prompt_are_items_of_their_own(name: str, tmp_path: Path) -> None:
    model = make_vision(tmp_path, name)
    ids, tensors = two_images(name)
    with engine(tmp_path, max_num_batched_tokens=20) as llm:
        assert llm.processor.media is not None
        _, items, _ = llm.processor.media(ids, {"processed": tensors})
        assert [item.length for item in items] == [16, 16 if name in ("Llava", "Gemma3") else 8]
        assert answers(llm, [prompt(ids, tensors)]) == [greedy(model, ids, tensors, 12)]


@pytest.mark.parametrize("budget", [2048, 20])
def test_a_video_beside_an_image_is_answered_as_transformers_answers_it(budget: int, tmp_path: Path) -> None:
    model = make_vision(tmp_path, "Qwen2VL")
    ids, tensors = image_and_video()
    with engine(tmp_path, max_model_len=96, max_num_batched_tokens=budget) as llm:
        assert llm.processor.media is not None and llm.processor.facts.modalities == ("image", "video")
        _, items, _ = llm.processor.media(ids, {"processed": tensors})
        assert [(item.modality, item.length) for item in items] == [("image", 16), ("video", 32)]
        assert set(items[1].tensors) == {"pixel_values_videos", "video_grid_thw", "mm_token_type_ids"}
        other = {**tensors, "pixel_values_videos": -tensors["pixel_values_videos"]}
        want = [greedy(model, ids, one, 12) for one in (tensors, other)]
        assert want[0] != want[1]
        assert answers(llm, [prompt(ids, tensors), prompt(ids, other)]) == want
        with pytest.raises(RequestError, match="takes text and images, videos; leave out the sounds"):
            answers(llm, [{"prompt_token_ids": ids, "multi_modal_data": {"audio": [0.0]}}])


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL", "Qwen3VL"])
def test_equal_images_share_pages_and_others_never_do(name: str, tmp_path: Path) -> None:
    model = make_vision(tmp_path, name)
    (ids, first), (_, second) = inputs(name, 1), inputs(name, 2)
    with engine(tmp_path, block_size=16) as llm:
        cached = []
        for tensors in (first, second, first, second):
            (output,) = llm.generate([prompt(ids, tensors)], GREEDY, use_tqdm=False)
            cached.append(output.num_cached_tokens)
            assert list(output.outputs[0].token_ids) == greedy(model, ids, tensors, 12)
    assert cached == [0, 0, 16, 16]  # the second time from within the image on


def test_a_model_without_eyes_refuses_and_a_prompt_without_places_is_refused(tmp_path: Path) -> None:
    make_vision(tmp_path, "Llava")
    ids, tensors = inputs("Llava", 1)
    with engine(tmp_path) as llm, pytest.raises(RequestError, match="stands for the image"):
        answers(llm, [prompt([token for token in ids if token != IMAGE], tensors)])


def test_pictures_go_through_the_models_own_processor(tmp_path: Path) -> None:
    model = make_vision(tmp_path, "Llava")
    add_processor(tmp_path)
    with engine(tmp_path, skip_tokenizer_init=False) as llm:
        assert llm.processor.media is not None
        ids, items, _ = llm.processor.media("t7 <image> t40", {"image": picture(1)})
        assert ids == [7, *[IMAGE] * 16, 40] and [(item.offset, item.length) for item in items] == [(1, 16)]
        pixels = torch.frombuffer(bytearray(items[0].tensors["pixel_values"].data), dtype=torch.float32).view(1, 3, 32, 32)
        want = greedy(model, ids, {"pixel_values": pixels}, 12)
        assert answers(llm, [{"prompt": "t7 <image> t40", "multi_modal_data": {"image": picture(1)}}]) == [want]


def test_a_conversation_brings_images_as_data_uris_or_objects(tmp_path: Path) -> None:
    make_vision(tmp_path, "Llava")
    add_processor(tmp_path)
    stream = io.BytesIO()
    picture(1).save(stream, "png")
    uri = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    with engine(tmp_path, skip_tokenizer_init=False) as llm:
        want = answers(llm, [{"prompt": "<image> t40 ", "multi_modal_data": {"image": picture(1)}}])
        for part in ({"type": "image_url", "image_url": {"url": uri}}, {"type": "image_pil", "image_pil": picture(1)}):
            (output,) = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "t40"}]}], GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids)] == want
        for address, why in (("https://example.org/a.png", "data URI here"), ("data:image/png;base64,AAAA", "cannot be decoded")):
            with pytest.raises(RequestError, match=why):
                llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}], GREEDY)


POISON = 1000.0


def fail_on_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder raises for an image that begins with `POISON`."""
    real = BridgedEncoder._one

    def one(self: BridgedEncoder, item: EncoderInput) -> torch.Tensor:
        if float(item.tensors["pixel_values"].flatten()[0]) == POISON:
            raise RuntimeError("too bright")
        return real(self, item)

    monkeypatch.setattr(BridgedEncoder, "_one", one)


async def first_or_error(llm: AsyncLLM, name: str, asked: dict[str, Any]) -> list[int] | str:
    try:
        async for output in llm.generate(asked, GREEDY, name):
            last = list(output.outputs[0].token_ids)
    except PagodaError as error:
        return str(error)
    return last


@pytest.mark.parametrize("budget", [2048, 20])
def test_an_image_that_the_encoder_fails_on_ends_its_request_alone(budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_vision(tmp_path, "Llava")
    fail_on_poison(monkeypatch)
    (ids, good), (_, bad) = inputs("Llava", 1), inputs("Llava", 2)
    bad["pixel_values"].flatten()[0] = POISON
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}

    async def run() -> None:
        async with AsyncLLM(str(tmp_path), device="cpu", max_num_batched_tokens=budget, **settings) as llm:
            asked = {
                "good": prompt(ids, good),
                "bad": prompt(ids, bad),
                "again": prompt(ids, bad),
                "text": {"prompt_token_ids": [50, 51, 52]},
            }
            for _ in range(2):
                got = await asyncio.gather(*(first_or_error(llm, name, one) for name, one in asked.items()))
                assert got[0] == greedy(model, ids, good, 12) and got[3] == greedy(model, [50, 51, 52], {}, 12)
                assert all("RuntimeError: too bright" in str(each) for each in got[1:3])
            assert (await llm.session.client.call("stats")).pages_used == 0

    asyncio.run(run())


def test_a_request_with_images_may_be_aborted_at_any_time(tmp_path: Path) -> None:
    model = make_vision(tmp_path, "Llava")
    (ids, first), (_, second) = inputs("Llava", 1), inputs("Llava", 2)
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}

    async def run() -> None:
        async with AsyncLLM(str(tmp_path), device="cpu", max_num_batched_tokens=7, **settings) as llm:
            for wait in (0.0, 0.005, 0.02):
                task = asyncio.ensure_future(first_or_error(llm, "gone", prompt(ids, first)))
                other = asyncio.ensure_future(first_or_error(llm, "stays", prompt(ids, second)))
                await asyncio.sleep(wait)
                await llm.abort("gone")
                task.cancel()
                assert await other == greedy(model, ids, second, 12)
            assert await first_or_error(llm, "again", prompt(ids, first)) == greedy(model, ids, first, 12)
            assert (await llm.session.client.call("stats")).pages_used == 0

    asyncio.run(run())
