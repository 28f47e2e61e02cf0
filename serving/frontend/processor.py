"""From what a caller has (text, ids, messages, settings) to an `EngineRequest` that can run; all else is refused here with numbers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from pagoda.hal.errors import RequestError
from pagoda.models.media import MediaItem, MediaPositions, Numbers
from pagoda.serving.engine.messages import EncoderPrompt, EngineFacts, EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.token_ids import check_ids
from pagoda.serving.frontend.bad_words import with_bad_word_ids
from pagoda.serving.frontend.chat_media import take_media
from pagoda.serving.frontend.encoder_prompts import is_pair, split_pair, started
from pagoda.serving.frontend.media import MEDIA, ReadMedia
from pagoda.serving.frontend.prompt_embeds import PARAM, PLACEHOLDER, items_of, rows_of_tensor
from pagoda.serving.frontend.sound import heard
from pagoda.serving.frontend.text import TextFrontend

MANY = {"image": "images", "video": "videos", "audio": "sounds"}
KEPT = 1024
"""Different settings that are kept."""
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or either in a mapping: {"prompt": …}, {"prompt_token_ids": […]}; rows of embeddings: {"prompt_embeds": a tensor}."""


class Encoded(NamedTuple):
    """A prompt's ids, its text where there was one, its media, and what an encoder reads, where the
    prompt says so itself."""

    ids: list[int]
    text: str | None
    media: tuple[MediaItem, ...] = ()
    positions: MediaPositions | None = None
    encoder: EncoderPrompt | None = None


@dataclass(frozen=True)
class Processor:
    """One model's way in. `defaults` are the sampling settings of its generation_config.json; `media`: for models that take any."""

    text: TextFrontend
    facts: EngineFacts
    defaults: Mapping[str, Any] = field(default_factory=dict)
    media: ReadMedia | None = None
    _made: dict[tuple[Any, ...], SamplingParams] = field(default_factory=dict, repr=False, compare=False)

    def default_params(self, **given: Any) -> SamplingParams:
        """The model's own sampling settings; `given` ones win, and the output may be as long as the model allows."""
        return SamplingParams(**{"max_tokens": None, **self.defaults, **given})

    def params_for(self, prompt: int, given: Mapping[str, Any]) -> SamplingParams:
        """The `given` settings over the model's own, for a prompt of so many tokens.

        A length that only the model states is a default: it gives way to what the prompt leaves.
        """
        defaults = dict(self.defaults)
        if self.facts.encoder is not None and self.facts.encoder.kind == "text":
            prompt = len(self.facts.encoder.start)  # what is asked is read by the encoder
        if defaults.get("max_tokens") is not None:
            defaults["max_tokens"] = max(1, min(defaults["max_tokens"], self.facts.max_model_len - prompt))
        return self._params({"max_tokens": None, **defaults, **given})

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        """Most requests want what others wanted: settings are checked once and shared."""
        if given.get("structured_outputs") is not None:  # of texts that may be long
            return SamplingParams(**given)
        key = (*given, *given.values())
        try:
            made = self._made.get(key)
        except TypeError:  # lists and mappings
            return SamplingParams(**given)
        if made is None:
            made = SamplingParams(**given)
            if len(self._made) >= KEPT:
                self._made.clear()
            self._made[key] = made
        return made

    def encode(self, prompt: Prompt) -> Encoded:
        """Ids of a prompt; text gets the special tokens that the tokenizer adds."""
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        """Of several prompts, the texts among them on all cores."""
        if self.facts.encoder is not None and any(map(is_pair, prompts)):
            return [self._pair(prompt) if is_pair(prompt) else self.encode(prompt) for prompt in prompts]
        if any(map(_has_rows, prompts)):
            return [self._with_rows(prompt) if _has_rows(prompt) else self.encode(prompt) for prompt in prompts]
        if any(map(_has_media, prompts)):
            return [self._with_media(prompt) if _has_media(prompt) else self.encode(prompt) for prompt in prompts]
        plain = [_of_mapping(prompt) if isinstance(prompt, Mapping) else prompt for prompt in prompts]
        texts = [prompt for prompt in plain if isinstance(prompt, str)]
        ids = iter(self.text.tokenizer.encode_batch(texts))
        return [Encoded(next(ids), prompt) if isinstance(prompt, str) else Encoded(_checked(prompt), None) for prompt in plain]

    def _with_media(self, prompt: Mapping[str, Any]) -> Encoded:
        """Of a prompt with {"multi_modal_data": {"image": …}}."""
        if self.media is None:
            raise RequestError("this model takes text only; leave out multi_modal_data", param=MEDIA)
        check_kinds(prompt[MEDIA], self.facts.modalities, MEDIA)
        text = _of_mapping(prompt)
        ids, items, positions = self.media(text if isinstance(text, str) else _checked(text), prompt[MEDIA])
        return Encoded(ids, text if isinstance(text, str) else None, items, positions)

    def _with_rows(self, prompt: Mapping[str, Any]) -> Encoded:
        """Of a prompt with {"prompt_embeds": a tensor of torch}."""
        return self.of_rows(rows_of_tensor(prompt[PARAM], self.rows_width, self.facts.max_model_len - 1))

    @property
    def rows_width(self) -> int:
        """Numbers of a row of a prompt of embeddings. Raises `RequestError` where none are taken."""
        if not self.facts.embeds_width:
            raise RequestError("prompts of embeddings are not taken here; the flag is --enable-prompt-embeds", param=PARAM)
        return self.facts.embeds_width

    def of_rows(self, rows: Numbers) -> Encoded:
        """A prompt of rows that were checked."""
        return Encoded([PLACEHOLDER] * rows.shape[0], None, items_of(rows, max(self.facts.tokens_per_page, 16)))

    def _pair(self, prompt: Any) -> Encoded:
        assert self.facts.encoder is not None
        ids, encoder = split_pair(prompt, self.facts.encoder, self._ids, self._listen)
        return Encoded(ids, None, encoder=encoder)

    def _ids(self, prompt: Any, special: bool) -> list[int]:
        plain = _of_mapping(prompt) if isinstance(prompt, Mapping) else prompt
        return self.text.tokenizer.encode(plain, add_special_tokens=special) if isinstance(plain, str) else _checked(plain)

    def _listen(self, sound: Any) -> EncoderPrompt:
        assert self.facts.encoder is not None
        return heard(sound, self.facts.encoder)

    def encode_chat(self, messages: Messages, **options: Any) -> Encoded:
        """Ids of a conversation; `options` are those of `text.ChatTemplate.render`."""
        if self.text.template is None:
            raise RequestError("this model has no chat template: use generate with a prompt, or give a template", param="messages")
        messages, media = take_media(messages)
        check_kinds(media, self.facts.modalities if self.media is not None else (), "messages")
        text = self.text.template.render(messages, **options)
        if media and self.media is not None:
            ids, items, positions = self.media(text, media, add_special_tokens=False)
            return Encoded(ids, text, items, positions)
        return Encoded(self.text.tokenizer.encode(text, add_special_tokens=False), text)

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        beam_width: int = 0,
        length_penalty: float = 1.0,
        media: tuple[MediaItem, ...] = (),
        positions: MediaPositions | None = None,
        encoder: EncoderPrompt | None = None,
    ) -> EngineRequest:
        """A request that the engine can take, its output limit set. Where the model's encoder reads texts and `encoder` is None, the prompt
        is the encoder's.

        Raises `RequestError` when the prompt is empty, holds foreign ids, or is too long with its answer.
        """
        facts = self.facts.encoder
        if facts is not None and encoder is None and facts.kind == "text":
            prompt, encoder = started((), facts), EncoderPrompt(tuple(prompt))
        limit = _output_limit(len(prompt), params.max_tokens, self.facts.max_model_len)
        request = EngineRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=with_bad_word_ids(params if limit == params.max_tokens else params.limited(limit), self.text.tokenizer),
            eos_ids=self.text.tokenizer.eos_ids,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            beam_width=beam_width,
            length_penalty=length_penalty,
            arrival=time.time(),
            media=media,
            positions=positions,
            encoder=encoder,
        )
        check_ids(request, self.facts.vocab_size)
        if not request.spoken and params.prompt_logprobs is not None:
            raise RequestError("a prompt of embeddings has no tokens whose logprobs could be told", param="prompt_logprobs")
        return request


