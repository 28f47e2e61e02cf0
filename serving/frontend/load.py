"""The text side of a checkpoint on disk: its tokenizer, its chat templates, its sampling defaults. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pagoda.hal.errors import ConfigError, RequestError
from pagoda.models.loading.reference import resolve
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.frontend.chat_template import ChatTemplate
from pagoda.serving.frontend.gguf_tokenizer import load_gguf
from pagoda.serving.frontend.ids_only import IdsOnly
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import choose
from pagoda.serving.frontend.parsers.events import Hints
from pagoda.serving.frontend.text import TextFrontend
from pagoda.serving.frontend.tokenizer import Tokenizer, load_folder


def text_of(config: EngineConfig, **template: Any) -> TextFrontend:
    """The text side of an engine's configuration; `template` options are those of `load_text`."""
    return TextFrontend(IdsOnly()) if config.skip_tokenizer_init else load_text(tokenizer_path(config), **template)


def tokenizer_path(config: EngineConfig) -> Path:
    """Where the tokenizer of a configuration is: with the model, or where `tokenizer` says (a folder with a tokenizer will do)."""
    if config.tokenizer is None:
        return resolve(config.model, config.revision, cache=config.download_dir)
    folder = Path(config.tokenizer).expanduser()
    return folder if (folder / "tokenizer.json").is_file() else resolve(config.tokenizer, cache=config.download_dir)


def load_tokenizer(path: Path) -> Tokenizer:
    """From a model folder or a GGUF file. Raises `ConfigError` when there is none, `CheckpointError` when it is damaged."""
    return load_gguf(path) if path.is_file() else load_folder(path)


def load_text(
    path: Path,
    *,
    chat_template: str | None = None,
    content_format: Literal["auto", "string", "openai"] = "auto",
    template_defaults: Mapping[str, Any] | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    tool_parser_plugin: str | None = None,
    reasoning_parser_plugin: str | None = None,
) -> TextFrontend:
    """Tokenizer and templates of a model folder or GGUF file.

    Args:
        chat_template: a file with one, or the source itself, instead of the checkpoint's.
        content_format, template_defaults: see `ChatTemplate`.
        tool_call_parser, reasoning_parser, and files with further ones: see `parsers.choose`.
    """
    tokenizer = load_tokenizer(path)
    sources = dict(tokenizer.chat_templates)
    if chat_template is not None:
        sources = {"default": template_source(chat_template)}
    shown = "\n".join(sources.values())
    hints = Hints(tokenizer.added_tokens, tokenizer.response_template)
    answers = AnswerFormat(
        choose("tools", tool_call_parser, shown, tool_parser_plugin, hints),
        choose("reasoning", reasoning_parser, shown, reasoning_parser_plugin, hints),
    )
    if not sources:
        return TextFrontend(tokenizer, None, answers)
    template = ChatTemplate(sources, tokenizer.special_tokens, content_format, template_defaults or {})
    if chat_template is not None:
        _check(template)
    return TextFrontend(tokenizer, template, answers)


def _check(template: ChatTemplate) -> None:
    try:
        template.content_format(template.choose())
    except RequestError as error:
        raise ConfigError(f"--chat-template cannot be compiled: {error}; mend it, or leave the flag out") from error


def template_source(given: str) -> str:
    """A template from a file, or the source itself where it looks like one."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {given}: {error.strerror}; give a file, or the template itself") from error
