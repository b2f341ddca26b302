"""The imports of the two packages, read from their source: what tests and the docs' picture use.

Every import counts, also one inside a function or under TYPE_CHECKING: hidden arrows are arrows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "circles", "module_imports", "modules", "room_imports", "room_of"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("poprun_py", "popdist_py")
# No room but a folder of other packages: their only imports are the objects that they pass on.
_SDK_NAMES = "sdk_names"


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module by its dotted name; a package is its ``__init__.py``."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[1] == _SDK_NAMES:
                continue
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


@cache
def module_imports() -> dict[str, frozenset[str]]:
    """Return the modules of ours that each module imports by name."""
    return {name: frozenset(_imported(name, file)) for name, file in modules().items()}


def _imported(name: str, file: Path) -> Iterable[str]:
    known = modules()
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


def room_of(module: str) -> str:
    """Return the room of a module: its folder, or the module itself where it stands in none."""
    if modules()[module].name == "__init__.py":
        return module
    folder = module.rpartition(".")[0]
    return module if folder in (*PACKAGES, "popdist_py.poptorch") else folder


def room_imports() -> dict[str, frozenset[str]]:
    """Return the rooms that each room imports from."""
    found: dict[str, set[str]] = {}
    for module, imported in module_imports().items():
        room = room_of(module)
        found.setdefault(room, set()).update(room_of(other) for other in imported)
    return {room: frozenset(others - {room}) for room, others in found.items()}


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
