"""A tiny deterministic model for tests of the engine: two attention layers (all tokens; a sliding window) over paged KV, by the
primitives' references, and the same numbers from a dense forward over the whole sequence in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.hal.comm import Topology
from pagoda.hal.device import Device
from pagoda.hal.discovery import find
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.info import Feature
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache, LayerPages
from pagoda.hal.table import KernelTable
from pagoda.models.model import ModelFacts, ModelInputs, ModelOutput
from pagoda.ops.attention import AttentionFacts, PagedAttentionReference, PagedBatch, WriteKvReference
from pagoda.ops.references import reference_kernels
from pagoda.ops.table import kernel_table
from pagoda.serving.engine.core import EngineCore, Sink
from pagoda.serving.engine.executors.inprocess import InProcessExecutor
from pagoda.serving.engine.executors.multiproc import MultiprocExecutor
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts
from pagoda.serving.engine.runner import Runner, RunnerLimits
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.spec.drafter import Drafter

VOCAB, WIDTH, HEADS, DIM, WINDOW, EOS = 97, 24, 3, 8, 6, 1
SIZES = (1, 2, 4, 8, 16)
PROMPT_SIZES = (8, 16, 32, 64, 256)


class ToyModel:
    """See `Model`. `poison`: token whose row of logits is NaN wherever it is the input."""

    def __init__(self, dtype: torch.dtype = torch.float32, poison: int | None = None, device: torch.device | None = None) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device or torch.device("cpu"), dtype)

        self.dtype, self.poison = dtype, poison
        self.embed = draw(VOCAB, WIDTH) * 4
        self.place = draw(512, WIDTH)
        self.layers = [{name: draw(HEADS * DIM, WIDTH) for name in ("q", "k", "v")} | {"o": draw(WIDTH, HEADS * DIM)} for _ in range(2)]
        self.head = draw(VOCAB, WIDTH) * 3
        name = str(dtype).removeprefix("torch.")
        full = LayerCache(CacheKind.FULL, HEADS, DIM, DIM, name)
        sliding = LayerCache(CacheKind.SLIDING, HEADS, DIM, DIM, name, window=WINDOW)
        weights = sum(tensor.nbytes for layer in self.layers for tensor in layer.values())
        self.facts = ModelFacts("Toy", VOCAB, WIDTH, 512, (full, sliding), weights, 4 * WIDTH * 4, (EOS,))
        self.forwards = 0

    def page_sizes(self) -> tuple[int, ...]:
        return (4,)

    def bind(self, pages: Sequence[LayerPages | None], group_of_layer: Sequence[int], page_sizes: Sequence[int]) -> None:
        self.pages = list(pages)
        self.group_of_layer = list(group_of_layer)
        self.attend: list[Any] = []
        for layer, window in enumerate((None, WINDOW)):
            size = page_sizes[group_of_layer[layer]]
            name = str(self.dtype).removeprefix("torch.")
            facts = AttentionFacts(name, name, HEADS, HEADS, DIM, DIM, size, DIM**-0.5, window=window)
            self.attend.append((WriteKvReference(facts), PagedAttentionReference(facts)))

    def plan(self, groups: tuple[PagedBatch, ...], buffers: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        return (None,) * len(groups)

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        self.forwards += 1
        x = self.embed[inputs.token_ids] + self.place[inputs.positions]
        states = []
        for index, layer in enumerate(self.layers):
            q, k, v = (torch.nn.functional.linear(x, layer[name]).unflatten(-1, (HEADS, DIM)) for name in "qkv")
            pages, batch = self.pages[index], inputs.groups[self.group_of_layer[index]]
            assert pages is not None
            write, attend = self.attend[index]
            write.run(k, v, pages.k, pages.v, batch.slots)
            x = x + torch.nn.functional.linear(attend.run(q, pages.k, pages.v, batch).flatten(1), layer["o"])
            states.append(x)
        if self.poison is not None:
            x = torch.where((inputs.token_ids == self.poison)[:, None], torch.full_like(x, float("nan")), x)
        return ModelOutput(x, tuple(states[index] for index in inputs.taps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), self.head.float())


def dense_logits(model: ToyModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token of one sequence, `[T, VOCAB]`, without a cache: the oracle."""
    return (dense_states(model, tokens)[-1] @ model.head.to(torch.float64).T).float()


