"""Reads off a chat template whether it takes `message.content` as a string, as a list of parts, or both."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes
from pagoda.serving.frontend.chat_messages import ContentFormat


def content_format(tree: nodes.Template) -> ContentFormat:
    """Of a parsed template: one that loops over the content takes parts; one that never does, or tests `is string`, takes strings."""
    names = _names_of_content(tree)
    parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, names)}
    return ContentFormat(parts, not parts or bool(tests & _KINDS), "none" in tests)


_KINDS = {"string", "iterable", "sequence", "mapping"}


def _names_of_content(tree: nodes.Template) -> frozenset[str]:
    """Variables and macro arguments that hold a message's content, found until no new one turns up."""
    names: frozenset[str] = frozenset()
    while True:
        found = names | set(_assigned(tree, names)) | set(_macro_arguments(tree, names))
        if found == names:
            return names
        names = found


def _assigned(tree: nodes.Template, names: frozenset[str]) -> Iterator[str]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            yield assign.target.name


def _macro_arguments(tree: nodes.Template, names: frozenset[str]) -> Iterator[str]:
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            yield from (arg.name for arg, value in zip(macro.args, call.args, strict=False) if _is_content(value, names))


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    match node:
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    return False
