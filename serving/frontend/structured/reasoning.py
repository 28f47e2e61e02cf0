"""A grammar that binds what follows the reasoning: until that ends, every token may come, as many as its budget has."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.structured import Thinking
from pagoda.serving.frontend.structured.vocabulary import NO_TEXT, Vocabulary


class State(NamedTuple):
    """Where the output is, the end of what was written there, in which a mark may have begun, and how many tokens of thoughts there are.

    `opened`: the place of the mark that has opened them. `closing`: how many tokens of the mark that must close them are there; −1 while
    the budget lasts.
    """

    where: Literal["start", "thinking", "answer"]
    tail: bytes = b""
    spent: int = 0
    opened: int = 0
    closing: int = -1


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

    def idle(self) -> bool:
        return True

    def failure(self) -> str | None:
        return None


class AfterThinking:
    """Implements `grammar.Matcher`. Whether there is any reasoning is the model's choice at its first token, where a mark that opens it is
    one token, and at its first ones where nothing else is bound; otherwise marks of several tokens are known only where the prompt holds
    them. When the budget is spent, the mark that closes it comes, or what is missing of it.
    """

    def __init__(self, grammar: Grammar, thinking: Thinking, vocabulary: Vocabulary) -> None:
        self._inner, self._vocabulary, self._budget = grammar(), vocabulary, thinking.budget
        self._repeats, self._free = thinking.repeats, isinstance(self._inner, Anything)
        self._begins = [mark.lstrip().encode() for mark in thinking.opens]
        self._closes = [mark.encode() for mark in thinking.closes]
        encode = vocabulary.tokenizer.encode
        ids = [encode(mark, add_special_tokens=False) for mark in thinking.opens]
        self._opens = {tokens[0]: place for place, tokens in enumerate(ids) if len(tokens) == 1}
        closes = thinking.closes if thinking.budget is not None else ()
        self._closings = [encode(mark, add_special_tokens=False) for mark in closes]
        # one that only counts leaves it to the model whether it ends within its thoughts
        self._stops = [] if self._free else vocabulary.stops
        self._state = self._opened(thinking.opened, 0) if thinking.begun else State("start")
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
        where, closing = self._state.where, self._state.closing
        if closing >= 0:
            return self._closing(self._state.opened)[closing:]
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

    def idle(self) -> bool:
        return self._state.where == "answer" and self._inner.idle()

    def failure(self) -> str | None:
        return self._inner.failure()

    def _opened(self, place: int, spent: int) -> State:
        return State("thinking", b"", spent, place, 0 if self._budget is not None and spent >= self._budget else -1)

    def _closing(self, opened: int) -> list[int]:
        """The tokens of the mark that belongs to the one that opened the thoughts."""
        return self._closings[opened if len(self._closings) == len(self._begins) else 0]

    def _due(self) -> int | None:
        """The only token that may come, of the mark that closes thoughts whose budget is spent."""
        if self._state.closing < 0:
            return None
        mark = self._closing(self._state.opened)
        return mark[self._state.closing % len(mark)]

    def _after(self, token: int) -> State | None:
        """The state after a token that is none of the grammar's; None for one that is."""
        where, tail, spent, opened, closing = self._state
        if where == "answer":
            return None
        if where == "start" and token in self._opens:
            return self._opened(self._opens[token], spent)
        tail += self._vocabulary.texts[token].removeprefix(NO_TEXT)
        if where == "start":
            return self._begun(tail, spent) if self._free else None
        if any(mark in tail for mark in self._closes):
            return State("start", b"", spent + 1) if self._repeats else State("answer")
        spent += 1
        if closing >= 0:
            closing += 1
        elif self._budget is not None and spent >= self._budget:
            closing = self._written(tail, opened)
        longest = max(map(len, self._closes))
        return State("thinking", tail[-longest:], spent, opened, closing)

    def _begun(self, text: bytes, spent: int) -> State | None:
        """The state after a beginning of several tokens; None where that can open no thoughts."""
        for place, mark in enumerate(self._begins):
            if mark in text:
                return self._opened(place, spent)
        head = text.lstrip()
        return State("start", text, spent) if any(mark.startswith(head) for mark in self._begins) else None

    def _written(self, tail: bytes, opened: int) -> int:
        """How many tokens of the closing mark the thoughts end with already."""
        texts = [self._vocabulary.texts[token].removeprefix(NO_TEXT) for token in self._closing(opened)]
        return next((count for count in range(len(texts) - 1, 0, -1) if tail.endswith(b"".join(texts[:count]))), 0)


def _allow(row: IntArray, token: int) -> None:
    row.view("uint32")[token // 32] |= 1 << token % 32
