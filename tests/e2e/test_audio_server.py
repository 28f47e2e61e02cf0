"""A server with a tiny random Whisper: OpenAI's client gets what transformers' own spectra and model give, in every format."""

import io
import json
import subprocess
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
from frontend_samples import byte_level
from openai_document import checker
from tiny_checkpoints import make
from toy_process import SERVE, ServerProcess
from transformers import WhisperFeatureExtractor

GUIDE = Path(__file__).parents[2] / "docs/guide/audio.md"
RATE, FRAMES = 16000, 100  # a window of one second
SPECIAL = ("startoftranscript", "en", "de", "transcribe", "translate", "startofprev", "nospeech", "notimestamps")
SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(51)])
    values = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES.items()}
    model = make(
        folder, "WhisperForConditionalGeneration", **values, d_model=32, num_mel_bins=80, max_source_positions=FRAMES // 2,
        max_target_positions=40, vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1, pad_token_id=2,
        decoder_start_token_id=tokenizer.token_to_id("<|startoftranscript|>"),
    )  # fmt: skip
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[1] = 0.0  # nothing ends at once
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def server(checkpoint):
    command = [*SERVE, str(checkpoint[0]), "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    with ServerProcess([*command, "--kv-cache-memory-bytes", "8M", "--served-model-name", "ear"], patience=180) as made:
        yield made


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.where}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def sound(seconds, seed=0):
    """Tones that come and go, with noise."""
    at = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).standard_normal(len(at)) * 0.01
    return (0.3 * np.sin(2 * np.pi * (220 + 90 * seed) * at) * (np.sin(7 * at) > 0) + noise).astype(np.float32)


def file(samples, kind="wav", rate=RATE):
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind.upper())
    return f"sound.{kind}", out.getvalue()


@torch.no_grad()
def wanted(checkpoint, samples, language="en", task="transcribe", timed=False, before=(), kept=None):
    """transformers' greedy ids after the prompt, everything computed anew."""
    _, model, tokenizer = checkpoint
    made = WhisperFeatureExtractor(feature_size=80, chunk_length=1)(samples, sampling_rate=RATE, return_tensors="pt")
    names = ["startoftranscript", language, task, *(() if timed else ("notimestamps",))]
    ids = [*before, *(tokenizer.token_to_id(f"<|{name}|>") for name in names)]
    length = len(ids)
    while len(ids) < 40 and (kept is None or len(ids) - length < kept):
        logits = model(input_features=made.input_features, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == 1:
            break
        ids.append(token)
    return ids[length:]


def said(checkpoint, ids):
    tokenizer = checkpoint[2]
    first = tokenizer.token_to_id("<|0.00|>")
    parts, words = [], []
    for token in [*ids, first]:
        if token < first:
            words.append(token)
        elif words:
            parts.append(tokenizer.decode(words))
            words = []
    return "".join(parts).strip()


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_the_text_is_that_of_transformers(client, checkpoint, kind):
    samples = sound(0.8).round(4)
    name, content = file(samples, kind)
    heard = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    reply = client.audio.transcriptions.create(model="ear", file=(name, content), language="en")
    assert reply.text == said(checkpoint, wanted(checkpoint, heard))
    assert reply.usage.seconds == 1


def test_language_task_and_prompt_are_what_the_decoder_begins_with(client, server, checkpoint):
    name, content = file(sound(0.7, 1))
    heard = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    tokenizer = checkpoint[2]
    german = client.audio.transcriptions.create(model="ear", file=(name, content), language="de", prompt="Once upon")
    before = [tokenizer.token_to_id("<|startofprev|>"), *tokenizer.encode(" Once upon", add_special_tokens=False).ids]
    assert german.text == said(checkpoint, wanted(checkpoint, heard, "de", before=before))
    where = f"{server.where}/v1/audio/translations"  # the client's own call for it is deprecated
    turned = httpx.post(where, files={"file": (name, content)}, data={"model": "ear", "language": "de"}, timeout=60).json()
    assert turned["text"] == said(checkpoint, wanted(checkpoint, heard, "de", "translate"))
    with pytest.raises(openai.BadRequestError, match="language='xx' is not known"):
        client.audio.transcriptions.create(model="ear", file=(name, content), language="xx")


def test_the_language_is_heard_where_nobody_says_it(client, checkpoint):
    name, content = file(sound(0.7, 2))
    reply = client.audio.transcriptions.create(model="ear", file=(name, content), response_format="verbose_json")
    assert reply.language in ("en", "de")
    heard = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    assert reply.text == said(checkpoint, wanted(checkpoint, heard, reply.language, timed=True))


def test_long_sounds_are_cut_and_times_go_on(client, checkpoint):
    content = file(sound(2.6, 3))[1]
    reply = client.audio.transcriptions.create(
        model="ear", file=("a.wav", content), language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert reply.duration == pytest.approx(2.6) and reply.task == "transcribe"
    begins = sorted({segment.seek for segment in reply.segments})
    assert len(begins) >= 3 and begins[0] == 0
    assert [segment.id for segment in reply.segments] == list(range(len(reply.segments)))
    assert all(segment.start >= segment.seek / 100 - 0.01 for segment in reply.segments)
    srt, vtt, text = (
        client.audio.transcriptions.create(model="ear", file=("a.wav", content), language="en", response_format=kind)
        for kind in ("srt", "vtt", "text")
    )
    assert srt.startswith("1\n00:00:0") and vtt.startswith("WEBVTT\n\n00:00:0") and srt.count("-->") == len(reply.segments)
    assert text.endswith("\n") and text.strip()


def test_a_stream_says_the_same(client, checkpoint):
    name, content = file(sound(0.8))
    heard = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    events = list(client.audio.transcriptions.create(model="ear", file=(name, content), language="en", stream=True))
    assert events[-1].type == "transcript.text.done"
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text
    tokens = wanted(checkpoint, heard)
    assert events[-1].text == checkpoint[2].decode(tokens).strip()


def test_other_rates_and_channels_become_one_at_16000(client):
    samples = np.stack([sound(0.5)] * 2, 1)
    reply = client.audio.transcriptions.create(model="ear", file=file(samples, rate=RATE), language="en")
    again = client.audio.transcriptions.create(model="ear", file=file(samples[:, 0], rate=RATE), language="en")
    assert reply.text == again.text
    assert client.audio.transcriptions.create(model="ear", file=file(sound(0.5), rate=44100), language="en").usage.seconds == 1


@pytest.mark.parametrize(
    ("fields", "content", "words"),
    [
        ({}, b"no sound at all", "cannot be decoded"),
        ({}, b"", "is empty"),
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, None, "times of words"),
        ({"timestamp_granularities[]": "segment"}, None, "needs response_format=verbose_json"),
        ({"response_format": "xml"}, None, "response_format"),
        ({"temperature": "hot"}, None, "is no number"),
    ],
)
def test_what_cannot_be_heard_is_refused(server, fields, content, words):
    given = file(sound(0.2))[1] if content is None else content
    reply = httpx.post(f"{server.where}/v1/audio/transcriptions", files={"file": ("a.wav", given)}, data={"model": "ear", **fields})
    assert reply.status_code == 400 and words in json.loads(reply.text)["error"]["message"]


def test_a_form_without_a_file_and_a_body_that_is_no_form(server):
    where = f"{server.where}/v1/audio/transcriptions"
    assert "file is missing" in httpx.post(where, data={"model": "ear"}, files={"other": b"x"}).json()["error"]["message"]
    assert httpx.post(where, json={"model": "ear"}).status_code == 415


def test_the_guides_lines(server, tmp_path):
    soundfile.write(tmp_path / "recording.wav", sound(0.5), RATE)
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("curl ")]
    assert len(lines) >= 3
    for line in lines:
        command = line.replace("http://127.0.0.1:8000", server.where)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "text" in json.loads(done.stdout), (line, done.stdout, done.stderr)