def check_kinds(media: Mapping[str, Any], taken: Sequence[str], param: str) -> None:
    """Raises `RequestError` for media of a kind that the model does not take."""
    foreign = [MANY.get(kind, kind) for kind in media if kind != "processed" and kind not in taken]
    if foreign:
        takes = f"text and {', '.join(MANY[kind] for kind in taken)}" if taken else "text only"
        raise RequestError(f"this model takes {takes}; leave out the {', '.join(foreign)}", param=param, code="unsupported_content")


def _checked(ids: Sequence[int]) -> list[int]:
    if not all(isinstance(i, int) for i in ids):
        raise RequestError("a prompt is a text or a list of token ids", param="prompt")
    return list(ids)


def _has_rows(prompt: Prompt) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(prompt, Mapping) and prompt.get(PARAM) is not None


def _has_media(prompt: Prompt) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(prompt, Mapping) and bool(prompt.get(MEDIA))


def _of_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            return prompt[key]
    raise RequestError(f'a prompt mapping needs "prompt" or "prompt_token_ids", not {", ".join(map(repr, prompt))}', param="prompt")


def _output_limit(prompt: int, asked: int | None, longest: int) -> int:
    """Most tokens that the answer may have: what was asked for, or what the model's length leaves."""
    if prompt == 0:
        raise RequestError("the prompt has no tokens; it needs at least one", param="prompt")
    room = longest - prompt
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt} tokens, but prompt and answer together may have {longest}; shorten it, or raise --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )
    if asked is not None and asked > room:
        raise RequestError(
            f"the prompt has {prompt} tokens and max_tokens={asked}, but together they may have {longest}; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return room if asked is None else asked
