"""From a checkpoint to a model: `open_checkpoint` (passed on), `describe` before any weight is read, `load_model`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.device import Device
from pagoda.hal.errors import CheckpointError, ConfigError, KernelError, ModelError
from pagoda.hal.kernel import Facts
from pagoda.hal.table import KernelTable
from pagoda.models.adapters.slots import LoraLimits
from pagoda.models.bridge.kinds import answers_of, bridged_class
from pagoda.models.bridge.load import load_bridged
from pagoda.models.bridge.model import BridgeModel
from pagoda.models.bridge.outline import facts_of, outline
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.bridge.texts import TextModel
from pagoda.models.builder import Builder, Numerics, Parameter, Part
from pagoda.models.checkpoint import apply, check
from pagoda.models.config import Config, sensible
from pagoda.models.conversion import AS_IT_IS, Wanted
from pagoda.models.decoder import Decoder, ropes_in
from pagoda.models.encoder_decoder import built
from pagoda.models.encoding import Cut, EncoderFacts
from pagoda.models.family import Family, LeftToTransformers
from pagoda.models.loading.dummy_source import DummySource
from pagoda.models.loading.open import Checkpoint, open_checkpoint
from pagoda.models.loading.progress import Progress, watched
from pagoda.models.loading.respelled import respelled
from pagoda.models.model import LengthEpochs, ModelFacts
from pagoda.models.parallel.shard import Shard
from pagoda.models.registry import find_family
from pagoda.models.rope import DynamicScaling, LongRopeScaling
from pagoda.models.seeing import Seeing, Text, load_encoder, seeing, text_checkpoint, text_of, under
from pagoda.models.spec import Bidirectional, DecoderSpec, Embed, Encoder
from pagoda.models.weights import WeightSource
from pagoda.models.work import work_bytes
from pagoda.quant.format import Format, StoredTensor
from pagoda.quant.registry import format_for

log = logging.getLogger("pagoda.models")

__all__ = ["Checkpoint", "Description", "describe", "load_model", "open_checkpoint", "page_sizes", "read_spec"]

ModelImpl = Literal["auto", "pagoda", "vllm", "transformers"]
"""Who runs the model, as `--model-impl`: a family here ("pagoda"; "vllm" means the same), transformers' module on our pages, or that where
there is no family."""

COMPUTE = ("bfloat16", "float16", "float32")
"""Dtypes that a model may compute in, the first ones preferred where a checkpoint does not say."""

KV_DTYPES = {name: name for name in (*COMPUTE, "float64", "int8")} | {
    "int8_per_token_head": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
}  # fmt: skip
"""What KV pages may be stored in, by the names that are understood; int8 has a scale for each head of each token, float8 those of the
checkpoint, or none."""


@dataclass(frozen=True)
class Description:
    """All that is known of a model on one rank before its weights are read.

    Attributes:
        facts: what the engine asks. spec: the model as data; a `BridgeSpec`, without a family, where transformers runs it.
        parameters: our tensor names. uses: primitives with their facts.
        stored: the checkpoint's tensors under our names; empty when only the configuration is known.
        lora: room for adapters. adaptable: what they may change, by path.
        sees: what stands before a native language model that sees.
    """

    facts: ModelFacts
    spec: DecoderSpec | BridgeSpec
    family: Family | None
    numerics: Numerics
    shard: Shard
    format: Format
    parameters: Mapping[str, Parameter]
    uses: tuple[tuple[str, Facts], ...]
    stored: Mapping[str, StoredTensor]
    adaptable: Mapping[str, Part]
    lora: LoraLimits | None = None
    sees: Seeing | None = None


@sensible
def describe(
    checkpoint: Checkpoint | Mapping[str, Any],
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    dtypes: Iterable[str] = COMPUTE,
    default: str = COMPUTE[0],
    shard: Shard | None = None,
    quantization: str | None = None,
    table: KernelTable | None = None,
    lora: LoraLimits | None = None,
    wanted: Wanted = AS_IT_IS,
    model_impl: ModelImpl = "auto",
) -> Description:
    """Spec, facts and needs of a model on one rank. Reads names and shapes of the checkpoint's tensors, no weight.

    Args:
        checkpoint: opened, or a bare config.json mapping.
        dtype: a dtype name, or "auto": the checkpoint's if the device has it (`dtypes`), `default` where it does not say.
        kv_dtype: one of `KV_DTYPES`, or "auto": the model's.
        quantization: name of a number format; found from the checkpoint when None.
        lora: room for adapters beside the linear layers.
        wanted: how the model is to be used, where that is not its usual way.
        model_impl: see `ModelImpl`.
        table: kernels of the device; given, every primitive is checked and `ModelError` names all that have no kernel.

    Raises `ModelError` for an unknown architecture or unread keys, `ConfigError` for a split that does not divide,
    `CheckpointError` naming every tensor that does not fit.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(respelled(checkpoint), {}, None, "config")
    shard = shard or Shard()
    computing = _dtype(checkpoint.config, dtype, tuple(dtypes), default)
    numerics = Numerics(computing, _kv_dtype(kv_dtype, computing))
    family = _family(checkpoint.config, wanted, model_impl)
    spec = _spec(family, checkpoint.config, wanted, model_impl) if family is not None else None
    text = text_of(checkpoint.config) if family is None and model_impl != "transformers" and wanted == AS_IT_IS else None
    if text is not None:
        try:
            return _seen(
                checkpoint, text, dtype=computing, kv_dtype=kv_dtype, shard=shard, quantization=quantization, table=table, lora=lora
            )
        except (CheckpointError, ModelError) as error:
            if model_impl != "auto":
                raise
            log.warning("%s: so the language model runs through transformers as well", error)
    if family is None or spec is None:
        _check_bridge(checkpoint, quantization, lora)
        return _bridged(checkpoint, numerics, shard, table, wanted)
    if spec.pooler is None and any(isinstance(layer.mixer, Bidirectional) for layer in spec.layers):
        raise ModelError("this model attends in both directions and cannot generate; run it with --runner pooling")
    if spec.encoder is not None and (spec.pooler is not None or lora is not None):
        raise ConfigError("this model has an encoder beside its decoder: it generates, and has no room for adapters; leave both flags out")
    source = checkpoint.open() if checkpoint.open is not None else None
    format = format_for(checkpoint.config, source.tensors if source else {}, quantization)
    listed = Builder(numerics, Shard(), format_for({}, {}, "none"))
    built(spec, listed)
    stored = _stored(source, family, spec, listed.parameters, format)
    build = Builder(numerics, shard, format, stored, table, lora=lora)
    hollow = built(spec, build)
    if table is not None:
        _check_kernels(build.uses, table)
    facts = _facts(checkpoint, spec, numerics, listed, build, hollow)
    uses = tuple(build.uses)
    return Description(facts, spec, family, numerics, shard, format, build.parameters, uses, stored, build.adaptable, lora)


