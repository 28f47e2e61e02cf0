"""The compiler of grammars: one interface over both libraries, which picks one by what it keeps to, and keeps what it compiled."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from threading import Lock, RLock
from typing import Any, NamedTuple

from pagoda.hal import heap
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.structured import StructuredOutputsConfig, StructuredOutputsParams
from pagoda.serving.frontend.load import load_tokenizer, tokenizer_path
from pagoda.serving.frontend.structured.compile_child import CompileChildren
from pagoda.serving.frontend.structured.guidance_backend import Guidance, choice_lark, with_options
from pagoda.serving.frontend.structured.reasoning import AfterThinking, Anything
from pagoda.serving.frontend.structured.schema import (
    MANY_OPTIONAL,
    beyond_xgrammar,
    optional_properties,
    prepared,
    read_schema,
    with_lengths,
)
from pagoda.serving.frontend.structured.tags import (
    formats,
    read_tag,
    tag_beyond_guidance,
    tag_beyond_xgrammar,
    tag_lark,
    tag_with_schemas,
)
from pagoda.serving.frontend.structured.vocabulary import Vocabulary, vocabulary_of
from pagoda.serving.frontend.structured.xgrammar_backend import Compiled, Writing, choice_grammar, load, token_info
from pagoda.serving.frontend.text import Tokenizer

CACHED = 256
CACHED_BYTES = 512 << 20
"""Compiled grammars that are kept, and what they may hold together (of 49,000 tokens one holds 2.5 MiB or more); the least recently used
ones go first."""

TIDY_SECONDS = 5.0
"""Between two looks for what the heap could give back, when grammars are asked for."""


class Way(NamedTuple):
    """One backend's way to a grammar: what it gets, or why it cannot."""

    kind: str
    source: str
    lack: str | None = None


