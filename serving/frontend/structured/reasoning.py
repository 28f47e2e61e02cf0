"""A grammar that binds what follows the reasoning: until that ends, every token may come."""

from __future__ import annotations

from typing import Literal

from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.structured import Thinking
from pagoda.serving.frontend.structured.vocabulary import NO_TEXT, Vocabulary

State = tuple[Literal["start", "thinking", "answer"], bytes]
"""Where the output is, and the end of what was thought, in which a mark may have begun."""


class AfterThinking:
    """Implements `grammar.Matcher`. Whether there is any reasoning is the model's choice at its first token, where a mark that opens it is
    one token; marks of several tokens are known only where the prompt holds them."""

    def __init__(self, grammar: Grammar, thinking: Thinking, vocabulary: Vocabulary) -> None:
        self._inner, self._vocabulary = grammar(), vocabulary
        self._closes = [mark.encode() for mark in thinking.closes]
        self._opens = {ids[0] for mark in thinking.opens if len(ids := vocabulary.tokenizer.encode(mark, add_special_tokens=False)) == 1}
        self._state: State = ("thinking", b"") if thinking.begun else ("start", b"")
        self._guessed: list[tuple[State, bool]] = []

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            state = self._after(token)
            if state is None:
                self._state = ("answer", b"")
                self._inner.accept([token])
            else:
                self._state = state

    def advance(self, token: int) -> bool:
        before, state = self._state, self._after(token)
        if state is None:
            if not self._inner.advance(token):
                return False
            self._state = ("answer", b"")
        elif token in self._vocabulary.stops:
            return False
        else:
            self._state = state
        self._guessed.append((before, state is None))
        return True

    def go_back(self) -> None:
        self._state, inner = self._guessed.pop()
        if inner:
            self._inner.go_back()

    def forced(self) -> list[int]:
        return self._inner.forced() if self._state[0] == "answer" or (self._state[0] == "start" and not self._opens) else []

    def fill(self, row: IntArray) -> None:
        if self._state[0] == "thinking":
            row[:] = -1
            for token in self._vocabulary.stops:
                row.view("uint32")[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF
            return
        self._inner.fill(row)
        if self._state[0] == "start":
            for token in self._opens:
                row.view("uint32")[token // 32] |= 1 << token % 32

    def _after(self, token: int) -> State | None:
        """The state after a token that is none of the grammar's; None for one that is."""
        kind, tail = self._state
        if kind == "start" and token in self._opens:
            return ("thinking", b"")
        if kind != "thinking":
            return None
        tail += self._vocabulary.texts[token].removeprefix(NO_TEXT)
        if any(mark in tail for mark in self._closes):
            return ("answer", b"")
        longest = max(map(len, self._closes))
        return ("thinking", tail[-longest:])
