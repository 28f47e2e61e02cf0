"""What the API and the SDK ask of the text side: `Tokenizer`, `Detokenizer`, `ChatTemplate`, gathered in one `TextFrontend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagoda.serving.frontend.parsers.answers import AnswerFormat


class Detokenizer(Protocol):
    """Turns one sequence's token ids into text as they come; one object a sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens add. Never ends inside a character: its bytes are held until it is whole."""
        ...

    def flush(self) -> str:
        """The rest at the end of the sequence; incomplete bytes become U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back; thread-safe, so that long prompts are encoded off the event loop.

    Attributes:
        vocab_size: ids are below it.
        eos_ids: tokens that end a generation, from tokenizer and generation config.
        special_ids: tokens that `skip_special_tokens` leaves out of text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; `add_special_tokens` lets the tokenizer put its own begin and end tokens around it."""
        ...

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        ...

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Ids of two texts as one prompt, and where the tokens of the second type begin (None: all are of the first)."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in running text (special tokens: their name). Raises `RequestError` above the vocabulary."""
        ...

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling (`Ġthe`, `▁the`, `<0x0A>`), as `/tokenize` shows with `return_token_strs`."""
        ...

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> Detokenizer:
        """A new stream; `prompt` is what came before, for tokenizers whose first token drops a space."""
        ...


class ChatTemplate(Protocol):
    """Messages to prompt text."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens spelled out (encode it with `add_special_tokens=False`).

        `template` replaces the checkpoint's own; `variables` are the request's `chat_template_kwargs`.
        Raises `RequestError` for what the template refuses, and where the model has no template.
        """
        ...


@dataclass(frozen=True)
class TextFrontend:
    """The text side of one model; `template` is None for a model without one, `answers` is how its answers are read."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    answers: AnswerFormat = field(default_factory=AnswerFormat)
