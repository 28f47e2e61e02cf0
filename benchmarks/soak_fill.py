"""What servers make at first need and keep, asked for once before a soak measures.

A soak draws some requests rarely and in random order. What is bounded and made for the first of them (the two libraries that follow
grammars take 12 MiB of a tiny model's engine, the grammars that are kept some 30 more, a reader of films 2; 12 MiB of a process that speaks
HTTP come with the first 200 malformed requests) would come late and look like growth. It is asked for here, by the same values that the
soak's clients draw from: every hostile grammar once, and some malformed requests of each kind. What comes after that is measured.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from hostile import CHAT, GRAMMARS, JSON, MEDIA, REGEXES, SCHEMAS, Case, cases, encoded

FOLLOW = ("generate", "see")
"""Kinds of servers that follow grammars."""
MALFORMED = 200
AT_ONCE = 2
"""Requests, as many as a server compiles grammars at a time."""


def needs(kind: str) -> Iterator[Case]:
    """The requests for a server of this kind. Templates may never end, and are left out as in the soak."""
    yield from (case for case in list(cases(Random(kind), 2 * MALFORMED))[1::2] if case.kind != "template")
    if kind in FOLLOW:
        named = (("choice", [["a"]]), ("json_object", [True]), ("regex", REGEXES), ("grammar", GRAMMARS), ("json", SCHEMAS))
        for name, values in named:
            for value in values:
                body = {"prompt": "hello", "max_tokens": 16, "structured_outputs": {name: value}}
                yield Case("structure", "/v1/completions", encoded(body), JSON)
    for url in MEDIA if kind == "see" else ():
        for form in ("image_url", "video_url") if url.startswith("data:") else ():
            messages = [{"role": "user", "content": [{"type": form, form: {"url": url}}]}, *CHAT]
            yield Case("media", "/v1/chat/completions", encoded({"messages": messages, "max_tokens": 4}), JSON)


async def fill(http: httpx.AsyncClient, kind: str, faults: list[str]) -> int:
    """Ask a server for all of it; how many requests it answered, well or by naming what it refuses. Others are noted in `faults`."""
    waiting, done = needs(kind), 0

    async def work() -> None:
        nonlocal done
        for case in waiting:
            try:
                answer = await http.post(case.path, content=case.body, headers={"Content-Type": case.media})
            except httpx.HTTPError as error:
                faults.append(f"fill of {kind}: {error!r} for {case}"[:600])
                continue
            done += 1
            if answer.status_code >= 500:
                faults.append(f"fill of {kind}: {answer.status_code} {answer.text[:200]} for {case}"[:600])

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return done
