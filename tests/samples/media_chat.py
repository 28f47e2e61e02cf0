"""One chat with media by OpenAI's client, for servers of tiny models whose words are `t` and a number."""

from __future__ import annotations

from typing import Any

import openai


def chat(where: str, count: int, *parts: dict[str, Any]) -> str:
    """The greedy answer of `count` tokens to the parts and "t40"."""
    with openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "t40"}]}],  # type: ignore[list-item, misc]
            temperature=0,
            max_tokens=count,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
    return (answer.choices[0].message.content or "").strip()
