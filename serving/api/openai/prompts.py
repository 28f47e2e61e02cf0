"""Prompts of completions requests: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import CompletionRequest
from pagoda.serving.api.service import Service


async def prompt_ids(service: Service, request: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt. Raises `RequestError` for empty prompts, mixtures and too many of them."""
    prompts = _split(request.prompt)
    if len(prompts) > service.config.max_prompts:
        raise RequestError(
            f"prompt holds {len(prompts)} prompts, the limit is {service.config.max_prompts}; the server's flag is --max-prompts",
            param="prompt",
        )
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
