"""HTML that stands in somebody else's page, such as a notebook: its frame, tables and blocks.

It takes letters and ground from around it, so that it suits light and dark pages alike, and its
rules reach nothing beyond it. No script, nothing from elsewhere. Only text is made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poprun_py.planning.views.svg import escaped

_NAME = "poprun-py"
# Greys with an alpha, and colours of middling lightness: both are seen on white and on black.
_LOOK = """
.poprun-py{font:13px/1.45 system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;
max-width:1180px}
.poprun-py .pp-head{font-weight:600;margin:2px 0 6px}
.poprun-py .pp-note{margin:4px 0}
.poprun-py .pp-good{color:#1a9a50}.poprun-py .pp-bad{color:#e5484d}
.poprun-py .pp-warn{color:#c77d0a}
.poprun-py .pp-rows{overflow-x:auto;margin:4px 0}
.poprun-py table{border-collapse:collapse;font-size:12.5px;margin:0}
.poprun-py th,.poprun-py td{padding:3px 9px;border:1px solid rgba(128,128,128,.35);
text-align:left;white-space:nowrap;vertical-align:middle;background:none}
.poprun-py th{font-weight:600;background:rgba(128,128,128,.12)}
.poprun-py td.pp-number{text-align:right;font-variant-numeric:tabular-nums}
.poprun-py tr.pp-marked td{background:rgba(230,150,20,.18)}
.poprun-py pre{margin:4px 0;padding:7px 10px;border:1px solid rgba(128,128,128,.35);
border-radius:4px;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;line-height:1.4;
background:rgba(128,128,128,.08);color:inherit;max-height:32em;overflow:auto}
.poprun-py .pp-bar{display:inline-block;width:90px;height:8px;margin-right:7px;border-radius:4px;
background:rgba(128,128,128,.25);overflow:hidden;vertical-align:middle}
.poprun-py .pp-bar i{display:block;height:100%;background:#3b82f6}
.poprun-py summary{cursor:pointer;margin:4px 0}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a table: its text, ``kind`` (good, bad, warn) and how full its bar is, if any."""

    text: str
    kind: str = ""
    is_number: bool = False
    part: float | None = None


def framed(*parts: str, style: str = "") -> str:
    """Return parts as one piece of HTML with its own rules; ``style`` adds to them."""
    body = "\n".join(part for part in parts if part)
    return f'<div class="{_NAME}"><style>{_LOOK}{style}</style>\n{body}\n</div>'


def heading(text: str, kind: str = "") -> str:
    """Return the first line, in the colour of ``kind``: good, bad, warn or none."""
    colour = f" pp-{kind}" if kind else ""
    return f'<div class="pp-head{colour}">{escaped(text)}</div>'


def note(text: str, kind: str = "") -> str:
    """Return a line of less weight; nothing for an empty text."""
    colour = f" pp-{kind}" if kind else ""
    return f'<div class="pp-note{colour}">{escaped(text)}</div>' if text else ""


def block(text: str) -> str:
    """Return lines as they stand, such as a traceback."""
    return f"<pre>{escaped(text)}</pre>"


def details(title: str, body: str) -> str:
    """Return what is shown once the reader opens it."""
    return f"<details><summary>{escaped(title)}</summary>{body}</details>"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell | str]], marked: Iterable[int] = ()
) -> str:
    """Return a table; the rows whose positions are ``marked`` stand out."""
    names = "".join(f'<th scope="col">{escaped(name)}</th>' for name in columns)
    signs = frozenset(marked)
    lines = []
    for number, row in enumerate(rows):
        sign = ' class="pp-marked"' if number in signs else ""
        lines.append(f"<tr{sign}>{''.join(map(_cell, row))}</tr>")
    return "\n".join(
        ('<div class="pp-rows" tabindex="0"><table>', f"<tr>{names}</tr>", *lines, "</table></div>")
    )


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f"<td>{escaped(cell)}</td>"
    kinds = [f"pp-{cell.kind}"] if cell.kind else []
    kinds += ["pp-number"] if cell.is_number else []
    bar = ""
    if cell.part is not None:
        share = min(1.0, max(0.0, cell.part))
        bar = f'<span class="pp-bar"><i style="width:{share:.0%}"></i></span>'
    named = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<td{named}>{bar}{escaped(cell.text)}</td>"