def dense_states(model: ToyModel, tokens: Sequence[int]) -> torch.Tensor:
    """Hidden states after each layer, `[2, T, WIDTH]` float64."""
    ids, wide = torch.tensor(tokens), torch.float64
    at = torch.arange(len(tokens))
    x = (model.embed[ids] + model.place[at]).to(wide)
    states = []
    for index, layer in enumerate(model.layers):
        q, k, v = ((x @ layer[name].to(wide).T).unflatten(-1, (HEADS, DIM)) for name in "qkv")
        scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        behind = at[:, None] - at[None, :]
        hidden = (behind < 0) | (behind >= (WINDOW if index else 10**6))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ layer["o"].to(wide).T
        states.append(x)
    return torch.stack(states)


def dense_greedy(model: ToyModel, prompt: Sequence[int], count: int) -> list[int]:
    """The oracle's `count` greedy tokens after the prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def toy_groups(model: ToyModel, device: Device) -> tuple[CacheGroup, ...]:
    """One group a layer, four tokens a page."""
    sizes = [device.kv_layout(_group(model, layer, 0)).page_bytes for layer in range(2)]
    return tuple(_group(model, layer, max(sizes)) for layer in range(2))


def _group(model: ToyModel, layer: int, page_bytes: int) -> CacheGroup:
    cache = model.facts.caches[layer]
    assert cache is not None
    return CacheGroup(cache.kind, (layer,), (cache,), 4, page_bytes, cache.window)


def toy_table(device: Device) -> KernelTable:
    return KernelTable(device.info, reference_kernels())


def toy_runner(
    topology: Topology,
    device: str = "reference",
    dtype: str = "float32",
    num_pages: int = 600,
    max_num_seqs: int = 16,
    poison: int | None = None,
    overlap: int = 2,
    burst: int = 0,
    shared: bool = False,
    warm: bool = False,
    tuned: bool = False,
) -> Runner:
    """A runner of the toy model; a partial of it is a `RunnerBuilder`. `burst`: with captured steps, and bursts of so many; `warm`: some
    of them before the first request; `tuned`: samples by the device's own kernels."""
    opened = find(device).open()
    if burst:
        prompts = {"prompt_tokens": PROMPT_SIZES, "prompt_rows": (4, 16)}
        opened.graphs = EagerGraphs(GraphPolicy("captured", SIZES, SIZES, burst=burst, shared=shared, **prompts))
    model = ToyModel(getattr(torch, dtype), poison, opened.torch_device)
    groups = toy_groups(model, opened)
    pages = Pages(opened, groups, num_pages, 2)
    pages.bind(model)
    timely = Feature.IN_CALLS in opened.info.features
    facts = RunnerFacts(groups, num_pages, 256, VOCAB, opened.info.model, overlap, kv_bytes=pages.nbytes, trees=True, in_calls=timely)
    table = kernel_table(find(device), opened.info) if tuned else toy_table(opened)
    runner = Runner(opened, table, model, pages, facts, RunnerLimits(max_num_seqs, 256, 256, overlap))
    if warm:
        runner.warm_up()
    return runner


def toy_engine(
    sink: Sink, world: int = 0, max_num_seqs: int = 16, budget: int = 64, drafter: Drafter | None = None, **settings: Any
) -> Engine:
    """An engine of the toy model; a partial of it is an `EngineStarter`. `world` 0 runs in this process, else that many ranks."""
    builder = partial(toy_runner, max_num_seqs=max_num_seqs, **settings)
    executor: InProcessExecutor | MultiprocExecutor = MultiprocExecutor(builder, world) if world else InProcessExecutor(builder)
    facts = executor.start()
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget), facts, drafter=drafter)
    core = EngineCore(scheduler, executor, facts, sink)
    if isinstance(executor, MultiprocExecutor):
        executor.on_failure = core.rank_failed
    return Engine(core, executor)


async def ask(client: InProcessClient, request: EngineRequest, n: int = 1) -> list[list[int]]:
    """The tokens of each of the request's `n` sequences."""
    out: list[list[int]] = [[] for _ in range(n)]
    async for delta in client.generate(request):
        for part in delta.sequences:
            out[part.index] += part.token_ids
    return out


def toy_request(name: str, prompt: Sequence[int], max_tokens: int = 8, **params: Any) -> EngineRequest:
    """A greedy request unless `params` say otherwise."""
    settings = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | params
    return EngineRequest(name, tuple(prompt), SamplingParams(**settings), eos_ids=(EOS,))
