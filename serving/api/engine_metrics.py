"""What the engine counts, as Prometheus metrics under vLLM's names: made anew for each scrape, of one snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from pagoda.serving.engine.histograms import BOUNDS
from pagoda.serving.engine.messages import EngineStats
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

LABELS = ("model_name", "engine")
_Reads = tuple[tuple[str, str, Callable[[EngineStats], float]], ...]
_GAUGES: _Reads = (
    ("num_requests_running", "Requests that run.", lambda s: s.running),
    ("num_requests_waiting", "Requests that wait to run.", lambda s: s.waiting),
    ("kv_cache_usage_perc", "Share of the KV pages in use, from 0 to 1.", lambda s: s.pages_used / s.pages_total if s.pages_total else 0.0),
    ("steps_captured", "Kinds of steps that are captured, where that is done ahead of need.", lambda s: s.steps_captured),
    ("steps_to_capture", "Kinds of steps that will be captured in idle moments.", lambda s: s.steps_to_capture),
)
_COUNTERS: _Reads = (
    ("prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens that were not computed, being found.", lambda s: s.prefix_hits + s.external_hits),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("num_preemptions", "Preemptions.", lambda s: s.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("external_prefix_cache_queries", "Prompt tokens asked of a store beside the pool.", lambda s: s.external_queries),
    ("external_prefix_cache_hits", "Prompt tokens brought back from it.", lambda s: s.external_hits),
    ("spec_decode_num_drafts", "Times that tokens were drafted for a sequence.", lambda s: s.drafts),
    ("spec_decode_num_draft_tokens", "Drafted tokens.", lambda s: s.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were right.", lambda s: s.accepted_tokens),
    ("corrupted_requests", "Requests for which the model gave NaN.", lambda s: s.corrupted),
    ("mm_cache_queries", "Media items of requests.", lambda s: s.media_queries),
    ("mm_cache_hits", "Media items whose embeddings were there when their request came.", lambda s: s.media_hits),
    ("structured_jumped_tokens", "Tokens that a grammar forced and that took no step of their own.", lambda s: s.jumped_tokens),
)
_COUNTED = tuple[tuple[str, float], ...]


class _ByLabel(NamedTuple):
    """A family with a label of its own."""

    name: str
    text: str
    label: str
    read: Callable[[EngineStats], _COUNTED]


_GAUGES_BY = (
    _ByLabel(
        "num_requests_waiting_by_reason",
        "Requests that wait: for room (capacity), or for a grammar, pages from elsewhere or a sibling's prompt (deferred).",
        "reason",
        lambda s: (("capacity", s.waiting - s.deferred), ("deferred", s.deferred)),
    ),
    _ByLabel(
        "engine_sleep_state",
        "Which of them is 1: awake, without the KV cache (kv_cache_discarded, level 1), without the weights too (discard_all, level 2).",
        "sleep_state",
        lambda s: tuple((name, float(s.sleep_level == level)) for level, name in enumerate(SLEEP_STATES)),
    ),
)
_COUNTERS_BY = (
    _ByLabel(
        "prompt_tokens_by_source",
        "Prompt tokens of requests that began: computed, found in the pool, brought back from a store beside it.",
        "source",
        lambda s: (
            ("local_compute", s.computed_tokens),
            ("local_cache_hit", s.prefix_hits),
            ("external_kv_transfer", s.external_hits),
        ),
    ),
    _ByLabel(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by place.",
        "position",
        lambda s: tuple((str(place), count) for place, count in enumerate(s.accepted_at)),
    ),
)
SLEEP_STATES = ("awake", "kv_cache_discarded", "discard_all")
"""By level."""
_HISTOGRAMS = (
    ("iteration_tokens_total", "Tokens that a step computed.", "iteration_tokens"),
    ("request_num_preemptions", "Preemptions per request.", "request_preemptions"),
    ("kv_block_lifetime_seconds", "Time from a KV page's allocation to the loss of its prefix.", "page_lifetime"),
    ("kv_block_idle_before_evict_seconds", "Time from the last request that wanted a KV page to the loss of its prefix.", "page_idle"),
    ("kv_block_reuse_gap_seconds", "Time between requests that wanted the same KV page.", "page_gap"),
)


class EngineCollector(Collector):
    """Turns the snapshot taken for this scrape into metrics; `values` are those of `LABELS`."""

    def __init__(self, values: tuple[str, str]) -> None:
        self._values = values
        self.stats = EngineStats()

    def collect(self) -> Iterable[Metric]:
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._values, read(self.stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, read(self.stats))
            yield counter
        yield from self._by_label(GaugeMetricFamily, _GAUGES_BY)
        yield from self._by_label(CounterMetricFamily, _COUNTERS_BY)
        yield from self._histograms()
        yield self._adapters()

    def _by_label(self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], told: tuple[_ByLabel, ...]) -> Iterator[Metric]:
        for one in told:
            metric = family(f"vllm:{one.name}", one.text, labels=(*LABELS, one.label))
            for value, number in one.read(self.stats):
                metric.add_metric((*self._values, value), number)
            yield metric

    def _histograms(self) -> Iterator[Metric]:
        for name, text, key in _HISTOGRAMS:
            metric = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counts, total = self.stats.histograms.get(key, ((0,) * (len(BOUNDS[key]) + 1), 0.0))
            ends = (*map(floatToGoString, BOUNDS[key]), "+Inf")
            metric.add_metric(self._values, list(zip(ends, accumulate(counts), strict=True)), total)
            yield metric

    def _adapters(self) -> Metric:
        """Of servers with adapters: the time, with their names as labels."""
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that requests use and wait with, and when.", labels=names)
        if slots := self.stats.adapter_slots:
            info.add_metric((str(slots), ",".join(self.stats.adapters_waiting), ",".join(self.stats.adapters_running)), time.time())
        return info
