"""What can never fit is refused at submit, with the number that was too big."""

from __future__ import annotations

from pagoda.hal.errors import CapacityError, RequestError
from pagoda.models.encoding import EncoderFacts
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.plan import IntArray, RunnerFacts
from pagoda.serving.engine.pooling import check_pooling
from pagoda.serving.engine.token_ids import checked_prompt


def check_request(request: EngineRequest, budget: int, facts: RunnerFacts, ledger: Ledger) -> tuple[IntArray, int]:
    """The prompt and the length at which its sequences end, or the reason why it cannot be served. `budget`: tokens of a step."""
    if not request.prompt:
        raise RequestError("the prompt holds no token; it needs at least one", param="prompt")
    return checked_prompt(request, facts.vocab_size), _check_length(request, budget, facts, ledger)


def _check_length(request: EngineRequest, budget: int, facts: RunnerFacts, ledger: Ledger) -> int:
    prompt, longest = len(request.prompt), facts.max_model_len
    check_pooling(request.pooling, facts.pooling)
    _check_media(request, budget, ledger)
    _check_encoder(request, facts.encoder)
    if request.pooling is not None:
        return _check_pooled(request, longest, facts.overlap * budget, ledger)
    if request.beam_width and facts.logprobs.endswith("logits"):
        raise RequestError(f"beam search adds up logprobs, and this engine gives {facts.logprobs} in their place", param="use_beam_search")
    if prompt >= longest:
        raise RequestError(
            f"the prompt has {prompt} tokens and the model's length is {longest}: at most {longest - 1} leave room for an answer",
            param="prompt",
            code="context_length_exceeded",
        )
    limit = longest if request.params.max_tokens is None else min(prompt + request.params.max_tokens, longest)
    _check_pages(request, limit, facts.overlap * budget, ledger, _crossed(request, facts.encoder, ledger))
    return limit


def _check_media(request: EngineRequest, budget: int, ledger: Ledger) -> None:
    if ledger.media is not None:
        ledger.media.check(request, budget)
    elif request.media:
        raise RequestError(f"this model takes tokens only, and the request brings an {request.media[0].modality}", param="media")


def _check_pooled(request: EngineRequest, longest: int, ahead: int, ledger: Ledger) -> int:
    """Nothing follows the prompt; that it is done counts as one token that has no page."""
    prompt = len(request.prompt)
    if prompt > longest:
        raise RequestError(
            f"the prompt has {prompt} tokens and the model's length is {longest}: shorten it, or send truncate_prompt_tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    _check_pages(request, prompt, ahead, ledger)
    return prompt + 1


def _check_pages(request: EngineRequest, limit: int, ahead: int, ledger: Ledger, crossed: int = 0) -> None:
    """Samples run in turns where they must; beams live side by side. They share the prompt's full pages, but not for certain where a
    window moves on."""
    states = ledger.states.peak if ledger.states is not None else 0
    need, there = states + sum(rule.peak_pages(limit, ahead) for rule in ledger.rules), ledger.pool.num_pages - 1
    if request.beam_width > 1:
        windows = any(rule.window is not None for rule in ledger.rules)
        shared = 0 if windows else sum(len(request.prompt) // rule.tokens_per_page for rule in ledger.rules)
        need = shared + request.beam_width * (need - shared)
    need += crossed
    if need > there:
        raise CapacityError(
            f"prompt and answer of {limit} tokens need {need} KV pages and the pool has {there}:"
            " shorten them, or give the KV cache more memory",
            asked=need,
            available=there,
        )


def _check_encoder(request: EngineRequest, encoder: EncoderFacts | None) -> None:
    """Whether there is what the model's encoder reads, and no more than it can."""
    if encoder is None:
        if request.encoder is not None:
            raise RequestError("this model has no encoder and was given an input for one; send a prompt alone", param="encoder_prompt")
        return
    if request.encoder is None:
        raise RequestError(f"this model's encoder reads {encoder.kind} and was given nothing; send it too", param="encoder_prompt")
    ids, shape = request.encoder.token_ids, request.encoder.shape
    wanted = {"text": 0, "frames": 2, "samples": 1}[encoder.kind]
    if len(shape) != wanted or (encoder.kind == "frames" and shape[0] != encoder.bins):
        raise RequestError(
            f"this model's encoder reads {encoder.kind} and was given numbers of shape {list(shape)}", param="encoder_prompt"
        )
    if ids and not 0 <= min(ids) <= max(ids) < encoder.vocab:
        raise RequestError(f"the encoder's prompt holds a token id that is not one of its {encoder.vocab}", param="encoder_prompt")
    tokens = encoder.tokens(request.encoder.count)
    if not 0 < tokens <= encoder.longest:
        raise RequestError(
            f"the encoder's input makes {tokens} tokens, and there must be 1 to {encoder.longest}; make it shorter or longer",
            param="encoder_prompt",
            code="context_length_exceeded",
        )


def _crossed(request: EngineRequest, encoder: EncoderFacts | None, ledger: Ledger) -> int:
    """Pages of what the encoder gives, which all of a request's sequences share."""
    if encoder is None or request.encoder is None or ledger.crosses is None:
        return 0
    return ledger.crosses.pages(encoder.tokens(request.encoder.count))
