"""A line of throughput in the log every ten seconds, while there is something to say."""

from __future__ import annotations

import asyncio
import logging
import time

from pagoda.hal.errors import EngineDeadError
from pagoda.serving.api.service import Service
from pagoda.serving.engine.messages import EngineStats

log = logging.getLogger("pagoda.api")
PERIOD = 10.0


async def log_stats(service: Service, period: float = PERIOD) -> None:
    """Runs until cancelled, or until the engine dies."""
    before, then = EngineStats(), time.monotonic()
    while True:
        await asyncio.sleep(period)
        try:
            stats = await service.client.stats()
        except EngineDeadError:
            return
        now = time.monotonic()
        if stats.running or stats.waiting or stats.steps != before.steps:
            log.info(stats_line(stats, before, now - then))
        before, then = stats, now


def stats_line(stats: EngineStats, before: EngineStats, seconds: float) -> str:
    """What happened between two snapshots."""
    prompt = (stats.prompt_tokens - before.prompt_tokens) / seconds
    generated = (stats.generation_tokens - before.generation_tokens) / seconds
    queries = stats.prefix_queries - before.prefix_queries
    hits = (stats.prefix_hits - before.prefix_hits) / queries if queries else 0.0
    drafts = stats.draft_tokens - before.draft_tokens
    accepted = f"; drafts accepted {(stats.accepted_tokens - before.accepted_tokens) / drafts:.1%}" if drafts else ""
    used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
    return (
        f"{prompt:.1f} prompt and {generated:.1f} generated tokens/s; {stats.running} running, {stats.waiting} waiting;"
        f" KV pages {used:.1%} used; prefix hits {hits:.1%}{accepted}"
    )
