"""A grammar that binds what follows the reasoning: until that ends, every token may come, as many as its budget has."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.structured import Thinking
from pagoda.serving.frontend.structured.vocabulary import NO_TEXT, Vocabulary


class State(NamedTuple):
    """Where the output is, the end of what was thought, in which a mark may have begun, and how many tokens of it there are."""

    where: Literal["start", "thinking", "answer"]
    tail: bytes = b""
    spent: int = 0


class Anything:
    """Implements `grammar.Matcher`: every token may follow."""

    def accept(self, tokens: list[int]) -> None: ...

    def advance(self, token: int) -> bool:
        return True

    def go_back(self) -> None: ...

    def forced(self) -> list[int]:
        return []

    def fill(self, row: IntArray) -> None:
        row[:] = -1

    def failure(self) -> str | None:
        return None


class AfterThinking:
    """Implements `grammar.Matcher`. Whether there is any reasoning is the model's choice at its first token, where a mark that opens it is
    one token; marks of several tokens are known only where the prompt holds them. When the budget is spent, the mark that closes it comes.
    """

    def __init__(self, grammar: Grammar, thinking: Thinking, vocabulary: Vocabulary) -> None:
        self._inner, self._vocabulary, self._budget = grammar(), vocabulary, thinking.budget
        self._closes = [mark.encode() for mark in thinking.closes]
        encode = vocabulary.tokenizer.encode
        self._opens = {ids[0] for mark in thinking.opens if len(ids := encode(mark, add_special_tokens=False)) == 1}
        self._closing = encode(thinking.closes[0], add_special_tokens=False) if thinking.budget is not None else []
        # one that only counts leaves it to the model whether it ends within its thoughts
        self._stops = [] if isinstance(self._inner, Anything) else vocabulary.stops
        self._state = State("thinking" if thinking.begun else "start")
        self._guessed: list[tuple[State, bool]] = []

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            state = self._after(token)
            if state is None:
                self._state = State("answer")
                self._inner.accept([token])
            else:
                self._state = state

    def advance(self, token: int) -> bool:
        before, state = self._state, self._after(token)
        if state is None:
            if not self._inner.advance(token):
                return False
            self._state = State("answer")
        elif token in self._stops or self._due() not in (None, token):
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
        where = self._state.where
        return self._inner.forced() if where == "answer" or (where == "start" and not self._opens) else []

    def fill(self, row: IntArray) -> None:
        if self._state.where == "thinking":
            if (due := self._due()) is not None:
                return _allow(row, due)
            row[:] = -1
            for token in self._stops:
                row.view("uint32")[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF
            return
        self._inner.fill(row)
        if self._state.where == "start":
            for token in self._opens:
                _allow(row, token)

    def failure(self) -> str | None:
        return self._inner.failure()

    def _due(self) -> int | None:
        """The only token that may come, of the mark that closes thoughts whose budget is spent."""
        if self._state.where != "thinking" or self._budget is None or self._state.spent < self._budget:
            return None
        return self._closing[(self._state.spent - self._budget) % len(self._closing)]

    def _after(self, token: int) -> State | None:
        """The state after a token that is none of the grammar's; None for one that is."""
        where, tail, spent = self._state
        if where == "start" and token in self._opens:
            return State("thinking")
        if where != "thinking":
            return None
        tail += self._vocabulary.texts[token].removeprefix(NO_TEXT)
        if any(mark in tail for mark in self._closes):
            return State("answer")
        longest = max(map(len, self._closes))
        return State("thinking", tail[-longest:], spent + 1)


def _allow(row: IntArray, token: int) -> None:
    row.view("uint32")[token // 32] |= 1 << token % 32
