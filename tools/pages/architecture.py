"""The pictures and the table of docs/architecture.md: packages, and which package imports which.

Imports that follow from others are not drawn: if one package imports a second and that one a third,
there is no arrow from the first to the third.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.pages.imports import module_imports, modules, package_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
TABLE = re.compile(r"(?<=<!-- packages -->\n).*?(?=<!-- end -->)", re.DOTALL)

_GROUND = ("enums", "errors", "logger")
_LEFT_OUT = (
    "__main__",
    "atomic_file",
    "errors",
    "process_info",
    "terminal",
    "versions",
)
# Of the PopTorch API: modules that hold names only.
_NAMES = ("autocasting", "old_spellings", "poptorch_core", "profiling", "testing", "torch_ops")
_BOX, _GAP, _ROW, _MARGIN = (148, 44), 16, 84, 24
_COLOURS = {"poprun_py": "#dbeafe", "popdist_py": "#dcfce7", "popdist_py.poptorch": "#fef3c7"}

Arrows = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One part of a picture: a title, and which node of it a module belongs to (None: none)."""

    title: str
    package: str
    node_of: Callable[[str], str | None]


def _launcher(module: str) -> str | None:
    if not module.startswith("poprun_py.") or module.rpartition(".")[2] in _LEFT_OUT:
        return None
    return package_of(module).removeprefix("poprun_py.").partition(".")[0]


def _library(module: str) -> str | None:
    if module.startswith("popdist_py.poptorch"):
        return "poptorch"
    name = module.rpartition(".")[2]
    if not module.startswith("popdist_py.") or name in ("popdist_core", *_LEFT_OUT):
        return None
    package = package_of(module).removeprefix("popdist_py.")
    return None if package == "start_hook" else package.replace(".", "/")


def _poptorch(module: str) -> str | None:
    name = module.removeprefix("popdist_py.poptorch.")
    if name == module or name in _NAMES:
        return None
    return " ".join(_GROUND) if name in _GROUND else name.partition(".")[0]


PICTURES = {
    "launcher-packages.svg": (Panel("The launcher: poprun_py", "poprun_py", _launcher),),
    "library-packages.svg": (
        Panel("The library: popdist_py", "popdist_py", _library),
        Panel("The PopTorch API: popdist_py/poptorch", "popdist_py.poptorch", _poptorch),
    ),
}


def arrows_of(panel: Panel) -> dict[str, frozenset[str]]:
    """Return the nodes of a panel, each with the nodes that it imports from."""
    found: dict[str, set[str]] = {}
    for module, imported in module_imports().items():
        node = panel.node_of(module)
        if node is not None:
            others = {panel.node_of(other) for other in imported} - {node, None}
            found.setdefault(node, set()).update(other for other in others if other)
    return {node: frozenset(others) for node, others in sorted(found.items())}


def reduced(arrows: Arrows) -> dict[str, frozenset[str]]:
    """Return ``arrows`` without those that follow from the others; there are no circles."""

    def reached(node: str) -> set[str]:
        return {far for near in arrows[node] for far in {near} | reached(near)}

    return {
        node: frozenset(o for o in others if not any(o in reached(p) for p in others - {o}))
        for node, others in arrows.items()
    }


def rows_of(arrows: Arrows) -> list[list[str]]:
    """Return the nodes in rows, callers above; within a row, below those that call them."""

    def height(node: str) -> int:
        return 1 + max((height(other) for other in arrows[node]), default=-1)

    rows: list[list[str]] = [[] for _ in range(max(map(height, arrows)) + 1)]
    for node in arrows:
        rows[-1 - height(node)].append(node)
    place: dict[str, float] = {}
    for row in rows:
        callers = {node: [place[p] for p in place if node in arrows[p]] for node in row}
        row.sort(key=lambda n: (sum(callers[n]) / len(callers[n]) if callers[n] else 0.5, n))
        place |= {node: (index + 0.5) / len(row) for index, node in enumerate(row)}
    return rows


