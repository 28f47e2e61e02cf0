"""`Tokenizer`: text to ids and back over the `tokenizers` library, from a model folder's own files; no transformers needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from pagoda.hal.errors import CheckpointError, ConfigError, RequestError
from pagoda.serving.frontend.detokenizer import Pieces, pieces_of
from pagoda.serving.frontend.text import Detokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with its rules, as the checkpoint's own files give them; implements `text.Tokenizer`.

    Attributes:
        core: the library's tokenizer, truncation and padding off.
        special_tokens: "bos_token" → "<s>" and so on, those that the checkpoint names; chat templates see them as variables.
        eos_ids: tokens that end a generation.
        chat_templates: "default" and further named Jinja sources; empty for base models.
        response_template: the checkpoint's own description of its answers, in transformers' form; None where it has none.
    """

    core: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)
    response_template: dict[str, Any] | None = None
    special_ids: frozenset[int] = field(init=False, repr=False)
    vocab_size: int = field(init=False)
    _pieces: Pieces = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.core.no_truncation()
        self.core.no_padding()
        special = frozenset(i for i, token in self.core.get_added_tokens_decoder().items() if token.special)
        object.__setattr__(self, "special_ids", special)
        last = max(self.core.get_vocab_size(with_added_tokens=False) - 1, *self.core.get_added_tokens_decoder(), -1)
        object.__setattr__(self, "vocab_size", last + 1)
        object.__setattr__(self, "_pieces", pieces_of(self.core, special))

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens beside the vocabulary's own pieces, special or not."""
        return tuple(token.content for _, token in sorted(self.core.get_added_tokens_decoder().items()))

    def special_id(self, name: str) -> int | None:
        """The id of "bos_token", "pad_token" …; None where the checkpoint has none."""
        return self.token_to_id(self.special_tokens.get(name, ""))

    def token_to_id(self, token: str) -> int | None:
        """Of a whole vocabulary entry, such as "<|im_end|>"."""
        return self.core.token_to_id(token) if token else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it become their ids. `add_special_tokens`: with BOS, CLS … as it trained."""
        return list(self.core.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        return [list(e.ids) for e in self.core.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """See `text.Tokenizer`."""
        encoded = self.core.encode(first, second)
        types = list(encoded.type_ids)
        return list(encoded.ids), types.index(1) if 1 in types else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; those outside the vocabulary give nothing.

        Equals the library's decode, but for runs of byte tokens that are no valid UTF-8: there only the broken bytes are
        replaced, so that the same text also comes out of a stream.
        """
        stream = self._pieces.stream(skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to running text, a special one its name. Raises `RequestError` outside the vocabulary."""
        self.token_text(token_id)
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The raw vocabulary entry ("Ġthe"). Raises `RequestError` outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary: ids are from 0 to {self.vocab_size - 1}", param="tokens")
        return self.core.id_to_token(token_id) or ""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> Detokenizer:
        """See `text.Tokenizer`; no vocabulary of the `tokenizers` library puts spaces between special tokens."""
        return self._pieces.stream(skip_special_tokens, prompt)


def load_folder(folder: Path) -> Tokenizer:
    """From `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and chat template files in `folder`.

    Raises `ConfigError` when the folder has no tokenizer.json, `CheckpointError` when a file is corrupt.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"no tokenizer.json in {folder}; save the tokenizer there in that format, name another with --tokenizer,"
            " or work with token ids alone by --skip-tokenizer-init"
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}; download it again") from error
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    _add_missing_tokens(core, config, special)
    response = config.get("response_template")
    described = response if isinstance(response, dict) else None
    return Tokenizer(core, special, _eos_ids(folder, core, special), _chat_templates(folder, config), described)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in found.items() if text}


def _eos_ids(folder: Path, core: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    stated = _read_json(folder / "generation_config.json").get("eos_token_id")
    ids = [core.token_to_id(special.get("eos_token", "")), *(stated if isinstance(stated, list) else [stated])]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing_tokens(core: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    present = core.get_added_tokens_decoder()
    declared = {int(key): value for key, value in (config.get("added_tokens_decoder") or {}).items()}
    for token_id in sorted(declared.keys() - present.keys()):
        facts = {k: v for k, v in declared[token_id].items() if k in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        _add(core, tokenizers.AddedToken(_content(declared[token_id]) or "", **facts))
    known = {token.content: token for token in core.get_added_tokens_decoder().values()}
    further = [config.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
    texts = [_content(token) for tokens in further for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    for text in filter(None, [*special.values(), *texts]):
        if text not in known or (text in special.values() and not known[text].special):
            _add(core, tokenizers.AddedToken(text, special=True, normalized=False))


def _add(core: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> None:
    (core.add_special_tokens if token.special else core.add_tokens)([token])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stated = config.get("chat_template")
    if isinstance(stated, str):
        stated = {"default": stated}
    elif isinstance(stated, list):
        stated = {entry["name"]: entry["template"] for entry in stated}
    templates = dict(stated or {})
    old = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(old, str):
        templates["default"] = old
    for name, path in _template_files(folder):
        templates[name] = path.read_text(encoding="utf-8")
    return templates


def _template_files(folder: Path) -> list[tuple[str, Path]]:
    named = [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    default = folder / "chat_template.jinja"
    return [*named, ("default", default)] if default.is_file() else named
