"""Flags of `vllm serve` that are not Pagoda's own: accepted where they ask for what Pagoda does anyway, else refused with what to do.

A flag that becomes an option of ours wins over its line here, and docs/migrate.md, made from both, changes with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagoda.hal.errors import ConfigError


@dataclass(frozen=True)
class Foreign:
    """One flag of the peer.

    names: all its spellings, without the `--no-` form. switch: it takes no value.
    same: values that ask for what Pagoda does anyway, so that they are accepted; for a switch "on" and "off"; "*" is any.
    instead: what to do here when another value is given; None: there is nothing like it in this release.
    stands: values in small letters that stand for a value of an option of ours: its field, and that value. plain: of a value as it was
        given, the word that is looked up.
    """

    names: tuple[str, ...]
    switch: bool
    same: tuple[str, ...]
    instead: str | None
    stands: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    plain: Callable[[str], str] = str.lower

    def read(self, flag: str, value: str) -> tuple[str, Any] | None:
        """The option of ours that `value` stands for, if any. Raises `ConfigError` unless it does, or asks for what Pagoda does anyway."""
        if "*" in self.same or value.lower() in self.same:
            return None
        if (word := self.plain(value)) in self.stands:
            return self.stands[word]
        asked = flag if self.switch else f"{flag} {value}"
        what = self.instead or "there is nothing like it in this release; leave it out"
        also = f" (accepted: {', '.join(self.same)})" if self.same and not self.switch else ""
        raise ConfigError(f"{asked} is a flag of `vllm serve`, not of Pagoda{also}: {what}")


def foreign(own: Collection[str]) -> tuple[Foreign, ...]:
    """The peer's flags without those that are among `own` spellings."""
    left = ((flag, tuple(name for name in flag.names if name not in own)) for flag in FLAGS)
    return tuple(replace(flag, names=names) for flag, names in left if names)


def _switch(names: str, same: str = "off", instead: str | None = None) -> Foreign:
    return Foreign(tuple(names.split()), True, tuple(same.split()), instead)


def _value(names: str, same: str = "", instead: str | None = None) -> Foreign:
    return Foreign(tuple(names.split()), False, tuple(same.split()), instead)


def _graph_mode(text: str) -> str:
    """The mode in a compilation configuration that has nothing else."""
    try:
        given = json.loads(text)
    except ValueError:
        return text
    return str(given["cudagraph_mode"]).lower() if isinstance(given, dict) and set(given) == {"cudagraph_mode"} else text


_KERNEL = "name a kernel with --kernel OP=NAME; `pagoda devices --kernels` lists them with the reason for each choice"
_GRAPHS = (
    "--graphs full, piecewise or none says what is captured of a step; --torch-compile compiles models that run through transformers;"
    " --kernel and --strict-kernels choose kernels"
)
_SIZES = "sizes are the device's own; --graphs none captures nothing"
_MODES = {"full": "full", "full_and_piecewise": "full", "full_decode_only": "full", "piecewise": "piecewise", "none": "none"}
_GRAPH_MODES = {name: ("graphs", mode) for name, mode in _MODES.items()}
_REPLICAS = "start one server a replica and balance between them"
_TOOLS = "parsers are chosen from the chat template, or named by --tool-call-parser and --reasoning-parser"
_PREFILLS = "--long-prefill-token-threshold bounds what one prompt takes of a step"

