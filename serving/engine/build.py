"""From an `EngineConfig` to a running engine: device, kernels, model, pool, scheduler and executor, in this order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.device import Device
from pagoda.hal.errors import PagodaError
from pagoda.hal.info import Feature
from pagoda.hal.kv import CacheGroup
from pagoda.hal.stream import Stream
from pagoda.hal.table import KernelTable
from pagoda.models.adapters.peft import read_adapter
from pagoda.models.load import Description, load_model
from pagoda.models.model import Model
from pagoda.serving.engine.adapter_store import AdapterStore
from pagoda.serving.engine.adapters import LoadedAdapter, modules_of
from pagoda.serving.engine.compiled import compiled, to_compile
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import EngineCore, Sink
from pagoda.serving.engine.executor import Executor
from pagoda.serving.engine.executors.inprocess import InProcessExecutor
from pagoda.serving.engine.executors.multiproc import MultiprocExecutor
from pagoda.serving.engine.inprocess_client import Engine, EngineStarter
from pagoda.serving.engine.loading import loading_progress
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.plan import RunnerFacts
from pagoda.serving.engine.pooling import PoolingFacts
from pagoda.serving.engine.pooling_runner import PoolingRunner
from pagoda.serving.engine.profile_desk import ProfileDesk
from pagoda.serving.engine.runner import Runner, RunnerLimits
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.sizing import describe_model, embeds_width, in_whole_steps, media_of, media_rows, size
from pagoda.serving.engine.spec.ahead import open_drafter
from pagoda.serving.engine.target import Target, open_target, ranks
from pagoda.serving.engine.transfer.make import StoreSpec, files_of, identity_of, make_connector, make_shelf
from pagoda.serving.engine.transfer.shelves import Shelf
from pagoda.serving.engine.transfer.store import StoreConnector

log = logging.getLogger("pagoda.engine")


def engine_starter(config: EngineConfig) -> EngineStarter:
    """What both clients take: `await InProcessClient.start(engine_starter(config))`, or the same with `ZmqClient`."""
    return partial(start_engine, config)


def start_engine(config: EngineConfig, sink: Sink) -> Engine:
    """Load the model on all ranks; the loop is ready to `run`. Raises the `PagodaError` of whatever cannot work."""
    drafter = open_drafter(config)
    builder, world = partial(build_runner, config), ranks(config)
    executor = InProcessExecutor(builder) if world == 1 else MultiprocExecutor(builder, world)
    facts = executor.start()
    try:
        connector = _connector(config, facts, executor)
        scheduler = Scheduler(SchedulerConfig.of(config, facts), facts, connector, drafter)
        core = EngineCore(scheduler, executor, facts, sink, config.max_cpu_loras)
        core.controls |= ProfileDesk(executor, config.profiling).controls
        if connector is not None:
            connector.wake = core.wake
    except BaseException:
        executor.stop()
        raise
    if isinstance(executor, MultiprocExecutor):
        executor.on_failure = core.rank_failed
    return Engine(core, executor)


def _connector(config: EngineConfig, facts: RunnerFacts, executor: Executor) -> StoreConnector | None:
    spec = _store(config, facts.groups)

    def post(method: str, *, aside: bool = False, **arguments: Any) -> Sequence[Future[Any]]:
        return executor.post("store", aside=aside, action=method, **arguments)

    return make_connector(spec, post) if spec is not None else None


def _store(config: EngineConfig, groups: tuple[CacheGroup, ...]) -> StoreSpec | None:
    if config.storage is None:
        return None
    asked = [getattr(config, name) for name in ("load_format", "dtype", "kv_cache_dtype", "quantization", "seed", "hf_overrides", "kernel")]
    identity = identity_of(files_of(Path(config.model)), asked, config.device, groups)
    return StoreSpec(config.storage, groups, identity, ranks(config))


def build_runner(config: EngineConfig, topology: Topology, target: Target | None = None) -> Runner:
    """Load one rank, on the device that the configuration names or on one that was opened before."""
    began = time.perf_counter()
    target = target or open_target(config, topology.rank)
    if target.sharing > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // target.sharing))
    device, description = target.device, describe_model(config, target, topology.rank)
    if config.torch_compile:
        config = to_compile(config, description, topology.world, device)
    config = in_whole_steps(config, description)
    topology = replace(topology, direct=not config.disable_custom_all_reduce)
    communicator = device.communicator(topology) if topology.world > 1 else None  # first, since it takes memory
    sizes, facts = size(config, target, description), description.facts
    store, adapters = _adapters(config, description)
    num_pages = _smallest(communicator, device, sizes.num_pages)
    max_model_len = _smallest(communicator, device, sizes.max_model_len)
    planned = time.perf_counter()
    load: Callable[..., Model] = partial(load_model, sizes.description, device, target.table, communicator, config.seed)
    if config.torch_compile:
        load = partial(compiled, load)
    model = _told(load, config.use_tqdm_on_load) if topology.rank == 0 else load()
    loaded = time.perf_counter()
    pages = Pages(device, sizes.groups, num_pages, len(facts.caches))
    pages.bind(model)
    device.memory.trim()  # what loading needed beside the weights
    _check_weights(model.loaded.nbytes, facts.weight_bytes)
    told = _facts(config, target, sizes.groups, pages, model, max_model_len)
    runner_facts = replace(told, adapters=adapters, embeds_width=embeds_width(config, description))
    limits = RunnerLimits(config.max_num_seqs, config.max_num_batched_tokens, max_model_len, runner_facts.overlap)
    shelf = _shelf(config, pages, topology.rank)
    kind = Runner if facts.pooler is None else PoolingRunner
    runner = kind(
        device, target.table, model, pages, runner_facts, limits, load, communicator, store, shelf, config.graphs, config.logprobs_mode
    )
    runner.warm_up()
    ended = time.perf_counter()
    seconds = {"device and plan": planned - began, "weights": loaded - planned, "buffers and warm-up": ended - loaded}
    runner.facts = replace(runner.facts, load_seconds=seconds)
    log.info("rank %d loaded %s on %s in %.1f s", topology.rank, facts.architecture, device.info.model, ended - began)
    return runner


def _adapters(config: EngineConfig, description: Description) -> tuple[AdapterStore | None, tuple[LoadedAdapter, ...]]:
    """The rank's store, with the adapters of the configuration read and checked: before the weights, which take longer."""
    if description.lora is None:
        return None, ()
    store, loaded = AdapterStore(partial(read_adapter, description=description)), []
    for number, module in enumerate(modules_of(config.lora_modules)):
        read = store.load(number, module.path)
        if isinstance(read, PagodaError):
            raise read
        loaded.append(LoadedAdapter(module, number, *read))
    return store, tuple(loaded)


