"""A tiny random decoder that hears, of transformers' own class, its processor, and sounds."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers
from tiny_checkpoints import SMALL
from tokenizers import Tokenizer, models, pre_tokenizers

AUDIO = 5
RATE = 16_000
BINS = 16


def make_hearing(folder: Path) -> torch.nn.Module:
    """Save a random GLM-ASR with its processor; float32 and eager."""
    torch.manual_seed(0)
    ears = {"num_mel_bins": BINS, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GlmAsrConfig(
        audio_config={**ears, "num_key_value_heads": 2, "max_position_embeddings": 512},
        text_config={"model_type": "llama", **SMALL, "tie_word_embeddings": False},
        audio_token_id=AUDIO,
    )
    config._attn_implementation = "eager"
    model = transformers.GlmAsrForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(131) if i != AUDIO} | {"<sound>": AUDIO}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t3", eos_token="t2", pad_token="t0", extra_special_tokens=["<sound>"]
    )
    fast.chat_template = (
        "{% for m in messages %}{% for p in m.content %}{{ '<sound>' if p.type == 'audio' else p.text }} {% endfor %}{% endfor %}"
    )
    spectra = transformers.WhisperFeatureExtractor(feature_size=BINS, sampling_rate=RATE, chunk_length=2, padding_value=0.0)
    transformers.GlmAsrProcessor(spectra, fast, chat_template=fast.chat_template, audio_token="<sound>").save_pretrained(folder)
    fast.save_pretrained(folder)
    return model


def tone(seed: int, seconds: float = 0.6) -> np.ndarray:
    """Samples of a chord and some noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, len(time))
    return (0.3 * np.sin(2 * np.pi * 200 * seed * time) + noise).astype(np.float32)


def wav(seed: int) -> bytes:
    """The same as a file."""
    stream = io.BytesIO()
    soundfile.write(stream, tone(seed), RATE, format="WAV", subtype="FLOAT")
    return stream.getvalue()


@torch.no_grad()
def greedy(model: torch.nn.Module, folder: Path, text: str, seed: int, count: int) -> list[int]:
    """What transformers answers to a text with one sound, each token computed anew."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    made = dict(processor(text=[text], audio=[tone(seed)], sampling_rate=RATE, return_tensors="pt"))
    ids = made.pop("input_ids")[0].tolist()
    made.pop("attention_mask")
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), use_cache=False, **made).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[-count:]
