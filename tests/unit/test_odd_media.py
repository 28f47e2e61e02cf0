"""Pictures and sounds of every odd size and content: each an answer or an error that is the client's, and no harm to who runs beside it."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from pagoda.hal.errors import PagodaError, RequestError
from pagoda.models.bridge.encoder import BridgedEncoder
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend import sound
from pagoda.serving.frontend.sound import decoded
from pagoda.serving.sdk import LLM
from PIL import Image
from tiny_hearing import make_hearing
from tiny_vision import add_processor, inputs, make_vision

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
VICTIM = {"prompt_token_ids": [50, 51, 52, 53]}


def engine(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 96, "kv_cache_memory_bytes": 8 << 20, **options}
    return LLM(str(folder), device="cpu", **settings)


def outcome(llm: LLM, asked: Any) -> str:
    """ "answer", or why not; anything but a refusal is an error of the test."""
    try:
        (output,) = llm.generate([asked], GREEDY, use_tqdm=False)
    except RequestError as error:
        return str(error)
    return "answer" if len(output.outputs[0].token_ids) == 6 else "short"


SIZES = [(1, 1), (1, 2), (3, 1), (1, 4000), (4000, 1), (7, 5), (31, 33), (257, 3), (640, 480)]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_pictures_of_any_size_are_answered_or_refused(mode: str, tmp_path: Path) -> None:
    make_vision(tmp_path, "Llava")
    add_processor(tmp_path)
    with engine(tmp_path) as llm:
        want = llm.generate([VICTIM], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for size in SIZES:
            stream = io.BytesIO()
            Image.new(mode, size, None).save(stream, "png")
            told = outcome(llm, {"prompt": "<image> t40", "multi_modal_data": {"image": stream.getvalue()}})
            assert told == "answer" or "processor refuses" in told, (size, told)
        assert llm.generate([VICTIM], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want


def wave(samples: Any, rate: int = 16_000, form: str = "WAV", kind: str = "FLOAT") -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, np.asarray(samples, np.float32), rate, format=form, subtype=kind)
    return stream.getvalue()


def header(rate: int, size: int) -> bytes:
    """Of a wav of 16 bits that says it has so many bytes, and brings 64."""
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + bytes(64)
    )


SOUNDS = {
    "nothing": (b"", "empty"),
    "no samples": (wave([]), "no samples"),
    "one sample": (wave([0.5]), ""),
    "few samples": (wave(np.zeros(159)), ""),
    "silence": (wave(np.zeros(16_000)), ""),
    "not numbers": (wave(np.full(16_000, np.nan)), "not finite"),
    "one infinite": (wave([*np.zeros(9000), np.inf]), "not finite"),
    "as loud as can be": (wave(np.full(16_000, 3e38)), "not finite"),
    "at one sample a second": (wave(np.zeros(100_000), 1), "at most 4 hours"),
    "a header that promises": (header(16_000, 1 << 31), ""),
    "eight channels": (wave(np.random.default_rng(0).normal(0, 0.1, (4000, 8))), ""),
    "noise": (bytes(range(256)) * 9, "cannot be decoded"),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_files_of_sounds_are_read_or_refused(name: str) -> None:
    content, why = SOUNDS[name]
    if not why or name == "as loud as can be":
        assert np.isfinite(decoded(content)).all()
    else:
        with pytest.raises(RequestError, match=why):
            decoded(content)


def test_silence_that_lasts_for_days_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "LONGEST", 2)
    monkeypatch.setattr(soundfile.SoundFile, "blocks", lambda *given, **options: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match="cut it"):
        decoded(wave(np.zeros(40_000), form="FLAC", kind="PCM_16"))


def test_a_model_hears_any_sound_or_says_why_not(tmp_path: Path) -> None:
    make_hearing(tmp_path)
    with engine(tmp_path, max_model_len=128) as llm:
        want = llm.generate([VICTIM], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        told = {
            name: outcome(llm, {"prompt": "<sound> t40", "multi_modal_data": {"audio": content}}) for name, (content, _) in SOUNDS.items()
        }
        for name, (_, why) in SOUNDS.items():
            small = "processor refuses" in told[name] or "no token of the prompt stands for the audio" in told[name]
            assert why in told[name] if why else told[name] == "answer" or small, (name, told[name])
        assert told["silence"] == "answer"
        assert llm.generate([VICTIM], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want


FAILURES: dict[str, tuple[Exception, type[PagodaError]]] = {
    "value": (ValueError("height must be a multiple of 14"), RequestError),
    "index": (IndexError("index out of range in self"), RequestError),
    "shape": (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), RequestError),
    "kernel": (RuntimeError("Calculated padded input size per channel: (1). Kernel size: (3)"), RequestError),
    "memory": (torch.OutOfMemoryError("the device has no memory of that size left"), PagodaError),
    "device": (torch.AcceleratorError("an illegal memory access"), PagodaError),
    "unknown": (RuntimeError("launch failed"), PagodaError),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_encoder_that_fails_at_a_size_refuses_and_a_device_that_fails_does_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, kind = FAILURES[name]
    make_vision(tmp_path, "Llava")
    real = BridgedEncoder._one

    def one(self: BridgedEncoder, item: Any) -> torch.Tensor:
        if float(item.tensors["pixel_values"].flatten()[0]) == 1000.0:
            raise error
        return real(self, item)

    monkeypatch.setattr(BridgedEncoder, "_one", one)
    (ids, good), (_, bad) = inputs("Llava", 1), inputs("Llava", 2)
    bad["pixel_values"].flatten()[0] = 1000.0
    with engine(tmp_path, skip_tokenizer_init=True) as llm:
        with pytest.raises(PagodaError, match="encoder failed on an image") as told:
            llm.generate([{"prompt_token_ids": ids, "multi_modal_data": {"processed": bad}}], GREEDY, use_tqdm=False)
        assert type(told.value) is kind
        assert llm.generate([{"prompt_token_ids": ids, "multi_modal_data": {"processed": good}}], GREEDY, use_tqdm=False)


def test_numbers_of_a_picture_that_make_nan_are_the_pictures_fault(tmp_path: Path) -> None:
    make_vision(tmp_path, "Llava")
    ids, bad = inputs("Llava", 2)
    bad["pixel_values"].flatten()[0] = float("nan")
    with engine(tmp_path, skip_tokenizer_init=True) as llm:
        with pytest.raises(RequestError, match="NaN of the image"):
            llm.generate([{"prompt_token_ids": ids, "multi_modal_data": {"processed": bad}}], GREEDY, use_tqdm=False)
        assert llm.generate([VICTIM], GREEDY, use_tqdm=False)
