"""From an engine's token deltas to text deltas: detokenizing, stop strings, and the finish reason that the client sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagoda.serving.engine.messages import FinishReason, RequestDelta, SequenceDelta, TokenLogprobs
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.repeats import Repeats
from pagoda.serving.frontend.stop import StopStrings
from pagoda.serving.frontend.text import Tokenizer


class TextDelta(NamedTuple):
    """What one delta adds to one sequence.

    Attributes:
        index: which of the request's sequences.
        text: new text, free of stop strings; may be empty while a character or a possible stop string is incomplete.
        token_ids, logprobs: as the engine gave them, cut after the token that completed a stop string, or repeated too much.
        finish_reason: set once, on the sequence's last delta. stop_reason: the stop string or token id behind it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


class SequenceText:
    """The text side of one sequence."""

    __slots__ = ("_detokenizer", "_params", "_repeats", "_stops", "_tokens", "detokenize", "ending", "finished")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            prompt=prompt,
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._params = params
        self._repeats = Repeats(params.repetition_detection) if params.repetition_detection is not None else None
        self.detokenize = self._detokenizer.push if params.detokenize else _no_text
        self._tokens = 0
        self.finished = False
        self.ending: TextDelta | None = None

    def plain(self, token_ids: Sequence[int]) -> str | None:
        """Text of tokens with which nothing else comes. None: a stop string ended it, and `ending` says how, to whoever is told next."""
        delta = self.push(SequenceDelta(0, tuple(token_ids)))
        if not self.finished:
            return delta.text
        self.ending = delta
        return None

    def push(self, delta: SequenceDelta) -> TextDelta:
        """Text of these tokens; a stop string, and too much repetition, end the sequence here whatever the engine thinks."""
        shown = self._shown_tokens(delta)
        if not searches(self._params):  # nothing to look for: no token needs its own text
            return self._going_on(delta, self.detokenize(delta.token_ids[:shown]))
        text = ""
        for count, token in enumerate(delta.token_ids[:shown], 1):
            self._tokens += 1
            piece = self.detokenize((token,))
            repeats = self._repeats is not None and self._repeats.push(token)
            if self._tokens <= self._params.min_tokens:
                text += self._stops.release(piece)
                continue
            scan = self._stops.push(piece)
            text += scan.text
            if scan.stopped_by is not None:
                return self._stopped(delta, text, count, scan.stopped_by)
            if repeats:
                return self._stopped(delta, text + self._stops.release(), count, None)
        return self._going_on(delta, text)

    def _going_on(self, delta: SequenceDelta, text: str) -> TextDelta:
        if delta.finish_reason is None:
            return TextDelta(delta.index, text, delta.token_ids, delta.logprobs)
        return self._ended(delta, text)

    def _shown_tokens(self, delta: SequenceDelta) -> int:
        # a stop token ends the text; it is no part of it unless asked for
        if delta.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output:
            return max(len(delta.token_ids) - 1, 0)
        return len(delta.token_ids)

    def _stopped(self, delta: SequenceDelta, text: str, count: int, stop: str | None) -> TextDelta:
        self.finished = True
        logprobs = delta.logprobs[:count] if delta.logprobs is not None else None
        reason = FinishReason.REPETITION if stop is None else FinishReason.STOP
        return TextDelta(delta.index, text, delta.token_ids[:count], logprobs, reason.value, stop)

    def _ended(self, delta: SequenceDelta, text: str) -> TextDelta:
        self.finished = True
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        scan = self._stops.push(self._detokenizer.flush())
        text += scan.text
        if scan.stopped_by is not None:
            reason, stop_reason = FinishReason.STOP, scan.stopped_by
        else:
            text += self._stops.release()
        assert reason is not None
        return TextDelta(delta.index, text, delta.token_ids, delta.logprobs, reason.value, stop_reason, delta.cumulative_logprob)


def searches(params: SamplingParams) -> bool:
    """Whether each token is looked at for an end that the engine does not know of."""
    return bool(params.stop) or params.repetition_detection is not None


def _no_text(token_ids: Sequence[int]) -> str:
    return ""


class RequestText:
    """The text side of one request: a `SequenceText` for each sequence, made when it first appears."""

    __slots__ = ("_open", "_params", "_prompt", "_sequences", "_stopped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._params, self._prompt = tokenizer, params, prompt
        self._sequences: dict[int, SequenceText] = {}
        self._open = params.n
        self._stopped: list[int] = []

    def push(self, delta: RequestDelta) -> list[TextDelta]:
        """Text deltas of the sequences that are still open to the client."""
        out = []
        for part in delta.sequences:
            sequence = self._sequences.get(part.index)
            if sequence is None:
                sequence = self._sequences[part.index] = SequenceText(self._tokenizer, self._params, self._prompt)
            if sequence.finished and sequence.ending is None:
                continue
            told, sequence.ending = sequence.ending or sequence.push(part), None
            out.append(told)
            self._open -= sequence.finished
            if sequence.finished and part.finish_reason is None:
                self._stopped.append(part.index)
        return out

    @property
    def push_plain(self) -> Callable[[Sequence[int]], str | None]:
        """Makes text of tokens with which nothing else comes, of a request with one sequence, which has begun. None: a stop string is in
        it; `push` of the same tokens tells the end."""
        sequence = self._sequences[0]
        return sequence.plain if searches(self._params) else sequence.detokenize

    @property
    def searches(self) -> bool:
        """Whether stop strings, or repetition, are looked for."""
        return searches(self._params)

    def take_stopped(self) -> list[int]:
        """Sequences that a stop string ended since the last call, which the engine does not know of: for its `abort`."""
        stopped, self._stopped = self._stopped, []
        return stopped

    @property
    def finished(self) -> bool:
        """Every sequence has ended for the client, though the engine may still run some."""
        return self._open <= 0
