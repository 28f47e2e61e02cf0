"""Grammars of every kind by both libraries: what they take and refuse, which library is picked, and errors that name the feature."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from grammar_walk import accepts, allowed, maker, sample_tokenizer, schema, walk
from pagoda.hal import heap
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.structured import StructuredOutputsParams, Thinking
from pagoda.serving.frontend.structured import compile_child, guidance_backend
from pagoda.serving.frontend.structured import maker as maker_module
from pagoda.serving.frontend.structured.guidance_backend import GuidanceMatcher
from pagoda.serving.frontend.structured.maker import GrammarMaker
from pagoda.serving.frontend.structured.vocabulary import vocabulary_of
from pagoda.serving.frontend.structured.xgrammar_backend import Writing, XMatcher
from pagoda.serving.frontend.text import Tokenizer
from patience import until

ITEM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
TEXTS = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 1, "maxLength": 3}, "b": {"type": "string", "maxLength": 2}},
    "required": ["a", "b"],
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"type": "tag", "begin": "<f=x>", "content": {"type": "json_schema", "json_schema": ITEM}, "end": "</f>"},
            {"type": "tag", "begin": "<f=y>", "content": {"type": "any_text"}, "end": "</f>"},
        ],
    },
}
OLD_TAG = {"structures": [{"begin": "<f=x>", "schema": ITEM, "end": "</f>"}], "triggers": ["<f="]}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "schema": ({"json": ITEM}, ['{"a":1}', '{"a": 1, "b": "x\\t"}', '{\n  "a": 1}'], ["{}", '{"a":"x"}', '{"a":1,"c":2}', '{"a":1}x']),
    "schema as a text": ({"json": json.dumps(ITEM)}, ['{"a":1}'], ["{}"]),
    "no blanks": ({"json": ITEM, "disable_any_whitespace": True}, ['{"a": 1, "b": "x"}'], ['{"a":1}', '{ "a": 1}']),
    "any JSON object": ({"json_object": True}, ["{}", '{"a":[1,null]}'], ["[1]", "3"]),
    "lengths": (
        {"json": TEXTS},
        ['{"a": "é", "b": ""}', '{"a": "a\\tb", "b": "\\"\\\\"}'],
        ['{"a": "", "b": ""}', '{"a": "abcd", "b": ""}', '{"a": "a\t", "b": ""}', '{"a": "a", "b": "\\n\\n\\n"}'],
    ),
    "regex": ({"regex": r"[a-z]+\t\d{2}"}, ["abc\t12"], ["abc\t1", "ABC\t12"]),
    "choice": ({"choice": ["yes", "no way", 'q"\n\\']}, ["yes", "no way", 'q"\n\\'], ["no", "yesno"]),
    "ebnf": ({"grammar": 'root ::= "a" b+\nb ::= [0-9] | "x"\n'}, ["a1x"], ["a", "b1"]),
    "tag": ({"structural_tag": TAG}, ["hello", 'hi <f=x>{"a":1}</f> and <f=y>any </thing></f> more'], ['<f=x>{"b":1}</f>', "<f=z>"]),
    "older tag": ({"structural_tag": OLD_TAG}, ["hello", 'hi <f=x>{"a":1}</f> and'], ['<f=x>{"b":1}</f>', "<f=z>"]),
}
GUIDANCE_ALONE: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "lark": ({"grammar": 'start: "a" B+\nB: /[0-9]/ | "x"\n'}, ["a1x"], ["a", "b1"]),
    "length": ({"json": {"type": "string", "maxLength": 65}}, ['"abc"', '"a\\t"'], [f'"{"a" * 66}"', '"a\t"']),
    "open": (
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}, "disable_additional_properties": False},
        ['{"b":[1]}', '{"a":1}'],
        ['{"a":"x"}'],
    ),
    "put together": ({"json": {"allOf": [{"minimum": 3}, {"maximum": 7}], "type": "integer"}}, ["5"], ["8"]),
    "blanks by pattern": ({"json": ITEM, "whitespace_pattern": "_?"}, ['{_"a":_1}'], ['{ "a":1}']),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sample_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def makers(tokenizer: Tokenizer) -> dict[str, GrammarMaker]:
    return {backend: maker(tokenizer, backend) for backend in ("auto", "xgrammar", "guidance")}


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance"])
@pytest.mark.parametrize("case", CASES)
def test_a_kind(backend: str, case: str, makers: dict[str, GrammarMaker], tokenizer: Tokenizer) -> None:
    asked, right, wrong = CASES[case]
    grammar = makers[backend](StructuredOutputsParams(**asked))
    assert isinstance(grammar(), XMatcher if backend != "guidance" else GuidanceMatcher)
    assert [text for text in right if not accepts(grammar, tokenizer, text)] == []
    assert [text for text in wrong if accepts(grammar, tokenizer, text)] == []


@pytest.mark.parametrize("case", GUIDANCE_ALONE)
def test_what_xgrammar_would_not_keep_to_goes_to_the_other(case: str, makers: dict[str, GrammarMaker], tokenizer: Tokenizer) -> None:
    asked, right, wrong = GUIDANCE_ALONE[case]
    grammar = makers["auto"](StructuredOutputsParams(**asked))
    assert isinstance(grammar(), GuidanceMatcher)
    assert [text for text in right if not accepts(grammar, tokenizer, text)] == []
    assert [text for text in wrong if accepts(grammar, tokenizer, text)] == []
    with pytest.raises(RequestError, match="xgrammar does not keep to"):
        makers["xgrammar"](StructuredOutputsParams(**asked))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, '"uniqueItems"'),
        ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, '"dependentRequired"'),
        ({"json": {"not": {"type": "string"}}}, '"not"'),
        ({"json": {"if": {"type": "string"}, "then": {"maxLength": 3}}}, '"if", "then"'),
        ({"json": {"type": "string", "format": "nonsense"}}, "Unknown format: nonsense"),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": "{"}, "no JSON"),
        ({"json": "3"}, "object, true or false"),
        ({"regex": "(a"}, "not closed"),
        ({"grammar": "root ::= ("}, "Expected"),
        ({"structural_tag": {"format": {"type": "foo"}}}, "foo"),
        ({"structural_tag": "[]"}, "an object with"),
        ({"json": "[" * 300 + "]" * 300}, "deep|object, true"),
    ],
)
def test_what_cannot_be_followed_is_named(asked: dict[str, Any], message: str, makers: dict[str, GrammarMaker]) -> None:
    with pytest.raises(RequestError, match=message) as told:
        makers["auto"](StructuredOutputsParams(**asked, origin="response_format"))
    assert told.value.param == "response_format"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "exactly one of"),
        ({"json": {}, "regex": "a"}, "found json, regex"),
        ({"choice": []}, "none of them empty|list of texts"),
        ({"regex": 3}, "must be a text"),
        ({"regex": "a" * 300_000}, "300000 characters"),
    ],
)
def test_what_is_no_request(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams.of(asked)


def test_the_engines_configuration_is_checked() -> None:
    assert EngineConfig(structured_outputs_config={"backend": "guidance"}).structured.backend == "guidance"
    for given in ({"backend": "outlines"}, {"back": "auto"}, {"disable_any_whitespace": 1}):
        with pytest.raises(ConfigError, match="structured_outputs_config"):
            EngineConfig(structured_outputs_config=given)


@pytest.mark.heavy
def test_a_grammar_that_takes_too_long_is_given_up_and_others_go_on(
    makers: dict[str, GrammarMaker], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = maker(tokenizer, "xgrammar")
    assert accepts(made(StructuredOutputsParams(regex="ab?")), tokenizer, "ab")
    monkeypatch.setattr(compile_child, "COMPILE_SECONDS", 0.2)
    with pytest.raises(RequestError, match="make it simpler"):
        made(StructuredOutputsParams(regex=HOSTILE))
    monkeypatch.setattr(compile_child, "COMPILE_SECONDS", 100.0)
    assert accepts(made(StructuredOutputsParams(regex="ab?")), tokenizer, "a")
    assert accepts(made(StructuredOutputsParams(regex="a[bc]")), tokenizer, "ac")


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_grammars_are_kept_as_long_as_there_is_room(backend: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = maker(tokenizer, backend), [StructuredOutputsParams(regex=f"a{{{n}}}") for n in range(1, 6)]
    first = made(asked[0])
    assert made(asked[0]) is first
    one = made._cached
    assert one > 0
    monkeypatch.setattr(maker_module, "CACHED_BYTES", 3 * one + one // 2)
    rest = [made(each) for each in asked[1:]]
    assert made._cached == sum(each.nbytes for each in made._cache.values()) <= 3 * one + one // 2
    assert made(asked[4]) is rest[3]
    assert made(asked[0]) is not first  # the longest unused, and made again
    monkeypatch.setattr(maker_module, "CACHED_BYTES", one // 2)
    assert accepts(made(asked[2]), tokenizer, "aaa")  # alone above the bound
    assert (made._cached, len(made._cache)) == (0, 0)


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "number"} for i in range(600)}}
NESTED = {
    "type": "object",
    "properties": {f"p{i}": {"type": "object", "properties": {f"q{j}": {"type": "number"} for j in range(10)}} for i in range(60)},
}


def test_what_one_library_has_no_room_for_is_the_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_child, "COMPILE_BYTES", 64 << 20)
    made = maker(tokenizer)(StructuredOutputsParams(json=NESTED))
    assert isinstance(made(), GuidanceMatcher)
    assert accepts(made, tokenizer, '{"p3": {"q9": 1}, "p59": {}}') and not accepts(made, tokenizer, '{"p3": {"q10": 1}}')
    with pytest.raises(RequestError, match="GiB; make it simpler"):
        maker(tokenizer, "xgrammar")(StructuredOutputsParams(json=NESTED))


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_objects_of_many_optional_properties_are_not_compiled_for_long(
    kind: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_child, "COMPILE_SECONDS", 100.0)
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": WIDE}, "end": "</f>"}
    asked = {"json": WIDE} if kind == "json" else {"structural_tag": {"type": "structural_tag", "format": tag}}
    made = maker(tokenizer)
    grammar = made(StructuredOutputsParams(**asked))
    assert isinstance(grammar(), GuidanceMatcher) and "children" not in made._made
    before, after = ("", "") if kind == "json" else ("<f>", "</f>")
    for text in ('{"p3": 1, "p599": 2.5}', "{}", json.dumps(dict.fromkeys(WIDE["properties"], 1))):
        assert accepts(grammar, tokenizer, before + text + after)
    for text in ('{"p600": 1}', '{"p3": "x"}', '{"p4": 1, "p3": 1}'):
        assert not accepts(grammar, tokenizer, before + text + after)
    required = {**WIDE, "required": [*WIDE["properties"]]}
    assert isinstance(made(StructuredOutputsParams(json=required))(), XMatcher)


def test_what_one_library_refuses_is_the_others_and_both_are_heard(makers: dict[str, GrammarMaker], tokenizer: Tokenizer) -> None:
    nothing = StructuredOutputsParams(regex="a(?=b)b")
    for backend in ("xgrammar", "guidance"):
        with pytest.raises(RequestError):
            makers[backend](nothing)
    with pytest.raises(RequestError) as told:
        makers["auto"](nothing)
    assert "xgrammar: " in str(told.value) and "guidance: " in str(told.value)
    # `\\u` is EBNF that one library reads alone
    one = StructuredOutputsParams(grammar='root ::= "\\u0041" "b"')
    with pytest.raises(RequestError):
        makers["guidance"](one)
    assert accepts(makers["auto"](one), tokenizer, "Ab")


def test_an_output_whose_grammar_takes_too_much_work_says_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guidance_backend.LIMITS, "max_items_in_row", 100)
    matcher = maker(tokenizer, "guidance")(StructuredOutputsParams(json=WIDE))()
    assert allowed(matcher, tokenizer) and matcher.failure() is None
    matcher.accept(tokenizer.encode("{", add_special_tokens=False))
    assert set(allowed(matcher, tokenizer)) == set(tokenizer.eos_ids)
    assert "more work than is allowed" in str(matcher.failure())


def test_memory_that_a_grammar_ran_out_of_is_given_back(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_child, "COMPILE_BYTES", 256 << 20)
    monkeypatch.setattr(compile_child, "CHILDREN", 1)
    children = compile_child.CompileChildren(vocabulary_of(tokenizer, tokenizer.vocab_size))
    try:
        plain = json.dumps({"type": "integer"})
        children.compile("json", plain, False, "schema")
        before = _resident(children)
        with pytest.raises(RequestError, match="GiB; make it simpler"):
            children.compile("json", json.dumps(NESTED), True, "schema")
        children.compile("json", plain, False, "schema")  # which is read after the memory was given back
        assert _resident(children) < before + (96 << 20)
    finally:
        children.close()


def test_the_heap_keeps_nothing_that_a_grammar_freed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = maker(tokenizer, "xgrammar")
    known = StructuredOutputsParams(choice=("a",))
    made(known)
    matcher = made(StructuredOutputsParams(regex="a{100000}"))()
    for _ in range(20):
        matcher.accept(allowed(matcher, tokenizer)[:1])
    del matcher
    monkeypatch.setattr(maker_module, "TIDY_SECONDS", 0.0)
    made(known)
    before = psutil.Process().memory_info().rss
    heap.trim()
    assert before - psutil.Process().memory_info().rss < 4 << 20


def _resident(children: compile_child.CompileChildren) -> int:
    (process,) = children.processes
    return int(psutil.Process(process).memory_info().rss)


def both_started(children: compile_child.CompileChildren) -> None:
    children.compile("regex", "ab?", False, "regex")
    until(lambda: len(children.processes) == compile_child.CHILDREN, "for the second compiler")


HOSTILE = "|".join(f"([a-z]{{1,{900 + i}}}[0-9a-f]{{1,{900 + i}}})*" for i in range(60))


@pytest.mark.heavy
def test_beside_a_grammar_that_takes_all_its_time_others_are_compiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_child, "COMPILE_SECONDS", 60.0)
    children = compile_child.CompileChildren(vocabulary_of(tokenizer, tokenizer.vocab_size))
    with ThreadPoolExecutor(1) as pool:
        try:
            both_started(children)
            hostile = pool.submit(children.compile, "regex", HOSTILE, False, "regex")
            for number in range(20):
                children.compile("regex", f"a{{{number + 1}}}", False, "regex")
            assert not hostile.done()
        finally:
            children.close()
        with pytest.raises(RequestError):
            hostile.result(60)


@pytest.mark.heavy
def test_what_was_given_up_is_not_tried_again_unless_its_compiler_was_killed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_child, "COMPILE_SECONDS", 0.5)
    children = compile_child.CompileChildren(vocabulary_of(tokenizer, tokenizer.vocab_size))
    try:
        both_started(children)
        with pytest.raises(RequestError, match="make it simpler"):
            children.compile("regex", HOSTILE, False, "regex")
        monkeypatch.setattr(children, "_take", lambda origin: pytest.fail("it was tried again"))
        with pytest.raises(RequestError, match="make it simpler"):
            children.compile("regex", HOSTILE, False, "regex")
        monkeypatch.undo()
        both_started(children)
        psutil.Process(children.processes[0]).kill()
        for number in range(2 * compile_child.CHILDREN):
            assert children.compile("regex", f"a{{{number + 1}}}", False, "regex")
    finally:
        children.close()


@pytest.mark.heavy
def test_compilers_end_with_whoever_started_them() -> None:
    code = (
        "import sys; from threading import Thread; from time import sleep;"
        "from pagoda.serving.frontend.structured.compile_child import CompileChildren;"
        "from pagoda.serving.frontend.structured.vocabulary import Vocabulary;"
        "made = CompileChildren(Vocabulary(None, [bytes([i]) for i in range(256)], [], [0]));"
        "made.compile('regex', 'ab?', False, 'regex');"
        "[Thread(target=made.compile, args=('regex', sys.argv[1] + 'x' * i, False, 'regex'), daemon=True).start() for i in range(2)];"
        "[sleep(0.01) for _ in iter(lambda: len(made.processes) < 2, False)];"
        "print(*made.processes, flush=True); sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, HOSTILE], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            children = [psutil.Process(int(process)) for process in parent.stdout.readline().split()]
            assert len(children) == 2 and all(child.is_running() for child in children)
            parent.kill()
            _, alive = psutil.wait_procs(children, timeout=20)
            assert not alive
        finally:
            parent.kill()


def test_the_same_grammar_is_compiled_once(makers: dict[str, GrammarMaker]) -> None:
    asked = [StructuredOutputsParams(regex="once", origin=origin) for origin in ("structured_outputs", "guided_regex")]
    assert makers["auto"](asked[0]) is makers["auto"](asked[1])


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_comes_before_the_grammar(begun: bool, makers: dict[str, GrammarMaker], tmp_path: Path) -> None:
    tokenizer = sample_tokenizer(tmp_path, ("<think>", "</think>"))
    thinking = Thinking(("<think>",), ("</think>",), begun)
    grammar = maker(tokenizer)(StructuredOutputsParams(choice=["yes", "no"], thinking=thinking))
    opened = "" if begun else "<think>"
    assert accepts(grammar, tokenizer, f"{opened}no? {{ maybe</think>yes")
    assert not accepts(grammar, tokenizer, f"{opened}no?</think>maybe")
    assert not accepts(grammar, tokenizer, f"{opened}no?")
    assert accepts(grammar, tokenizer, "yes") != begun
    plain = grammar()
    plain.accept(tokenizer.encode(f"{opened}hm</think>ye", add_special_tokens=False))
    assert plain.advance(tokenizer.encode("s", add_special_tokens=False)[0])


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_thoughts_end_when_their_budget_is_spent(begun: bool, bound: bool, single: bool, tmp_path: Path) -> None:
    tokenizer = sample_tokenizer(tmp_path, ("<think>", "</think>") if single else ("<think>",))
    thinking = Thinking(("<think>",), ("</think>",), begun, 3)
    asked = {"choice": ["yes", "no"]} if bound else {"free": True}
    grammar = maker(tokenizer)(StructuredOutputsParams(**asked, thinking=thinking))
    opened = [] if begun else tokenizer.encode("<think>", add_special_tokens=False)
    thought = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    assert (len(closing) == 1) == single
    matcher = grammar()
    for token in [*opened, *thought]:
        assert len(allowed(matcher, tokenizer)) > (0 if token in opened else 100)
        matcher.accept([token])
    for token in closing:
        assert allowed(matcher, tokenizer) == [token]
        assert not matcher.advance(thought[0]) and matcher.advance(token)
        matcher.go_back()
        matcher.accept([token])
    assert (len(allowed(matcher, tokenizer)) < 50) == bound
    early = grammar()
    early.accept([*opened, thought[0], *closing])
    assert (len(allowed(early, tokenizer)) < 50) == bound


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_masks_allow_is_the_schemas(seed: int, makers: dict[str, GrammarMaker], tokenizer: Tokenizer) -> None:
    draw = random.Random(seed)
    made = schema(draw)
    grammar = makers["guidance" if seed % 3 == 0 else "auto"](StructuredOutputsParams(json=made))
    for again in range(3):
        tokens = walk(grammar, tokenizer, 100 * seed + again)
        if tokens is not None:
            jsonschema.validate(json.loads(tokenizer.decode(tokens, skip_special_tokens=False)), made)
            break
    else:
        pytest.fail("no walk ended")


@pytest.mark.parametrize("taken", [True, False])
def test_what_must_come_is_written_as_the_tokenizer_does(taken: bool, makers: dict[str, GrammarMaker], tokenizer: Tokenizer) -> None:
    """Where the tokenizer's own token may not come, as of those that put a space first, all that write the same may."""
    words = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in range(tokenizer.vocab_size)]
    word = next(word for word in words if len(word) > 2 and word.isalpha())
    matcher: Any = makers["xgrammar"](StructuredOutputsParams(json={"const": word}))()
    own = tokenizer.encode(f'"{word}"', add_special_tokens=False)
    if not taken:
        own_writing = matcher._writing
        others = {"beginnings": staticmethod(own_writing.beginnings), "after": staticmethod(own_writing.after)}
        matcher._writing = type("Other", (), {"__call__": lambda self, text, last: (0,), **others})()
    alone = []
    for token in own:
        before = allowed(matcher, tokenizer)
        alone.append(before == [token])
        assert matcher.advance(token)
        ahead = allowed(matcher, tokenizer)
        matcher.go_back()
        assert allowed(matcher, tokenizer) == before
        matcher.accept([token])
        assert allowed(matcher, tokenizer) == ahead
    assert all(alone) == taken