def _family(config: Mapping[str, Any], wanted: Wanted, model_impl: ModelImpl) -> Family | None:
    """None where transformers is to run the model."""
    if model_impl == "transformers":
        bridged_class(config, answers_of(config, wanted))
        return None
    try:
        return find_family(config, wanted)
    except ModelError as error:
        if model_impl != "auto" and text_of(config) is None:
            raise
        try:
            bridged_class(config, answers_of(config, wanted))
        except ModelError as other:
            raise ModelError(f"{error}; nor can transformers run it: {other}") from None
        return None


def _spec(family: Family, config: Mapping[str, Any], wanted: Wanted, model_impl: ModelImpl) -> DecoderSpec | None:
    """None where the family lacks what a value asks for and transformers has it; a key that nobody reads is an error anyway."""
    reader = Config(config)
    try:
        spec = family.spec(reader)
    except LeftToTransformers as error:
        if model_impl != "auto":
            raise
        log.warning("%s: so the model runs through transformers", error)
        return None
    reader.finish()
    return spec


def support_of(config: Mapping[str, Any]) -> Literal["native", "bridge", "unsupported"]:
    """Who would run a config.json, or its language model: a family, transformers or nobody. Whether the bridge carries what transformers
    has, `describe` says."""
    config = respelled(config)
    try:
        family = _family(config, AS_IT_IS, "auto")
        if family is None and text_of(config) is not None:
            return "bridge" if describe(config).family is None else "native"
        return "bridge" if family is None or _spec(family, config, AS_IT_IS, "auto") is None else "native"
    except ModelError:
        return "unsupported"


def _check_bridge(checkpoint: Checkpoint, quantization: str | None, lora: LoraLimits | None) -> None:
    name = f"{_architecture(checkpoint)}, which runs through transformers,"
    if lora is not None:
        raise ConfigError(f"{name} has no room for adapters; leave out enable_lora, or merge the adapter into its model")
    if quantization not in (None, "none") or checkpoint.config.get("quantization_config"):
        raise ConfigError(f"{name} is served from plain weights only; give a checkpoint that is not quantised")


