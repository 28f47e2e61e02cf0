"""What an answer says, whole or streamed, endpoint by endpoint: both must come to the same."""

from __future__ import annotations

import json
from typing import Any

import httpx

Record = dict[str, Any]
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


async def both(http: httpx.AsyncClient, path: str, body: Record) -> tuple[Any, Any]:
    """What the whole answer to a body says, and what its stream says."""
    whole = await http.post(path, json={**body, "stream": False})
    options = {} if path in ("/v1/responses", "/v1/messages", "/inference/v1/generate") else {"stream_options": {"include_usage": True}}
    streamed = await http.post(path, json={**body, "stream": True, **options})
    if whole.status_code != 200 or streamed.status_code != 200:
        return _refusal(whole), _refusal(streamed)
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: {")]
    return WHOLE[path](whole.json()), STREAM[path](events)


def _refusal(answer: httpx.Response) -> Any:
    return answer.status_code, answer.json().get("error", {}).get("message") if answer.status_code != 200 else answer.text


def _sorted(choices: dict[int, Record]) -> list[Record]:
    return [choices[index] for index in sorted(choices)]


def _completion(reply: Record) -> Any:
    rows = {
        one["index"]: {key: one.get(key) for key in ("text", "finish_reason", "stop_reason", "logprobs", "token_ids")}
        for one in reply["choices"]
    }
    return _sorted(rows), _usage(reply["usage"])


def _completion_stream(events: list[Record]) -> Any:
    rows: dict[int, Record] = {}
    for one in [choice for event in events for choice in event["choices"]]:
        row = rows.setdefault(one["index"], {"text": "", "finish_reason": None, "stop_reason": None, "logprobs": None, "token_ids": None})
        row["text"] += one["text"]
        row["finish_reason"] = one.get("finish_reason") or row["finish_reason"]
        row["stop_reason"] = one.get("stop_reason") if one.get("finish_reason") else row["stop_reason"]
        if one.get("token_ids") is not None:
            row["token_ids"] = (row["token_ids"] or []) + one["token_ids"]
        if one.get("logprobs"):
            row["logprobs"] = row["logprobs"] or {name: [] for name in one["logprobs"]}
            for name, values in one["logprobs"].items():
                row["logprobs"][name] += values
    return _sorted(rows), _usage(events[-1]["usage"])


def _chat(reply: Record) -> Any:
    rows = {}
    for one in reply["choices"]:
        said = one["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in said.get("tool_calls") or ()]
        rows[one["index"]] = {
            "role": said["role"],
            "content": said["content"] or "",
            "reasoning": said.get("reasoning_content") or "",
            "calls": calls,
            "finish_reason": one["finish_reason"],
            "logprobs": (one.get("logprobs") or {}).get("content") or [],
            "token_ids": one.get("token_ids"),
        }
    return _sorted(rows), _usage(reply["usage"])


def _chat_stream(events: list[Record]) -> Any:
    rows: dict[int, Record] = {}
    empty = {"role": None, "content": "", "reasoning": "", "finish_reason": None, "token_ids": None}
    for one in [choice for event in events for choice in event["choices"]]:
        row = rows.setdefault(one["index"], {**empty, "calls": [], "logprobs": []})
        delta = one["delta"]
        row["role"] = delta.get("role") or row["role"]
        row["content"] += delta.get("content") or ""
        row["reasoning"] += delta.get("reasoning_content") or ""
        row["finish_reason"] = one.get("finish_reason") or row["finish_reason"]
        row["logprobs"] += (one.get("logprobs") or {}).get("content") or []
        if one.get("token_ids") is not None:
            row["token_ids"] = (row["token_ids"] or []) + one["token_ids"]
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(row["calls"])
                row["calls"].append((call["function"]["name"], ""))
            name, arguments = row["calls"][call["index"]]
            row["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    return _sorted(rows), _usage(events[-1]["usage"])


def _response(reply: Record) -> Any:
    left_out = ("id", "call_id")
    output = [{key: value for key, value in item.items() if key not in left_out} for item in reply["output"]]
    return {"status": reply["status"], "incomplete": reply["incomplete_details"], "output": output, "usage": _uncached(reply["usage"])}


def _response_stream(events: list[Record]) -> Any:
    """The last event's record, after checking that its texts are the sums of the deltas."""
    grown: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["item_id"]] = grown.get(event["item_id"], "") + event["delta"]
    last = events[-1]["response"]
    for item in last["output"]:
        text = item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])
        assert grown.get(item["id"], "") == text, (item, grown)
    return _response(last)


def _message(reply: Record) -> Any:
    content = [{key: value for key, value in block.items() if key != "id"} for block in reply["content"]]
    return {"stop": (reply["stop_reason"], reply["stop_sequence"]), "content": content, "usage": _uncached(reply["usage"])}


def _message_stream(events: list[Record]) -> Any:
    blocks: list[Record] = []
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                if delta["type"] == "input_json_delta":
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                else:
                    name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
                    block[name] = block.get(name, "") + delta[name]
            case "content_block_stop" if event["index"] in arguments:
                blocks[event["index"]]["input"] = _object(arguments[event["index"]])
    end = next(event for event in events if event["type"] == "message_delta")
    return _message({"content": blocks, **end["delta"], "usage": end["usage"]})


def _object(text: str) -> Any:
    try:
        made = json.loads(text or "{}")
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}


def _generated(reply: Record) -> Any:
    return _sorted(
        {one["index"]: {key: one[key] for key in ("token_ids", "logprobs", "finish_reason")} for one in reply["choices"]}
    ), _usage(reply["usage"])


def _generated_stream(events: list[Record]) -> Any:
    rows: dict[int, Record] = {}
    for one in [choice for event in events for choice in event["choices"]]:
        row = rows.setdefault(one["index"], {"token_ids": [], "logprobs": None, "finish_reason": None})
        row["token_ids"] += one["token_ids"]
        row["finish_reason"] = one.get("finish_reason") or row["finish_reason"]
        if one.get("logprobs"):
            before = (row["logprobs"] or {"content": []})["content"]
            row["logprobs"] = {**one["logprobs"], "content": before + one["logprobs"]["content"]}
    return _sorted(rows), _usage(events[-1]["usage"])


def _usage(usage: Record) -> Any:
    return usage["prompt_tokens"], usage["completion_tokens"]  # the second of two may find its prompt cached


def _uncached(usage: Record) -> Any:
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]


WHOLE = dict(zip(STREAMED, (_completion, _chat, _response, _message, _generated), strict=True))
STREAM = dict(zip(STREAMED, (_completion_stream, _chat_stream, _response_stream, _message_stream, _generated_stream), strict=True))