class GrammarMaker:
    """Implements `grammar.Compiler`; thread-safe."""

    def __init__(self, config: StructuredOutputsConfig, tokenizer: Callable[[], Tokenizer], vocab: int) -> None:
        self._made: dict[str, Any] = {}
        self._config, self._load, self._vocab = config, tokenizer, vocab
        self._cache: OrderedDict[StructuredOutputsParams, Compiled] = OrderedDict()
        self._cached = 0
        self._tidied = -TIDY_SECONDS
        self._lock, self._making = Lock(), RLock()

    def __call__(self, asked: StructuredOutputsParams) -> Grammar:
        if asked.free:
            return partial(AfterThinking, Anything, asked.thinking, self._vocabulary) if asked.thinking is not None else Anything
        key = replace(asked, thinking=None, origin="")
        with self._lock:
            made = self._cache.get(key)
        try:
            made = made or self._compile(asked)
        finally:
            self._tidy()
        self._keep(key, made)
        grammar = made.grammar
        if asked.thinking is None or (self._config.enable_in_reasoning and asked.thinking.budget is None):
            return grammar
        return partial(AfterThinking, grammar, asked.thinking, self._vocabulary)

    def _tidy(self) -> None:
        """Return what grammars and their matchers freed: of twenty characters that may be 90 MiB, which the heap would keep."""
        with self._lock:
            now = time.monotonic()
            if now < self._tidied + TIDY_SECONDS:
                return
            self._tidied = now
        heap.trim()

    def _keep(self, key: StructuredOutputsParams, made: Compiled) -> None:
        """As the one last used. One that alone is above the bound is not kept."""
        with self._lock:
            if key not in self._cache:
                self._cached += made.nbytes
            self._cache[key] = made
            self._cache.move_to_end(key)
            while len(self._cache) > CACHED or self._cached > CACHED_BYTES:
                self._cached -= self._cache.popitem(last=False)[1].nbytes

    def _compile(self, asked: StructuredOutputsParams) -> Compiled:
        """By the backend that was asked for; under `auto` by the first one that keeps to all of it and compiles it: what a library refuses,
        or does not finish within its bounds of time and memory, is the other's."""
        lacks, errors = {}, {}
        for name, way_of in self._ways(asked).items():
            try:
                way = way_of(asked)
                if way.lack is None:
                    return self._by(name, way, asked)
                lacks[name] = way.lack
            except RequestError as error:
                errors[name] = error
        if len({str(error) for error in errors.values()}) == 1:
            raise next(iter(errors.values()))
        said = errors or {name: f"does not keep to {lack}" for name, lack in lacks.items()}
        why = "; ".join(f"{name}{':' * bool(errors)} {what}" for name, what in said.items())
        raise RequestError(f"{asked.kind} cannot be followed: {why}", param=asked.origin)

    def _ways(self, asked: StructuredOutputsParams) -> dict[str, Callable[[StructuredOutputsParams], Way]]:
        """To the backends that may be used here, the one first whose masks are faster, unless it would compile for long."""
        both: dict[str, Callable[[StructuredOutputsParams], Way]] = {"xgrammar": self._xgrammar, "guidance": self._guidance}
        packages = {"xgrammar": "xgrammar", "guidance": "llguidance"}
        wanted = [name for name in both if self._config.backend in ("auto", name)]
        usable = [name for name in wanted if find_spec(packages[name]) is not None]
        if not usable:
            raise RequestError(
                f'this server lacks the package {packages[wanted[0]]}: pip install "pagoda-llm[structured]"', param=asked.origin
            )
        return {name: both[name] for name in (usable[::-1] if len(usable) > 1 and self._wide(asked) else usable)}

    def _wide(self, asked: StructuredOutputsParams) -> bool:
        schemas: list[Any] = [self._schema(asked)] if asked.kind == "json" else []
        if asked.kind == "structural_tag":
            schemas = [part.get("json_schema") for part in formats(self._tag(asked)["format"]) if part.get("type") == "json_schema"]
        return any(optional_properties(schema) > MANY_OPTIONAL for schema in schemas)

    def _xgrammar(self, asked: StructuredOutputsParams) -> Way:
        if asked.kind == "choice":
            return Way("grammar", choice_grammar(asked.choice or ()))
        if asked.kind == "structural_tag":
            tag = self._tag(asked)
            return Way("structural_tag", json.dumps(tag), tag_beyond_xgrammar(tag))
        if asked.kind == "grammar":
            return Way("grammar", asked.grammar or "", "a Lark grammar" if _is_lark(asked.grammar or "") else None)
        if asked.kind == "regex":
            return Way("regex", asked.regex or "")
        schema = self._schema(asked)
        lack = beyond_xgrammar(schema, lengths=True) if asked.kind == "json" else None
        lack = "whitespace_pattern" if asked.whitespace_pattern is not None else lack
        return Way("json", json.dumps(schema if lack else with_lengths(schema)), lack)

    def _guidance(self, asked: StructuredOutputsParams) -> Way:
        if asked.kind == "choice":
            return Way("lark", choice_lark(asked.choice or ()))
        if asked.kind == "structural_tag":
            tag = self._tag(asked)
            lack = tag_beyond_guidance(tag)
            return Way("lark", "" if lack else tag_lark(tag, self._blanks(asked)), lack)
        if asked.kind == "grammar":
            return Way("lark", self._guide.as_lark(asked.grammar or "", asked.origin))
        if asked.kind == "regex":
            return Way("regex", asked.regex or "")
        return Way("json", json.dumps(with_options(self._schema(asked), self._blanks(asked), asked.whitespace_pattern)))

    def _schema(self, asked: StructuredOutputsParams) -> dict[str, object] | bool:
        if asked.kind == "json_object":
            return {"type": "object"}
        return prepared(read_schema(asked.json if isinstance(asked.json, str) else "", asked.origin), self._closed(asked))

    def _tag(self, asked: StructuredOutputsParams) -> dict[str, object]:
        source = asked.structural_tag if isinstance(asked.structural_tag, str) else ""
        return tag_with_schemas(read_tag(source, asked.origin), self._closed(asked))

    def _closed(self, asked: StructuredOutputsParams) -> bool | None:
        return True if self._config.disable_additional_properties else asked.disable_additional_properties

    def _blanks(self, asked: StructuredOutputsParams) -> bool:
        return not (asked.disable_any_whitespace or self._config.disable_any_whitespace)

    def _by(self, name: str, way: Way, asked: StructuredOutputsParams) -> Compiled:
        if name == "guidance":
            return Compiled(self._guide.compile(way.kind, way.source, asked.origin), len(way.source))
        return load(self._children.compile(way.kind, way.source, self._blanks(asked), asked.origin), self._info, self._writing)

    @property
    def _vocabulary(self) -> Vocabulary:
        return self._once("vocabulary", lambda: vocabulary_of(self._load(), self._vocab))

    @property
    def _guide(self) -> Guidance:
        return self._once("guide", lambda: Guidance(self._vocabulary))

    @property
    def _children(self) -> CompileChildren:
        return self._once("children", lambda: CompileChildren(self._vocabulary))

    @property
    def _info(self) -> Any:
        return self._once("info", lambda: token_info(self._vocabulary.texts, self._vocabulary.stops))

    @property
    def _writing(self) -> Writing:
        return self._once("writing", lambda: Writing(self._vocabulary))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What is made when first needed, by whichever thread comes first."""
        with self._making:
            if name not in self._made:
                self._made[name] = make()
            return self._made[name]


def maker_of(config: EngineConfig, vocab: int) -> GrammarMaker:
    """Of an engine's configuration; the tokenizer is read when the first grammar is asked for."""
    return GrammarMaker(config.structured, lambda: load_tokenizer(tokenizer_path(config)), vocab)


def _is_lark(grammar: str) -> bool:
    """EBNF defines its rules with `::=`."""
    return "::=" not in grammar
