"""Special tokens and chat templates in GGUF metadata. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

SPELLINGS = {"sep": ("seperator", "sep"), "unk": ("unknown", "unk"), "pad": ("padding", "pad")}
"""How metadata keys call a token where they differ from the rest of the world."""

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|endoftext|>", "<|eot|>")
"""Tokens that end an answer even where the metadata names only the end of a text."""


class TokenType(IntEnum):
    """What a vocabulary entry is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Id of "bos", "eos", "unk", "pad", "sep", "cls", "mask", "eot", "eom"; None where the file has none."""
    for spelling in SPELLINGS.get(name, (name,)):
        found = metadata.get(f"tokenizer.ggml.{spelling}_token_id")
        if found is not None:
            return int(found)
    return None


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of text, turn and message, and the control tokens with which the chat template closes a turn."""
    named = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    template, types = chat_templates(metadata).get("default", ""), metadata.get("tokenizer.ggml.token_type", ())
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    closing = {text for text in TURN_ENDS if text in template}
    spelled = [i for i, kind in enumerate(types) if kind == TokenType.CONTROL and tokens[i] in closing]
    return tuple(dict.fromkeys(i for i in (*named, *spelled) if i is not None))


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Jinja sources by name; "default" is the one to use."""
    found = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in metadata.get("tokenizer.chat_templates", ())}
    found["default"] = metadata.get("tokenizer.chat_template")
    return {name: source for name, source in found.items() if source}
