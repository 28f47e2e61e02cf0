"""Writes docs/migrate.md from the options of `pagoda serve`, the flags of `vllm serve` and the request fields; `--check`: is it stale?"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from pagoda.serving.api.anthropic.protocol import MessagesRequest
from pagoda.serving.api.metrics import Metrics
from pagoda.serving.api.openai.protocol import ChatRequest, CompletionRequest
from pagoda.serving.api.openai.responses_protocol import ResponseRequest
from pagoda.serving.api.openai.unsupported import REFUSED, WITHOUT_EFFECT
from pagoda.serving.cli.compat import FLAGS, Foreign
from pagoda.serving.cli.serve_run import options
from pagoda.serving.engine.messages import EngineFacts


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SHARED = _words(
    """
    --model --served-model-name --tokenizer --revision --trust-remote-code --dtype --max-model-len --seed --hf-overrides
    --generation-config --override-generation-config --skip-tokenizer-init --quantization -q --load-format --gpu-memory-utilization
    --kv-cache-memory-bytes --block-size --kv-cache-dtype --num-gpu-blocks-override --enable-prefix-caching --max-num-batched-tokens
    --max-num-seqs --max-num-queued-reqs --max-num-queued-tokens --enable-chunked-prefill --long-prefill-token-threshold
    --scheduling-policy --async-scheduling --tensor-parallel-size -tp --disable-custom-all-reduce --disable-log-stats
    --shutdown-timeout --host --port --uds
    --api-key --ssl-keyfile --ssl-certfile --chat-template --chat-template-content-format --trust-request-chat-template
    --default-chat-template-kwargs --tool-call-parser --reasoning-parser --return-tokens-as-token-ids --enable-force-include-usage
    --logprobs-mode --max-logprobs --stream-interval --tool-parser-plugin --reasoning-parser-plugin --enable-log-requests --max-log-len
    --disable-fastapi-docs --middleware --ssl-ciphers --ssl-ca-certs --ssl-cert-reqs --allowed-origins --allowed-methods
    --allowed-headers --allow-credentials --response-role --limit-mm-per-prompt --allowed-local-media-path --allowed-media-domains
    --uvicorn-log-level --disable-uvicorn-access-log --enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras
    --enable-prompt-embeds --profiler-config --runner --convert --pooler-config --use-tqdm-on-load --model-impl
    --root-path --config --grpc-port --speculative-config -sc --spec-method --spec-tokens --kv-offloading-size --kv-transfer-config
    """
)
"""Flags of the peer that have been options here from the start; the others are in `serving/cli/compat.py`."""
_PLUGIN = "a Python file too, but with `Family` records of `pagoda.serving.frontend.parsers.events`"
NOTES = {
    "--trust-remote-code": "accepted with a warning: no code of a checkpoint is ever run",
    "--logprobs-mode": "same; logprobs of prompts are logprobs in every mode",
    "--max-logprobs": "same; 64 when not given",
    "--allowed-origins": "none when not given, where `vllm serve` lets the pages of all origins call",
    "--tool-parser-plugin": _PLUGIN,
    "--reasoning-parser-plugin": _PLUGIN,
}
"""Options of ours that do not do what the peer's do."""
FIELDS = _words(
    """
    top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
    allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids return_weight_versions return_token_offsets return_prompt_text mm_payload cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget reasoning_effort
    include_reasoning watermarking routed_experts_prompt_start prompt_embeds response_format
    """
)
"""Request fields of the peer beyond OpenAI's."""
CHAT_ONLY = _words(
    """
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs reasoning_effort include_reasoning
    media_io_kwargs mm_processor_kwargs mm_payload
    """
)