def _shelf(config: EngineConfig, pages: Pages, rank: int) -> Callable[[Stream], Shelf] | None:
    spec, pool = _store(config, pages.groups), pages.pool
    if spec is None or pool is None:
        return None
    return lambda stream: make_shelf(spec, pages.device, stream, pool.view(len(pool), -1), rank)


def _told(load: Callable[..., Model], shown: bool) -> Model:
    loading = loading_progress(shown)
    try:
        return load(progress=loading)
    finally:
        loading.end()


def _smallest(communicator: Communicator | None, device: Device, number: int) -> int:
    if communicator is None:
        return number
    return -int(communicator.all_reduce(torch.tensor([-number], device=device.torch_device), "max").item())


def _check_weights(used: int, planned: int) -> None:
    if abs(used - planned) > planned / 100:
        log.warning("weights take %d bytes, %d were planned; please report this model", used, planned)


def _facts(
    config: EngineConfig, target: Target, groups: tuple[CacheGroup, ...], pages: Pages, model: Model, max_model_len: int
) -> RunnerFacts:
    return RunnerFacts(
        groups=groups,
        num_pages=pages.num_pages,
        max_model_len=max_model_len,
        vocab_size=model.facts.vocab_size,
        device=target.info.model,
        overlap=2 if config.async_scheduling else 1,
        weight_bytes=model.loaded.nbytes,
        kv_bytes=pages.nbytes,
        kernels=kernel_names(target.table),
        adapter_slots=config.max_loras if config.enable_lora else 0,
        in_calls=Feature.IN_CALLS in target.info.features,
        length_epochs=model.facts.length_epochs,
        pooling=_pooling(model),
        whole_prompts=model.facts.whole_prompts,
        media=media_of(config, model.facts),
        media_rows=media_rows(config, model.facts),
        encoder=model.facts.encoder,
        logprobs=config.logprobs_mode,
    )


def _pooling(model: Model) -> PoolingFacts | None:
    pooler = model.facts.pooler
    return PoolingFacts(pooler, pooler.outputs(model.facts.width)) if pooler is not None else None


def kernel_names(table: KernelTable) -> dict[str, str]:
    """op → the names of the kernels that its uses got."""
    names: dict[str, list[str]] = {}
    for choice in table.explain():
        chosen = names.setdefault(choice.op, [])
        if choice.chosen.name not in chosen:
            chosen.append(choice.chosen.name)
    return {op: ", ".join(chosen) for op, chosen in sorted(names.items())}
