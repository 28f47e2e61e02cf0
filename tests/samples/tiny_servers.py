"""Servers of tiny random checkpoints, one for each kind of model: `generate`, `embed`, `score`, `see`, `hear`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
import torch
from frontend_samples import byte_level
from lora_folders import make_adapter, modules_of
from tiny_checkpoints import make
from tiny_vision import add_processor, make_vision
from tokenizers import Tokenizer
from toy_process import SERVE, ServerProcess

HERE = Path(__file__).parent
TEMPLATE = HERE / "chat_templates" / "tools_and_reasoning.jinja"
SPEECH = ("startoftranscript", "en", "de", "transcribe", "translate", "startofprev", "notimestamps")
LENGTH = 512
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
COMMON = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32", "--disable-access-log"]


def tiny_server(folder: Path, kind: str, *flags: str) -> ServerProcess:
    """Make the checkpoint in a folder and serve it, by the names `tiny` and `small`."""
    made = {"generate": _generate, "embed": _embed, "score": _score, "see": _see, "hear": _hear}[kind](folder)
    return ServerProcess([*SERVE, str(folder), *COMMON, "--served-model-name", "tiny", "small", *made, *flags], patience=300)


def _generate(folder: Path) -> list[str]:
    tokenizer = byte_level()
    make(folder, "Llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=LENGTH, **IDS)
    _save(tokenizer, folder)
    adapter(folder)
    return [
        "--kv-cache-memory-bytes",
        "8M",
        "--chat-template",
        str(TEMPLATE),
        "--enable-lora",
        "--trust-request-chat-template",
        "--enable-prompt-embeds",
    ]


def adapter(folder: Path) -> Path:
    """A LoRA adapter for the generating model of `folder`."""
    where = folder / "adapter"
    return where if where.exists() else make_adapter(where, modules_of(folder, ("q_proj",)), seed=1)


def _embed(folder: Path) -> list[str]:
    tokenizer = byte_level()
    make(folder, "BertModel", vocab_size=tokenizer.get_vocab_size(), pad_token_id=2)
    _save(tokenizer, folder)
    return []


def _score(folder: Path) -> list[str]:
    tokenizer = byte_level()
    make(
        folder, "BertForSequenceClassification", vocab_size=tokenizer.get_vocab_size(), pad_token_id=2, id2label={0: "s"}, label2id={"s": 0}
    )
    _save(tokenizer, folder)
    return []


def _see(folder: Path) -> list[str]:
    make_vision(folder, "Llava")
    add_processor(folder)
    return ["--kv-cache-memory-bytes", "8M", "--max-model-len", "128"]


def _hear(folder: Path) -> list[str]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPEECH])
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(51)])
    sizes = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    model = make(
        folder,
        "WhisperForConditionalGeneration",
        **sizes,
        **IDS,
        d_model=32,
        num_mel_bins=80,
        max_source_positions=50,
        max_target_positions=40,
        vocab_size=tokenizer.get_vocab_size(),
        decoder_start_token_id=tokenizer.token_to_id("<|startoftranscript|>"),
    )
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[1] = 0.0  # nothing ends at once
    model.save_pretrained(folder)
    _save(tokenizer, folder)
    return ["--kv-cache-memory-bytes", "8M"]


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))


def tone(seconds: float = 0.8, rate: int = 16000) -> bytes:
    """A sound as a WAV file."""
    out = io.BytesIO()
    soundfile.write(out, 0.3 * np.sin(np.arange(int(seconds * rate)) * 0.1).astype(np.float32), rate, format="WAV")
    return out.getvalue()
