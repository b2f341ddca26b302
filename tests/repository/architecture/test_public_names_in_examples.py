"""Examples import and use only names that the pages for users offer."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.repository import ROOT

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))
PACKAGES = ("popdist_py", "poprun_py")
# These pages describe the inside of the packages, or hold output that programs printed.
NOT_FOR_USERS = {"architecture.md", "seeds.md"}
# Underscore names that examples may use: PopTorch's own spelling, and the notebook protocol.
DOCUMENTED = {"_Popart", "_repr_html_"}
# argparse has no public way to list a parser's arguments. One method of one module does it.
ARGPARSE = {("common/arguments.py", "_actions")}


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a name inside a module
        return False


def module_of(dotted: str) -> str:
    """Return the longest beginning of a dotted name that is a module."""
    while not is_module(dotted):
        dotted = dotted.rpartition(".")[0]
    return dotted


@cache
def public_modules() -> frozenset[str]:
    """Return the modules that a page for users names or imports from, and those that they offer."""
    found = set(PACKAGES)
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst"), ROOT / "README.md"]
    for page in pages:
        if page.name in NOT_FOR_USERS:
            continue
        text = page.read_text(encoding="utf-8")
        found |= {module_of(name) for name in re.findall(r"\bpop(?:dist|run)_py[.\w]+\w", text)}
        for package, names in re.findall(r"from (popdist_py|poprun_py) import ([\w, ]+)", text):
            dotted = (f"{package}.{name}" for name in names.replace(" ", "").split(","))
            found |= {name for name in dotted if is_module(name)}
    offered = {f"{module}.{name}" for module in found for name in offered_names(module)}
    return frozenset(found | set(filter(is_module, offered)))


def offered_names(module: str) -> tuple[str, ...]:
    return tuple(getattr(importlib.import_module(module), "__all__", ()))


def is_public(module: str, name: str) -> bool:
    """Tell whether a page offers the name of this module."""
    dotted = f"{module}.{name}"
    return dotted in public_modules() or (
        module in public_modules() and name in offered_names(module)
    )


def own(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield each import from the packages: the name in the program, the module, and the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and own(node.module or ""):
            for each in node.names:
                yield each.asname or each.name, node.module, each.name
        elif isinstance(node, ast.Import):
            for each in filter(lambda each: own(each.name), node.names):
                package, _, rest = each.name.partition(".")
                yield each.asname or package, package, rest


def internal_uses(tree: ast.AST) -> Iterator[str]:
    """Yield imports and attributes of the packages that no page offers."""
    bound = {}
    for alias, module, name in imported_names(tree):
        dotted = f"{module}.{name}" if name else module
        if name and not is_public(*dotted.rpartition(".")[::2]):
            yield dotted
        if is_module(dotted):
            bound[alias] = dotted
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used = dotted_name(node)
            module = bound.get(used.partition(".")[0])
            for name in used.split(".")[1:]:
                if module is None:
                    break
                if not is_public(module, name):
                    yield f"{module}.{name}"
                    break
                module = f"{module}.{name}" if is_module(f"{module}.{name}") else None


def dotted_name(node: ast.AST) -> str:
    """Return ``a.b.c`` of an attribute of a name; an empty text for attributes of other values."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted_name(node.value)):
        return f"{before}.{node.attr}"
    return ""


def private_uses(tree: ast.AST, file: str) -> Iterator[str]:
    """Yield attributes with an underscore that this file does not define."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    defined |= {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            is_known = node.attr in DOCUMENTED or (file, node.attr) in ARGPARSE
            if not is_known and node.attr not in defined:
                yield f"{ast.unparse(node.value)}.{node.attr}"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_program_uses_public_names_only(program: Path):
    tree = ast.parse(program.read_text(encoding="utf-8"))
    file = str(program.relative_to(EXAMPLES))
    assert sorted({*internal_uses(tree), *private_uses(tree, file)}) == []


@pytest.mark.parametrize(
    ("code", "internal"),
    [
        ("from popdist_py.atomic_file import write_whole", "popdist_py.atomic_file.write_whole"),
        ("from popdist_py import context", "popdist_py.context"),
        ("import popdist_py\npopdist_py.context.environment()", "popdist_py.context"),
        ("import popdist_py.leaf_arrays as leaves", "popdist_py.leaf_arrays"),
        ("from popdist_py import poptorch\nx = poptorch.logger_", "popdist_py.poptorch.logger_"),
        ("import popdist_py\npopdist_py.poptorch.calls", "popdist_py.poptorch.calls"),
        ("from popdist_py.ipu.schedule import _window", "popdist_py.ipu.schedule._window"),
    ],
)  # fmt: skip
def test_internal_names_are_found(code, internal):
    assert set(internal_uses(ast.parse(code))) == {internal}


def test_private_attributes_are_found():
    code = "class A:\n def f(self):\n  self._mine = self._theirs\n  parser._actions"
    assert list(private_uses(ast.parse(code), "x.py")) == ["self._theirs", "parser._actions"]