def _seen(checkpoint: Checkpoint, text: Text, dtype: str, **options: Any) -> Description:
    """The language model's description with what stands before it; `options` of `describe`."""
    sees = seeing(checkpoint, text, dtype)
    own = describe(text_checkpoint(checkpoint, text, sees.tied), dtype=dtype, model_impl="pagoda", **options)
    assert isinstance(own.spec, DecoderSpec)
    facts = replace(
        own.facts,
        architecture=_architecture(checkpoint),
        weight_bytes=own.facts.weight_bytes + sees.nbytes,
        eos_ids=_eos(checkpoint) or own.facts.eos_ids,
        media=sees.media,
    )
    return replace(own, spec=under(sees, own.spec), facts=facts, sees=sees)


def _bridged(checkpoint: Checkpoint, numerics: Numerics, shard: Shard, table: KernelTable | None, wanted: Wanted) -> Description:
    spec, module = outline(checkpoint.config, numerics.dtype, wanted, shard)
    source = checkpoint.open() if checkpoint.open is not None else None
    stored: Mapping[str, StoredTensor] = dict(source.tensors) if source is not None else {}
    packed = [name for name, tensor in stored.items() if not hasattr(torch, tensor.dtype)]
    if packed:
        raise ModelError(f"{_architecture(checkpoint)} runs through transformers, which cannot read {packed[0]} in blocks; use safetensors")
    format = format_for({}, {}, "none")
    build = Builder(numerics, shard, format, {}, table)
    BridgeModel(spec, build)
    if table is not None:
        _check_kernels(build.uses, table)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    saved = module.state_dict().keys()
    parameters = {name: Parameter(name, tuple(tensor.shape), "replicated") for name, tensor in tensors.items() if name in saved}
    facts = facts_of(spec, module, _architecture(checkpoint), numerics, _eos(checkpoint), wanted)
    if facts.encoder is not None:
        facts = replace(facts, encoder=replace(facts.encoder, start=_start(checkpoint)))
    return Description(facts, spec, None, numerics, shard, format, parameters, tuple(build.uses), stored, {})


def page_sizes(description: Description, table: KernelTable) -> tuple[int, ...]:
    """Tokens per page that every layer's attention kernel allows, in the device's order. Raises `ModelError` where none fits all."""
    build = Builder(description.numerics, description.shard, description.format, description.stored, table, lora=description.lora)
    if isinstance(description.spec, BridgeSpec):
        model = BridgeModel(description.spec, build) if description.spec.way == "paged" else TextModel(description.spec, table)
        return model.page_sizes()
    return built(description.spec, build, description.facts).page_sizes()


def read_spec(family: Family, config: Mapping[str, Any]) -> DecoderSpec:
    """The family's reading of a configuration. Raises `ModelError` naming keys that nobody read."""
    reader = Config(config)
    spec = family.spec(reader)
    reader.finish()
    return spec


