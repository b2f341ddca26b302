"""The imports of the two packages, read from their sources, for tests of the architecture.

Every import counts, also an import inside a function or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

__all__ = [
    "PACKAGES",
    "ROOT",
    "circles",
    "module_imports",
    "modules",
    "package_imports",
    "package_of",
]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("poprun_py", "popdist_py")
# A folder of packages that only pass on objects of other packages.
_SDK_NAMES = "sdk_names"


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the file of every module by its dotted name; a package is its ``__init__.py``."""
    return _modules(root)


@cache
def _modules(root: Path) -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if parts[1] == _SDK_NAMES:
                continue
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def module_imports(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Return the modules of ours that each module imports by name."""
    return _module_imports(root)


@cache
def _module_imports(root: Path) -> dict[str, frozenset[str]]:
    known = modules(root)
    return {name: frozenset(_imported(name, file, known)) for name, file in known.items()}


def _imported(name: str, file: Path, known: Mapping[str, Path]) -> Iterable[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # A name of a package is a module of it, or what the package itself defines.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            wanted = [w if w in known else node.module for w in inside]
        else:
            continue
        yield from (w for w in wanted if w in known and w != name)


def package_of(module: str, root: Path = ROOT) -> str:
    """Return the package of a module, or the module itself where it is in none."""
    if modules(root)[module].name == "__init__.py":
        return module
    folder = module.rpartition(".")[0]
    return module if folder in (*PACKAGES, "popdist_py.poptorch") else folder


def package_imports(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Return the packages that each package imports from."""
    found: dict[str, set[str]] = {}
    for module, imported in module_imports(root).items():
        package = package_of(module, root)
        found.setdefault(package, set()).update(package_of(other, root) for other in imported)
    return {package: frozenset(others - {package}) for package, others in found.items()}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Return the sets of nodes that reach one another, each sorted."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        todo = list(arrows[start])
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += arrows.get(node, ())
        reached[start] = seen
    found = {
        tuple(sorted(other for other in reached[node] | {node} if node in reached.get(other, ())))
        for node in arrows
        if node in reached[node]
    }
    return sorted(found)