METRICS = _words(
    """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
    external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions prompt_tokens
    prompt_tokens_cached prompt_tokens_by_source generation_tokens iteration_tokens_total request_success time_to_first_token_seconds
    inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds request_prompt_tokens
    request_generation_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens request_num_preemptions
    cache_config_info lora_requests_info spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds
    admission_rejections corrupted_requests engine_sleep_state sleep_mode_operation_duration_seconds
    rl_weight_update_operation_duration_seconds tool_call_parser_invocations estimated_flops_per_gpu estimated_read_bytes_per_gpu
    estimated_write_bytes_per_gpu
    """
)
"""Core metrics of the peer, without their prefix and the `_total` of counters."""
_PAGES = "same, of every page rather than of a sample"
_ESTIMATE = "not told: an estimate from the shape of a model, which holds for no format or kernel in particular; steps are measured"
METRIC_NOTES = {
    "mm_cache_queries": "media items of requests",
    "mm_cache_hits": "media items whose embeddings were there when their request came",
    "kv_block_lifetime_seconds": _PAGES,
    "kv_block_idle_before_evict_seconds": _PAGES,
    "kv_block_reuse_gap_seconds": f"{_PAGES}, told at once rather than when the page is given to others",
    "engine_sleep_state": "`awake`, `discard_all` as there; level 1 is `kv_cache_discarded`, since weights stay where they are",
    "tool_call_parser_invocations": "each choice once, in streams too, where `vllm serve` counts each delta",
    "rl_weight_update_operation_duration_seconds": "not told: weights of a running server are not replaced in this release",
    "estimated_flops_per_gpu": _ESTIMATE,
    "estimated_read_bytes_per_gpu": _ESTIMATE,
    "estimated_write_bytes_per_gpu": _ESTIMATE,
}
"""Those that are not told, or that mean something else."""

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrate.md"
HEAD = """# From `vllm serve` to `pagoda serve`

Made by `python ci/migrate_table.py` from the configuration itself; do not edit.

Put `pagoda serve` where `vllm serve` stood: flags and request fields below marked *same* mean what they meant. A flag that Pagoda does
not have is accepted when its value asks for what Pagoda does anyway, and refused by name otherwise, with what to do instead; nothing is
ignored in silence. There are no environment variables to carry over.
"""


def flag_rows() -> list[tuple[str, str]]:
    """(spellings, what happens) of every flag of the peer's, Pagoda's own first."""
    own = {name: option for section in options().sections.values() for option in section for name in option.names}
    theirs = {name for flag in FLAGS for name in flag.names}
    same = sorted({", ".join(option.names) for name, option in own.items() if name in theirs.union(SHARED)})
    rest = [(", ".join(names), _fate(flag)) for flag in FLAGS if (names := [name for name in flag.names if name not in own])]
    return [(names, NOTES.get(names, "same")) for names in same] + rest


def _fate(flag: Foreign) -> str:
    accepted = (
        "any value is accepted: it changes no answer" if "*" in flag.same else f"accepted: {', '.join(flag.same)}" if flag.same else ""
    )
    if "*" in flag.same or (flag.switch and {"on", "off"} <= set(flag.same)):
        return "accepted, nothing to turn on or off" if flag.switch else accepted
    for value, (field, ours) in flag.stands.items():
        accepted += f"{'; ' if accepted else ''}{value}: `--{field} {ours}`"
    otherwise = f"else {flag.instead}" if flag.instead else "else not in this release"
    return f"{accepted}; {otherwise}" if accepted else otherwise.removeprefix("else ")


def field_rows() -> list[tuple[str, ...]]:
    """(field, fate in chat, completions, responses, messages)."""
    return [
        (name, *(_fate_in(name, request) for request in (ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest)))
        for name in FIELDS
    ]


def _fate_in(name: str, request: type[msgspec.Struct]) -> str:
    return "–" if name in CHAT_ONLY and request is CompletionRequest else _field(name, request)


def _field(name: str, request: type[msgspec.Struct]) -> str:
    if name not in request.__struct_fields__:
        return "–"
    if name in REFUSED:
        return "not in this release: refused by name"
    return "accepted, without effect" if name in WITHOUT_EFFECT else "same"


def metric_rows() -> list[tuple[str, str]]:
    """(name, what it means here), of all `METRICS`. Raises `AssertionError` for one that is neither told nor explained."""
    metrics = Metrics("any")
    metrics.describe_cache(EngineFacts(1, 1, 1, 1, "any"))
    told = {family.name.removeprefix("vllm:") for family in metrics.families()}
    rows = [(name, METRIC_NOTES.get(name, "same")) for name in METRICS]
    if wrong := [name for name, fate in rows if (name in told) == fate.startswith("not told")]:
        raise AssertionError(f"metrics whose line in the table is not what /metrics has: {wrong}")
    return rows


def page() -> str:
    flags = "\n".join(f"| {_code(names)} | {fate} |" for names, fate in flag_rows())
    metrics = "\n".join(f"| `vllm:{name}` | {fate} |" for name, fate in metric_rows())
    fields = "\n".join(f"| `{name}` | {' | '.join(fates)} |" for name, *fates in field_rows())
    return (
        f"{HEAD}\n## Flags\n\n| flag | here |\n| --- | --- |\n{flags}\n"
        f"\n## Request fields\n\n| field | chat | completions | responses | messages |\n| --- | --- | --- | --- | --- |\n{fields}\n"
        f"\n## Metrics\n\nCounters end in `_total` on the wire.\n\n| metric | here |\n| --- | --- |\n{metrics}\n"
    )


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def main(arguments: list[str]) -> int:
    made = page()
    if "--check" not in arguments:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made
    if stale:
        print("docs/migrate.md is stale; run python ci/migrate_table.py")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
