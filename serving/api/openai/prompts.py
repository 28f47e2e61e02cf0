"""Prompts of completions requests: a text, texts, token ids, lists of token ids, and rows of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import CompletionRequest
from pagoda.serving.api.openai.sampling import truncated
from pagoda.serving.api.service import Service
from pagoda.serving.frontend.processor import Encoded
from pagoda.serving.frontend.prompt_embeds import cut


async def prompts_of(service: Service, request: CompletionRequest, max_tokens: int | None) -> list[Sequence[int] | Encoded]:
    """Those of embeddings, then the others. Raises `RequestError` as `prompt_ids` does, and for what is no row of embeddings."""
    given = request.prompt_embeds
    if not given:
        return [*await prompt_ids(service, request)]
    if request.echo or request.prompt_logprobs is not None:
        name = "echo" if request.echo else "prompt_logprobs"
        raise RequestError(f"{name} is about a prompt's tokens, and a prompt of embeddings has none; leave it out", param=name)
    texts = [given] if isinstance(given, str) else given
    others = [*await prompt_ids(service, request)] if request.prompt else []
    _check_count(service, len(texts) + len(others))
    made = [await service.rows(text) for text in texts]
    longest = service.client.facts.max_model_len
    kept = [truncated(range(rows.shape[0]), request, longest, max_tokens) for rows in made]
    return [*(service.processor.of_rows(cut(rows, range(some[0], some[-1] + 1))) for rows, some in zip(made, kept, strict=True)), *others]


async def prompt_ids(service: Service, request: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt. Raises `RequestError` for empty prompts, mixtures and too many of them."""
    prompts = _split(request.prompt)
    _check_count(service, len(prompts))
    special = request.add_special_tokens is not False
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if request.truncate_prompt_tokens is None:
        service.check_size(max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0))
    encode = service.text.tokenizer.encode

    def encode_all() -> list[list[int]]:
        return [encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt for prompt in prompts]

    ids = await service.off_loop(size, encode_all)
    if empty := next((index for index, prompt in enumerate(ids) if not prompt), None):
        raise RequestError(f"prompt[{empty}] has no tokens; it needs at least one", param="prompt")
    if not ids[0]:
        raise RequestError("the prompt has no tokens; it needs at least one", param="prompt")
    return ids


def _check_count(service: Service, count: int) -> None:
    if count > service.config.max_prompts:
        raise RequestError(
            f"prompt holds {count} prompts, the limit is {service.config.max_prompts}; the server's flag is --max-prompts", param="prompt"
        )


def _split(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    if prompt is None:
        raise RequestError("prompt is missing; it is required", param="prompt", code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list; it needs a text or token ids", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if int in kinds:
        raise RequestError("prompt mixes token ids with texts or lists; send one kind", param="prompt")
    return prompt  # type: ignore[return-value]
