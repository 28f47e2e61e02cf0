"""Malformed and hostile request bodies for every endpoint that reads one, drawn from a seed."""

from __future__ import annotations

import base64
import copy
import io
import json
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any, NamedTuple

import msgspec
import torch
from pagoda.serving.api.openai.protocol import CompletionRequest
from pagoda.serving.api.operations_table import FORM, JSON, OPERATIONS, Operation
from safetensors.torch import save as safetensors

Body = dict[str, Any]
CHAT = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "t", "content": "y"}]}]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call_output", "call_id": "c", "output": "y"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]}

BASES: dict[str, list[Body]] = {
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 4},
        {
            "prompt": [[5, 6], [7]],
            "max_tokens": 3,
            "logprobs": 2,
            "echo": True,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "prompt": "a",
            "max_tokens": 4,
            "structured_outputs": {"json": SCHEMA},
            "stop": ["x", "yz"],
            "logit_bias": {"5": 1.5},
            "bad_words": ["no"],
        },
    ],
    "/v1/chat/completions": [
        {"messages": CHAT, "max_tokens": 4},
        {"messages": PARTS, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 4, "stream": True, "logprobs": True, "top_logprobs": 2},
        {
            "messages": CHAT,
            "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "chat_template_kwargs": {"x": 1},
        },
    ],
    "/v1/responses": [
        {"input": "hello", "max_output_tokens": 4},
        {
            "input": ITEMS,
            "max_output_tokens": 4,
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
        },
        {
            "input": "x",
            "max_output_tokens": 4,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
            "background": True,
        },
        {
            "input": ITEMS,
            "max_output_tokens": 4,
            "background": True,
            "stream": True,
            "truncation": "auto",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        },
    ],
    "/v1/messages": [
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        {
            "model": "tiny",
            "messages": BLOCKS,
            "max_tokens": 4,
            "stream": True,
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ],
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": BLOCKS, "system": "s"}],
    "/v1/load_lora_adapter": [{"lora_name": "x", "lora_path": "/nonexistent"}],
    "/v1/unload_lora_adapter": [{"lora_name": "x"}],
    "/tokenize": [{"prompt": "hello", "return_token_strs": True}, {"messages": CHAT, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/v1/embeddings": [{"input": "hello"}, {"input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 8}],
    "/classify": [{"input": ["hello", "x"]}],
    "/pooling": [{"input": "hello", "task": "embed"}, {"input": "hello", "task": "token_embed"}],
    "/score": [{"text_1": "a", "text_2": ["b", "c"]}],
    "/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}],
    "/inference/v1/generate": [
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "logprobs": 1}},
        {"token_ids": [5], "sampling_params": {"max_tokens": 4, "structured_outputs": {"json": SCHEMA}}, "stream": True},
    ],
    "/inference/v1/abort_requests": [{"request_ids": ["cmpl-x", "y"]}],
    "/v1/completions/render": [{"prompt": ["a", "b"], "max_tokens": 4, "structured_outputs": {"json": SCHEMA}}],
    "/v1/chat/completions/render": [{"messages": PARTS, "tools": [TOOL], "max_tokens": 4}],
}
ALIASES = {
    "/v1/score": "/score",
    "/v1/rerank": "/rerank",
    "/v2/rerank": "/rerank",
    "/v1/responses/render": "/v1/responses",
    "/v1/responses/input_tokens": "/v1/responses",
    "/v1/messages/render": "/v1/messages",
}
ENDS_ALL = "/abort_requests"
"""Without ids it ends the requests beside the hostile ones too."""
SURROGATE, HUGE = "\ud800", 10**30
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP, {"a": DEEP}] if _ < 4 else [DEEP]

JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    HUGE,
    -HUGE,
    0.5,
    -0.0,
    1.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    SURROGATE,
    "a" * 5000,
    "é日👩‍👩‍👧",
    "{{ 1/0 }}",
    "../../etc/passwd",
    "true",
    "1",
    [],
    [[]],
    {},
    {"": {}},
    [None],
    [0] * 500,
    ["x"] * 200,
    [HUGE],
    [-1],
    [1e308],
    ["\0"],
    [SURROGATE],
    [{}],
    [[1], "a"],
    [[[[[]]]]],
    {"type": []},
    {"type": "x"},
    {"type": None},
    {"a": {"b": [None, {"c": HUGE}]}},
    {SURROGATE: "\0"},
    {"1": HUGE},
    {"-1": 1},
    {"x": 0.1},
    DEEP,
)

SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/x"},
    {"$ref": "#/no"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"enum": []},
    {"enum": list(range(5000))},
    {"type": "x"},
    {"type": []},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "a{1000000}"},
    {"type": "string", "maxLength": 10**9},
    {"type": "string", "minLength": 5, "maxLength": 1},
    {"type": "array", "minItems": 10**9},
    {"type": "array", "maxItems": -1},
    {"type": "object", "required": list("ab") * 50},
    {"anyOf": [{"$ref": "#"}] * 20},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"oneOf": []},
    False,
    True,
    0,
    "x",
    [],
    None,
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "object", "properties": {f"q{j}": {"type": "number"} for j in range(10)}} for i in range(60)},
    },
    {"type": "number", "multipleOf": 0},
    {"type": "integer", "minimum": 1e308},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"const": DEEP},
    {"type": "object", "patternProperties": {"(": {}}},
    {"type": "string", "format": "no"},
    {"properties": 5},
    {"items": 5},
    {"type": "string", "pattern": SURROGATE},
)
GRAMMARS = (
    "",
    "x",
    "root ::= root",
    "root ::= ",
    'root ::= "a" | root root',
    "root ::= undefined",
    'root ::= "' + "a" * 5000 + '"',
    "root ::= (" * 500,
    'start: "a"',
    "start: start",
    "start: /(/",
    "start: A\nA: /a*/ ",
    "start: " + "x" * 1000,
    'root ::= "a"{1000000}',
    "\0",
    "root ::= [z-a]",
    "%import x",
    'root ::= "\\u{110000}"',
    "root ::= [^",
    "start: %json {",
    "%llguidance {",
    'root ::= ("a"?){50000}',
    SURROGATE,
)
REGEXES = (
    "(",
    "(a+)+$",
    "a{100000}",
    "[",
    "\\",
    "(?<=a)b",
    "\\p{L}{1,9999}",
    "(" * 1000 + ")" * 1000,
    "",
    "\0",
    "a|" * 3000,
    "(?P<x>a)(?P=x)",
    SURROGATE,
)
BOMBS = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [1]*10**9 }}",
    "{{ 9**9**9 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'x'.center(10**10) }}",
    "{{ lipsum(n=10**6) }}",
    "{{ 'a'.join(range(10**9)) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ messages | tojson(indent=99999999) }}",
)
"""Templates that never end, for servers that take none from requests: to trust requests with templates is to trust them with this."""
TRUSTED = ("/v1/chat/completions", "/tokenize", "/v1/chat/completions/render")
"""Where the server that takes templates from requests takes them."""
TEMPLATES = (
    "{{",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 1/0 }}",
    "{{ raise_exception('no') }}",
    "{% include 'x' %}",
    "\0",
    "{% set x = messages %}{{ x.append(1) }}",
    "{{ cycler }}",
    SURROGATE,
    "",
    "{{ namespace.__init__ }}",
    "{{ strftime_now('%' * 1000) }}",
    "{{ strftime_now(5) }}",
    "{{ messages[99] }}",
    "{{ '{0.__class__}'.format(1) }}",
)
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xff\xff\xff\xff\xff\xff\xff\x08\x02\0\0\0"
MEDIA = (
    "data:image/png;base64,",
    "data:image/png;base64,!!!!",
    "data:,",
    "data:image/png;base64," + base64.b64encode(PNG).decode(),
    "x",
    "",
    "\0",
    "file:///etc/passwd",
    "http://127.0.0.1:1/a.png",
    "http://169.254.169.254/",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "data:image/gif;base64,R0lGODlhAQABAAAAACw=",
    "ftp://x",
    "data:image/png;base64," + base64.b64encode(PNG + zlib.compress(b"\0" * 10**6)).decode(),
    "data:" + "a" * 100_000,
    "data:image/png;base64,é",
    "http://[",
    "//x",
    SURROGATE,
)


