"""Writes down a torch namespace from a vendor's wheel, names and signatures alone: `python record_namespace.py WHEEL FOLDER > OUT.json`;
`… WHEEL FILE.py OPERATOR…` operators that a file of it registers (`@impl(library, "operator")`).

Nothing of the wheel is imported: it would want its driver. What is written in C has no signature and is `null`.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import PurePosixPath
from typing import Any

NAMED = ("Stream", "Event", "NPUGraph", "graph", "stream")
"""Classes whose methods are used; of others the constructor is enough."""


def record(wheel: str, folder: str) -> dict[str, Any]:
    """Name → signature, or for a class a record of its methods; of all that the namespace exports."""
    trees: list[ast.Module] = []
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            if str(PurePosixPath(path).parent) == folder and path.endswith(".py"):
                trees.append(ast.parse(archive.read(path)))
        init = ast.parse(archive.read(f"{folder}/__init__.py"))
    exported = set(_exported(init))
    found = {node.name: _entry(node) for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {"wheel": PurePosixPath(wheel).name, "members": {name: found.get(name) for name in sorted(exported)}}


def operators(wheel: str, path: str, names: list[str]) -> dict[str, Any]:
    """Name → signature of each of the operators that a file registers."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(path))
    found = {}
    for node in tree.body:
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and len(call.args) == 2 and isinstance(call.args[1], ast.Constant):
                found[call.args[1].value] = _signature(node.args)  # type: ignore[attr-defined]
    return {"wheel": PurePosixPath(wheel).name, "file": path, "operators": {name: found[name] for name in names}}


def _exported(init: ast.Module) -> list[str]:
    for node in init.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise SystemExit("the namespace exports nothing by name (__all__)")


def _entry(node: ast.FunctionDef | ast.ClassDef) -> Any:
    if isinstance(node, ast.FunctionDef):
        return _signature(node.args)
    methods = {part.name: _signature(part.args) for part in node.body if isinstance(part, ast.FunctionDef)}
    return methods if node.name in NAMED else {name: methods[name] for name in ("__new__", "__init__") if name in methods}


def _signature(args: ast.arguments) -> str:
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])):
        arg.annotation = None
    args.defaults = [value if isinstance(value, ast.Constant) else ast.Constant(None) for value in args.defaults]
    args.kw_defaults = [value if value is None or isinstance(value, ast.Constant) else ast.Constant(None) for value in args.kw_defaults]
    return f"({ast.unparse(args)})"


if __name__ == "__main__":
    asked = sys.argv[1:]
    print(json.dumps(record(*asked) if len(asked) == 2 else operators(asked[0], asked[1], asked[2:]), indent=1))
