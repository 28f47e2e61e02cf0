"""Everything an engine is told, typed; the command line is generated from these dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pagoda.hal.errors import ConfigError
from pagoda.serving.engine.params import LogprobsMode
from pagoda.serving.engine.profile_config import ProfilerConfig, profiler_of
from pagoda.serving.engine.spec.config import Speculation, speculation_of
from pagoda.serving.engine.structured import StructuredOutputsConfig, structured_of
from pagoda.serving.engine.transfer.config import Storage, storage_of


@dataclass(frozen=True)
class Flag:
    """Command-line facts of a field: its help text, further names, metavar; `section` opens a part of `--help` with this field."""

    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    section: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Field names are the flags of `vllm serve` with underscores."""

    model: Annotated[str, Flag("Local folder, GGUF file, hub id, or a name from `pagoda list`.", section="Model and device")] = (
        "smollm2-135m-instruct"
    )
    device: Annotated[str, Flag("Backend to run on; `auto` takes the best one here and says why.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        Flag("Dtype of weights and activations; `auto` follows the checkpoint and the device."),
    ] = "auto"
    kv_cache_dtype: Annotated[str, Flag("Dtype of the KV cache; `auto` is the model's, `int8` and `fp8` half of bfloat16's bytes.")] = (
        "auto"
    )
    load_format: Annotated[Literal["auto", "safetensors", "gguf", "dummy"], Flag("Where weights come from; `dummy` draws random ones.")] = (
        "auto"
    )
    quantization: Annotated[str | None, Flag("Weight format; found from the checkpoint when not given.", ("-q",))] = None
    use_tqdm_on_load: Annotated[bool, Flag("Show how far the loading of weights is.")] = True
    download_dir: Annotated[str | None, Flag("Folder that hub models are fetched into, instead of the hub's own cache.")] = None
    revision: Annotated[str | None, Flag("Branch, tag or commit of a hub model.")] = None
    tokenizer: Annotated[str | None, Flag("Folder or hub id of the tokenizer, when not the model's own.")] = None
    skip_tokenizer_init: Annotated[bool, Flag("Work with token ids alone; texts and chats are refused.")] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Flag("How the model answers: with tokens, or with vectors and scores; `auto` follows the checkpoint."),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"], Flag("Make a model of vectors, or of scores, of one that generates.")
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | None,
        Flag(
            "JSON: how hidden states are pooled, where the checkpoint does not say; `pooling_type` (CLS, LAST, MEAN, ALL, STEP),"
            " `normalize`, `use_activation`, `step_tag_id`, `returned_token_ids`.",
            metavar="JSON",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, Flag("Longest prompt plus output, in tokens; by default what the model and the memory allow.", section="Capacity")
    ] = None
    max_num_seqs: Annotated[int, Flag("Most requests that run at the same time.")] = 256
    max_num_batched_tokens: Annotated[int, Flag("Token budget of one step.")] = 2048
    block_size: Annotated[int | None, Flag("Tokens per KV page; the device's choice when not given.")] = None
    device_memory_utilization: Annotated[
        float, Flag("Share of the device's memory that this engine may use.", ("--gpu-memory-utilization",))
    ] = 0.9
    kv_cache_memory_bytes: Annotated[int | None, Flag("Size of the KV pool in bytes, instead of all that is left.")] = None
    num_gpu_blocks_override: Annotated[int | None, Flag("Number of KV pages, instead of what fits.")] = None
    enable_prefix_caching: Annotated[bool, Flag("Reuse the pages of earlier requests with the same beginning.", section="Scheduling")] = (
        True
    )
    enable_chunked_prefill: Annotated[bool, Flag("Split long prompts over steps, so that they do not stall others.")] = True
    long_prefill_token_threshold: Annotated[int, Flag("Most tokens of one prompt in a step; 0 is no limit.")] = 0
    kv_offloading_size: Annotated[float | None, Flag("GiB of host memory that keep KV pages which leave the pool.", metavar="GIB")] = None
    kv_transfer_config: Annotated[
        dict[str, Any] | None,
        Flag(
            "JSON: a store of KV pages beside the pool; `kv_connector` is OffloadingConnector (host memory) or ExampleConnector (files),"
            " with `kv_connector_extra_config`.",
            metavar="JSON",
        ),
    ] = None
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Flag("Order of waiting requests.")] = "fcfs"
    async_scheduling: Annotated[bool, Flag("Plan the next step while the device runs this one.")] = True
    speculative_config: Annotated[
        dict[str, Any] | None,
        Flag(
            "JSON: draft tokens that the model then verifies, which changes no answer; `method` is ngram or mtp, with"
            " `num_speculative_tokens`, `prompt_lookup_max`, `prompt_lookup_min`.",
            ("-sc",),
            metavar="JSON",
        ),
    ] = None
    spec_method: Annotated[str | None, Flag("`method` of --speculative-config, by itself.")] = None
    spec_tokens: Annotated[int | None, Flag("`num_speculative_tokens` of --speculative-config, by itself.")] = None
    structured_outputs_config: Annotated[
        dict[str, Any] | None,
        Flag(
            "JSON: what follows grammars; `backend` is auto, xgrammar or guidance, with `disable_any_whitespace`,"
            " `disable_additional_properties`, `enable_in_reasoning`.",
            metavar="JSON",
        ),
    ] = None
    tensor_parallel_size: Annotated[int, Flag("Ranks that each layer is split over.", ("-tp",), section="Execution")] = 1
    disable_custom_all_reduce: Annotated[
        bool,
        Flag("Sum over ranks by the vendor's library alone, and not what is small in one kernel in each other's memory."),
    ] = False
    enable_prompt_embeds: Annotated[bool, Flag("Take prompts that are rows of embeddings: `prompt_embeds` of completions and the SDK.")] = (
        False
    )
    seed: Annotated[int, Flag("Seed of dummy weights and of requests that bring none.")] = 0
    kernel: Annotated[
        dict[str, str], Flag("Force a kernel, as in `--kernel paged_attention=reference`; repeatable.", metavar="OP=NAME")
    ] = field(default_factory=dict)
    strict_kernels: Annotated[bool, Flag("Falling back to a reference kernel is an error.")] = False
    kernel_log: Annotated[
        Literal["off", "calls", "statistics", "nan"],
        Flag("Log every kernel call with its shapes; also statistics of results; or stop where NaN is made. Slow, but for `off`."),
    ] = "off"
    profiler_config: Annotated[
        dict[str, Any] | None,
        Flag(
            "JSON: serve /start_profile and /stop_profile, which trace steps into files of the folder `torch_profiler_dir`; also"
            " `torch_profiler_record_shapes`, `_with_memory`, `_with_stack`, `_use_gzip`.",
            metavar="JSON",
        ),
    ] = None
    graphs: Annotated[
        Literal["full", "piecewise", "none"],
        Flag("How steps are made replayable: whole, in pieces around attention, or not at all, which starts sooner and runs slower."),
    ] = "full"
    torch_compile: Annotated[
        bool, Flag("Compile the layers of a model that runs through transformers: fewer kernels a step, and ten seconds more to start.")
    ] = False
    logprobs_mode: Annotated[
        LogprobsMode,
        Flag(
            "Logprobs of tokens are of the model's own logits, or of those after biases, penalties, temperature and filters; or these"
            " logits stand in their place."
        ),
    ] = "raw_logprobs"
    batch_invariant: Annotated[
        bool, Flag("Only kernels whose results do not depend on the batch: a request's answer is the same to the bit in any company.")
    ] = False
    model_impl: Annotated[
        Literal["auto", "pagoda", "vllm", "transformers"],
        Flag("Who runs the model: a family here (`pagoda`; `vllm` means the same), transformers' module on our pages, or what there is."),
    ] = "auto"
    trust_remote_code: Annotated[bool, Flag("Accepted, without effect: no code of a checkpoint is ever run.")] = False
    hf_overrides: Annotated[dict[str, Any], Flag("JSON of config.json keys to replace.", metavar="JSON")] = field(default_factory=dict)
    disable_log_stats: Annotated[bool, Flag("Do not log throughput every ten seconds.")] = False
    enable_lora: Annotated[bool, Flag("Make room for LoRA adapters; requests name one as their model.", section="Adapters")] = False
    lora_modules: Annotated[
        tuple[str, ...], Flag("Adapters to load at start: name=FOLDER, or JSON with name, path, base_model_name.", metavar="NAME=PATH")
    ] = ()
    max_loras: Annotated[int, Flag("Most adapters on the device at a time, so in one step.")] = 1
    max_lora_rank: Annotated[int, Flag("Largest rank of an adapter.")] = 16
    max_cpu_loras: Annotated[
        int | None, Flag("Most adapters kept in host memory; others are read again when needed. No limit by default.")
    ] = None

    @property
    def speculation(self) -> Speculation | None:
        """What `speculative_config` asks for."""
        return speculation_of(self.speculative_config)

    @property
    def profiling(self) -> ProfilerConfig | None:
        """What `profiler_config` asks for."""
        return profiler_of(self.profiler_config)

    @property
    def structured(self) -> StructuredOutputsConfig:
        """What `structured_outputs_config` asks for."""
        return structured_of(self.structured_outputs_config)

    @property
    def storage(self) -> Storage | None:
        """What `kv_transfer_config` or `kv_offloading_size` asks for."""
        return storage_of(self.kv_transfer_config, self.kv_offloading_size, prefix_caching=self.enable_prefix_caching)

    def __post_init__(self) -> None:
        storage_of(self.kv_transfer_config, self.kv_offloading_size, prefix_caching=self.enable_prefix_caching)
        object.__setattr__(self, "dtype", {"half": "float16", "float": "float32"}.get(self.dtype, self.dtype))
        self._join_speculation()
        structured_of(self.structured_outputs_config)
        profiler_of(self.profiler_config)
        if not 0 < self.device_memory_utilization <= 1:
            raise ConfigError(f"device_memory_utilization={self.device_memory_utilization} must be above 0 and at most 1")
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "max_loras", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_model_len", "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        self._check_adapters()
        if self.batch_invariant and self.tensor_parallel_size > 2:
            raise ConfigError(
                f"batch_invariant with tensor_parallel_size={self.tensor_parallel_size}: the order in which more than two ranks are"
                " added up follows the size of a step; take at most two ranks, or leave batch_invariant out"
            )
        if not self.enable_chunked_prefill and self.max_model_len and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens={self.max_num_batched_tokens} must reach"
                f" max_model_len={self.max_model_len}"
            )

    def _join_speculation(self) -> None:
        alone = {"method": self.spec_method, "num_speculative_tokens": self.spec_tokens}
        if given := {name: value for name, value in alone.items() if value is not None}:
            object.__setattr__(self, "speculative_config", {**(self.speculative_config or {}), **given})
        speculation_of(self.speculative_config)

    def _check_adapters(self) -> None:
        object.__setattr__(self, "lora_modules", tuple(self.lora_modules))
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora, which makes room for adapters")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}")
