"""An engine that says what it is told to, and the text side of a model that calls tools and thinks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagoda.serving.engine.messages import EngineRequest, FinishReason, SequenceDelta
from pagoda.serving.frontend.chat_template import ChatTemplate
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import choose
from pagoda.serving.frontend.text import TextFrontend
from toy_engine import EOS, ToyEngine, ToyTokenizer

SOURCE = (Path(__file__).parent / "chat_templates" / "tools_and_reasoning.jinja").read_text()


class Scripted(ToyEngine):
    """Answers with `script`, `burst` bytes a step; `reason` ends it."""

    def __init__(
        self, script: str | Sequence[int], burst: int = 1, reason: FinishReason = FinishReason.STOP, *, held: int | None = None
    ) -> None:
        super().__init__(0.0, burst, held)
        self._tokens = list(script.encode() if isinstance(script, str) else script)
        self._reason = reason

    def _steps(self, request: EngineRequest) -> list[tuple[SequenceDelta, ...]]:
        tokens = [*self._tokens, EOS] if self._reason is FinishReason.STOP else self._tokens
        parts = [tuple(tokens[at : at + self.burst]) for at in range(0, len(tokens), self.burst)]
        ends = [None] * (len(parts) - 1) + [self._reason]
        return [tuple(SequenceDelta(i, part, None, end) for i in range(request.params.n)) for part, end in zip(parts, ends, strict=True)]


def text_side(source: str = SOURCE, tools: str = "auto", reasoning: str = "auto") -> TextFrontend:
    answers = AnswerFormat(choose("tools", tools, source), choose("reasoning", reasoning, source))
    return TextFrontend(ToyTokenizer(), ChatTemplate({"default": source}), answers)