class Case(NamedTuple):
    """One request. `kind`: what is wrong with it."""

    kind: str
    path: str
    body: bytes
    media: str = JSON


KINDS = {one.path: one.asks for one in OPERATIONS if one.asks is not None}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


def endpoints() -> list[Operation]:
    """Those that read a JSON body."""
    return [one for one in OPERATIONS if one.asks is not None and one.sent_as != FORM and one.path != ENDS_ALL]


def bases_of(path: str) -> list[Body]:
    return BASES[ALIASES.get(path, path)]


def cases(rng: Random, count: int, paths: tuple[str, ...] | None = None) -> Iterator[Case]:
    """`count` of them; first every field of every endpoint in turn, with other values at each seed."""
    chosen = [one for one in endpoints() if paths is None or one.path in paths]
    fields = [(one.path, name) for one in chosen for name in one.asks.__struct_fields__]  # type: ignore[union-attr]
    rng.shuffle(fields)
    for number in range(count):
        if number % 2 == 0:
            path, name = fields[(number // 2) % len(fields)]
            yield _field(rng, path, name)
        else:
            make = rng.choices(MAKERS, WEIGHTS)[0]
            yield make(rng, rng.choice(chosen).path)


def encoded(body: Any) -> bytes:
    """JSON as a careless client writes it: NaN and lone surrogates too."""
    return json.dumps(body).encode()


def _field(rng: Random, path: str, name: str) -> Case:
    """Half of the values have a type that the field may have, so that what reads them next is reached."""
    kind = KINDS[path]
    value = rng.choice(_fitting(kind, name) or JUNK) if rng.random() < 0.5 else rng.choice(JUNK)
    body = {**rng.choice(bases_of(path)), name: value}
    if rng.random() < 0.3:
        body["stream"] = True
    return Case("field", path, encoded(body))


def _setting(rng: Random, path: str) -> Case:
    """Two fields of fitting types at once, in the endpoints that generate."""
    path = path if path in GENERATING else rng.choice(GENERATING)
    names = [one for one in KINDS[path].__struct_fields__ if one not in ("model", "previous_response_id")]
    body = copy.deepcopy(rng.choice(bases_of(path)))
    for name in rng.sample(names, 2):
        body[name] = rng.choice(_fitting(KINDS[path], name) or (None,))
    if path == "/inference/v1/generate":
        name = rng.choice(CompletionRequest.__struct_fields__)
        body["sampling_params"] = {"max_tokens": 3, name: rng.choice(_fitting(CompletionRequest, name) or (None,))}
    return Case("setting", path, encoded(body))


@cache
def _fitting(kind: type[msgspec.Struct], name: str) -> tuple[Any, ...]:
    """The junk that the field's type allows."""
    wanted = next(one.type for one in msgspec.structs.fields(kind) if one.encode_name == name)
    found = []
    for value in JUNK:
        try:
            msgspec.convert(value, wanted, str_keys=True)
        except (msgspec.ValidationError, UnicodeEncodeError):
            continue
        found.append(value)
    return tuple(found)


def _nested(rng: Random, path: str) -> Case:
    body = copy.deepcopy(rng.choice(bases_of(path)))
    for _ in range(rng.choice((1, 1, 2, 4))):
        body = body or {"x": None}
        place, key = rng.choice(list(_places(body)))
        match rng.randrange(4):
            case 0 if isinstance(place, dict):
                place.pop(key)
            case 1:
                place[key] = [copy.deepcopy(place[key])]
            case 2:
                place[key] = {str(key): copy.deepcopy(place[key])}
            case _:
                place[key] = copy.deepcopy(rng.choice(JUNK))
    return Case("nested", path, encoded(body))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []:
        yield node, key
        yield from _places(value)


def _bytes(rng: Random, path: str) -> Case:
    text = bytearray(encoded(rng.choice(bases_of(path))))
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                del text[at:]
            case 1:
                text[at:at] = rng.choice(
                    (
                        b"\0",
                        b"\xff\xfe",
                        b"\xed\xa0\x80",
                        b"\xc0\xaf",
                        b"\\u0000",
                        b"\\ud800",
                        b"//",
                        b",",
                        b"}",
                        b"\xef\xbb\xbf",
                        b"1e999",
                        b"-",
                    )
                )
            case 2:
                text[at : at + 3] = bytes(rng.randrange(256) for _ in range(3))
            case _:
                text *= 2
        text = text or bytearray(b" ")
    return Case("bytes", path, bytes(text))


def _deep(rng: Random, path: str) -> Case:
    depth = rng.choice((100, 1000, 5000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"type":', b"}]")))
    nest = opening * depth + b"1" + (closing * depth if rng.random() < 0.8 else b"")
    if rng.random() < 0.3:
        return Case("deep", path, nest)
    base = rng.choice(bases_of(path))
    name = rng.choice([*base, "unknown"])
    return Case("deep", path, encoded({**base, name: "@"}).replace(b'"@"', nest, 1))


def _number(rng: Random, path: str) -> Case:
    digits = rng.choice(
        (
            b"1" * 5000,
            b"1e400",
            b"-1e400",
            b"0." + b"0" * 5000 + b"1",
            b"1" * 400 + b".5",
            b"00",
            b"+1",
            b".5",
            b"0x10",
            b"1_000",
            b"Infinity",
            b"-0",
            b"1E+2",
            b"18446744073709551616",
        )
    )
    base = rng.choice(bases_of(path))
    name = rng.choice([*base, "seed", "temperature", "max_tokens", "priority"])
    return Case("number", path, encoded({**base, name: "@"}).replace(b'"@"', digits, 1))


def _structure(rng: Random, _: str) -> Case:
    path = rng.choice(
        ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/v1/completions/render")
    )
    name, values = rng.choice(
        (
            ("json", SCHEMAS),
            ("grammar", GRAMMARS),
            ("regex", REGEXES),
            ("choice", ([], [""], ["a"] * 500, [1], "x", [SURROGATE])),
            ("structural_tag", SCHEMAS),
            ("json_object", JUNK),
        )
    )
    value = rng.choice(values)  # type: ignore[arg-type]
    base = {**bases_of(path)[0], "stream": rng.random() < 0.3}
    if path == "/v1/responses":
        return Case(
            "structure", path, encoded({**base, "text": {"format": {"type": "json_schema", "name": "s", "schema": rng.choice(SCHEMAS)}}})
        )
    if path == "/v1/messages":
        return Case(
            "structure", path, encoded({**base, "output_config": {"format": {"type": "json_schema", "schema": rng.choice(SCHEMAS)}}})
        )
    if path == "/inference/v1/generate":
        return Case("structure", path, encoded({**base, "sampling_params": {"max_tokens": 3, "structured_outputs": {name: value}}}))
    fields: list[Body] = [
        {"structured_outputs": {name: value}},
        {f"guided_{name}": value},
        {"structured_outputs": {name: value, "regex": "a"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}},
        {"response_format": {"type": "structural_tag", "structures": value, "triggers": value, "format": value}},
    ]
    return Case("structure", path, encoded({**base, **rng.choice(fields)}))


def _template(rng: Random, _: str) -> Case:
    path = rng.choice((*TRUSTED, "/v1/embeddings", "/classify"))
    body: Body = {
        "messages": copy.deepcopy(rng.choice((CHAT, PARTS))),
        "chat_template": rng.choice(TEMPLATES if path in TRUSTED else BOMBS),
    }
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {rng.choice(("messages", "tools", "bos_token", "raise_exception", "\0")): rng.choice(JUNK)}
    if path == "/v1/chat/completions":
        body["max_tokens"] = 2
    return Case("template", path, encoded(body))


def _tools(rng: Random, _: str) -> Case:
    tool = copy.deepcopy(TOOL)
    tool["function"][rng.choice(("name", "parameters", "strict", "description"))] = rng.choice((*JUNK, *SCHEMAS))  # type: ignore[index]
    body = {
        "messages": copy.deepcopy(rng.choice((CHAT, PARTS))),
        "max_tokens": 3,
        "tools": [tool] * rng.choice((1, 1, 40)),
        "tool_choice": rng.choice(("auto", "required", "none", {"type": "function", "function": {"name": "f"}}, rng.choice(JUNK))),
    }
    return Case("tools", "/v1/chat/completions", encoded(body))


def _media(rng: Random, _: str) -> Case:
    path = rng.choice(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"))
    url = rng.choice(MEDIA)
    source = {"type": "base64", "media_type": rng.choice(("image/png", "x", 5)), "data": url}
    kinds = {
        "/v1/messages": [
            {"type": "image", "source": rng.choice((source, {"type": "url", "url": url}, url, None))},
            {"type": "document", "source": source},
        ],
        "/v1/responses": [{"type": "input_image", "image_url": url}, {"type": "input_file", "file_data": url}],
    }.get(
        path,
        [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "image_url", "image_url": rng.choice(JUNK)},
        ],
    )
    messages = [{"role": "user", "content": [rng.choice(kinds)] * rng.choice((1, 1, 30))}]
    name = "input" if path == "/v1/responses" else "messages"
    return Case(
        "media",
        path,
        encoded({**bases_of(path)[0], "prompt": None, name: messages} if path == "/tokenize" else {**bases_of(path)[0], name: messages}),
    )


def _saved(given: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(given, stream)
    return stream.getvalue()


def _rows(rng: Random, _: str) -> Case:
    """Prompts of embeddings: right ones, wrong ones, and either with bytes changed."""
    good = torch.zeros(3, 32)
    given: Any = rng.choice(
        (good, good[:, 1:], good.half(), good.long(), good / 0, good.to_sparse(), good[:1].expand(1 << 40, 32), [good], {"a": good}, None)
    )
    blob = bytearray(safetensors({"a": good}) if rng.random() < 0.4 else _saved(given))
    for _place in range(rng.choice((0, 0, 1, 5, 50))):
        blob[rng.randrange(len(blob))] = rng.randrange(256)
    text = base64.b64encode(blob[: rng.choice((len(blob), len(blob), rng.randrange(len(blob))))]).decode()
    value = rng.choice((text, text, text, [text, text], text[1:], [text] * 40, rng.choice(JUNK)))
    fields = {"echo": True} if rng.random() < 0.1 else {"stream": True} if rng.random() < 0.3 else {}
    return Case("rows", "/v1/completions", encoded({"max_tokens": 2, "prompt_embeds": value, **fields}))


def _declared(rng: Random, path: str) -> Case:
    media = rng.choice(
        ("", "text/plain", "application/json; charset=utf-16", "application/x-www-form-urlencoded", FORM, "a/b;" * 100, "application/json;")
    )
    return Case("declared", path, encoded(rng.choice(bases_of(path))), media)


MAKERS: tuple[Callable[[Random, str], Case], ...] = (
    _nested,
    _setting,
    _bytes,
    _deep,
    _number,
    _structure,
    _template,
    _tools,
    _media,
    _rows,
    _declared,
)
WEIGHTS = (30, 24, 16, 8, 8, 14, 7, 7, 7, 7, 3)
