"""Chat templates: messages to prompt text by the checkpoint's own Jinja source, with what transformers lets templates use."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.chat_messages import ContentFormat, normalise
from pagoda.serving.frontend.template_content import content_format

_ERROR = "chat_template_error"
_MARK = "\ue000\ue001 "
"""Put behind a message that is to be continued; a template that strips messages takes its last space."""


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's templates; implements `text.ChatTemplate`.

    Attributes:
        sources: "default" and further names ("tool_use", "rag") → Jinja source.
        special_tokens: variables such as "bos_token".
        format: "string" joins text parts, "openai" gives templates lists of parts, "auto" reads it off the template.
        defaults: variables of every request, such as {"enable_thinking": False}.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    format: Literal["auto", "string", "openai"] = "auto"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """See `text.ChatTemplate`; `template` may also be the name of one of the checkpoint's own.

        `continue_final_message` leaves the last message open, for the model to go on with it; it excludes
        `add_generation_prompt`.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        source = self.choose(template, bool(tools))
        chat = normalise(messages, self.content_format(source))
        given = dict(self.special_tokens) | dict(self.defaults) | _checked(variables or {})
        given |= {"tools": list(tools) if tools else None, "documents": list(documents) if documents else None}
        compiled = _compile(source)
        if not continue_final_message:
            return _run(compiled, chat, add_generation_prompt, given)
        open_end, text = _with_mark(chat)
        return _cut_at_mark(_run(compiled, open_end, False, given), text)

    def choose(self, template: str | None = None, tools: bool = False) -> str:
        """The source that a request gets: its own, one of ours by name, the one for tools, the default.

        Raises `RequestError` when there is none.
        """
        if template is not None:
            return self.sources.get(template, template)
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name in self.sources:
            return self.sources[name]
        have = f"it has templates {', '.join(sorted(self.sources))}: name one" if self.sources else "start the server with --chat-template"
        raise RequestError(f"this model has no default chat template; {have}, or send a prompt instead of messages", param="messages")

    def content_format(self, source: str) -> ContentFormat:
        """How messages reach this source."""
        found = _content_format(source)
        return found if self.format == "auto" else found._replace(parts=self.format == "openai")


_OWN = ("messages", "add_generation_prompt", "tools", "documents")
"""Variables that fields of the request fill."""


def _checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    if taken := [name for name in _OWN if name in variables]:
        raise RequestError(f"{taken[0]} is no template variable to set: send it as a field of the request", param="chat_template_kwargs")
    return dict(variables)


def _with_mark(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    last = dict(chat[-1]) if chat else {}
    content = last.get("content")
    if isinstance(content, list):
        texts = [part for part in content if "text" in part]
        if texts:
            marked = [part | {"text": part["text"] + _MARK} if part is texts[-1] else part for part in content]
            return [*chat[:-1], last | {"content": marked}], texts[-1]["text"]
    elif content:
        return [*chat[:-1], last | {"content": content + _MARK}], content
    raise RequestError("continue_final_message needs a last message with text to go on with", param="messages")


def _cut_at_mark(rendered: str, text: str) -> str:
    before, mark, after = rendered.rpartition(_MARK.rstrip())
    if not mark or text.strip() not in before:
        raise RequestError("the chat template does not show the last message as it is, so it cannot be continued", param="messages")
    return before if after.startswith(" ") else before.rstrip()


def _run(compiled: jinja2.Template, chat: list[dict[str, Any]], add_generation_prompt: bool, given: dict[str, Any]) -> str:
    try:
        return compiled.render(given | {"messages": chat, "add_generation_prompt": add_generation_prompt})
    except Exception as error:  # a template is foreign code: whatever it raises is the request's error
        message = getattr(error, "message", None) or str(error)
        raise RequestError(f"chat template, line {_line(error)}: {message}", param="messages", code=_ERROR) from error


def _line(error: Exception) -> int | str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return frames[-1].lineno or "?" if frames else "?"


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"chat template, line {error.lineno}: {error.message}", param="chat_template", code="chat_template_error"
        ) from error


@lru_cache(maxsize=64)
def _content_format(source: str) -> ContentFormat:
    _compile(source)  # names the line of a syntax error
    return content_format(_ENVIRONMENT.parse(source))


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore, through which a template could reach the interpreter."""

    def __init__(*args: Any, **attributes: Any) -> None:
        for name in dict(*args[1:], **attributes):
            _check_name(name)
        Namespace.__init__(*args, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: names must not begin with an underscore")


def _dict(*args: Any, **entries: Any) -> dict[Any, Any]:
    return dict(*args, **entries)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_dict, namespace=_Namespace)
    return environment


_ENVIRONMENT = _environment()