FLAGS = (
    # model
    _value("--tokenizer-mode", "auto hf"),
    _value("--code-revision --tokenizer-revision", "", "pin the whole checkpoint with --revision"),
    _value("--hf-config-path", "", "replace keys of config.json with --hf-overrides"),
    _value("--model-class-overrides", "{}", "register a family by a plugin: docs/design/models.md"),
    _value("--config-format", "auto hf"),
    _value("--logits-processors"),
    replace(_switch("--enforce-eager", "off", _GRAPHS), stands={"on": ("graphs", "none")}),
    _value("--quantization-config"),
    _value("--download-dir", "", "the hub's own cache folder is used; `pagoda pull` fills it"),
    _value("--safetensors-load-strategy", "mmap lazy", "weights are always mapped from the file"),
    _value("--model-loader-extra-config", "{}"),
    _value("--hf-token", "", "log in with `hf auth login`, or fetch with `pagoda pull --hf-token`"),
    # cache
    _value("--kv-cache-dtype-skip-layers", "[]"),
    _value("--prefix-caching-hash-algo", "*"),
    _value("--prefix-match-unit", "block"),
    _value("--kv-offloading-size"),
    _value("--kv-offloading-backend", "native"),
    _value("--mamba-cache-mode --mamba-cache-dtype --mamba-ssm-cache-dtype", "auto align"),
    _switch("--disable-hybrid-kv-cache-manager", "off", "layer groups share one pool, which wastes less; there is nothing to turn off"),
    # scheduling
    _value("--max-num-active-seqs", "", "bound running requests with --max-num-seqs"),
    _value("--scheduler-cls"),
    _switch("--scheduler-reserve-full-isl", "on off"),
    _value("--watermark", "0 0.0"),
    _value("--max-num-partial-prefills --max-long-partial-prefills", "1", _PREFILLS),
    # parallel
    _value("--pipeline-parallel-size -pp", "1", "split layers over ranks with --tensor-parallel-size"),
    _value("--prefill-context-parallel-size -pcp", "1"),
    _value("--decode-context-parallel-size -dcp", "1"),
    _value("--data-parallel-size -dp", "1", _REPLICAS),
    _value("--data-parallel-size-local", "1", _REPLICAS),
    _value("--data-parallel-rank --data-parallel-start-rank", "0", _REPLICAS),
    _value("--data-parallel-address --data-parallel-rpc-port --data-parallel-backend", "", _REPLICAS),
    _switch("--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-multi-port-external-lb", "off", _REPLICAS),
    _switch("--enable-expert-parallel -ep", "off", "experts are split over ranks with --tensor-parallel-size"),
    _value("--all2all-backend", "allgather_reducescatter"),
    _switch("--enable-eplb"),
    _value("--eplb-config"),
    _value("--expert-placement-strategy", "linear"),
    _switch("--enable-elastic-ep"),
    _switch("--enable-dbo"),
    _value("--dbo-decode-token-threshold --dbo-prefill-token-threshold", "*"),
    _value("--distributed-executor-backend", "mp uni auto", "an executor is chosen from --tensor-parallel-size"),
    _value("--nnodes", "1"),
    _value("--node-rank", "0"),
    _value("--master-addr --master-port", "*"),
    _switch("--numa-bind", "on off", "ranks of a CPU are bound to memory nodes by themselves"),
    _value("--numa-bind-nodes --numa-bind-cpus", "", "start the server under `numactl`; its affinity is kept"),
    _value("--device-ids", "all", "name one as --device NAME:INDEX"),
    _value("--worker-cls", "auto"),
    _value("--worker-extension-cls"),
    _value("--distributed-timeout-seconds"),
    _switch("--enable-fault-tolerance"),
    _value("--fault-tolerance-config"),
    # compilation and kernels
    replace(_value("--compilation-config -cc", "{}", _GRAPHS), stands=_GRAPH_MODES, plain=_graph_mode),
    replace(_value("--compilation-config.cudagraph-mode -cc.cudagraph_mode", "", _GRAPHS), stands=_GRAPH_MODES),
    _value("--optimization-level -O", "2 3", _GRAPHS),
    _value("--performance-mode", "balanced"),
    _value("--cudagraph-capture-sizes --max-cudagraph-capture-size", "", _SIZES),
    _value("--attention-backend --attention-config -ac", "auto", _KERNEL),
    _value("--kernel-config --linear-backend --moe-backend", "auto", _KERNEL),
    _switch("--enable-flashinfer-autotune", "on off"),
    # adapters, speculation, structure
    _value("--lora-dtype --lora-target-modules"),
    _switch("--fully-sharded-loras"),
    _value("--default-mm-loras"),
    _switch("--enable-mixed-moe-lora-format --enable-moe-shared-loras"),
    _value("--spec-model", "", "drafts come from the text (`ngram`) or from the checkpoint's own layer (`mtp`): --spec-method"),
    _value("--structured-outputs-config"),
    _value("--reasoning-config"),
    # media
    _switch("--language-model-only", "on off"),
    _value("--mm-processor-kwargs --media-io-kwargs", "{}"),
    _value("--mm-processor-cache-gb --mm-processor-cache-type"),
    _value("--mm-encoder-tp-mode", "weights"),
    _switch("--skip-mm-profiling"),
    _value("--video-pruning-rate --video-pruning-method", "0"),
    # transfer and memory
    _value("--kv-transfer-config --kv-events-config --ec-transfer-config --weight-transfer-config"),
    _switch("--enable-return-routed-experts --return-sampling-mask"),
    _value("--cpu-offload-gb", "0"),
    _value("--offload-backend", "auto"),
    _value("--offload-group-size --offload-num-in-group --offload-prefetch-step", "*"),
    _switch("--enable-sleep-mode"),
    _value("--sleep-mode-backend"),
    # watching it
    _value("--otlp-traces-endpoint --collect-detailed-traces"),
    _switch("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics", "off", "`/metrics` and `/stats` have what is measured"),
    _value("--additional-config", "{}"),
    # front end
    _value("--api-server-count -asc", "1"),
    _switch("--headless"),
    _switch("--grpc", "off", "--grpc-port N serves gRPC beside HTTP"),
    _switch("--trust-request-mm-kwargs"),
    _value("--reasoning-effort-map"),
    _switch("--enable-auto-tool-choice", "on off", _TOOLS),
    _value("--tool-strict-level"),
    _value("--tool-server"),
    _switch("--enable-prompt-tokens-details", "on", "cached tokens are always in `usage`"),
    _switch("--enable-request-id-headers", "on", "every reply has its X-Request-Id"),
    _switch("--exclude-tools-when-tool-choice-none", "on", "prompts show no tools when tool_choice is none"),
    _switch("--enable-server-load-tracking", "on off", "`/load` is always there"),
    _switch("--enable-tokenizer-info-endpoint", "on", "`/tokenizer_info` is always there"),
    _switch("--log-error-stack", "on", "what is no fault of a request is logged with its stack"),
    _switch("--enable-log-outputs --enable-log-deltas"),
    _switch("--enable-offline-docs", "off", "`/openapi.json` needs no network; there are no pages around it"),
    _switch("--enable-ssl-refresh", "off", "start the server anew with the new certificate"),
    _switch("--enable-per-request-metrics", "off", "`/metrics` and traces have them"),
    _value("--sse-keep-alive-interval --anthropic-disabled-thinking-effort --logging-config --log-config-file"),
    _value("--h11-max-incomplete-event-size --h11-max-header-count", "", "bodies are bounded by --max-request-bytes"),
    _switch("--tokens-only"),
    _switch("--enable-scale-out", "on off"),
    _value("--fingerprint-mode", "full"),
)
"""In the order of the peer's documentation."""