def _panel(panel: Panel, top: int, width: int) -> tuple[list[str], int]:
    """Return a panel's SVG and where it ends."""
    arrows = reduced(arrows_of(panel))
    rows = rows_of(arrows)
    sizes = Counter(
        node
        for module, file in modules().items()
        if file.name != "__init__.py" and (node := panel.node_of(module))
    )
    place: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        step = (width - 2 * _MARGIN) / len(row)
        for index, node in enumerate(row):
            place[node] = (_MARGIN + (index + 0.5) * step, top + 60 + number * _ROW)
    lines = [f'<text class="title" x="{_MARGIN}" y="{top + 12}">{escape(panel.title)}</text>']
    for node, others in arrows.items():
        x, y = place[node]
        for other in sorted(others):
            to_x, to_y = place[other]
            start, end = y + _BOX[1] / 2, to_y - _BOX[1] / 2 - 5
            middle = (start + end) / 2
            lines.append(
                f'<path class="arrow" d="M{x:.0f} {start:.0f} C{x:.0f} {middle:.0f} '
                f'{to_x:.0f} {middle:.0f} {to_x:.0f} {end:.0f}"/>'
            )
    for node, (x, y) in place.items():
        size = sizes[node]
        note = "" if size < 2 or " " in node else f"{size} modules"
        lines += _box(node, note, x, y, _COLOURS[panel.package])
    return lines, top + 60 + len(rows) * _ROW


def _box(name: str, note: str, x: float, y: float, colour: str) -> list[str]:
    width, height = _BOX
    wide = max(width, 8 * len(name) + 12)
    lines = [
        f'<rect x="{x - wide / 2:.0f}" y="{y - height / 2:.0f}" width="{wide}" height="{height}" '
        f'rx="6" fill="{colour}" stroke="#475569"/>',
        f'<text class="name" x="{x:.0f}" y="{y - 1 if note else y + 5:.0f}">{escape(name)}</text>',
    ]
    if note:
        lines.append(f'<text class="note" x="{x:.0f}" y="{y + 14:.0f}">{note}</text>')
    return lines


def picture(panels: Sequence[Panel]) -> str:
    """Return the panels below each other as SVG."""
    widest = max(len(row) for panel in panels for row in rows_of(reduced(arrows_of(panel))))
    width = 2 * _MARGIN + widest * (_BOX[0] + _GAP)
    lines: list[str] = []
    top = _MARGIN
    for panel in panels:
        drawn, top = _panel(panel, top, width)
        lines += drawn
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" '
            f'width="{width}" height="{top}" font-family="sans-serif">',
            "<!-- made by make generated -->",
            "<style>.title{font-size:16px;font-weight:bold;fill:#0f172a}"
            ".name{font-size:13px;font-weight:bold;text-anchor:middle;fill:#0f172a}"
            ".note{font-size:11px;text-anchor:middle;fill:#475569}"
            ".arrow{fill:none;stroke:#94a3b8;stroke-width:1.3;marker-end:url(#tip)}</style>",
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="3" refY="3" '
            'orient="auto"><path d="M0 0 L6 3 L0 6 z" fill="#94a3b8"/></marker></defs>',
            f'<rect width="{width}" height="{top}" fill="#ffffff"/>',
            *lines,
            "</svg>\n",
        )
    )


def table() -> str:
    """Return a table of the packages, with the first sentences of their docstrings."""
    inside: dict[str, list[str]] = {}
    for file in modules().values():
        if file.name != "__init__.py":
            inside.setdefault(str(file.parent.relative_to(ROOT)), []).append(file.stem)
    rows = ["| package | what it contains | modules |", "| --- | --- | --- |"]
    for folder, names in sorted(inside.items()):
        source = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
        sentence = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| `{folder}/` | {sentence} | {listed} |")
    return "\n".join(rows) + "\n"


def files() -> dict[Path, str]:
    """Return what the files of the pictures and the page have to contain."""
    page = PAGE.read_text(encoding="utf-8")
    return {
        PAGE: TABLE.sub(lambda _: table(), page),
        **{PAGE.with_name(name): picture(panels) for name, panels in PICTURES.items()},
    }
