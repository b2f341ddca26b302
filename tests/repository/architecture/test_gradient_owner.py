"""One module assigns the attribute ``grad`` of tensors in the package ``popdist_py.poptorch``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.imports import ROOT

_PACKAGE = ROOT / "popdist_py" / "poptorch"
_OWNER = _PACKAGE / "weights" / "parameter_gradients.py"


def _assignments(code: str) -> Iterator[int]:
    """Yield the line of each statement that stores or deletes an attribute ``grad``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            if not isinstance(node.ctx, ast.Load):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            if node.func.id in ("setattr", "delattr") and names == ["grad"]:
                yield node.lineno


def test_one_module_assigns_gradients():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in _PACKAGE.rglob("*.py")
        if path != _OWNER
        for line in _assignments(path.read_text())
    }
    assert not found, f"use the functions of {_OWNER.relative_to(ROOT)}"
    assert list(_assignments(_OWNER.read_text()))


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("p.grad = g", 1),
        ("p.grad, q = g, 1", 1),
        ("for p.grad in gs: pass", 1),
        ("del p.grad", 1),
        ("setattr(p, 'grad', g)", 1),
        ("p.grad.add_(g); q = p.grad; torch.autograd.grad(l, w)", 0),
    ],
)
def test_assignments_are_found(code: str, count: int):
    assert len(list(_assignments(code))) == count
