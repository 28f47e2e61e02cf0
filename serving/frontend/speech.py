"""Whisper's special tokens: what the decoder's text begins with, and the times between its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.text import Tokenizer

STEP = 0.02
"""Seconds between two timestamp tokens."""
KEPT_PROMPT = 224
"""Tokens of earlier text that a prompt keeps, its last ones."""

_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml cy sk te fa lv bn sr"
    " az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo"
    " tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = tuple(_CODES.split())
"""What Whisper's tokenizers may know; larger models know all."""

Task = Literal["transcribe", "translate"]


class Segment(NamedTuple):
    """What was said from `start` to `end`, seconds of the sound's part."""

    start: float
    end: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SpeechTokens:
    """The ids of a tokenizer's special tokens; None where it lacks them. `languages`: by code, empty for models of one language."""

    start: int
    before: int | None
    untimed: int | None
    first_time: int | None
    tasks: dict[str, int]
    languages: dict[str, int] = field(default_factory=dict)
    silence: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpeechTokens:
        """Raises `RequestError` for a tokenizer that is not of Whisper's kind."""

        def found(name: str) -> int | None:
            ids = tokenizer.encode(f"<|{name}|>", add_special_tokens=False)
            return ids[0] if len(ids) == 1 else None

        start = found("startoftranscript")
        if start is None:
            raise RequestError("this model's tokenizer knows no <|startoftranscript|>: transcriptions need a model of Whisper's kind")
        languages = {code: token for code in LANGUAGES if (token := found(code)) is not None}
        tasks = {task: token for task in ("transcribe", "translate") if (token := found(task)) is not None}
        silence = found("nospeech") if found("nospeech") is not None else found("nocaptions")
        return cls(start, found("startofprev"), found("notimestamps"), found("0.00"), tasks, languages, silence)

    def prompt(self, language: str | None, task: Task, timed: bool, text_before: Sequence[int] = ()) -> list[int]:
        """Ids that the decoder begins with. Raises `RequestError` for a language or a task that the model does not know."""
        before = [self.before, *text_before[-KEPT_PROMPT:]] if text_before and self.before is not None else []
        spoken = [self.language(language)] if self.languages and language is not None else []
        if self.languages and task not in self.tasks:
            raise RequestError(f"this model does not {task}", param="task")
        asked = [self.tasks[task]] if self.languages else []
        quiet = [self.untimed] if not timed and self.untimed is not None else []
        return [*before, self.start, *spoken, *asked, *quiet]

    def language(self, code: str) -> int:
        if code not in self.languages:
            raise RequestError(f"language={code!r} is not known; there are {', '.join(self.languages)}", param="language")
        return self.languages[code]

    def code(self, token: int) -> str:
        """The language of a token."""
        return next((code for code, known in self.languages.items() if known == token), "en")

    def segments(self, ids: Sequence[int], duration: float) -> list[Segment]:
        """The parts between timestamps; where an end lacks, `duration` is it."""
        found: list[Segment] = []
        begin, words = 0.0, list[int]()
        for token in ids:
            if self.first_time is None or token < self.first_time:
                words.append(token)
                continue
            time = (token - self.first_time) * STEP
            if words:
                found.append(Segment(begin, time, tuple(words)))
            begin, words = time, []
        return [*found, Segment(begin, max(duration, begin), tuple(words))] if words else found


class SpokenText:
    """Text of one part's tokens as they come, without the times: all of it is the texts of `SpeechTokens.segments` together."""

    def __init__(self, tokens: SpeechTokens, tokenizer: Tokenizer) -> None:
        self._tokens, self._tokenizer = tokens, tokenizer
        self._words = tokenizer.detokenizer()

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._text_of, ids))

    def flush(self) -> str:
        """The end of a segment, or of all."""
        rest, self._words = self._words.flush(), self._tokenizer.detokenizer()
        return rest

    def _text_of(self, token: int) -> str:
        if token in self._tokenizer.eos_ids:
            return ""
        if self._tokens.first_time is not None and token >= self._tokens.first_time:
            return self.flush()
        return self._words.push((token,))