def test_every_answer_and_event_is_of_openais_own_document(server, require):
    check = checker()
    require("OpenAI's API document", check is not None)
    with httpx.Client(base_url=f"{server.where}/v1/audio", timeout=120) as http:

        def ask(what, **fields):
            return http.post(f"/{what}", files={"file": file(sound(1.5))}, data={"model": "ear", **fields})

        for what, name in (("transcriptions", "Transcription"), ("translations", "Translation")):
            check(f"Create{name}ResponseJson", ask(what).json())
            check(f"Create{name}ResponseVerboseJson", ask(what, response_format="verbose_json").json())
        lines = [line.removeprefix("data: ") for line in ask("transcriptions", stream="true").text.split("\n\n") if line]
        assert lines.pop() == "[DONE]" and len(lines) > 1
        for line in lines:
            check("CreateTranscriptionResponseStreamEvent", json.loads(line))
        wrong = ask("transcriptions", response_format="x")
        assert wrong.status_code == 400
        check("ErrorResponse", wrong.json())


@torch.no_grad()
def test_how_likely_nobody_speaks_is_what_the_model_says_at_its_start(client, checkpoint):
    _, model, tokenizer = checkpoint
    content = file(sound(0.9, 4))[1]
    reply = client.audio.transcriptions.create(model="ear", file=("a.wav", content), language="en", response_format="verbose_json")
    heard = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    made = WhisperFeatureExtractor(feature_size=80, chunk_length=1)(heard, sampling_rate=RATE, return_tensors="pt")
    start = torch.tensor([[tokenizer.token_to_id("<|startoftranscript|>")]])
    chances = torch.softmax(model(input_features=made.input_features, decoder_input_ids=start, use_cache=False).logits[0, -1], -1)
    want = float(chances[tokenizer.token_to_id("<|nospeech|>")])
    assert reply.segments and [segment.no_speech_prob for segment in reply.segments] == pytest.approx(
        [want] * len(reply.segments), rel=1e-3
    )