def load_model(
    description: Description,
    device: Device,
    table: KernelTable,
    communicator: Communicator | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Decoder | BridgeModel | TextModel:
    """Read, pack and place the weights of one rank. Without stored tensors the weights are random numbers drawn from `seed`.

    Args:
        communicator: of the tensor-parallel group; None for one rank.
        progress: told of every read.

    Raises `CheckpointError` for damaged files, `CapacityError` when the device is too small.
    """
    stored: Mapping[str, StoredTensor] = description.stored
    if not stored:
        shapes = ((p.path, p.shape, description.numerics.dtype) for p in description.parameters.values())
        stored = DummySource(shapes, seed).tensors
    if progress is not None:
        stored = watched(stored, progress)
    if description.shard.world == 1:
        communicator = None
    if isinstance(description.spec, BridgeSpec):
        build = Builder(description.numerics, description.shard, description.format, {}, table, communicator=communicator)
        return load_bridged(description.spec, description.facts, build, device, stored)
    build = Builder(description.numerics, description.shard, description.format, stored, table, device, communicator, description.lora)
    model = built(description.spec, build, description.facts)
    if description.sees is not None:
        model.encoder = load_encoder(description.sees, description.numerics.dtype, device, model.loaded, seed)
    return model


def _dtype(config: Mapping[str, Any], asked: str, available: tuple[str, ...], default: str) -> str:
    if asked != "auto":
        return asked
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    fitting = [name for name in (stored, default, *COMPUTE) if name in COMPUTE and name in available]
    return fitting[0] if fitting else "float32"


def _kv_dtype(asked: str, computing: str) -> str:
    if asked != "auto" and asked not in KV_DTYPES:
        raise ConfigError(f"a KV cache of {asked} was asked for; there are auto, {', '.join(KV_DTYPES)}; int8 and fp8 are the smallest")
    return KV_DTYPES.get(asked, computing)


_UNREAD = re.compile(r"(^|\.)mtp[._]|rotary_emb\.\w*inv_freq$|coder\.version$")
"""What no model reads: layers that predict several tokens (`models.ahead` reads those itself), tables of rotations, counts of versions."""


def _stored(
    source: WeightSource | None, family: Family, spec: DecoderSpec, parameters: Mapping[str, Parameter], format: Format
) -> Mapping[str, StoredTensor]:
    if source is None:
        return {}
    read = {name: tensor for name, tensor in source.tensors.items() if not _UNREAD.search(name)}
    stored = apply(family.rules(spec), read) if source.naming == "hf" else dict(source.tensors)
    check(stored, parameters, format)
    return stored


def _check_kernels(uses: Iterable[tuple[str, Facts]], table: KernelTable) -> None:
    lacking = []
    for op, facts in dict.fromkeys(uses):
        try:
            table.choose(op, facts)
        except KernelError as error:
            lacking.append(str(error))
    if lacking:
        raise ModelError("the device cannot run this model: " + "; ".join(lacking))


def _facts(checkpoint: Checkpoint, spec: DecoderSpec, numerics: Numerics, listed: Builder, build: Builder, hollow: Decoder) -> ModelFacts:
    return ModelFacts(
        architecture=_architecture(checkpoint),
        vocab_size=spec.vocab,
        width=spec.width,
        max_positions=spec.max_positions,
        caches=hollow.caches,
        weight_bytes=build.nbytes,
        work_bytes_per_token=work_bytes(spec, build),
        eos_ids=_eos(checkpoint),
        parameters=sum(prod(parameter.shape) for parameter in listed.parameters.values()),
        length_epochs=_length_epochs(spec),
        tasks=spec.pooler.tasks if spec.pooler is not None else ("generate",),
        pooler=spec.pooler,
        whole_prompts=any(isinstance(layer.mixer, Bidirectional) for layer in spec.layers),
        types=spec.embed.types,
        dtype=build.numerics.dtype,
        encoder=_encoder(checkpoint, spec.encoder),
    )


def _encoder(checkpoint: Checkpoint, spec: Encoder | None) -> EncoderFacts | None:
    if spec is None:
        return None
    start = _start(checkpoint)
    if isinstance(spec.entry, Embed):
        return EncoderFacts("text", spec.longest, vocab=spec.vocab, start=start)
    cuts = tuple(Cut(conv.kernel, conv.stride, conv.padding) for conv in spec.entry.convs)
    kind: Literal["frames", "samples"] = "frames" if spec.entry.bins else "samples"
    return EncoderFacts(kind, spec.longest, bins=spec.entry.bins, cuts=cuts, start=start, log_mel=spec.entry.log_mel)


def _start(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids that a decoder's text begins with."""
    first = _ids(checkpoint, "decoder_start_token_id") or _ids(checkpoint, "bos_token_id")
    return first[:1] + _ids(checkpoint, "forced_bos_token_id")[:1]


def _architecture(checkpoint: Checkpoint) -> str:
    names = checkpoint.config.get("architectures") or (checkpoint.config.get("model_type", ""),)
    return str(names[0])


def _length_epochs(spec: DecoderSpec) -> LengthEpochs | None:
    scalings = [rope.scaling for rope in ropes_in(spec.layers) if isinstance(rope.scaling, DynamicScaling | LongRopeScaling)]
    if not scalings:
        return None
    return LengthEpochs(min(scaling.original for scaling in scalings), any(isinstance(s, DynamicScaling) for s in scalings))


def _eos(checkpoint: Checkpoint) -> tuple[int, ...]:
    return _ids(checkpoint, "eos_token_id")


def _ids(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    found: list[int] = []
    for config in (checkpoint.generation_config, checkpoint.config):
        value = config.get(name)
        found += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
    return tuple(dict.fromkeys(found))
