"""Tokenizers of every decoder shape, made offline, for the frontend's tests."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, isn't it?",
    "def main(argv: list[str]) -> int:\n    return {'a': 1, \"b\": [2, 3.5e-7]}\n\n\n",
    "日本語の文章と中文的句子，以及 한국어 문장.",
    "Ünïcödé na\u0308ive cafe\u0301 👩‍👩‍👧‍👦 🇫🇷 👍🏽 नमस्ते Ελληνικά العربية ไทย",
] * 4
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("naïve Ġ token", special=False)])
    return tokenizer


def sentencepiece(prefix_space: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("\u2581")] if prefix_space else []), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix_space else [])])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        CORPUS[:2], trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL + bytes_, show_progress=False, max_token_length=8)
    )
    return without_special_bytes(tokenizer)


def without_special_bytes(tokenizer: Tokenizer) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False))
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return tokenizer


SHAPES = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece-bare": lambda: sentencepiece(prefix_space=False),
    "word-piece": word_piece,
    "metaspace": metaspace,
}
