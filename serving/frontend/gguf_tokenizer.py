"""The tokenizer inside a GGUF file: byte-level BPE, SentencePiece BPE, WordPiece and unigram vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from pagoda.hal.errors import CheckpointError, ConfigError, PagodaError
from pagoda.models.loading.gguf_head import GgufHead
from pagoda.models.loading.gguf_tokens import TokenType, chat_templates, end_tokens, token_id
from pagoda.serving.frontend.gguf_splits import split_of
from pagoda.serving.frontend.tokenizer import SPECIAL_NAMES, Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

SPACE = "▁"


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, chat templates and end tokens with it.

    Raises `ConfigError` for a kind of vocabulary that is not known, `CheckpointError` for a damaged one.
    """
    return from_metadata(GgufHead(path).metadata, str(path))


def from_metadata(metadata: Mapping[str, Any], where: str = "the GGUF file") -> Tokenizer:
    """The same, from metadata already read; `where` is how messages call their source."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise ConfigError(
            f"{where} has a vocabulary of kind {kind!r}; known are {known}. Name a folder with tokenizer.json with --tokenizer"
        )
    vocabulary = _Vocabulary(metadata, where)
    try:
        core = KINDS[kind](vocabulary)
        _add_special(core, vocabulary)
    except PagodaError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{where} holds a vocabulary that cannot be built: {error}; fetch the file again") from error
    names = {name: token_id(metadata, name.removesuffix("_token")) for name in SPECIAL_NAMES}
    special = {name: vocabulary.tokens[i] for name, i in names.items() if i is not None and 0 <= i < len(vocabulary.tokens)}
    return Tokenizer(core, special, end_tokens(metadata), chat_templates(metadata))


class _Vocabulary:
    """The lists of the metadata, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
        self.types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(self.tokens)
        self.scores: Sequence[float] = metadata.get("tokenizer.ggml.scores") or [0.0] * len(self.tokens)
        lengths = {len(self.tokens), len(self.types), len(self.scores)}
        if not self.tokens or len(lengths) > 1:
            found = f"{len(self.tokens)} tokens, {len(self.types)} types and {len(self.scores)} scores"
            raise CheckpointError(f"{where} holds {found}; a vocabulary has as many of each. Fetch the file again")

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in reversed(list(enumerate(self.tokens)))}

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def token(self, name: str) -> str | None:
        found = token_id(self.metadata, name)
        return self.tokens[found] if found is not None and 0 <= found < len(self.tokens) else None

    def frame(self, begin: str, end: str, add_begin: bool, add_end: bool) -> processors.PostProcessor | None:
        """Puts the begin and end tokens, where asked for and present, around each text."""
        first = self.token(begin) if self.flag("add_bos_token", add_begin) else None
        last = self.token(end) if self.flag("add_eos_token", add_end) else None
        used = [token for token in (first, last) if token is not None]
        if not used:
            return None
        head, tail = ([first] if first else []), ([last] if last else [])
        return processors.TemplateProcessing(
            single=[*head, "$A", *tail],
            pair=[*head, "$A", *tail, *(f"{token}:1" for token in head), "$B:1", *(f"{token}:1" for token in tail)],
            special_tokens=[(token, self.ids[token]) for token in dict.fromkeys(used)],
        )


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    split = split_of(vocabulary.metadata.get("tokenizer.ggml.pre"))
    merges = [_pair(merge) for merge in vocabulary.metadata.get("tokenizer.ggml.merges", ())]
    core = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=split.ignore_merges))
    normalizer = split.normalizer()
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = split.pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    frame = vocabulary.frame("bos", "eos", split.bos, False)
    if frame is not None:
        core.post_processor = frame
    return core


def _pair(merge: str) -> tuple[str, str]:
    # A piece may begin with a space of its own in vocabularies that are not byte-level.
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    prefix = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.token("unk") or next((t for t, k in zip(vocabulary.tokens, vocabulary.types) if k == TokenType.UNKNOWN), None)
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, _merges_by_score(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(vocabulary))
    )
    replace = normalizers.Replace(" ", SPACE)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    frame = vocabulary.frame("bos", "eos", True, False)
    if frame is not None:
        core.post_processor = frame
    return core


def _has_bytes(vocabulary: _Vocabulary) -> bool:
    return TokenType.BYTE in vocabulary.types


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores highest: each way to make a piece is a merge, best scores first."""
    ids = vocabulary.ids
    ranked = sorted(range(len(vocabulary.tokens)), key=lambda i: -vocabulary.scores[i])
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    merges = []
    for i in ranked:
        piece = vocabulary.tokens[i]
        if vocabulary.types[i] in mergeable and len(piece) > 1:
            cuts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
            merges += sorted(((a, b) for a, b in cuts if a in ids and b in ids), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _wordpiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pieces = [_bert_piece(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types)]
    vocab = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    unknown = vocabulary.token("unk") or "[UNK]"
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    # The format does not say whether text is lowered; a vocabulary without capitals can only mean that.
    words = (piece for piece, kind in zip(pieces, vocabulary.types) if kind == TokenType.NORMAL)
    core.normalizer = normalizers.BertNormalizer(lowercase=not any(word != word.lower() for word in words))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece("##")
    begin, end = (
        vocabulary.token("cls") or vocabulary.token("bos") or "[CLS]",
        vocabulary.token("sep") or vocabulary.token("eos") or "[SEP]",
    )
    if begin in vocab and end in vocab:
        core.post_processor = processors.BertProcessing((end, vocab[end]), (begin, vocab[begin]))
    return core


def _bert_piece(token: str, kind: int) -> str:
    """GGUF marks beginnings of words, BERT marks what continues them."""
    if kind != TokenType.NORMAL:
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def _unigram(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    unknown = token_id(vocabulary.metadata, "unk")
    pieces = list(zip(vocabulary.tokens, map(float, vocabulary.scores), strict=True))
    core = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=_has_bytes(vocabulary)))
    steps: list[normalizers.Normalizer] = []
    charsmap = vocabulary.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(byte & 255 for byte in charsmap)))
    if vocabulary.flag("remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    core.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.flag("add_space_prefix", True) else "never"
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    frame = vocabulary.frame("bos", "eos", False, True)
    if frame is not None:
        core.post_processor = frame
    return core


def _add_special(core: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are found in text whole and left out of it; user-defined ones are found whole and stay."""
    known = core.get_vocab()
    found = [(t, k) for t, k in zip(vocabulary.tokens, vocabulary.types) if t in known and t]
    hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in found if k in hidden])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in found if k == TokenType.USER_DEFINED])


KINDS: Mapping[str, Callable[[_Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "bert": _wordpiece,
    "t5": _unigram,
}
"""Kinds of vocabulary by the name under `tokenizer.ggml.model`."""
