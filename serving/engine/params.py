"""How one request wants its tokens: `SamplingParams`, validated on construction, with vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.structured import StructuredOutputsParams

MAX_LOGPROBS = 64
MAX_N = 256
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""Of the model's own logits, or of those that tokens are drawn by: after masks, biases, penalties, temperature and filters. Or these logits
themselves, where a reply has logprobs."""


@dataclass(frozen=True)
class RepetitionDetection:
    """Ends an answer whose newest tokens are `min_count` times the same pattern of `min_pattern_size` to `max_pattern_size` tokens."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (("max_pattern_size", 1, 1024), ("min_pattern_size", 1, self.max_pattern_size), ("min_count", 2, 2**31 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise RequestError(f"repetition_detection.{name}={value!r} must be from {low} to {high}", param="repetition_detection")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RepetitionDetection | None:
        """From a request's object; a `max_pattern_size` of 0 asks for none. Raises `RequestError` naming what is wrong."""
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise RequestError(f"repetition_detection has no key {name!r}; it has {', '.join(known)}", param="repetition_detection")
        if given.get("max_pattern_size") in (None, 0):
            return None
        if "min_count" not in given:
            raise RequestError("repetition_detection.min_count is missing; it is required", param="repetition_detection")
        return cls(**{**given, "min_pattern_size": given.get("min_pattern_size") or 1})


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; anything out of range raises `RequestError` naming the field.

    Attributes:
        n: sequences to return; they share the prompt's pages.
        temperature: 0 is greedy. top_p in (0, 1], top_k 0 or −1 for all, min_p in [0, 1).
        presence_penalty, frequency_penalty: −2 to 2, over generated tokens. repetition_penalty: 1e−6 to 1e6, over prompt and output.
        seed: makes a request's tokens repeatable whatever its batch; None draws one.
        max_tokens: output limit; None means up to the model's length. min_tokens: no stop before it.
        stop: strings that end the output. stop_token_ids: ids that do. include_stop_str_in_output: keep the string.
        ignore_eos: the end token does not stop.
        logprobs: top-k of each output token (0 gives only the token's own); prompt_logprobs: of each prompt token.
        logit_bias: token id → added logit. bad_words_token_ids: id sequences that must not appear.
        allowed_token_ids: only these may be sampled.
        skip_special_tokens, spaces_between_special_tokens, detokenize: how text is made of tokens.
        structured_outputs: what the output must look like (a `StructuredOutputsParams`, or a mapping of its fields), or None.
        thinking_token_budget: so many tokens of reasoning at most, in the SDK; None: as many as the model likes.
        repetition_detection: when an answer that repeats itself ends (a `RepetitionDetection`, or a mapping of its fields), or None.
        extra: vendor or plugin fields, passed through to logits processors.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "bad_words_token_ids"):
            value = getattr(self, name)
            if type(value) is not tuple or any(isinstance(item, list) for item in value):
                object.__setattr__(self, name, _as_tuple(value))
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if isinstance(self.repetition_detection, Mapping):
            object.__setattr__(self, "repetition_detection", RepetitionDetection.of(self.repetition_detection))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}={value} is out of range: it must be from {low} to {high}", param=name)
        self._check_open_ends()

    def _check_open_ends(self) -> None:
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p} is out of range: it must be above 0 and at most 1", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}", param="min_tokens")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are looked for in text: they need detokenize=True", param="stop")
        if any(not text for text in self.stop):
            raise RequestError("stop must not hold an empty string", param="stop")

    def seeded(self, seed: int) -> Self:
        """The same with a seed of 63 bits; what was checked once need not be again."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, seed=seed)
        return made

    def limited(self, max_tokens: int) -> SamplingParams:
        """The same settings with this output limit; what it does not touch is not checked again."""
        made = object.__new__(SamplingParams)
        made.__dict__.update(self.__dict__, max_tokens=max_tokens)
        made._check_open_ends()
        return made

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def bound(self) -> bool:
        """The host must see this request's last token before its next step can run (interfaces: free and bound rows)."""
        return self.structured_outputs is not None or bool(self.bad_words_token_ids)

    @property
    def plain(self) -> bool:
        """Temperature and filters alone decide its tokens, and nothing but tokens is asked for."""
        return not self.bound and self.unedited

    @property
    def unedited(self) -> bool:
        """The same, but for a grammar: where that leaves one token, its logits are nobody's concern."""
        edited = self.logit_bias or self.min_tokens or self.allowed_token_ids or self.bad_words_token_ids
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return not edited and not penalties and self.logprobs is None and self.prompt_logprobs is None


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_N),
    ("temperature", 0, 1e4),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 1e-6, 1e6),
    ("seed", -(2**63), 2**63 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("thinking_token_budget", 0, 2**31 - 1),
)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)