@pytest.mark.parametrize("seed", range(8))
def test_what_must_come_is_the_same_however_one_came_there(seed: int, makers: dict[str, GrammarMaker], tokenizer: Tokenizer) -> None:
    draw = random.Random(seed)
    grammar = makers["xgrammar"](StructuredOutputsParams(choice=["in one, two", "in one, three", "é" * 9, str(seed) * 9]))
    matcher, tokens = grammar(), list[int]()
    while tokenizer.eos_ids[0] not in (choices := allowed(matcher, tokenizer)):
        fresh = grammar()
        fresh.accept(tokens)
        assert matcher.forced() == fresh.forced() and choices == allowed(fresh, tokenizer)
        for token in (ahead := matcher.forced()[:2]):
            assert matcher.advance(token)
        for _ in ahead:
            matcher.go_back()
        token = draw.choice(choices)
        matcher.accept([token])
        tokens.append(token)
    assert len(tokens) > 2


class Asked:
    """Another object's attributes, and how often `name` of it was called."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name, self.times = inner, name, 0

    def __getattr__(self, name: str) -> Any:
        self.times += name == self._name
        return getattr(self._inner, name)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_a_step_looks_at_little_of_a_long_text_that_must_come(
    backend: str, makers: dict[str, GrammarMaker], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's loop asks at each step: what a text of many characters is, is found once, and never written as a whole."""
    written = [0]
    monkeypatch.setattr(
        Writing, "_write", lambda own, text, last, write=Writing._write: written.append(len(text)) or write(own, text, last)
    )
    matcher: Any = makers[backend](StructuredOutputsParams(regex="[bc]a{50000}"))()
    asked = matcher._matcher = Asked(matcher._matcher, "find_jump_forward_string" if backend == "xgrammar" else "compute_ff_tokens")
    matcher.accept(tokenizer.encode("b", add_special_tokens=False))
    for _ in range(30):
        ahead = matcher.forced()
        assert 2 < len(ahead) <= 512 and set(tokenizer.decode(ahead)) == {"a"}
        assert ahead[0] in allowed(matcher, tokenizer)
        matcher.accept(ahead[:1])
        assert matcher.advance(ahead[1])
        matcher.go_back()
    assert asked.times == 1 and max(written) <= 512
