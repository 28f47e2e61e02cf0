"""Decoders that hear: transformers' answers to sounds, however they come, and kinds of media that a model does not take."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.chat_media import take_media
from pagoda.serving.sdk import LLM
from tiny_hearing import AUDIO, RATE, greedy, make_hearing, tone, wav

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("budget", [2048, 7])
def test_sounds_are_answered_as_transformers_answers_them(budget: int, tmp_path: Path) -> None:
    model = make_hearing(tmp_path)
    want = [greedy(model, tmp_path, "t7 <sound> t40", seed, 10) for seed in (1, 2)]
    assert want[0] != want[1]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=budget, **settings) as llm:
        assert llm.processor.facts.modalities == ("audio",)
        ids, items, _ = llm.processor.media("t7 <sound> t40", {"audio": (tone(1), RATE)})
        assert ids.count(AUDIO) == items[0].length > 4 and items[0].modality == "audio"
        forms: list[Any] = [(tone(1), RATE), wav(1), tone(1), (np.stack([tone(1)] * 2, 1), RATE)]
        asked = [{"prompt": "t7 <sound> t40", "multi_modal_data": {"audio": sound}} for sound in (*forms, tone(2))]
        got = [list(output.outputs[0].token_ids) for output in llm.generate(asked, GREEDY, use_tqdm=False)]
        assert got == [want[0]] * 4 + [want[1]]
        data = base64.b64encode(wav(2)).decode()
        for part in (
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        ):
            (output,) = llm.chat(
                [{"role": "user", "content": [{"type": "text", "text": "t7"}, part, {"type": "text", "text": "t40"}]}], GREEDY
            )
            assert list(output.outputs[0].token_ids) == want[1]
        for part, why in (
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "takes text and sounds; leave out the images"),
            ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}, "leave out the videos"),
            ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "cannot be decoded"),
            ({"type": "input_audio", "input_audio": {"format": "wav"}}, "must be like"),
        ):
            with pytest.raises(RequestError, match=why):
                llm.chat([{"role": "user", "content": [part]}], GREEDY)


def test_media_are_taken_out_in_their_order() -> None:
    frames = ["a", "b"]
    content = [
        {"type": "video", "video": frames},
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": "p"}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}},
        {"type": "video_url", "video_url": {"url": "q"}},
    ]
    messages, media = take_media([{"role": "user", "content": content}])
    assert media == {"video": [frames, "q"], "image": ["p"], "audio": ["data:audio/mp3;base64,QUJD"]}
    assert [part["type"] for part in messages[0]["content"]] == ["video", "text", "image", "audio", "video"]
